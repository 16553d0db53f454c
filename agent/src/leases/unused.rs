//! The actions of the idle policy: it tells the holder of a lease, and revokes the lease. The task of the lease
//! executes both.

use gpush_api::LeaseId;
use tokio::sync::oneshot;

use super::{
    Leases,
    actor::{ChangeRequest, LeaseCommand, RequestedChange, SeenUnused, UnusedNews},
};

/// Tells the holder of a lease that the lease is unused, or that an earlier warning does not apply any more. Returns
/// whether a terminal of the holder shows the notice, or the notice is recorded.
pub(crate) async fn tell_unused(leases: &Leases, id: LeaseId, news: UnusedNews) -> bool {
    let (reply, sent) = oneshot::channel();
    let Some(inbox) = leases.actors.get(id) else { return false };
    inbox.send(LeaseCommand::SendUnusedNotice { news, reply }).is_ok() && sent.await.unwrap_or(false)
}

/// Revokes a lease because it is unused, unless the holder keeps it, or a process of the lease was not seen. With
/// `ends_processes`, its processes end after a last notice. Returns whether the revocation is recorded.
pub(crate) async fn end_unused(
    leases: &Leases,
    id: LeaseId,
    reason: String,
    ends_processes: bool,
    seen: SeenUnused,
) -> bool {
    change(leases, id, RequestedChange::EndUnused { reason, ends_processes, seen }).await
}

/// Returns whether a lease is active and not kept, and each of its processes was seen.
pub(crate) async fn is_still_unused(leases: &Leases, id: LeaseId, seen: SeenUnused) -> bool {
    change(leases, id, RequestedChange::CheckUnused(seen)).await
}

async fn change(leases: &Leases, id: LeaseId, change: RequestedChange) -> bool {
    let (reply, changed) = oneshot::channel();
    let Some(inbox) = leases.actors.get(id) else { return false };
    let sent = inbox.send(LeaseCommand::Change(ChangeRequest { change, by: None, key: None, reply })).is_ok();
    if !sent {
        return false;
    }
    match changed.await {
        Ok(Ok(())) => true,
        Ok(Err(error)) => {
            let error = gpush_api::ApiError::from(error);
            tracing::warn!(lease = %id, "lease {id} was unused, but it cannot be ended: {error}");
            false
        }
        // The lease has just ended, or gpushd is stopping.
        Err(_) => false,
    }
}
