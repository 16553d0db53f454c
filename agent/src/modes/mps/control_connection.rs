//! Finds the processes that prevent a daemon from answering, and names them to callers who may see them.

use gpush_core::mps::DaemonReport;
use gpush_host::identity::ProcessIdentity;

use super::Mps;
use crate::requests::caller::Caller;

/// Returns a sentence for each process that keeps a daemon's control connection open. Leaves out processes that the
/// caller may not see.
pub(super) async fn holders(mps: &Mps, caller: &Caller, report: &DaemonReport) -> Vec<String> {
    let pids: Vec<u32> = report.ear.iter().filter_map(|pid| u32::try_from(*pid).ok()).collect();
    let identities = mps.handles.context.users.processes(pids.clone()).await;
    let known = pids.into_iter().filter_map(|pid| Some((pid, identities.get(&pid)?)));
    known
        .filter(|(_, identity)| caller.viewer.may_see(Some(identity.uid)))
        .map(|(pid, identity)| sentence(pid, identity))
        .collect()
}

fn sentence(pid: u32, identity: &ProcessIdentity) -> String {
    format!(
        "{} holds the control connection of the MPS daemon: the daemon answers again when that process has ended",
        identity.describe(pid)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holder_is_named_with_pid_and_user() {
        let mut identity = ProcessIdentity {
            uid: 0,
            user: Some("root".to_owned()),
            command: Some("nvidia-cuda-mps-control".to_owned()),
        };
        assert_eq!(
            sentence(4711, &identity),
            "nvidia-cuda-mps-control (pid 4711, root) holds the control connection of the MPS daemon: the \
            daemon answers again when that process has ended"
        );
        (identity.user, identity.command) = (None, None);
        assert_eq!(
            sentence(4711, &identity),
            "a process without a command line (pid 4711, uid 0) holds the control connection of the MPS daemon: \
            the daemon answers again when that process has ended"
        );
    }
}
