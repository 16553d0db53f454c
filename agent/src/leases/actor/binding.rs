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
