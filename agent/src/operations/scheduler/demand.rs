//! What a request for a lease asks for.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::GpuIndex;
use gpush_core::{
    config::Config,
    lease::{placement::PlacementRequest, quota::Effective},
};
use gpush_host::accounts::Account;
use gpush_store::NewLease;

/// A request for a lease, in the form that the scheduler needs.
#[derive(Debug, Clone)]
pub(crate) struct LeaseDemand {
    pub(crate) new: NewLease,
    /// The share and the GPUs that the placement must find.
    pub(crate) wanted: PlacementRequest,
    /// Indexes of the GPUs that the caller may lease, also those that the request does not select.
    pub(crate) allowed: BTreeSet<GpuIndex>,
    /// The account of the holder, for which quotas count.
    pub(crate) account: Account,
    /// The effective quota of the holder.
    pub(crate) quota: Effective,
    /// The config whose rules and quotas the request was checked against. With another config, it must be resolved again.
    pub(crate) config: Arc<Config>,
}
