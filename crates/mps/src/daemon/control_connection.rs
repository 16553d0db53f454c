//! Finds the processes that prevent a daemon from answering.
//!
//! A daemon accepts one connection at a time. If a daemon does not answer, gpushd searches for the
//! processes that are connected to the daemon. Reports to all callers say only that another process
//! is connected; gpushd's log contains the pid, user and name of that process.

use std::{collections::BTreeSet, path::Path};

use gpush_host::{proc, subtask};

use crate::protocol::{control::ControlError, holder, session::SessionError};

/// The message for all callers.
pub(super) const HELD: &str = "another process is connected to the MPS daemon, so the daemon does not answer gpushd";

/// Returns the pids of the processes that hold the control connection of a daemon that did not
/// answer. Logs the processes that are not in `before`.
pub(super) async fn holders(
    error: &ControlError,
    daemon: i32,
    pipe: &Path,
    target: &str,
    before: &BTreeSet<i32>,
) -> BTreeSet<i32> {
    if !is_possible_cause(error) {
        return BTreeSet::new();
    }
    let pipe = pipe.to_owned();
    let found = subtask::blocking(move || holder::holders(daemon, &pipe)).await;
    let holders: BTreeSet<i32> = match found.unwrap_or_else(|| Err(std::io::Error::other("gpushd is stopping"))) {
        Ok(holders) => holders.into_iter().collect(),
        Err(error) => {
            tracing::debug!(mps = target, "cannot find out which process is connected to the MPS daemon: {error}");
            return BTreeSet::new();
        }
    };
    for pid in holders.difference(before) {
        tracing::warn!(mps = target, pid, uid = proc::owner(*pid), command = proc::name(*pid), "{HELD}");
    }
    holders
}

/// Returns whether the connection of another process can cause this error.
fn is_possible_cause(error: &ControlError) -> bool {
    match error {
        ControlError::Busy | ControlError::Session(SessionError::Closed | SessionError::Silent { .. }) => true,
        ControlError::Session(
            SessionError::Absent { .. }
            | SessionError::Another { .. }
            | SessionError::Foreign(_)
            | SessionError::NoCommand(_)
            | SessionError::System(_),
        )
        | ControlError::Refused { .. }
        | ControlError::Unknown(_)
        | ControlError::NoServer
        | ControlError::ServerBusy
        | ControlError::NotSet { .. }
        | ControlError::Strange { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn absent_daemon_has_no_connection_holders() {
        let none = BTreeSet::new();
        let absent = SessionError::Foreign("the greeting has 3 bytes".to_owned()).into();
        assert!(!is_possible_cause(&absent));
        assert_eq!(holders(&ControlError::Busy, i32::MAX, Path::new("/nowhere"), "gpu-0", &none).await, none);
    }
}
