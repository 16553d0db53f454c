//! Who keeps a daemon from answering: it listens to one at a time. It is looked for only when a daemon did
//! not answer. That it is somebody everybody may know; who it is stands in the log, and is shown to admins
//! and to the one himself.

use std::{collections::BTreeSet, path::Path};

use gpush_host::{identity::ProcessIdentity, proc};
use gpush_mps::{control::ControlError, holder, session::SessionError};

use super::Mps;
use super::daemon::Seen;
use crate::caller::Caller;

/// Said to everybody.
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

/// Those of them whom somebody may see, a sentence each.
pub(super) async fn named(mps: &Mps, caller: &Caller, seen: &Seen) -> Vec<String> {
    let pids: Vec<u32> = seen.ear.iter().filter_map(|pid| u32::try_from(*pid).ok()).collect();
    let people = mps.handles.users.processes(pids.clone()).await;
    let known = pids.into_iter().filter_map(|pid| Some((pid, people.get(&pid)?)));
    known
        .filter(|(_, person)| caller.viewer.may_see(Some(person.uid)))
        .map(|(pid, person)| sentence(pid, person))
        .collect()
}

fn sentence(pid: u32, person: &ProcessIdentity) -> String {
    format!("{} has its ear: once that process has ended, it answers", person.describe(pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_it_is_named_with_pid_and_user() {
        let mut person = ProcessIdentity {
            uid: 0,
            user: Some("root".to_owned()),
            command: Some("nvidia-cuda-mps-control".to_owned()),
        };
        assert_eq!(
            sentence(4711, &person),
            "nvidia-cuda-mps-control (pid 4711, root) has its ear: once that process has ended, it answers"
        );
        (person.user, person.command) = (None, None);
        assert_eq!(
            sentence(4711, &person),
            "a process without a command line (pid 4711, uid 0) has its ear: once that process has ended, it answers"
        );
    }

    #[tokio::test]
    async fn a_daemon_that_is_not_there_is_had_by_nobody() {
        let nobody = BTreeSet::new();
        let absent = SessionError::Foreign("it greets with 3 bytes".to_owned()).into();
        assert!(!may_be_had(&absent));
        assert_eq!(holders(&ControlError::Busy, i32::MAX, Path::new("/nowhere"), "gpu-0", &nobody).await, nobody);
    }
}
