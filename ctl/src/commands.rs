//! The commands. Each command sends requests to gpushd, or uses `gpush-core` instead. `render` converts the result to
//! text.

mod advise;
mod apply;
mod audit;
mod bill;
mod completions;
mod config;
mod config_check;
mod config_init;
mod doctor;
#[cfg(test)]
mod documents;
mod drain;
mod enforce;
mod events;
mod explain;
mod gpu;
mod host;
#[cfg(test)]
mod json_page;
mod lease;
mod man;
mod metrics;
mod mig;
mod mig_history;
mod mps;
mod offered;
mod operation;
mod parted;
mod ps;
mod quota;
mod ready;
mod reset;
mod slurm;
mod startup;
mod status;
mod support_bundle;
mod top;
mod usage;
mod version;

use std::{io::Write, time::Duration};

pub(crate) use self::offered::offers;
use gpush_api::{ApiError, Code, Gpu};
use gpush_client::{Client, Kind};
use gpush_core::selector::Selector;

use crate::{
    args::{self, Cli, Command, Global, Topic},
    exit::{Failure, Outcome},
    output::{Output, Prints},
    socket,
};

/// If a command has waited this long, it prints what it waits for.
const SILENCE: Duration = Duration::from_secs(2);

/// Maximum wait for a gpushd that is stopping and for its next start. systemd ends a stopping gpushd after 150 s
/// (TimeoutStopSec=).
const RESTART: Duration = Duration::from_secs(180);

pub(crate) fn run(cli: Cli, out: &Output) -> Outcome {
    let global = &cli.global;
    if let Some(error) = out.unsupported_format(prints(&cli.command)) {
        return if matches!(cli.command, Command::Run(_)) { lease::refused(error, out) } else { Err(error.into()) };
    }
    match cli.command {
        Command::Status(args) => ask(global, async |client| status::run(client, &args, out).await),
        Command::Top(args) => top::run(global, &args, out),
        Command::Apply(args) => with_agent(global, async |client| {
            if !args.execution.dry_run {
                startup::wait_until_finished(client, out).await;
            }
            apply::desired(client, &args, out).await
        }),
        Command::Run(args) => lease::become_command(global, &args, out),
        Command::Lease(command) => lease::run(global, command, out),
        Command::Quota(args) => ask(global, async |client| quota::run(client, &args, out).await),
        Command::Usage(args) => ask(global, async |client| usage::run(client, &args, out).await),
        Command::Bill(args) => ask(global, async |client| bill::run(client, &args, out).await),
        Command::Gpu(command) => ask(global, async |client| gpu::run(client, &command, out).await),
        Command::Maintenance(command) => ask(global, async |client| host::maintenance(client, command, out).await),
        Command::Enforce(command) => enforce::run(global, command, out),
        Command::Recover(why) => ask(global, async |client| host::recover(client, why, out).await),
        Command::Mig(command) => mig::run(global, command, out),
        Command::Mps(command) => mps::run(global, command, out),
        Command::Ps(args) => ask(global, async |client| ps::run(client, &args, out).await),
        Command::Operation(command) => ask(global, async |client| operation::run(client, &command, out).await),
        Command::Events(args) => ask(global, async |client| events::run(client, &args, out).await),
        Command::Metrics(command) => metrics::run(global, command, out),
        Command::Audit(args) => ask(global, async |client| audit::run(client, &args, out).await),
        Command::Config(command) => config::run(global, command, out),
        Command::Ready { timeout, quiet } => ready::run(global, timeout, quiet, out),
        Command::Advise(command) => advise::run(global, command, out),
        Command::Doctor { only, quiet } => doctor::run(global, &only, quiet, out),
        Command::SupportBundle(args) => support_bundle::run(global, &args, out),
        Command::Slurm(command) => slurm::run(global, &command, out),
        Command::Explain { topic } => explain::run(global, topic.unwrap_or(Topic::All), out),
        Command::Version => ask(global, async |client| version::run(client, out).await),
        Command::Completions { shell } => completions::script(shell, out),
        Command::Man { dir } => man::pages(&dir),
    }
}

/// Returns which kind of output a command prints. This determines the permitted formats.
fn prints(command: &Command) -> Prints {
    let is_list = match command {
        Command::Lease(args::Lease::Env { .. }) => return Prints::Environment,
        Command::Lease(lease) => lease.prints_list(),
        Command::Gpu(gpu) => gpu.prints_list(),
        Command::Mig(mig) => mig.prints_list(),
        Command::Mps(mps) => mps.prints_list(),
        Command::Operation(operation) => operation.prints_list(),
        Command::Config(config) => config.prints_list(),
        Command::Ps(_) | Command::Audit(_) | Command::Usage(_) | Command::Bill(_) => true,
        Command::Quota(quota) => quota.all,
        Command::Slurm(slurm) => slurm.prints_list(),
        Command::Events(args) => !args.follow,
        Command::Status(_)
        | Command::Top(_)
        | Command::Run(_)
        | Command::Apply(_)
        | Command::Maintenance(_)
        | Command::Enforce(_)
        | Command::Recover(_)
        | Command::Ready { .. }
        | Command::Advise(_)
        | Command::Doctor { .. }
        | Command::SupportBundle(_)
        | Command::Metrics(_)
        | Command::Explain { .. }
        | Command::Version
        | Command::Completions { .. }
        | Command::Man { .. } => false,
    };
    if is_list { Prints::List } else { Prints::Other }
}

/// Runs a command that needs gpushd. If the config file has changed since gpushd loaded it, a refusal says so.
fn ask<T>(global: &Global, command: impl AsyncFnOnce(&mut Client) -> Result<T, Failure>) -> Result<T, Failure> {
    with_agent(global, async |client| match command(client).await {
        Err(Failure::Error(error)) if depends_on_config(error.code) => Err(with_changed_file(client, *error).await),
        outcome => outcome,
    })
}

/// Does the same as [`ask`], but first waits until gpushd has done the work of its start.
fn ask_after_start(global: &Global, out: &Output, command: impl AsyncFnOnce(&mut Client) -> Outcome) -> Outcome {
    ask(global, async |client| {
        startup::wait_until_finished(client, out).await;
        command(client).await
    })
}

/// Returns whether another config may permit what was refused with this code.
fn depends_on_config(code: Code) -> bool {
    match code {
        Code::NotFound | Code::UnknownProfile | Code::Blocked | Code::Conflict | Code::Unsupported | Code::Denied => {
            true
        }
        Code::BadRequest
        | Code::LayoutImpossible
        | Code::Resetting
        | Code::Cancelled
        | Code::DriverUnavailable
        | Code::DriverError
        | Code::DriverTimeout
        | Code::GpuLost
        | Code::ConfigInvalid
        | Code::Unavailable
        | Code::Stopping
        | Code::Unreachable
        | Code::TimedOut
        | Code::Internal => false,
    }
}

/// Adds a cause to a refusal if the config file has changed since gpushd loaded it.
async fn with_changed_file(client: &mut Client, refusal: ApiError) -> Failure {
    let is_changed = client.health().await.is_ok_and(|health| health.config_file_changed);
    Failure::from(if is_changed { refusal.cause(crate::render::status::FILE_CHANGED) } else { refusal })
}

/// Runs the part of a command that sends requests to gpushd.
fn with_agent<T>(global: &Global, what: impl AsyncFnOnce(&mut Client) -> Result<T, Failure>) -> Result<T, Failure> {
    let runtime = runtime()?;
    let is_json = out_is_json(global);
    let mut client = Client::new(socket::chosen(global)).deadline(global.request_timeout);
    client = client.wait_for_restart(RESTART, SILENCE, move || {
        if !is_json {
            let _ = writeln!(
                std::io::stderr(),
                "gpushd is stopping and finishes its operations; waiting up to {} until gpushd has started again",
                gpush_core::duration::format(RESTART)
            );
        }
    });
    if !is_json {
        client = client.when_slow(SILENCE, |deadline| {
            let limit = gpush_core::duration::format(deadline);
            let _ =
                writeln!(std::io::stderr(), "gpushd has not answered yet; waiting up to {limit} (--request-timeout)");
        });
    }
    runtime.block_on(what(&mut client))
}

fn out_is_json(global: &Global) -> bool {
    global.json || global.output == Some(args::Format::Json)
}

/// Creates a runtime with one thread, I/O and timers. The runtime has nothing else, so that commands start quickly.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, ApiError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    runtime.map_err(|e| crate::exit::io("can't start the event loop", &e))
}

/// Returns the GPUs that match the selectors, in the host's order; all GPUs if there are no selectors.
fn select(gpus: Vec<Gpu>, selectors: &[String]) -> Result<Vec<Gpu>, Failure> {
    if selectors.is_empty() {
        return Ok(gpus);
    }
    let positions = Selector::resolve(selectors, &gpus)?;
    let chosen = gpus.into_iter().enumerate().filter(|(at, _)| positions.contains(at));
    Ok(chosen.map(|(_, gpu)| gpu).collect())
}

/// Returns the GPUs that match the selectors, from the GPUs that gpushd lists. If a selector names a GPU that the
/// driver cannot identify, returns gpushd's error about that GPU.
async fn select_of(client: &mut Client, gpus: Vec<Gpu>, texts: &[String]) -> Result<Vec<Gpu>, Failure> {
    let selectors = texts.iter().flat_map(|text| text.split(',')).filter_map(|text| text.parse::<Selector>().ok());
    let absent = selectors.filter_map(|selector| selector.absent(&gpus)).next();
    if let Some(index) = absent
        && let Err(error) = client.gpu(&index.to_string()).await
        && error.kind == Kind::Answer
        && error.code() != Code::NotFound
    {
        return Err(error.into());
    }
    select(gpus, texts)
}

/// Returns the error that the host has no GPUs.
fn no_gpu() -> ApiError {
    ApiError::new(Code::NotFound, "the driver shows no GPU on this host")
        .hint("`nvidia-smi -L` shows what the driver has, `lspci -d 10de:` what the host has")
}
