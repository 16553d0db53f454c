//! The actions of policies: they tell the holder of a lease, and revoke the lease. The task of the lease executes both.

use gpush_api::LeaseId;
use tokio::sync::oneshot;

use super::{
    Leases,
    actor::{ChangeRequest, EndCheck, HolderNews, LeaseCommand, RequestedChange},
};

/// Tells the holder of a lease what a policy does with it, or that an earlier warning does not apply any more. Returns
/// whether a terminal of the holder shows the notice, or the notice is recorded.
pub(crate) async fn tell_holder(leases: &Leases, id: LeaseId, news: HolderNews) -> bool {
    let (reply, sent) = oneshot::channel();
    let Some(inbox) = leases.actors.get(id) else { return false };
    inbox.send(LeaseCommand::SendPolicyNotice { news, reply }).is_ok() && sent.await.unwrap_or(false)
}

/// Revokes a lease if the check permits it. With `ends_processes`, its processes end after a last notice. Returns whether
/// the revocation is recorded.
pub(crate) async fn end_by_policy(
    leases: &Leases,
    id: LeaseId,
    reason: String,
    ends_processes: bool,
    check: EndCheck,
) -> bool {
    change(leases, id, RequestedChange::EndByPolicy { reason, ends_processes, check }).await
}

/// Returns whether a policy may end a lease.
pub(crate) async fn may_end(leases: &Leases, id: LeaseId, check: EndCheck) -> bool {
    change(leases, id, RequestedChange::CheckEnd(check)).await
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
            tracing::warn!(lease = %id, "gpushd does not end lease {id}: {error}");
            false
        }
        // The lease has just ended, or gpushd is stopping.
        Err(_) => false,
    }
}
