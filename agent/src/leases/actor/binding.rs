//! Waits until the binding of a lease has ended: its process, its scope or its cgroup.

use std::time::Duration;

use gpush_api::{LeaseBinding, LeaseId};
use gpush_host::{cgroup, pidfd::Awaited, proc};

use crate::state::OpenLease;

/// Pause between two attempts to watch a process.
const PAUSE: Duration = Duration::from_secs(1);

/// Waits until the binding of a lease has ended. Never returns if the binding cannot end, for example if the lease only
/// has an end time.
pub(super) async fn ended(lease: &OpenLease) {
    match &lease.record.binding {
        LeaseBinding::Scope { cgroup: Some(cgroup), .. }
        | LeaseBinding::Cgroup { cgroup: Some(cgroup), pid: None, .. } => cgroup::wait_until_empty(cgroup).await,
        LeaseBinding::Cgroup { cgroup: Some(cgroup), pid: Some(pid), start } => tokio::select! {
            () = cgroup::wait_until_empty(cgroup) => {}
            () = process_ends(lease.id(), *pid, *start) => {}
        },
        LeaseBinding::Process { pid: Some(pid), start } => process_ends(lease.id(), *pid, *start).await,
        LeaseBinding::Scope { cgroup: None, .. }
        | LeaseBinding::Cgroup { cgroup: None, .. }
        | LeaseBinding::Process { pid: None, .. }
        | LeaseBinding::Job { .. }
        | LeaseBinding::Time
        | LeaseBinding::None => std::future::pending().await,
    }
}

/// Waits until the process to which a lease is bound has ended.
async fn process_ends(id: LeaseId, pid: u32, start: Option<u64>) {
    let mut is_logged = false;
    loop {
        // The pidfd is opened before the start times are compared, so the pidfd refers to the
        // process with this start time.
        let opened = Awaited::open(pid).and_then(|process| Ok((process, proc::try_start(pid)?)));
        match opened {
            Ok((Some(process), found)) if found == start => return process.wait_until_ended().await,
            Ok(_) => return,
            // gpushd cannot watch the process, for example because too many files are open. Check the process again
            // later.
            Err(error) => {
                if !std::mem::replace(&mut is_logged, true) {
                    tracing::warn!(lease = %id, pid, "cannot watch the process that lease {id} is bound to: {error}");
                }
                tokio::time::sleep(PAUSE).await;
                if proc::try_start(pid).is_ok_and(|found| found != start) {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use futures_util::FutureExt;

    use super::*;
    use crate::state::leases::tests::record;

    fn bound(binding: LeaseBinding) -> OpenLease {
        let mut record = record(1, 1000, "GPU-0");
        record.binding = binding;
        OpenLease::new(record)
    }

    fn process(child: &Child, start: Option<u64>) -> OpenLease {
        bound(LeaseBinding::Process { pid: Some(child.id()), start })
    }

    #[tokio::test]
    async fn binding_ends_with_its_process() {
        let mut child = Command::new("/bin/cat").stdin(Stdio::piped()).spawn().unwrap();
        let start = proc::start(child.id());
        let lease = process(&child, start);
        assert!(ended(&lease).now_or_never().is_none(), "the process runs");
        // Another process may have got the pid.
        let earlier = process(&child, start.map(|start| start - 1));
        assert!(ended(&earlier).now_or_never().is_some(), "the process of the lease has ended");
        drop(child.stdin.take());
        ended(&lease).await;
        child.wait().unwrap();
        ended(&lease).await;
    }

    #[test]
    fn binding_without_process_or_cgroup_never_ends() {
        for binding in [LeaseBinding::Time, LeaseBinding::None, LeaseBinding::Process { pid: None, start: None }] {
            assert!(ended(&bound(binding)).now_or_never().is_none());
        }
    }
}
