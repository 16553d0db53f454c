//! Warns about unleased processes, or ends them, as the config says.
//!
//! ```text
//! seen ─► on a device of others: one log line and one event, with every policy
//!      ├► policy "warn": one log line
//!      └► policy "end": open its pidfd and read its identity (`identity`)
//!           root's process, MPS server, allowed, uncertain? ─► exempt, with the reason; checked again in each round
//!           grace period not over? ─► wait
//!           due for SIGTERM, or for SIGKILL after the grace period
//!
//! all due processes of a round, together:
//!   read their GPUs again ─► same process, still unleased? ─► no: forget it
//!   first all except MPS clients that get SIGKILL, then these clients, two at a time:
//!     record them in the audit trail ─► clients: `mps::terminate`
//!     read their GPUs again ─► each process: check it again, and the leases of its user ─► signal ─► event
//! ```
//!
//! After gpushd has read which pids are on a GPU, another process may get one of these pids. While the process of a
//! pidfd is alive, no other process can get its pid. So gpushd first opens the pidfd, then reads the GPU, and only then
//! sends a signal.
//!
//! Except for MPS clients that get SIGKILL, a round reads the GPUs at most three times, however many processes are due. So a
//! user with many processes does not delay the end of another user's process. An MPS daemon ends the work of one client
//! after the other, and gpushd waits for at most 5 s: so gpushd asks it about two clients at a time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use gpush_api::{
    GpuProcess, GpuUuid, LeaseOwner, LeaseRequirement, ProcessKind, UnknownProcesses, UnleasedPolicy, UnleasedProcess,
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
use crate::modes::mps::{self, Place};

/// Pause between two checks for unleased processes.
const PAUSE: Duration = Duration::from_secs(5);

/// Minimum pause until gpushd tries again to kill a process.
const RETRY: Duration = Duration::from_millis(100);

/// Number of MPS clients that gpushd kills at the same time.
const MOST_KILLED: usize = 2;

/// After this time, a round kills no further MPS clients.
const KILLING: Duration = Duration::from_secs(5);

/// Why gpushd does not end a process whose identity it cannot read.
const UNREADABLE: &str = "gpushd cannot read which program it executes";

/// A process that must get a signal.
#[derive(Debug)]
struct DueSignal {
    process: Arc<OpenedProcess>,
    signal: Signal,
    /// UUID of the process's GPU.
    gpu: GpuUuid,
}

impl DueSignal {
    /// Returns what gpushd is about to do, for the reports.
    fn step(&self) -> UnleasedStep {
        if self.signal == Signal::SIGKILL { UnleasedStep::Killed } else { UnleasedStep::Asked }
    }

    fn exempt(&self, unleased: &Unleased, one: &GpuProcess, why: String) {
        exempt(unleased, one, self.process.pid, self.process.identity.start, why);
    }
}

/// Checks for unleased processes until gpushd stops.
pub(crate) async fn run(unleased: Unleased) {
    let mut next = Instant::now() + PAUSE;
    loop {
        tokio::select! {
            () = unleased.context.stopping.cancelled() => return,
            () = tokio::time::sleep_until(next) => {}
        }
        let begun = Instant::now();
        let rest = round(&unleased).await;
        let (earliest, latest) = (Instant::now() + RETRY, Instant::now() + PAUSE);
        next = match rest {
            Rest::Clients => earliest,
            // Run again when the next process must be killed, so that it is killed at the announced time. If this round
            // could not kill a process, for example because it changed its user, the next usual round tries again.
            Rest::Nothing => unleased.next_kill(begun).map_or(latest, |at| at.clamp(earliest, latest)),
        };
    }
}

/// What a round did not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    Nothing,
    /// It did not kill all MPS clients that are due.
    Clients,
}

/// Reads the GPUs and executes a round at once, for tests.
#[cfg(test)]
pub(crate) async fn check_once(unleased: &Unleased) {
    let uuids: Vec<GpuUuid> = unleased.context.state.now().gpus.iter().map(|gpu| gpu.gpu.uuid.clone()).collect();
    let _unread = unleased.context.readings.now(&uuids).await;
    round(unleased).await;
}

async fn round(unleased: &Unleased) -> Rest {
    let config = unleased.context.state.config();
    let allow = match config.processes.unleased {
        UnleasedPolicy::Report | UnleasedPolicy::Warn => Some(Arc::default()),
        UnleasedPolicy::End => unleased.allow_list().await,
    };
    let Some(allow) = allow else { return Rest::Nothing };
    unleased.note_invisible(allow.invisible());
    // If the GPUs cannot be read, the processes of the last round count.
    let Some((found, unread)) = find(unleased, &config).await else { return Rest::Nothing };
    show_trespassers(unleased, &config, &found, &unread);
    let pids: Vec<u32> = found.iter().filter_map(|one| one.process.process.pid).collect();
    unleased.retain(&pids, unread.is_empty());
    match config.processes.unleased {
        UnleasedPolicy::Report => {}
        UnleasedPolicy::Warn => found.iter().for_each(|one| warn(unleased, &one.process)),
        UnleasedPolicy::End => return end(unleased, found, allow).await,
    }
    Rest::Nothing
}

/// Shows the processes on devices of others with their GPUs, and publishes one event about each of them. Keeps what is
/// known about the GPUs whose processes could not be read.
fn show_trespassers(unleased: &Unleased, config: &Config, found: &[ClassifiedProcess], unread: &[UnknownProcesses]) {
    let mut by_gpu: BTreeMap<GpuUuid, Vec<UnleasedProcess>> = BTreeMap::new();
    let host = unleased.context.state.now();
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
    unleased.context.state.set_unleased(by_gpu);
}

/// Returns the unleased processes of the host. Returns none, without reading the GPUs, if no process can be unleased. If
/// gpushd only shows unleased processes (policy `report`), returns none unless a process can be on a device of others.
/// Also returns the GPUs whose processes are not known. Returns `None` if the GPUs cannot be read.
async fn find(unleased: &Unleased, config: &Config) -> Option<(Vec<ClassifiedProcess>, Vec<UnknownProcesses>)> {
    let mut requirements = config.rules.iter().filter_map(|rule| rule.lease?.requirement);
    let is_slurms = |rule: &Rule| rule.lease.is_some_and(|terms| terms.owner == LeaseOwner::Slurm);
    let may_trespass = unleased.context.state.leases().has_exclusive_lease() || config.rules.iter().any(is_slurms);
    let is_needed = match config.processes.unleased {
        UnleasedPolicy::Report => may_trespass,
        UnleasedPolicy::Warn | UnleasedPolicy::End => {
            may_trespass || unleased.mps.is_used() || requirements.any(LeaseRequirement::needs_lease)
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

async fn end(unleased: &Unleased, found: Vec<ClassifiedProcess>, allow: Arc<AllowList>) -> Rest {
    let handle = unleased.clone();
    let due = subtask::blocking(move || due_signals(&handle, found, &allow)).await.unwrap_or_default();
    let due = check_again(unleased, due, |_, due, one| Some((due, one.clone()))).await;
    let (mut killed_clients, others): (Vec<_>, Vec<_>) = due
        .into_iter()
        .partition(|(due, one)| due.signal == Signal::SIGKILL && one.process.kind == ProcessKind::MpsClient);
    send_all(unleased, others).await;
    let begun = Instant::now();
    // The other clients are due again in the next round.
    while !killed_clients.is_empty() && begun.elapsed() < KILLING {
        let rest = killed_clients.split_off(killed_clients.len().min(MOST_KILLED));
        send_all(unleased, std::mem::replace(&mut killed_clients, rest)).await;
    }
    if killed_clients.is_empty() { Rest::Nothing } else { Rest::Clients }
}

/// Records these signals, and sends them. Before that, ends the work of MPS clients that get SIGKILL: if a client is killed
/// while it computes, the MPS server may end too.
async fn send_all(unleased: &Unleased, due: Vec<(DueSignal, GpuProcess)>) {
    let due = record(unleased, due).await;
    let is_killed_client = |(due, one): &&(DueSignal, GpuProcess)| {
        due.signal == Signal::SIGKILL && one.process.kind == ProcessKind::MpsClient
    };
    join_all(due.iter().filter(is_killed_client).map(|(due, _)| mps::terminate(&unleased.mps, due.process.pid))).await;
    // Check again just before the signals, because a user may have got a lease meanwhile.
    let due = due.into_iter().map(|(due, _)| due).collect();
    let _sent: Vec<()> = check_again(unleased, due, send).await;
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

/// Records in the audit trail what gpushd is about to do. Returns nothing, and notes the processes as exempt, if the
/// records cannot be written.
async fn record(unleased: &Unleased, due: Vec<(DueSignal, GpuProcess)>) -> Vec<(DueSignal, GpuProcess)> {
    match report::record(unleased, due.iter().map(|(due, one)| (one, due.step()))).await {
        Ok(()) => due,
        Err(why) => {
            for (due, one) in due {
                due.exempt(unleased, &one, format!("gpushd cannot record the signal, and does not send it: {why}"));
            }
            Vec::new()
        }
    }
}

/// Checks again which of the processes gpushd must end, with the current config, leases and GPU readings. Calls `act` for
/// each of them, directly after its check. Reads the GPUs once for all processes. Skips processes on a GPU that cannot be
/// read.
async fn check_again<T: Send + 'static>(
    unleased: &Unleased,
    due: Vec<DueSignal>,
    act: impl Fn(&Unleased, DueSignal, &GpuProcess) -> Option<T> + Send + 'static,
) -> Vec<T> {
    if due.is_empty() {
        return Vec::new();
    }
    let gpus: BTreeSet<GpuUuid> = due.iter().map(|due| due.gpu.clone()).collect();
    let readings = unleased.context.readings.now(&gpus.into_iter().collect::<Vec<_>>()).await;
    let read: BTreeSet<GpuUuid> = readings.into_iter().filter(|(_, one)| one.is_ok()).map(|(uuid, _)| uuid).collect();
    let config = unleased.context.state.config();
    let Some(allow) = unleased.allow_list().await else { return Vec::new() };
    let mut found: BTreeMap<(u32, GpuUuid), ClassifiedProcess> = BTreeMap::new();
    if config.processes.unleased == UnleasedPolicy::End {
        for one in find(unleased, &config).await.map(|(found, _)| found).unwrap_or_default() {
            let Some(pid) = one.process.process.pid else { continue };
            found.entry((pid, one.process.gpu_uuid.clone())).or_insert(one);
        }
    }
    let unleased = unleased.clone();
    let check = move |due: DueSignal| {
        let one = found.get(&(due.process.pid, due.gpu.clone()));
        let one = check(&unleased, &due, one, &allow)?;
        act(&unleased, due, one)
    };
    let due = due.into_iter().filter(move |due| read.contains(&due.gpu));
    subtask::blocking(move || due.filter_map(check).collect()).await.unwrap_or_default()
}

/// Checks the identity of a process, and the leases of its user. `found` is the unleased process in the last reading of its
/// GPU. Returns `None` if gpushd must not end the process.
fn check<'a>(
    unleased: &Unleased,
    due: &DueSignal,
    found: Option<&'a ClassifiedProcess>,
    allow: &AllowList,
) -> Option<&'a GpuProcess> {
    // Read the identity last: if the process is still the same, everything that was read before belongs to this process.
    let (Some(one), Some(identity)) = (found, due.process.identity_now()) else {
        unleased.forget(due.process.pid);
        return None;
    };
    // If the user of the process has just changed, the next round classifies the process again. But a process that changes
    // between subordinate uids of one user remains a process of this user. Otherwise it could prevent its end.
    if !one.process.process.uid.is_some_and(|uid| unleased.is_same_user(uid, identity.uid())) {
        return None;
    }
    let exemption = exemption(&Classifier::new(unleased), one, due.process.pid, &identity, allow);
    match exemption {
        Some(why) => due.exempt(unleased, &one.process, why),
        None => return Some(&one.process),
    }
    None
}

/// Sends a signal. Returns `None` if it cannot be sent.
fn send(unleased: &Unleased, due: DueSignal, one: &GpuProcess) -> Option<()> {
    if let Err(error) = due.process.signal(due.signal) {
        due.exempt(unleased, one, format!("gpushd cannot send {}: {error}", due.signal));
        return None;
    }
    let (pid, start, step) = (due.process.pid, due.process.identity.start, due.step());
    let grace = unleased.context.state.config().processes.grace;
    let action = match due.signal {
        Signal::SIGKILL => Action::Killed,
        _ => Action::Asked { process: due.process, kill_at: Instant::now() + grace },
    };
    unleased.note(pid, start, action);
    report::warn(one, &format!("; {}", step.log_text()));
    report::publish(unleased, one, step);
    Some(())
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
    let place = Place::Device { gpu, device: Some(&one.target).filter(|target| **target != *gpu) };
    if let Some(server) = classifier.servers.of_process(pid, one.process.process.kind, place) {
        return Some(format!("it is the {}", server.describe()));
    }
    match allow.matches(identity) {
        Match::Yes => Some("the config allows it".to_owned()),
        Match::Uncertain(why) => Some(why),
        // The user may have got a lease after the process was classified.
        Match::No => one.exempt.or_else(|| classifier.holder(one, identity.uid())).map(str::to_owned),
    }
}

/// Notes that a process is exempt. Logs the exemption if it is new.
fn exempt(unleased: &Unleased, one: &GpuProcess, pid: u32, start: u64, why: String) {
    let text = format!("; not ended: {why}");
    if unleased.note(pid, start, Action::Exempt(why)) {
        report::warn(one, &text);
    }
}
