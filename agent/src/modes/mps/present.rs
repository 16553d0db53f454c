//! Which daemons have no user, and the poll of daemons, for plans and operations.

use gpush_api::GpuUuid;
use std::{collections::BTreeSet, time::Duration};

use futures_util::future::join_all;

use super::{DaemonHandle, Mps, uses};

impl Mps {
    /// Returns the pids of processes that do no work for a user: the MPS daemons and servers on targets without clients
    /// and leases.
    pub(crate) fn idle(&self) -> BTreeSet<u32> {
        let host = self.handles.context.state.now();
        let idle = host.mps.all().filter(|target| uses(&host, target).is_empty());
        idle.flat_map(|target| target.report.daemon_pids().collect::<Vec<_>>()).collect()
    }
}

/// Polls the daemons of the GPUs in `asked`, so that clients that have exited do not block a plan. Does not poll other
/// daemons, because they may hang.
pub(crate) async fn poll(mps: &Mps, asked: &BTreeSet<GpuUuid>) {
    let targets = mps.handles.context.state.mps();
    let asked = targets.all().filter(|target| asked.contains(&target.gpu_uuid));
    let daemons: Vec<DaemonHandle> = asked.filter_map(|target| mps.daemon(&target.uuid)).collect();
    join_all(daemons.iter().map(|handle| handle.daemon.refresh(Duration::ZERO))).await;
}
