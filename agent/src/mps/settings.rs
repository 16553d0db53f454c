//! What a daemon lets its clients have: compared with what is wanted, set where it differs, read back.

use std::time::Duration;

use gpush_api::MpsSettings;
use gpush_mps::{
    command::Pid,
    control::{Control, ControlError, shown},
};

/// What a daemon came to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Put {
    /// Read back. A memory limit is the one that was set, of which the daemon shows whole GiB.
    pub(super) in_force: MpsSettings,
    /// What was otherwise before, in words: `percentage 50, not 25`.
    pub(super) differed: Vec<String>,
}

/// Makes a daemon have these settings, for its next servers and for the next clients of those that it has.
pub(super) async fn put(
    control: &Control,
    servers: &[Pid],
    wanted: &MpsSettings,
    deadline: Duration,
) -> Result<Put, ControlError> {
    let mut differed = Vec::new();
    let percentage = control.default_percentage(deadline).await?;
    if percentage != wanted.percentage {
        differed.push(format!("percentage {percentage}, not {}", wanted.percentage));
        control.set_default_percentage(wanted.percentage, deadline).await?;
        for server in servers {
            match control.set_percentage(*server, wanted.percentage, deadline).await {
                // It has ended meanwhile.
                Ok(()) | Err(ControlError::NoServer) => {}
                Err(error) => return Err(error),
            }
        }
    }
    let limit = control.default_memory_limit(deadline).await?;
    if limit != wanted.memory_limit_mib.map(shown) {
        let words = |limit: Option<_>| {
            limit.map_or_else(|| "none".to_owned(), |limit: gpush_api::MemoryLimit| limit.to_string())
        };
        differed.push(format!("memory limit {}, not {}", words(limit), words(wanted.memory_limit_mib)));
        control.set_default_memory_limit(wanted.memory_limit_mib, deadline).await?;
    }
    let priority = control.default_priority(deadline).await?;
    if priority != wanted.priority {
        differed.push(format!("priority {priority}, not {}", wanted.priority));
        control.set_default_priority(wanted.priority, deadline).await?;
    }
    Ok(Put { in_force: wanted.clone(), differed })
}
