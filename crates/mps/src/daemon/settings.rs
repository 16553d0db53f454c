//! Settings of a daemon and its servers. gpushd compares these settings with the desired settings,
//! sets the settings that differ, and reads the result back.
//!
//! A server takes the daemon's values at its start, and keeps them when the daemon's values change. Before version 550,
//! any user with access can change a server's values. gpushd does not apply a new memory limit to a running server,
//! because the server's clients rely on the limit that the server started with. gpushd restores that limit if a user
//! changed it.

use std::time::Duration;

use crate::protocol::{
    command::Pid,
    control::{Control, ControlError, as_reported},
};
use gpush_api::{MemoryLimit, MpsSettings, Percentage};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ServerSettings {
    pub(super) server: Pid,
    /// Active thread percentage of the server's next clients.
    pub(super) percentage: Percentage,
    /// Memory limit of the server's next clients.
    pub(super) limit: Option<MemoryLimit>,
    /// The memory limit that gpushd first read from the server.
    pub(super) first_limit: Option<MemoryLimit>,
}

/// The settings of a daemon after a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AppliedSettings {
    /// The settings, as read back. The daemon reports memory limits only in whole GiB, so the limit
    /// here is the exact limit that was set.
    pub(super) effective: MpsSettings,
    /// The differences that were corrected, such as `percentage 50, not 25`.
    pub(super) changes: Vec<String>,
}

/// Reads the settings of a daemon. From 1 GiB on, the memory limit is rounded down to whole GiB.
pub(super) async fn read(control: &Control, deadline: Duration) -> Result<MpsSettings, ControlError> {
    Ok(MpsSettings {
        percentage: control.default_percentage(deadline).await?,
        memory_limit_mib: control.default_memory_limit(deadline).await?,
        priority: control.default_priority(deadline).await?,
    })
}

/// Applies the desired settings to a daemon, for its next servers and for the next clients of its running servers.
pub(super) async fn apply(
    control: &Control,
    servers: &mut [ServerSettings],
    wanted: &MpsSettings,
    deadline: Duration,
) -> Result<AppliedSettings, ControlError> {
    let mut changes = Vec::new();
    let percentage = control.default_percentage(deadline).await?;
    if percentage != wanted.percentage {
        changes.push(format!("percentage {percentage} instead of {}", wanted.percentage));
        control.set_default_percentage(wanted.percentage, deadline).await?;
    }
    for ServerSettings { server, percentage: has, .. } in
        servers.iter_mut().filter(|has| has.percentage != wanted.percentage)
    {
        if *has != percentage {
            changes.push(format!("a server has percentage {has} instead of {}", wanted.percentage));
        }
        if was_received(control.set_percentage(*server, wanted.percentage, deadline).await)? {
            *has = wanted.percentage;
        }
    }
    for ServerSettings { server, limit, first_limit, .. } in
        servers.iter_mut().filter(|has| has.limit != has.first_limit)
    {
        changes.push(format!(
            "a server has memory limit {} instead of {}",
            describe_limit(*limit),
            describe_limit(*first_limit)
        ));
        // The daemon cannot remove a server's limit. So if the server had no limit at first, the
        // current limit stays.
        match *first_limit {
            Some(first) if was_received(control.set_memory_limit(*server, first, deadline).await)? => {
                *limit = Some(first);
            }
            Some(_) => {}
            None => *first_limit = *limit,
        }
    }
    let limit = control.default_memory_limit(deadline).await?;
    if limit != wanted.memory_limit_mib.map(as_reported) {
        changes.push(format!(
            "memory limit {} instead of {}",
            describe_limit(limit),
            describe_limit(wanted.memory_limit_mib)
        ));
        control.set_default_memory_limit(wanted.memory_limit_mib, deadline).await?;
    }
    let priority = control.default_priority(deadline).await?;
    if priority != wanted.priority {
        changes.push(format!("priority {priority} instead of {}", wanted.priority));
        control.set_default_priority(wanted.priority, deadline).await?;
    }
    Ok(AppliedSettings { effective: wanted.clone(), changes })
}

/// Returns a sentence about each server whose memory limit differs from the daemon's. A server keeps the limit from its
/// start.
pub(super) fn own_limits<'a>(
    servers: &'a [ServerSettings],
    daemon: &MpsSettings,
) -> impl Iterator<Item = String> + use<'a> {
    let now = daemon.memory_limit_mib.map(as_reported);
    servers.iter().filter(move |has| has.limit != now).map(|has| {
        let limit = has.limit.map_or_else(|| "no memory limit".to_owned(), |limit| format!("memory limit {limit}"));
        format!("an MPS server was started with {limit}; the limit cannot change until this server ends")
    })
}

fn describe_limit(limit: Option<MemoryLimit>) -> String {
    limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string())
}

/// Returns whether a server received a command. It is not an error if the server has ended, is
/// starting or is ending.
fn was_received(done: Result<(), ControlError>) -> Result<bool, ControlError> {
    match done {
        Ok(()) => Ok(true),
        Err(ControlError::NoServer | ControlError::ServerBusy) => Ok(false),
        Err(error) => Err(error),
    }
}
