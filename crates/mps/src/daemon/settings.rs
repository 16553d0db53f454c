//! What a daemon and its servers let clients have: compared with what is wanted, set where it differs, read
//! back.
//!
//! A server has the daemon's values from its start on, and then its own, which any user who is let in may
//! change before version 550. Its memory limit is not ours to change: the one that it was first seen with
//! is what its clients count on, and is set back.

use std::time::Duration;

use crate::protocol::{
    command::Pid,
    control::{Control, ControlError, shown},
};
use gpush_api::{MemoryLimit, MpsSettings, Percentage};

/// What a server has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ServerSettings {
    /// Its pid.
    pub(super) server: Pid,
    /// Percentage of its next clients.
    pub(super) percentage: Percentage,
    /// Memory limit of its next clients.
    pub(super) limit: Option<MemoryLimit>,
    /// The one that it was first seen with.
    pub(super) first_limit: Option<MemoryLimit>,
}

/// What a daemon came to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AppliedSettings {
    /// Read back. A memory limit is the one that was set, of which the daemon shows whole GiB.
    pub(super) in_force: MpsSettings,
    /// What was otherwise before, in words: `percentage 50, not 25`.
    pub(super) differed: Vec<String>,
}

/// What a daemon has; a memory limit in whole GiB.
pub(super) async fn read(control: &Control, deadline: Duration) -> Result<MpsSettings, ControlError> {
    Ok(MpsSettings {
        percentage: control.default_percentage(deadline).await?,
        memory_limit_mib: control.default_memory_limit(deadline).await?,
        priority: control.default_priority(deadline).await?,
    })
}

/// Makes a daemon have these settings, for its next servers and for the next clients of those that it has.
pub(super) async fn put(
    control: &Control,
    servers: &mut [ServerSettings],
    wanted: &MpsSettings,
    deadline: Duration,
) -> Result<AppliedSettings, ControlError> {
    let mut differed = Vec::new();
    let percentage = control.default_percentage(deadline).await?;
    if percentage != wanted.percentage {
        differed.push(format!("percentage {percentage}, not {}", wanted.percentage));
        control.set_default_percentage(wanted.percentage, deadline).await?;
    }
    for ServerSettings { server, percentage: has, .. } in
        servers.iter_mut().filter(|has| has.percentage != wanted.percentage)
    {
        if *has != percentage {
            differed.push(format!("percentage {has} at server {server}, not {}", wanted.percentage));
        }
        if still(control.set_percentage(*server, wanted.percentage, deadline).await)? {
            *has = wanted.percentage;
        }
    }
    for ServerSettings { server, limit, first_limit, .. } in
        servers.iter_mut().filter(|has| has.limit != has.first_limit)
    {
        differed.push(format!("memory limit {} at server {server}, not {}", words(*limit), words(*first_limit)));
        // None can't be given back: what there is now is what it has.
        match *first_limit {
            Some(first) if still(control.set_memory_limit(*server, first, deadline).await)? => *limit = Some(first),
            Some(_) => {}
            None => *first_limit = *limit,
        }
    }
    let limit = control.default_memory_limit(deadline).await?;
    if limit != wanted.memory_limit_mib.map(shown) {
        differed.push(format!("memory limit {}, not {}", words(limit), words(wanted.memory_limit_mib)));
        control.set_default_memory_limit(wanted.memory_limit_mib, deadline).await?;
    }
    let priority = control.default_priority(deadline).await?;
    if priority != wanted.priority {
        differed.push(format!("priority {priority}, not {}", wanted.priority));
        control.set_default_priority(wanted.priority, deadline).await?;
    }
    Ok(AppliedSettings { in_force: wanted.clone(), differed })
}

/// Servers whose memory limit is another than that of a daemon, in words: each keeps what it was started with.
pub(super) fn own_limits<'a>(
    servers: &'a [ServerSettings],
    daemon: &MpsSettings,
) -> impl Iterator<Item = String> + use<'a> {
    let now = daemon.memory_limit_mib.map(shown);
    servers.iter().filter(move |has| has.limit != now).map(|has| {
        let limit = has.limit.map_or_else(|| "no memory limit".to_owned(), |limit| format!("memory limit {limit}"));
        format!("server {} was started with {limit}, and keeps it until it has ended", has.server)
    })
}

fn words(limit: Option<MemoryLimit>) -> String {
    limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string())
}

/// Whether something was done with a server, which may have ended meanwhile, or be about to.
fn still(done: Result<(), ControlError>) -> Result<bool, ControlError> {
    match done {
        Ok(()) => Ok(true),
        Err(ControlError::NoServer | ControlError::ServerBusy) => Ok(false),
        Err(error) => Err(error),
    }
}
