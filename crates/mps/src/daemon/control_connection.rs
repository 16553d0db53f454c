//! Who keeps a daemon from answering: it listens to one at a time. It is looked for only when a daemon did
//! not answer. That it is somebody everybody may know; who it is stands in the log, and is shown to admins
//! and to the one himself.

use std::{collections::BTreeSet, path::Path};

use crate::protocol::{control::ControlError, holder, session::SessionError};
use gpush_host::proc;

/// LogParser to everybody.
pub(super) const SOMEBODY: &str = "another process is connected to it and keeps it from answering";

/// Pids of those who have the ear of a daemon that did not answer. Who was not among those of before is logged.
pub(super) async fn holders(
    error: &ControlError,
    daemon: i32,
    pipe: &Path,
    target: &str,
    before: &BTreeSet<i32>,
) -> BTreeSet<i32> {
    if !may_be_had(error) {
        return BTreeSet::new();
    }
    let pipe = pipe.to_owned();
    let found = tokio::task::spawn_blocking(move || holder::holders(daemon, &pipe)).await;
    let holders: BTreeSet<i32> = match found.map_err(std::io::Error::other).and_then(|found| found) {
        Ok(holders) => holders.into_iter().collect(),
        Err(error) => {
            tracing::debug!(mps = target, "who has its ear can't be told: {error}");
            return BTreeSet::new();
        }
    };
    for pid in holders.difference(before) {
        tracing::warn!(mps = target, pid, uid = proc::owner(*pid), command = proc::name(*pid), "{SOMEBODY}");
    }
    holders
}

/// Whether a silence may come of somebody who has its ear.
fn may_be_had(error: &ControlError) -> bool {
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
    async fn a_daemon_that_is_not_there_is_had_by_nobody() {
        let nobody = BTreeSet::new();
        let absent = SessionError::Foreign("it greets with 3 bytes".to_owned()).into();
        assert!(!may_be_had(&absent));
        assert_eq!(holders(&ControlError::Busy, i32::MAX, Path::new("/nowhere"), "gpu-0", &nobody).await, nobody);
    }
}
