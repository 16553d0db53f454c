//! `gpushctl ready`: waits until gpushd has done its work after a start.
//!
//! ```text
//! health, GPUs, MPS daemons ─► nothing is left ───────────────► 0
//!        ▲                  ├─ something has failed for good ──► error, at once
//!        │                  └─ something is pending
//!        └──── [`PAUSE`] ◄──────────┴─ after --timeout ────────► error that names it
//! ```
//!
//! If a rule of the config needs a GPU, a missing driver is pending: it may be loaded later in the boot, and gpushd then
//! restarts. Waiting changes nothing, so it is not an operation of gpushd.

use std::time::Duration;

use gpush_api::{
    ApiError, Code, ConfigView, Gpu, GpuIndex, GpuState, Health, Maintenance, Mig, Mode, MpsDaemon, MpsState,
};
use gpush_client::{Client, Error, Kind};
use gpush_core::{duration, holders};
use serde::Serialize;
use tokio::time::Instant;

use super::{events::may_pass, runtime};
use crate::{
    args::Global,
    exit::{Failure, INTERRUPTED, Outcome},
    output::Output,
    render::{host, names::state},
    socket,
};

/// Pause between two checks.
const PAUSE: Duration = Duration::from_millis(250);

/// Work that gpushd does after its start and has not finished yet.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Unfinished {
    /// gpushd is still doing this work.
    Pending(String),
    /// gpushd waits for the driver. The second text is the hint about the driver.
    NoDriver(String, Option<String>),
    /// gpushd could not do this work, and does not try again. The command in `Next` solves the problem.
    Failed(String, Next),
}

/// The command that solves a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Next {
    /// `gpushctl apply` for the GPU with this index.
    Apply(GpuIndex),
    /// A reboot of this virtual machine.
    Reboot,
    /// Another command.
    Run(String),
}

/// The JSON document of a host that is ready. If it is not ready, the JSON document is the error.
#[derive(Debug, Serialize)]
pub(super) struct Ready {
    /// Always true.
    pub(super) ready: bool,
    /// Maintenance of the host, during which gpushd does nothing; absent if the host is not in maintenance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) maintenance: Option<Maintenance>,
}

/// Waits until gpushd has done its work, and then exits with 0. During maintenance there is no work to wait for.
pub(super) fn run(global: &Global, timeout: Duration, quiet: bool, out: &Output) -> Outcome {
    let mut client = Client::new(socket::chosen(global)).deadline(global.request_timeout.min(timeout.max(PAUSE)));
    runtime()?.block_on(async {
        tokio::select! {
            waited = wait(&mut client, timeout, quiet, out) => waited,
            _ = tokio::signal::ctrl_c() => Ok(INTERRUPTED),
        }
    })
}

async fn wait(client: &mut Client, timeout: Duration, quiet: bool, out: &Output) -> Outcome {
    let end = Instant::now() + timeout;
    let mut last: Vec<Unfinished> = Vec::new();
    loop {
        let is_last = Instant::now() + PAUSE > end;
        let (left, maintenance, skipped) = match read_unfinished(client).await {
            Ok(read) => read,
            Err(error) if may_pass(&error) && !is_last => {
                (vec![Unfinished::Pending(error.error.message.clone())], None, String::new())
            }
            Err(error) => return Err(error.into()),
        };
        if left.is_empty() {
            if let Some(maintenance) = &maintenance {
                out.remark(&host::in_maintenance(maintenance, &out.look));
            }
            if !quiet && !skipped.is_empty() {
                out.remark(&(out.look.wrap("warning: ", &skipped).join("\n") + "\n"));
            }
            if out.json {
                out.document(&Ready { ready: true, maintenance })?;
            }
            return Ok(0);
        }
        if let Some(error) = failed(&left) {
            return Err(Failure::from(error));
        }
        if is_last {
            return Err(Failure::from(too_late(&left, timeout)));
        }
        if left != last && !quiet && !out.json {
            let new = left.iter().filter(|one| !last.contains(one));
            out.remark(&new.map(|one| format!("waiting: {}\n", out.look.clean(one.text()))).collect::<String>());
            last.clone_from(&left);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

impl Unfinished {
    fn text(&self) -> &str {
        match self {
            Self::Pending(text) | Self::NoDriver(text, _) | Self::Failed(text, _) => text,
        }
    }
}

/// Returns the unfinished work, the maintenance of the host, and a text that names the lost and held GPUs.
async fn read_unfinished(client: &mut Client) -> Result<(Vec<Unfinished>, Option<Maintenance>, String), Error> {
    let health = client.health().await?;
    let gpus = client.gpus(false).await;
    let daemons = client.mps().await;
    let skipped = gpus.as_deref().map(skipped).unwrap_or_default();
    let left = match (gpus, daemons) {
        (Ok(gpus), Ok(daemons)) => unfinished(&health, &gpus, &daemons),
        (Err(error), _) | (_, Err(error)) if means_no_driver(&error) => {
            without_gpus(&health, &client.config().await?, &error.error)
        }
        (Err(error), _) | (_, Err(error)) => return Err(error),
    };
    Ok((left, health.maintenance, skipped))
}

/// Returns whether gpushd answers, but does not know the GPUs at the moment, because the driver does not answer.
fn means_no_driver(error: &Error) -> bool {
    error.kind == Kind::Answer && (error.code() == Code::DriverUnavailable || may_pass(error))
}

/// Returns the work that is left while gpushd does not know the GPUs. `error` says why it does not know them. Asks the
/// active config, because a rule can be added after gpushd has recorded that no layout is left for this boot.
fn without_gpus(health: &Health, config: &ConfigView, error: &ApiError) -> Vec<Unfinished> {
    let is_needed = config.rules.iter().any(|rule| rule.mode.is_managed());
    if health.maintenance.is_some() || !is_needed && is_complete(health) {
        return Vec::new();
    }
    vec![Unfinished::NoDriver(error.sentences().join(": "), error.hint.clone())]
}

/// Returns a text that names the lost and held GPUs; empty if there are none. The command does not wait for them,
/// because they become ready only after an action of an administrator.
fn skipped(gpus: &[Gpu]) -> String {
    let is_skipped = |gpu: &&Gpu| matches!(gpu.state, GpuState::Lost | GpuState::Held);
    let words = |gpu: &Gpu| format!("GPU {} is {}", gpu.index, state(gpu.state).0);
    let texts: Vec<String> = gpus.iter().filter(is_skipped).map(words).collect();
    if texts.is_empty() { String::new() } else { format!("{}; see `gpushctl status`", texts.join(", ")) }
}

/// Returns whether gpushd no longer tries to apply the layouts of this boot.
fn is_complete(health: &Health) -> bool {
    health.layouts_at_start.as_ref().is_none_or(|layouts| layouts.complete)
}

/// Returns the work that gpushd has not done yet.
fn unfinished(health: &Health, gpus: &[Gpu], daemons: &[MpsDaemon]) -> Vec<Unfinished> {
    if health.maintenance.is_some() {
        return Vec::new();
    }
    let is_complete = is_complete(health);
    let layouts = (!is_complete)
        .then(|| Unfinished::Pending("gpushd has not yet applied all layouts since the host booted".to_owned()));
    let gpus = gpus.iter().filter_map(|gpu| {
        // While gpushd tries to restore a compute mode, its health has an error.
        let keeps_compute_mode = health.errors.is_empty() && differs_in_compute_mode_only(gpu, daemons);
        of_gpu(gpu, is_complete, keeps_compute_mode)
    });
    layouts.into_iter().chain(gpus).chain(daemons.iter().filter_map(of_daemon)).collect()
}

/// Returns whether drift of this GPU can only be its compute mode, which gpushd has not set. gpushd restores only a
/// compute mode that it has set itself, for an MPS daemon or for time-slicing.
fn differs_in_compute_mode_only(gpu: &Gpu, daemons: &[MpsDaemon]) -> bool {
    gpu.mode == Mode::Exclusive
        && gpu.mig.as_ref().is_none_or(Mig::is_off)
        && gpu.pending.is_empty()
        && daemons.iter().all(|daemon| daemon.uuid != gpu.uuid)
}

/// Returns the unfinished work of a GPU. `keeps_compute_mode` says that the drift of the GPU is a compute mode that
/// gpushd does not change.
fn of_gpu(gpu: &Gpu, is_complete: bool, keeps_compute_mode: bool) -> Option<Unfinished> {
    let index = gpu.index;
    match gpu.state {
        // Do not wait for these GPUs, because an administrator must decide what to do.
        GpuState::Held | GpuState::Cordoned | GpuState::Maintenance | GpuState::Lost => return None,
        GpuState::Unknown | GpuState::Changing => {
            return gpu.mode.is_managed().then(|| {
                Unfinished::Pending(format!("GPU {index} is being changed, or the driver has not answered yet"))
            });
        }
        GpuState::Degraded => {
            return Some(Unfinished::Failed(
                format!("GPU {index} is degraded"),
                Next::Run(format!("`gpushctl gpu show {index}`")),
            ));
        }
        GpuState::Ready => {}
    }
    // The leases of the GPU delay its change, so it may take days.
    if gpu.pending.iter().any(|change| !change.leases.is_empty()) {
        return None;
    }
    let drift = gpu.drift.first()?;
    let held = gpu.blocked_by.iter().map(|holder| format!("; held by {}", holders::describe(holder)));
    let text = format!("GPU {index}: {drift}{}", held.collect::<String>());
    let has_mig = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
    Some(match gpu.mode {
        _ if is_complete && gpu.waits_for_reboot() => Unfinished::Failed(text, Next::Reboot),
        // The change waits for an apply.
        _ if is_complete && !gpu.pending.is_empty() => Unfinished::Failed(text, Next::Apply(index)),
        // gpushd has given up, or tries a GPU in use only every 30 s.
        mode if is_complete && (mode == Mode::Mig || mode.is_managed() && has_mig) => {
            Unfinished::Failed(text, Next::Apply(index))
        }
        _ if is_complete && keeps_compute_mode => {
            Unfinished::Failed(text, Next::Run(format!("`gpushctl gpu show {index}`")))
        }
        _ => Unfinished::Pending(text),
    })
}

fn of_daemon(daemon: &MpsDaemon) -> Option<Unfinished> {
    let label = daemon.label();
    match daemon.state {
        MpsState::Ready => None,
        _ if daemon.stays_stopped || daemon.ends.is_some() => None,
        MpsState::GivenUp => Some(Unfinished::Failed(
            format!("the MPS daemon of {label} failed too often"),
            Next::Run(format!("`gpushctl mps show {}`", daemon.target)),
        )),
        MpsState::Stopped
        | MpsState::Starting
        | MpsState::Fault
        | MpsState::Hung
        | MpsState::BackingOff
        | MpsState::Draining
        | MpsState::Stopping => {
            Some(Unfinished::Pending(format!("the MPS daemon of {label} is in state `{}`", daemon.state.name())))
        }
    }
}

/// Returns the error for work that gpushd does not try again.
fn failed(left: &[Unfinished]) -> Option<ApiError> {
    let failed = left.iter().filter_map(|one| match one {
        Unfinished::Failed(text, next) => Some((text, next)),
        Unfinished::Pending(_) | Unfinished::NoDriver(..) => None,
    });
    let (causes, next): (Vec<&String>, Vec<&Next>) = failed.unzip();
    let mut error = ApiError::new(Code::Internal, "the host does not match the config");
    error.causes = causes.into_iter().cloned().collect();
    // One command solves all problems that `apply` can solve.
    let to_apply =
        next.iter().filter_map(|one| if let Next::Apply(index) = one { Some(index.to_string()) } else { None });
    let to_apply: Vec<String> = to_apply.collect();
    Some(match next.first()? {
        Next::Apply(_) => error.hint(format!("run `gpushctl apply {}` (administrator)", to_apply.join(","))),
        Next::Reboot => error.hint("reboot this virtual machine: its GPUs then get their MIG mode and their layouts"),
        Next::Run(command) => error.hint(format!("run {command}")),
    })
}

fn too_late(left: &[Unfinished], timeout: Duration) -> ApiError {
    let message = format!("gpushd has not finished its start-up work within {}", duration::format(timeout));
    let mut error = ApiError::new(Code::TimedOut, message);
    error.causes.extend(left.iter().map(|one| one.text().to_owned()));
    let of_driver = left.iter().find_map(|one| match one {
        Unfinished::NoDriver(_, hint) => hint.clone(),
        Unfinished::Pending(_) | Unfinished::Failed(..) => None,
    });
    error.hint(of_driver.unwrap_or_else(|| "`gpushctl status` shows the host; wait longer with --timeout".to_owned()))
}

#[cfg(test)]
mod tests {
    use gpush_api::{HealthStatus, LayoutsAtStart, PendingAim, PendingChange};

    use super::*;
    use crate::render::fixtures;

    fn health(complete: bool) -> Health {
        Health {
            status: HealthStatus::Ok,
            errors: Vec::new(),
            simulated: true,
            maintenance: None,
            gpu_count: 1,
            config_file_changed: false,
            layouts_at_start: Some(LayoutsAtStart { complete, ..LayoutsAtStart::default() }),
            tasks: Vec::new(),
            pid: 1,
        }
    }

    fn texts(left: &[Unfinished]) -> Vec<&str> {
        left.iter().map(Unfinished::text).collect()
    }

    #[test]
    fn ready_succeeds_on_host_that_matches_the_config() {
        assert_eq!(
            unfinished(&health(true), &[fixtures::gpu(0, "A100", 40_960, None)], &[fixtures::mps::daemon(0)]),
            []
        );
    }

    /// Fault: the command succeeded without a warning although a GPU was lost.
    #[test]
    fn ready_names_lost_gpus_and_does_not_wait() {
        let gpu = |index, state| Gpu { state, ..fixtures::gpu(index, "A100", 40_960, None) };
        let gpus =
            [gpu(0, GpuState::Ready), gpu(1, GpuState::Lost), gpu(2, GpuState::Cordoned), gpu(3, GpuState::Held)];
        assert_eq!(unfinished(&health(true), &gpus, &[]), []);
        assert_eq!(skipped(&gpus), "GPU 1 is lost, GPU 3 is held; see `gpushctl status`");
        assert_eq!(skipped(&gpus[..1]), "");
    }

    #[test]
    fn ready_fails_on_drift_only_after_the_boot_is_complete() {
        let mut gpu = fixtures::gpu(0, "A100", 40_960, None);
        (gpu.mode, gpu.drift) = (Mode::Mig, vec!["it has no instances".to_owned()]);
        let before = unfinished(&health(false), std::slice::from_ref(&gpu), &[]);
        assert_eq!(
            texts(&before),
            ["gpushd has not yet applied all layouts since the host booted", "GPU 0: it has no instances"]
        );
        assert_eq!(failed(&before), None);
        let error = failed(&unfinished(&health(true), &[gpu], &[])).expect("it has failed");
        assert_eq!(error.causes, ["GPU 0: it has no instances"]);
        assert_eq!(error.hint.as_deref(), Some("run `gpushctl apply 0` (administrator)"));
    }

    /// Fault: `ready` waited until its timeout for a GPU of mode `exclusive` that still had MIG. `ready` must name
    /// `gpushctl apply` instead.
    #[test]
    fn ready_fails_on_mig_in_mode_exclusive() {
        let mut gpu = fixtures::gpu(0, "A100", 40_960, Some(fixtures::mig(7, Vec::new())));
        (gpu.mode, gpu.drift) = (Mode::Exclusive, vec!["MIG is enabled".to_owned()]);
        assert_eq!(failed(&unfinished(&health(false), &[gpu.clone()], &[])), None);
        let other = Gpu { index: GpuIndex(5), ..gpu.clone() };
        let error = failed(&unfinished(&health(true), &[gpu, other], &[])).expect("they have failed");
        assert_eq!(error.hint.as_deref(), Some("run `gpushctl apply 0,5` (administrator)"));
    }

    /// Faults: the command failed at once if the driver was not loaded yet. If gpushd had recorded that no layout is left
    /// for this boot, and then got a rule, the command succeeded without a driver.
    #[test]
    fn ready_waits_for_missing_driver_if_a_rule_needs_a_gpu() {
        let error = ApiError::new(Code::DriverUnavailable, "the driver is not loaded").hint("load it");
        let config = |modes: &[Mode]| -> ConfigView {
            let rule = |mode| serde_json::json!({ "name": "a", "selectors": ["0"], "mode": mode, "claims": [] });
            let rules: Vec<_> = modes.iter().map(rule).collect();
            let view = serde_json::json!({ "rules": rules, "layouts": [], "effective": "" });
            serde_json::from_value(view).expect("a config")
        };
        for complete in [true, false] {
            let left = without_gpus(&health(complete), &config(&[Mode::Unmanaged, Mode::Mig]), &error);
            assert_eq!(texts(&left), ["the driver is not loaded"]);
            assert_eq!(failed(&left), None);
            let late = too_late(&left, Duration::from_secs(2));
            assert_eq!((late.code, late.hint.as_deref()), (Code::TimedOut, Some("load it")));
            assert_eq!(late.causes, ["the driver is not loaded"]);
        }
        for modes in [&[][..], &[Mode::Unmanaged]] {
            assert_eq!(without_gpus(&health(true), &config(modes), &error), []);
        }
        assert_eq!(without_gpus(&health(false), &config(&[]), &error).len(), 1, "gpushd has not decided yet");
        let since = jiff::Timestamp::UNIX_EPOCH;
        let closed = Health { maintenance: Some(Maintenance { reason: None, by: None, since }), ..health(true) };
        assert_eq!(without_gpus(&closed, &config(&[Mode::Mig]), &error), []);
    }

    /// Fault: the command waited until its timeout for a GPU whose compute mode another program had set. gpushd never
    /// changes such a mode.
    #[test]
    fn ready_fails_on_foreign_compute_mode_of_exclusive_gpu() {
        let mut gpu = fixtures::gpu(0, "A100", 40_960, None);
        gpu.mode = Mode::Exclusive;
        gpu.drift = vec!["the compute mode is `PROHIBITED`".to_owned()];
        let left = |complete, gpu: &Gpu, daemons: &[MpsDaemon]| {
            failed(&unfinished(&health(complete), std::slice::from_ref(gpu), daemons))
        };
        let error = left(true, &gpu, &[]).expect("it has failed");
        assert_eq!(error.causes, ["GPU 0: the compute mode is `PROHIBITED`"]);
        assert_eq!(error.hint.as_deref(), Some("run `gpushctl gpu show 0`"));
        assert_eq!(left(false, &gpu, &[]), None, "gpushd has not applied all layouts");
        let daemon = MpsDaemon { uuid: gpu.uuid.clone().into(), ..fixtures::mps::daemon(0) };
        assert_eq!(left(true, &gpu, &[daemon]), None, "gpushd restores the mode after the end of the daemon");
        let timesliced = Gpu { mode: Mode::Timeslice, ..gpu.clone() };
        assert_eq!(left(true, &timesliced, &[]), None, "gpushd sets the mode of a time-sliced GPU");
        let restores = ApiError::new(Code::DriverError, "the GPU still has the compute mode that gpushd set for MPS");
        let health = Health { errors: vec![restores], ..health(true) };
        assert_eq!(failed(&unfinished(&health, &[gpu], &[])), None, "gpushd tries to restore the mode");
    }

    /// Fault: the command waited until its timeout for a change that only an apply makes.
    #[test]
    fn ready_fails_on_change_that_waits_for_an_apply() {
        let change =
            |leases| PendingChange { aim: PendingAim::Mode { from: Mode::Mps, mode: Mode::Exclusive }, leases };
        let mut gpu = fixtures::gpu(0, "A100", 40_960, None);
        gpu.mode = Mode::Exclusive;
        gpu.drift = vec!["it is shared through MPS, but its rule no longer says so".to_owned()];
        gpu.pending = vec![change(Vec::new())];
        let error = failed(&unfinished(&health(true), std::slice::from_ref(&gpu), &[])).expect("it has failed");
        assert_eq!(error.hint.as_deref(), Some("run `gpushctl apply 0` (administrator)"));
        gpu.pending = vec![change(vec![gpush_api::LeaseId(3)])];
        assert_eq!(unfinished(&health(true), &[gpu], &[]), [], "the leases of the GPU delay its change");
    }

    #[test]
    fn ready_fails_on_mig_mode_that_waits_for_a_reboot() {
        let mut mig = fixtures::mig(8, Vec::new());
        mig.set_mode(false, true);
        let gpu = Gpu {
            mode: Mode::Mig,
            passed_through: true,
            drift: vec!["MIG mode is off".to_owned()],
            ..fixtures::gpu(0, "A100", 40_960, Some(mig))
        };
        assert_eq!(failed(&unfinished(&health(false), std::slice::from_ref(&gpu), &[])), None);
        let error = failed(&unfinished(&health(true), &[gpu], &[])).expect("it has failed");
        assert!(error.hint.is_some_and(|hint| hint.starts_with("reboot this virtual machine")));
    }

    /// Fault: each error in an answer of gpushd counted as a driver that does not answer, so the command waited until its
    /// timeout.
    #[test]
    fn only_temporary_errors_count_as_missing_driver() {
        let answer = |error: ApiError| Error { kind: Kind::Answer, error: Box::new(error) };
        let error = |code| ApiError::new(code, "no GPUs");
        for passing in [Code::DriverUnavailable, Code::Unavailable] {
            assert!(means_no_driver(&answer(error(passing))), "{passing:?}");
        }
        assert!(means_no_driver(&answer(error(Code::DriverTimeout).retryable())));
        for lasting in [Code::Denied, Code::Internal, Code::NotFound, Code::DriverError] {
            assert!(!means_no_driver(&answer(error(lasting))), "{lasting:?}");
        }
        assert!(!means_no_driver(&Error { kind: Kind::Lost, ..answer(error(Code::Unreachable).retryable()) }));
    }

    #[test]
    fn ready_does_not_wait_for_held_or_cordoned_gpus() {
        for state in [GpuState::Held, GpuState::Cordoned, GpuState::Maintenance, GpuState::Lost] {
            let mut gpu = fixtures::gpu(0, "A100", 40_960, None);
            (gpu.state, gpu.mode, gpu.drift) = (state, Mode::Mig, vec!["it differs".to_owned()]);
            assert_eq!(unfinished(&health(true), &[gpu], &[]), [], "{state:?}");
        }
        let mut stopped = fixtures::mps::daemon(0);
        (stopped.state, stopped.stays_stopped) = (MpsState::Stopped, true);
        assert_eq!(unfinished(&health(true), &[], &[stopped]), []);
    }

    #[test]
    fn ready_fails_on_daemon_that_gpushd_has_given_up() {
        let mut daemon = fixtures::mps::daemon(0);
        for state in [MpsState::Stopped, MpsState::Starting, MpsState::BackingOff, MpsState::Hung] {
            daemon.state = state;
            let found = unfinished(&health(true), &[], std::slice::from_ref(&daemon));
            assert_eq!((found.len(), failed(&found)), (1, None), "{state:?}");
        }
        daemon.state = MpsState::GivenUp;
        let error = failed(&unfinished(&health(true), &[], &[daemon.clone()])).expect("it has failed");
        assert_eq!(error.hint, Some(format!("run `gpushctl mps show {}`", daemon.target)));
    }
}
