//! The records about leases in the store: the last notice to the holder, and the last keep.

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{ApiError, Lease, LeaseId, LeaseKeep, LeaseNotice, LeaseState};

use super::Leases;
use crate::state::LeaseTable;

/// The stored notices and keeps of the leases.
#[derive(Debug, Clone, Default)]
pub(crate) struct StoredNotices {
    pub(crate) notices: BTreeMap<LeaseId, LeaseNotice>,
    pub(crate) keeps: BTreeMap<LeaseId, LeaseKeep>,
}

/// Adds the notices and keeps that an earlier gpushd has recorded to the open leases.
pub(crate) fn restore(table: &mut LeaseTable, stored: StoredNotices) {
    let StoredNotices { mut notices, mut keeps } = stored;
    for (id, lease) in &mut table.open {
        let (notice, keep) = (notices.remove(id), keeps.remove(id));
        if notice.is_some() || keep.is_some() {
            let lease = Arc::make_mut(lease);
            (lease.notice, lease.keep) = (notice, keep);
        }
    }
}

/// Adds the stored notices and keeps to ended leases. The caller must be permitted to read them in full.
///
/// # Errors
/// If the store cannot be read.
pub(super) async fn add_to_ended(leases: &Leases, shown: &mut [Lease]) -> Result<(), ApiError> {
    let is_ended = |lease: &&mut Lease| lease.state == LeaseState::Ended;
    let ids: Vec<LeaseId> =
        shown.iter().filter(|lease| lease.state == LeaseState::Ended).map(|lease| lease.id).collect();
    if ids.is_empty() {
        return Ok(());
    }
    let read = leases.handles.context.store.read(move |view| Ok((view.lease_notices(&ids)?, view.lease_keeps(&ids)?)));
    let (mut notices, mut keeps) = read.await?;
    for lease in shown.iter_mut().filter(is_ended) {
        (lease.notice, lease.keep) = (notices.remove(&lease.id), keeps.remove(&lease.id));
    }
    Ok(())
}
