//! What is done about strays.
//!
//! ```text
//! seen ─► warn: logged once
//!      └► end:  exempt? ──────────────────────────────► left, and why is shown
//!               SIGTERM ─► gone? ─► yes: forgotten
//!                          │ grace over
//!                          ▼
//!               SIGKILL (a client of MPS is told to its daemon before)
//! ```
//!
//! A process is held by its pidfd from before the first signal to the last, so that none ever goes to
//! another one that got its pid. Never ended: root's processes, MPS servers, those that the config allows.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use gpush_api::{GpuProcess, ProcessKind, StrayPolicy};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::Instant;

use super::{is_allowed, strays};
use crate::{agent::Shared, mps};

/// Between two looks.
const LOOK: Duration = Duration::from_secs(5);

/// What was done about each stray, by pid.
#[derive(Debug, Default)]
pub(crate) struct Strays(Mutex<HashMap<u32, Case>>);

#[derive(Debug)]
struct Case {
    /// Start of the process: another one may get its pid.
    start: u64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// It is left, for this reason.
    Left(&'static str),
    Warned,
    /// It was asked to end.
    Asked {
        process: OwnedFd,
        kill_at: Instant,
    },
    Killed,
}

impl Strays {
    /// What was done about a process, in words.
    pub(super) fn done(&self, one: &GpuProcess) -> Option<String> {
        one.stray.as_ref()?;
        let cases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = one.process.pid?;
        let case = cases.get(&pid).filter(|case| mps::start_of(pid) == Some(case.start))?;
        Some(match &case.stage {
            Stage::Left(why) => format!("left: {why}"),
            Stage::Warned => "the log warns of it".to_owned(),
            Stage::Asked { kill_at, .. } => {
                let left = kill_at.saturating_duration_since(Instant::now()).as_secs();
                format!("asked to end (SIGTERM), killed in {left} s")
            }
            Stage::Killed => "killed".to_owned(),
        })
    }
}

/// Looks for strays until the agent stops.
pub(crate) async fn run(agent: Shared) {
    loop {
        tokio::select! {
            () = agent.stopping.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        round(&agent).await;
    }
}

async fn round(agent: &Shared) {
    let config = agent.settings.config();
    let found = strays(agent).await;
    let pids: Vec<u32> = found.iter().filter_map(|one| one.process.pid).collect();
    agent.strays.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|pid, _| pids.contains(pid));
    let grace = Duration::from_secs(config.processes.grace_s.into());
    for one in &found {
        let (Some(pid), Some(uid)) = (one.process.pid, one.process.uid) else { continue };
        let Some(start) = mps::start_of(pid) else { continue };
        let terminate = {
            let mut cases = agent.strays.0.lock().unwrap_or_else(PoisonError::into_inner);
            let case = cases.get_mut(&pid).filter(|case| case.start == start);
            match (config.processes.stray, case) {
                (StrayPolicy::Report, _) => false,
                (StrayPolicy::Warn, Some(_)) => false,
                (StrayPolicy::Warn, None) => {
                    warn(one, "");
                    cases.insert(pid, Case { start, stage: Stage::Warned });
                    false
                }
                (StrayPolicy::End, Some(Case { stage: Stage::Left(_) | Stage::Killed, .. })) => false,
                (StrayPolicy::End, Some(Case { stage: Stage::Asked { kill_at, .. }, .. })) => {
                    *kill_at <= Instant::now()
                }
                (StrayPolicy::End, Some(Case { stage: Stage::Warned, .. }) | None) => {
                    let stage = ask(agent, one, pid, uid, start, grace);
                    cases.insert(pid, Case { start, stage });
                    false
                }
            }
        };
        if terminate {
            if one.process.kind == ProcessKind::MpsClient {
                // A client that is killed while it computes may take its server along.
                mps::terminate(agent, pid).await;
            }
            kill(agent, one, pid);
        }
    }
}

/// Asks a stray to end, unless it must not be ended.
fn ask(agent: &Shared, one: &GpuProcess, pid: u32, uid: u32, start: u64, grace: Duration) -> Stage {
    let exempt = if uid == 0 {
        Some("root's processes are never ended")
    } else if is_allowed(agent, pid, uid) {
        Some("the config allows it")
    } else {
        None
    };
    if let Some(why) = exempt {
        warn(one, &format!("; left: {why}"));
        return Stage::Left(why);
    }
    let held = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let held = held.and_then(|own| pidfd_open(own, PidfdFlags::empty()).ok());
    // Only now is it sure to be the one that was seen.
    let Some(process) = held.filter(|_| mps::start_of(pid) == Some(start)) else {
        return Stage::Left("it ended just now");
    };
    match pidfd_send_signal(&process, Signal::TERM) {
        Ok(()) => {
            warn(one, "; asked to end");
            Stage::Asked { process, kill_at: Instant::now() + grace }
        }
        Err(error) => {
            tracing::error!("stray {pid} can't be asked to end: {error}");
            Stage::Left("gpushd may not signal it")
        }
    }
}

fn kill(agent: &Shared, one: &GpuProcess, pid: u32) {
    let mut cases = agent.strays.0.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(case) = cases.get_mut(&pid) else { return };
    let Stage::Asked { process, .. } = &case.stage else { return };
    match pidfd_send_signal(process, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => warn(one, "; killed"),
        Err(error) => tracing::error!("stray {pid} can't be killed: {error}"),
    }
    case.stage = Stage::Killed;
}

fn warn(one: &GpuProcess, done: &str) {
    let process = &one.process;
    tracing::warn!(
        gpu = one.gpu_uuid,
        uid = process.uid,
        "stray process {} ({}): {}{done}",
        process.pid.unwrap_or_default(),
        process.command.as_deref().unwrap_or("?"),
        one.stray.as_deref().unwrap_or("?")
    );
}
