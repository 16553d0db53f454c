//! Ending strays, where the config says so.
//!
//! ```text
//! seen ─► warn: logged once
//!      └► end:  held by its pidfd, with what the kernel says of it (`held`)
//!               root's? an MPS server? allowed? can't be told? ─► left, and why is shown; looked at each time
//!               a new reading of its GPU: is the held process still a stray? ─► no: released
//!               recorded ─► nothing of this has changed? ─► SIGTERM ─► events
//!                           grace period over: same checks ─► SIGKILL (MPS clients: `mps::terminate` first)
//! ```
//!
//! A pid in a reading may have been reused meanwhile. While gpushd holds the pidfd of a live process, its pid is not
//! reused. So gpushd sends a signal only after a reading that began when the process was already held.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{GpuProcess, LeaseRequirement, ProcessKind, StrayPolicy, StrayStep};
use gpush_core::config::Config;
use gpush_host::proc;
use nix::sys::signal::Signal;
use tokio::time::Instant;

use super::Strays;
use super::{
    allow::{Allow, Verdict},
    held::Held,
    judge::{Judge, Judged},
    judged,
    strays::Stage,
    told,
};
use crate::mps;

/// Pause between two checks, and the shortest pause before a failed kill is tried again.
const LOOK: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(100));

/// A stray that is to be asked to end, or killed.
#[derive(Debug)]
struct Due {
    process: Arc<Held>,
    step: StrayStep,
    /// UUID of the GPU that it was seen on.
    gpu: String,
}

/// Looks for strays until the agent stops.
pub(crate) async fn run(strays: Strays) {
    let mut next = Instant::now() + LOOK.0;
    loop {
        tokio::select! {
            () = strays.stopping.cancelled() => return,
            () = tokio::time::sleep_until(next) => {}
        }
        round(&strays).await;
        let (soonest, usual) = (Instant::now() + LOOK.1, Instant::now() + LOOK.0);
        // A process that got SIGTERM is killed at the announced time, not at the next regular check.
        next = strays.next().map_or(usual, |at| at.clamp(soonest, usual));
    }
}

async fn round(strays: &Strays) {
    let config = strays.state.config();
    let Some(allow) = Allow::of(&config).await else { return };
    strays.tell_unseen(allow.unseen());
    let found = find_strays(strays, &config).await;
    let pids: Vec<u32> = found.iter().filter_map(|one| one.process.process.pid).collect();
    strays.keep(&pids);
    match config.processes.stray {
        StrayPolicy::Report => {}
        StrayPolicy::Warn => found.iter().for_each(|one| warn(strays, &one.process)),
        StrayPolicy::End => end(strays, found, &allow).await,
    }
}

/// The strays of this host, as gpushd itself sees them.
async fn find_strays(strays: &Strays, config: &Config) -> Vec<Judged> {
    // Without a GPU that requires a lease and without a leased device there are none, and no GPU need be read.
    let mut requires = config.rules.iter().filter_map(|rule| rule.lease?.requirement);
    let is_needed = strays.mps.is_used()
        || requires.any(|one| one == LeaseRequirement::Required)
        || strays.state.leases().has_lease_alone();
    if !is_needed || config.processes.stray == StrayPolicy::Report {
        return Vec::new();
    }
    let Ok((all, _)) = judged(strays).await else { return Vec::new() };
    all.into_iter().filter(|one| one.process.stray.is_some() && one.process.process.pid.is_some()).collect()
}

fn warn(strays: &Strays, one: &GpuProcess) {
    let Some((pid, start)) = one.process.pid.and_then(|pid| Some((pid, proc::start(pid)?))) else { return };
    if strays.note(pid, start, Stage::Warned) {
        told::warn(one, "");
    }
}

async fn end(strays: &Strays, found: Vec<Judged>, allow: &Allow) {
    let judge = Judge::of(strays);
    let mut due: Vec<Due> = Vec::new();
    for one in found {
        let Some(pid) = one.process.process.pid else { continue };
        // It may be on several GPUs.
        if due.iter().any(|due| due.process.pid == pid) {
            continue;
        }
        let (process, step) = match strays.stage(pid) {
            Some(Stage::Killed) => continue,
            Some(Stage::Asked { process, kill_at }) => {
                (process, (kill_at <= Instant::now()).then_some(StrayStep::Killed))
            }
            Some(Stage::Warned | Stage::Left(_)) | None => match Held::take(pid) {
                Some(held) => (Arc::new(held), Some(StrayStep::Asked)),
                // It has ended, or too little of it can be seen to be sure who it is.
                None => continue,
            },
        };
        if let Some(why) = exempt(&judge, &one, &process, allow) {
            leave(strays, &one.process, &process, &why);
        } else if let Some(step) = step {
            due.push(Due { process, step, gpu: one.process.gpu_uuid });
        }
    }
    if !due.is_empty() {
        proceed(strays, due).await;
    }
}

/// Executes the due steps on processes that a new reading still shows as strays.
async fn proceed(strays: &Strays, due: Vec<Due>) {
    let gpus: BTreeSet<String> = due.iter().map(|due| due.gpu.clone()).collect();
    let read = strays.readings.now(&gpus.into_iter().collect::<Vec<_>>()).await;
    let read: BTreeSet<String> = read.into_iter().filter(|(_, read)| read.is_ok()).map(|(uuid, _)| uuid).collect();
    for due in due.into_iter().filter(|due| read.contains(&due.gpu)) {
        step(strays, due).await;
    }
}

/// Sends SIGTERM or SIGKILL to a process, unless it has changed since it was held.
async fn step(strays: &Strays, Due { process, step, gpu }: Due) {
    let Some(one) = still(strays, &process, &gpu).await else { return };
    if let Err(why) = told::record(strays, &one, step).await {
        leave(strays, &one, &process, &format!("it can't be recorded: {why}"));
        return;
    }
    if step == StrayStep::Killed && one.process.kind == ProcessKind::MpsClient {
        // A client that is killed while it computes may take its server along.
        mps::terminate(&strays.mps, process.pid).await;
    }
    // Both took a while.
    let Some(one) = still(strays, &process, &gpu).await else { return };
    let (signal, done) = match step {
        StrayStep::Asked => (Signal::SIGTERM, "; asked to end"),
        StrayStep::Killed => (Signal::SIGKILL, "; killed"),
    };
    if let Err(error) = process.signal(signal) {
        leave(strays, &one, &process, &format!("gpushd can't signal it: {error}"));
        return;
    }
    let grace = Duration::from_secs(strays.state.config().processes.grace_s.into());
    let (pid, start) = (process.pid, process.facts.start);
    let stage = match step {
        StrayStep::Asked => Stage::Asked { process, kill_at: Instant::now() + grace },
        StrayStep::Killed => Stage::Killed,
    };
    strays.note(pid, start, stage);
    told::warn(&one, done);
    told::publish(strays, &one, step);
}

/// The stray that a process still is, by config, shares, kernel and driver as they are now.
async fn still(strays: &Strays, process: &Arc<Held>, gpu: &str) -> Option<GpuProcess> {
    let config = strays.state.config();
    let allow = Allow::of(&config).await?;
    let found = find_strays(strays, &config).await;
    let is_same = |one: &Judged| one.process.process.pid == Some(process.pid) && one.process.gpu_uuid == gpu;
    let one = found.into_iter().find(is_same).filter(|_| config.processes.stray == StrayPolicy::End);
    let Some(one) = one.filter(|one| one.process.process.uid == Some(process.facts.uid())) else {
        strays.forget(process.pid);
        return None;
    };
    if let Some(why) = exempt(&Judge::of(strays), &one, process, &allow) {
        leave(strays, &one.process, process, &why);
        return None;
    }
    // Last: what was read of it until here was its own.
    if !process.is_unchanged() {
        strays.forget(process.pid);
        return None;
    }
    Some(one.process)
}

/// Why a stray is not ended.
fn exempt(judge: &Judge<'_>, one: &Judged, process: &Held, allow: &Allow) -> Option<String> {
    if process.facts.is_roots() {
        return Some("root's processes are never ended".to_owned());
    }
    if let Some(server) = judge.servers.of_process(process.pid, one.process.process.kind) {
        return Some(format!("it is the {}", server.words()));
    }
    match allow.verdict(&process.facts) {
        Verdict::Yes => Some("the config allows it".to_owned()),
        Verdict::Perhaps(why) => Some(why),
        Verdict::No => one.spared.map(str::to_owned),
    }
}

/// Notes that one is left, and warns of it when that is new.
fn leave(strays: &Strays, one: &GpuProcess, process: &Held, why: &str) {
    if strays.note(process.pid, process.facts.start, Stage::Left(why.to_owned())) {
        told::warn(one, &format!("; left: {why}"));
    }
}
