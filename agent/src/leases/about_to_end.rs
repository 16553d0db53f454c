//! Waits for leases of an account that are about to end, so that a quota does not refuse the second of two commands that run
//! one after the other. A lease ends a moment after its last process, because gpushd first asks the driver.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::LeaseId;
use gpush_host::subtask;
use tokio::time::{Instant, timeout_at};

use super::Leases;
use crate::{
    operations::scheduler::{HeldLeases, LeaseDemand},
    state::OpenLease,
};

/// Maximum time to wait. Such a lease usually ends within milliseconds.
const LONGEST: Duration = Duration::from_secs(2);

/// Waits until a lease that is about to end, and that counts for the account of a request, has ended. Returns false if there
/// is no such lease, or if none ends before `until`.
pub(super) async fn one_ends(leases: &Leases, demand: &LeaseDemand, until: Instant) -> bool {
    let context = &leases.handles.context;
    let mut snapshots = context.state.watch();
    let table = Arc::clone(&snapshots.borrow_and_update().leases);
    let ids = HeldLeases::of(context.users.accounts(), &table).ids_of(demand.account);
    // Reads processes and cgroups.
    let ending = subtask::blocking(move || {
        let ends = |id: &LeaseId| table.get(*id).is_some_and(OpenLease::ends_now);
        ids.into_iter().filter(ends).collect::<BTreeSet<LeaseId>>()
    });
    let ending = ending.await.unwrap_or_default();
    if ending.is_empty() {
        return false;
    }
    let ended = snapshots.wait_for(|host| ending.iter().any(|id| host.leases.get(*id).is_none()));
    matches!(timeout_at(until.min(Instant::now() + LONGEST), ended).await, Ok(Ok(_)))
}
