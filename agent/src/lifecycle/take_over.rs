//! Takes over the maintenance, the MPS daemons, the operations and the leases of an earlier gpushd.

use gpush_api::GpuUuid;
use std::{collections::BTreeMap, sync::Arc};

use gpush_store::{OperationId, UnfinishedOperation};

use crate::{
    leases,
    modes::mps,
    operations::{
        apply::{Engine, QueuedOperation, Recovery},
        operation::OperationHandle,
    },
    serve::http::ApiHandles,
};

/// Takes over the maintenance, the MPS daemons, the operations and the leases of an earlier gpushd. Returns the UUIDs of the GPUs
/// that the operations have changed. Call this before gpushd serves requests.
pub(super) async fn take_over(
    engine: &Engine,
    handles: &ApiHandles,
    recovery: &Recovery,
    unfinished: Vec<UnfinishedOperation>,
    superseded: &BTreeMap<OperationId, OperationId>,
    boot_id: &str,
) -> Vec<GpuUuid> {
    let leases = &handles.leases;
    // Call this before any request or queued operation can begin, because they call the driver.
    handles.maintenance.resume();
    // Adopt running daemons before gpushd serves requests, because requests find only adopted daemons.
    mps::adopt_daemons(&handles.mps);
    // Put leases that arrived before this operation into the queue first, to keep the order of arrival.
    let overtaken = leases::overtaken_before(leases).await;
    let mut queued = Vec::new();
    let enqueue = |ongoing: &Arc<OperationHandle>, order, since| {
        leases::restore_places(leases, Some(since), &overtaken);
        queued.push(QueuedOperation::recovered(engine, ongoing, order, since));
    };
    let changed = recovery.take_over(unfinished, superseded, boot_id, enqueue).await;
    leases::restore_places(leases, None, &overtaken);
    // A request that changes a lease needs the task of this lease.
    leases::take_over(leases);
    // Now the operations that have begun have their lanes.
    queued.into_iter().for_each(|operation| operation.serve(engine));
    changed
}
