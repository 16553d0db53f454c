//! The actions of the idle policy: it tells the holder of a lease, and revokes the lease. The task of the lease
//! executes both.

use gpush_api::LeaseId;
use tokio::sync::oneshot;

use super::{
    Leases,
    actor::{ChangeRequest, LeaseCommand, RequestedChange, UnusedNews},
};

/// Tells the holder of a lease that the lease is unused, or that an earlier warning does not apply any more. Returns
/// whether a terminal of the holder shows the notice, or the notice is recorded.
pub(crate) async fn tell_unused(leases: &Leases, id: LeaseId, news: UnusedNews) -> bool {
    let (reply, sent) = oneshot::channel();
    let Some(inbox) = leases.actors.get(id) else { return false };
    inbox.send(LeaseCommand::SendUnusedNotice { news, reply }).is_ok() && sent.await.unwrap_or(false)
}

/// Revokes a lease because it is unused, unless the holder keeps it. With `ends_processes`, its processes end after a last
/// notice. Returns whether the revocation is recorded.
pub(crate) async fn end_unused(leases: &Leases, id: LeaseId, reason: String, ends_processes: bool) -> bool {
    let (reply, changed) = oneshot::channel();
    let change = RequestedChange::EndUnused { reason, ends_processes };
    let Some(inbox) = leases.actors.get(id) else { return false };
    let sent = inbox.send(LeaseCommand::Change(ChangeRequest { change, by: None, key: None, reply })).is_ok();
    if !sent {
        return false;
    }
    match changed.await {
        Ok(Ok(())) => true,
        Ok(Err(error)) => {
            tracing::warn!(lease = %id, "lease {id} is unused, but it cannot be ended: {}", gpush_api::ApiError::from(error));
            false
        }
        // The lease has just ended, or gpushd is stopping.
        Err(_) => false,
    }
}
