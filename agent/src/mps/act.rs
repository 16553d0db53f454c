//! What people may do with a daemon: start and stop it, have it drained, set what its clients may have.
//!
//! A stop or a restart under clients ends them, so it is refused unless that is said; who is there is
//! named. What was stopped stays so, over restarts of gpushd, until somebody starts it.

use std::time::Duration;

use gpush_api::{ApiError, Code, MpsDaemon, MpsEndRequest, MpsSet, MpsSetRequest, MpsSettings};
use gpush_core::{sharing, supervisor::State};
use gpush_store::MpsTarget;

use super::{
    Entry, clients,
    daemon::{Do, Seen},
    records,
    targets::Outlook,
    view,
};
use crate::{agent::Shared, auth::Asker, request::Request};

/// Longest time that clients may be given to go, seconds.
const LONGEST: u64 = 30 * 24 * 3600;

/// What shall become of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// Started, though it was stopped or given up.
    Start,
    /// Ended.
    Stop,
    /// Ended and started again.
    Restart,
    /// Ended once its clients have.
    Drain,
}

impl Act {
    /// As the path has it.
    pub(crate) fn verb(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Restart => "restart",
            Self::Drain => "drain",
        }
    }

    /// As the audit trail has it.
    fn name(self) -> &'static str {
        match self {
            Self::Start => "mps.start",
            Self::Stop => "mps.stop",
            Self::Restart => "mps.restart",
            Self::Drain => "mps.drain",
        }
    }
}

/// Has it done; how the daemon is right after.
///
/// # Errors
/// When clients are in the way and may not be ended, or it can't be recorded.
pub(crate) async fn act(
    agent: &Shared,
    asker: &Asker,
    text: &str,
    act: Act,
    how: MpsEndRequest,
    request: Request,
) -> Result<MpsDaemon, ApiError> {
    let (uuid, entry) = view::find(agent, text)?;
    let label = view::label(&entry, &uuid);
    entry.daemon.have(Do::Look).await?;
    let seen = entry.daemon.seen();
    if matches!(act, Act::Stop | Act::Restart) && !how.force {
        under_clients(agent, asker, act, &label, &uuid, &entry, &seen).await?;
    }
    let within = match how.wait_s {
        Some(seconds @ 0..=LONGEST) => Duration::from_secs(seconds),
        Some(seconds) => {
            let message = format!("wait_s is {seconds}; at most {LONGEST} (30 days) are allowed");
            return Err(ApiError::new(Code::BadRequest, message));
        }
        None => Duration::from_secs(agent.settings.config().mps.drain_s.into()),
    };
    let record = agent.mps.record(&uuid);
    let stopped_by = match act {
        Act::Start | Act::Restart => None,
        Act::Stop | Act::Drain => Some(request.by.clone()),
    };
    if let (None, Some(why)) = (&stopped_by, Outlook::of(agent, asker).ends(&uuid, &entry)) {
        return Err(view::refuse_end(&label, &entry, why));
    }
    if stopped_by.is_none() && entry.target.is_none() {
        let message = format!("{label} can't be started: how it is to be shared is not known yet");
        return Err(ApiError::new(Code::Unavailable, message).hint("`gpushctl status` shows its GPU").retryable());
    }
    let uid = request.by.uid;
    // What was set above the rule stands until the daemon is stopped.
    let set = record.set.clone().filter(|_| stopped_by.is_none());
    let record = MpsTarget { stopped_by, set, ..record };
    remember(agent, record, request, act.name(), &entry.short).await?;
    tracing::info!(mps = entry.short, uid, "{}", act.name());
    match act {
        Act::Start => {
            // One that was stopped is not wanted yet: how, the settling says.
            super::targets::settle(agent).await;
            entry.daemon.have(Do::Start).await?;
        }
        Act::Stop => entry.daemon.have(Do::Leave(Duration::ZERO)).await?,
        Act::Restart => {
            super::targets::settle(agent).await;
            entry.daemon.have(Do::Restart).await?;
        }
        Act::Drain => entry.daemon.have(Do::Leave(within)).await?,
    }
    view::one(agent, asker, &entry.short).await
}

/// Refuses what would end clients.
async fn under_clients(
    agent: &Shared,
    asker: &Asker,
    act: Act,
    label: &str,
    uuid: &str,
    entry: &Entry,
    seen: &Seen,
) -> Result<(), ApiError> {
    if seen.clients.is_empty() {
        return Ok(());
    }
    let shares = agent.mps.shares_of(uuid);
    let what = if act == Act::Stop { "stopped" } else { "restarted" };
    let mut error = ApiError::new(
        Code::Blocked,
        format!("the MPS daemon of {label} is not {what} under its {} clients", seen.clients.len()),
    );
    for client in clients::of(agent, seen, &shares).await {
        let (Some(pid), true) = (client.pid, asker.may_see(client.uid)) else { continue };
        let whose = client.user.unwrap_or_else(|| "an unknown user".to_owned());
        error = error.cause(format!("pid {pid} of {whose}: {}", client.command.unwrap_or_default()));
    }
    let verb = if act == Act::Stop { "stop" } else { "restart" };
    let short = view::name(entry);
    Err(error
        .hint(format!("`gpushctl mps drain {short}` lets them finish; `gpushctl mps {verb} {short} --force` ends them"))
        .retryable())
}

/// Sets what the daemon's clients may have, above its rule.
///
/// # Errors
/// When the target can't have it, it can't be recorded, or the daemon has another value afterwards.
pub(crate) async fn set(
    agent: &Shared,
    asker: &Asker,
    text: &str,
    change: MpsSetRequest,
    request: Request,
) -> Result<MpsSet, ApiError> {
    let (uuid, entry) = view::find(agent, text)?;
    let label = view::label(&entry, &uuid);
    let Some(target) = entry.target.clone() else {
        return Err(ApiError::new(Code::Conflict, format!("{label} is not shared through MPS any more")));
    };
    let record = agent.mps.record(&uuid);
    let before = record.set.clone().unwrap_or_else(|| target.policy.settings.clone());
    let settings = MpsSettings {
        percentage: change.percentage.unwrap_or(before.percentage),
        memory_limit_mib: change.memory_limit_mib.or(before.memory_limit_mib),
        priority: change.priority.unwrap_or(before.priority),
    };
    if let Some(memory) = target.memory_mib {
        sharing::fits(&settings, memory, &label)?;
    }
    let set = (settings != target.policy.settings).then(|| settings.clone());
    remember(agent, MpsTarget { set, ..record }, request, "mps.set", &entry.short).await?;
    super::targets::settle(agent).await;
    let daemon = view::one(agent, asker, &entry.short).await?;
    let reaches = reaches(&before, &settings, &daemon, &entry.daemon.seen());
    Ok(MpsSet { daemon, reaches })
}

/// Which clients a change reaches, as NVIDIA documents it.
fn reaches(before: &MpsSettings, now: &MpsSettings, daemon: &MpsDaemon, seen: &Seen) -> Vec<String> {
    if before == now {
        return vec!["nothing changed: it had these settings".to_owned()];
    }
    if !matches!(seen.state, State::Ready { .. }) {
        return vec![format!("its daemon is {}: they hold from its next start on", daemon.state.name())];
    }
    let mut reaches = vec!["clients that start from now on".to_owned()];
    let running = daemon.clients.len();
    if running > 0 {
        reaches.push(format!("not the {running} that run: they keep what they started with"));
    }
    if before.memory_limit_mib != now.memory_limit_mib && !daemon.servers.is_empty() {
        reaches.push("the memory limit only from the next server on: one that runs keeps its own".to_owned());
    }
    reaches
}

async fn remember(
    agent: &Shared,
    record: MpsTarget,
    request: Request,
    action: &'static str,
    short: &str,
) -> Result<(), ApiError> {
    Ok(records::keep(agent, record, request.recorded(action, short.to_owned())).await?)
}
