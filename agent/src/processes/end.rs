//! Warns about unleased processes, or ends them, as the config says.
//!
//! ```text
//! seen ─► on a device of others: one log line and one event, with every policy
//!      ├► policy "warn": one log line
//!      └► policy "end": open its pidfd and read its identity (`identity`)
//!           root's process, MPS server, allowed, uncertain? ─► exempt, with the reason; checked again in each round
//!           read its GPU again: same process, still unleased? ─► no: forget it
//!           record it in the audit trail ─► check again ─► SIGTERM ─► event
//!                        grace period over: same checks ─► SIGKILL (`mps::terminate` first for MPS clients)
//! ```
//!
//! After gpushd has read which pids are on a GPU, another process may get one of these pids. While the process of a
//! pidfd is alive, no other process can get its pid. So gpushd first opens the pidfd, then reads the GPU, and only then
//! sends a signal.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use gpush_api::{
    GpuProcess, LeaseOwner, LeaseRequirement, ProcessKind, UnknownProcesses, UnleasedPolicy, UnleasedProcess,
    UnleasedStep,
};
use gpush_core::config::{Config, Rule};
use gpush_host::{proc, subtask};
use nix::sys::signal::Signal;
use tokio::time::Instant;

use super::{
    Unleased,
    allow::{AllowList, Match},
    classified,
    classify::{ClassifiedProcess, Classifier},
    identity::{Identity, OpenedProcess},
    report,
    unleased::Action,
};
use crate::mps::{self, Place};

/// Pause between two checks for unleased processes.
const PAUSE: Duration = Duration::from_secs(5);

/// Minimum pause until gpushd tries again to kill a process.
const RETRY: Duration = Duration::from_millis(100);

/// Why gpushd does not end a process whose identity it cannot read.
const UNREADABLE: &str = "gpushd cannot read which program it executes";

/// A process that must get a signal.
#[derive(Debug)]
struct DueSignal {
    process: Arc<OpenedProcess>,
    signal: Signal,
    /// UUID of the process's GPU.
    gpu: String,
}

/// Checks for unleased processes until gpushd stops.
pub(crate) async fn run(unleased: Unleased) {
    let mut next = Instant::now() + PAUSE;
    loop {
        tokio::select! {
            () = unleased.stopping.cancelled() => return,
            () = tokio::time::sleep_until(next) => {}
        }
        round(&unleased).await;
        let (earliest, latest) = (Instant::now() + RETRY, Instant::now() + PAUSE);
        // Run again when the next process must be killed, so that it is killed at the announced time.
        next = unleased.next_kill().map_or(latest, |at| at.clamp(earliest, latest));
    }
}

async fn round(unleased: &Unleased) {
    let config = unleased.state.config();
    let allow = match config.processes.unleased {
        UnleasedPolicy::Report | UnleasedPolicy::Warn => Some(Arc::default()),
        UnleasedPolicy::End => unleased.allow_list().await,
    };
    let Some(allow) = allow else { return };
    unleased.note_invisible(allow.invisible());
    // If the GPUs cannot be read, the processes of the last round count.
    let Some((found, unread)) = find(unleased, &config).await else { return };
    show_trespassers(unleased, &config, &found, &unread);
    let pids: Vec<u32> = found.iter().filter_map(|one| one.process.process.pid).collect();
    unleased.retain(&pids, unread.is_empty());
    match config.processes.unleased {
        UnleasedPolicy::Report => {}
        UnleasedPolicy::Warn => found.iter().for_each(|one| warn(unleased, &one.process)),
        UnleasedPolicy::End => end(unleased, found, allow).await,
    }
}

/// Shows the processes on devices of others with their GPUs, and publishes one event about each of them. Keeps what is
/// known about the GPUs whose processes could not be read.
fn show_trespassers(unleased: &Unleased, config: &Config, found: &[ClassifiedProcess], unread: &[UnknownProcesses]) {
    let mut by_gpu: BTreeMap<String, Vec<UnleasedProcess>> = BTreeMap::new();
    let host = unleased.state.now();
    for one in unread {
        let known = host.gpu(&one.gpu_uuid).map(|gpu| gpu.gpu.unleased.clone()).unwrap_or_default();
        if !known.is_empty() {
            by_gpu.insert(one.gpu_uuid.clone(), known);
        }
    }
    let mut present = Vec::new();
    for one in found {
        let (Some(why), Some(pid)) = (&one.trespass, one.process.process.pid) else { continue };
        let Some(start) = proc::start(pid) else { continue };
        present.push((pid, start));
        by_gpu.entry(one.process.gpu_uuid.clone()).or_default().push(UnleasedProcess {
            target: one.target.clone(),
            device: one.process.device.clone(),
            process: one.process.process.clone(),
            why: why.clone(),
        });
        if unleased.is_new_trespasser(pid, start) {
            // With the policy `warn`, [`warn`] logs the process.
            if config.processes.unleased != UnleasedPolicy::Warn {
                report::warn(&one.process, "");
            }
            report::publish(unleased, &one.process, UnleasedStep::Found);
        }
    }
    unleased.retain_trespassers(&present, unread.is_empty());
    unleased.state.set_unleased(by_gpu);
}

/// Returns the unleased processes of the host. Returns none, without reading the GPUs, if no process can be unleased. If
/// gpushd only shows unleased processes (policy `report`), returns none unless a process can be on a device of others.
/// Also returns the GPUs whose processes are not known. Returns `None` if the GPUs cannot be read.
async fn find(unleased: &Unleased, config: &Config) -> Option<(Vec<ClassifiedProcess>, Vec<UnknownProcesses>)> {
    let mut requirements = config.rules.iter().filter_map(|rule| rule.lease?.requirement);
    let is_slurms = |rule: &Rule| rule.lease.is_some_and(|terms| terms.owner == LeaseOwner::Slurm);
    let may_trespass = unleased.state.leases().has_exclusive_lease() || config.rules.iter().any(is_slurms);
    let is_needed = match config.processes.unleased {
        UnleasedPolicy::Report => may_trespass,
        UnleasedPolicy::Warn | UnleasedPolicy::End => {
            may_trespass || unleased.mps.is_used() || requirements.any(|one| one == LeaseRequirement::Required)
        }
    };
    if !is_needed {
        return Some((Vec::new(), Vec::new()));
    }
    let (all, unread) = classified(unleased).await.ok()?;
    let is_found = |one: &ClassifiedProcess| one.process.unleased.is_some() && one.process.process.pid.is_some();
    Some((all.into_iter().filter(is_found).collect(), unread))
}

fn warn(unleased: &Unleased, one: &GpuProcess) {
    let Some((pid, start)) = one.process.pid.and_then(|pid| Some((pid, proc::start(pid)?))) else { return };
    if unleased.note(pid, start, Action::Warned) {
        report::warn(one, "");
    }
}

async fn end(unleased: &Unleased, found: Vec<ClassifiedProcess>, allow: Arc<AllowList>) {
    let handle = unleased.clone();
    let due = subtask::blocking(move || due_signals(&handle, found, &allow)).await.unwrap_or_default();
    if due.is_empty() {
        return;
    }
    let gpus: BTreeSet<String> = due.iter().map(|due| due.gpu.clone()).collect();
    let readings = unleased.readings.now(&gpus.into_iter().collect::<Vec<_>>()).await;
    for due in due {
        if readings.iter().any(|(uuid, reading)| *uuid == due.gpu && reading.is_ok()) {
            send(unleased, due).await;
        }
    }
}

/// Opens the unleased processes, and returns the signals that are due. Notes the exempt processes.
fn due_signals(unleased: &Unleased, found: Vec<ClassifiedProcess>, allow: &AllowList) -> Vec<DueSignal> {
    let classifier = Classifier::new(unleased);
    let mut due: Vec<DueSignal> = Vec::new();
    for one in found {
        let Some(pid) = one.process.process.pid else { continue };
        // Skip a process on several GPUs that is already in `due`.
        if due.iter().any(|due| due.process.pid == pid) {
            continue;
        }
        let (process, signal) = match unleased.action(pid) {
            Some(Action::Killed) => continue,
            Some(Action::Asked { process, kill_at }) => {
                (process, (kill_at <= Instant::now()).then_some(Signal::SIGKILL))
            }
            Some(Action::Warned | Action::Exempt(_)) | None => match OpenedProcess::open(pid) {
                Some(process) => (Arc::new(process), Some(Signal::SIGTERM)),
                None => {
                    // If the process has ended, it has no start time and needs no exemption.
                    if let Some(start) = proc::start(pid) {
                        exempt(unleased, &one.process, pid, start, UNREADABLE.to_owned());
                    }
                    continue;
                }
            },
        };
        if let Some(why) = exemption(&classifier, &one, pid, &process.identity, allow) {
            exempt(unleased, &one.process, pid, process.identity.start, why);
        } else if let Some(signal) = signal {
            due.push(DueSignal { process, signal, gpu: one.process.gpu_uuid });
        }
    }
    due
}

/// Sends the signal, unless the process has changed or is no longer unleased.
async fn send(unleased: &Unleased, DueSignal { process, signal, gpu }: DueSignal) {
    let step = if signal == Signal::SIGKILL { UnleasedStep::Killed } else { UnleasedStep::Asked };
    let (pid, start) = (process.pid, process.identity.start);
    let Some(one) = check_again(unleased, &process, &gpu).await else { return };
    if let Err(why) = report::record(unleased, &one, step).await {
        exempt(unleased, &one, pid, start, format!("gpushd cannot record the signal, and does not send it: {why}"));
        return;
    }
    if signal == Signal::SIGKILL && one.process.kind == ProcessKind::MpsClient {
        // Ask MPS to end the client first: if a client is killed while it computes, the MPS server may end too.
        mps::terminate(&unleased.mps, pid).await;
    }
    // Check again just before the signal, because the user may have got a lease meanwhile.
    let Some(one) = check_again(unleased, &process, &gpu).await else { return };
    if let Err(error) = process.signal(signal) {
        exempt(unleased, &one, pid, start, format!("gpushd cannot send {signal}: {error}"));
        return;
    }
    let grace = Duration::from_secs(unleased.state.config().processes.grace_s.into());
    let action = match signal {
        Signal::SIGKILL => Action::Killed,
        _ => Action::Asked { process, kill_at: Instant::now() + grace },
    };
    unleased.note(pid, start, action);
    report::warn(&one, &format!("; {}", step.log_text()));
    report::publish(unleased, &one, step);
}

/// Checks again whether gpushd must end a process, with the current config, leases and GPU readings. Returns `None` if
/// gpushd must not end the process.
async fn check_again(unleased: &Unleased, process: &Arc<OpenedProcess>, gpu: &str) -> Option<GpuProcess> {
    let config = unleased.state.config();
    let allow = unleased.allow_list().await?;
    let is_same = |one: &ClassifiedProcess| {
        let listed = &one.process.process;
        listed.pid == Some(process.pid) && one.process.gpu_uuid == gpu
    };
    let found = find(unleased, &config).await.and_then(|(found, _)| found.into_iter().find(is_same));
    let Some(one) = found.filter(|_| config.processes.unleased == UnleasedPolicy::End) else {
        unleased.forget(process.pid);
        return None;
    };
    let (unleased, process) = (unleased.clone(), Arc::clone(process));
    let check = move || {
        // Read the identity last: if the process is still the same, everything that was read above belongs to this
        // process.
        let Some(identity) = process.identity_now() else {
            unleased.forget(process.pid);
            return None;
        };
        // If the user of the process has just changed, the next round classifies the process again.
        if one.process.process.uid != Some(identity.uid()) {
            return None;
        }
        match exemption(&Classifier::new(&unleased), &one, process.pid, &identity, &allow) {
            Some(why) => exempt(&unleased, &one.process, process.pid, identity.start, why),
            None => return Some(one.process),
        }
        None
    };
    subtask::blocking(check).await.flatten()
}

/// Returns why gpushd does not end a process.
fn exemption(
    classifier: &Classifier<'_>,
    one: &ClassifiedProcess,
    pid: u32,
    identity: &Identity,
    allow: &AllowList,
) -> Option<String> {
    if identity.is_root() {
        return Some("gpushd never ends processes of root".to_owned());
    }
    let gpu = &one.process.gpu_uuid;
    let place = Place::Device { gpu, device: Some(one.target.as_str()).filter(|target| target != gpu) };
    if let Some(server) = classifier.servers.of_process(pid, one.process.process.kind, place) {
        return Some(format!("it is the {}", server.describe()));
    }
    match allow.matches(identity) {
        Match::Yes => Some("the config allows it".to_owned()),
        Match::Uncertain(why) => Some(why),
        Match::No => one.exempt.map(str::to_owned),
    }
}

/// Notes that a process is exempt. Logs the exemption if it is new.
fn exempt(unleased: &Unleased, one: &GpuProcess, pid: u32, start: u64, why: String) {
    let text = format!("; not ended: {why}");
    if unleased.note(pid, start, Action::Exempt(why)) {
        report::warn(one, &text);
    }
}
