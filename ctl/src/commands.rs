//! What each command does. They ask the agent or `gpush-core`, and hand the answer to `render`.

mod audit;
mod completions;
mod config;
mod drain;
mod events;
mod gpu;
mod host;
mod man;
mod mig;
mod mps;
mod operation;
mod parted;
mod process;
mod status;
mod version;

use std::{io::Write, time::Duration};

use gpush_api::{ApiError, Code, Gpu};
use gpush_client::{Client, Kind, Origin, Socket};
use gpush_core::selector::Selector;

use crate::{
    args::{Cli, Command, Global, Which},
    exit::{Failure, Outcome},
    output::Output,
};

/// How long nothing is said, before it is said what is waited for.
const SILENCE: Duration = Duration::from_secs(2);

/// Carries out the command.
pub(crate) fn run(cli: Cli, out: &Output) -> Outcome {
    let global = &cli.global;
    match cli.command {
        Command::Status(args) => ask(global, async |client| status::run(client, &args, out).await),
        Command::Gpu(command) => ask(global, async |client| gpu::run(client, &command, out).await),
        Command::Maintenance(command) => ask(global, async |client| host::maintenance(client, command, out).await),
        Command::Recover(why) => ask(global, async |client| host::recover(client, why, out).await),
        Command::Mig(command) => mig::run(global, command, out),
        Command::Mps(command) => mps::run(global, command, out),
        Command::Process(command) => ask(global, async |client| process::run(client, &command, out).await),
        Command::Operation(command) => ask(global, async |client| operation::run(client, &command, out).await),
        Command::Events(args) => ask(global, async |client| events::run(client, &args, out).await),
        Command::Audit(args) => ask(global, async |client| audit::run(client, &args, out).await),
        Command::Config(command) => config::run(global, command, out),
        Command::Version => ask(global, async |client| version::run(client, out).await),
        Command::Completions { shell } => completions::script(shell, out),
        Command::Man { dir } => man::pages(&dir),
    }
}

/// Runs what needs an agent.
fn ask(global: &Global, command: impl AsyncFnOnce(&mut Client) -> Outcome) -> Outcome {
    with_agent(global, command)
}

/// The same for what is not a whole command.
fn with_agent<T>(global: &Global, what: impl AsyncFnOnce(&mut Client) -> Result<T, Failure>) -> Result<T, Failure> {
    let runtime = runtime()?;
    let mut client = Client::new(socket(global)).deadline(Duration::from_secs_f64(global.timeout));
    if !global.json {
        client = client.when_slow(SILENCE, |deadline| {
            let seconds = deadline.as_secs_f64();
            let _ = writeln!(std::io::stderr(), "gpushd has not answered yet; waiting up to {seconds} s (--timeout)");
        });
    }
    runtime.block_on(what(&mut client))
}

/// One thread, and only the drivers that a socket and a deadline need: a command is typed often and
/// shall be back at once.
fn runtime() -> Result<tokio::runtime::Runtime, ApiError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    runtime.map_err(|e| crate::exit::io("can't start the event loop", &e))
}

/// `--socket`, else `GPUSH_SOCKET`, else the system's or the user's agent.
fn socket(global: &Global) -> Socket {
    if let Some(path) = &global.socket {
        return Socket::given(path, Origin::Option);
    }
    match std::env::var_os("GPUSH_SOCKET").filter(|path| !path.is_empty()) {
        Some(path) => Socket::given(path, Origin::Environment),
        None => Socket::default_for_user(),
    }
}

/// The GPUs that `--gpu` names, in the host's order; all when it names none.
fn select(gpus: Vec<Gpu>, which: &Which) -> Result<Vec<Gpu>, Failure> {
    if which.gpus.is_empty() {
        return Ok(gpus);
    }
    let positions = Selector::resolve(&which.gpus, &gpus)?;
    let chosen = gpus.into_iter().enumerate().filter(|(at, _)| positions.contains(at));
    Ok(chosen.map(|(_, gpu)| gpu).collect())
}

/// The same of an agent's GPUs. One that the driver lists and can't identify is none of them: of that the
/// agent says why.
async fn select_of(client: &mut Client, gpus: Vec<Gpu>, which: &Which) -> Result<Vec<Gpu>, Failure> {
    let selectors = which.gpus.iter().flat_map(|text| text.split(',')).filter_map(|text| text.parse::<Selector>().ok());
    let absent = selectors.filter_map(|selector| selector.absent(&gpus)).next();
    if let Some(index) = absent
        && let Err(error) = client.gpu(&index.to_string()).await
        && error.kind == Kind::Answer
        && error.code() != Code::NotFound
    {
        return Err(error.into());
    }
    select(gpus, which)
}

/// The error of a host on which there is nothing to show.
fn no_gpu() -> ApiError {
    ApiError::new(Code::NotFound, "the driver shows no GPU on this host")
        .hint("`nvidia-smi -L` shows what the driver has, `lspci -d 10de:` what the host has")
}
