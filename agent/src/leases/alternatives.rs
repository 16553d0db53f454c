//! What the holder of a refused request may lease on this host instead. The hints of refusals name nothing else.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{ApiError, Gpu, GpuIndex, LeaseKind};
use gpush_core::lease::{
    placement::{ErrorContext, Host, NoAssignment, PlacementPolicy, PlacementRequest, place},
    quota::{self, Allowance, Denial, Effective, Exceeded, HeldLease},
    request::{self, RequestError},
};
use gpush_store::NewLease;

use crate::operations::scheduler::denied;

/// What limits the holder, and what the host offers.
#[derive(Clone, Copy)]
pub(super) struct Alternatives<'a> {
    /// The GPUs as the caller may see them.
    pub(super) gpus: &'a [Gpu],
    /// Indexes of the GPUs that the holder may lease.
    pub(super) allowed: &'a BTreeSet<GpuIndex>,
    /// The quota of the holder.
    pub(super) quota: &'a Effective,
    /// Returns the leases of the holder.
    pub(super) held: &'a (dyn Fn() -> Vec<HeldLease> + Sync),
    /// Composes what the GPUs would offer if nothing were occupied.
    pub(super) offered: &'a (dyn Fn() -> Host + Sync),
}

impl Alternatives<'_> {
    /// Returns a request of each kind that the holder may lease now; if there is none, those that the holder may lease
    /// without the present leases.
    fn requests(&self) -> BTreeMap<LeaseKind, String> {
        let now = self.requests_with(&(self.held)());
        if now.is_empty() { self.requests_with(&[]) } else { now }
    }

    /// Returns a request of each kind that the holder may lease in addition to these leases.
    fn requests_with(&self, held: &[HeldLease]) -> BTreeMap<LeaseKind, String> {
        let host = (self.offered)();
        let allowance = Some(Allowance { effective: self.quota, held });
        let (gpus, allowed) = (self.gpus, Some(self.allowed));
        ErrorContext { host: &host, gpus, allowed, duration: None, allowance }.possible().into_iter().collect()
    }

    /// Adds to a hint about another request that the quota first needs the end of a lease, if it allows no further lease.
    /// Otherwise the user would follow the hint, and be refused again.
    pub(super) fn after_release(&self, hint: String) -> String {
        let held = (self.held)();
        let own = held.iter().find(|lease| lease.releasable && !lease.queued).map(|lease| lease.id);
        match own.filter(|_| self.requests_with(&held).is_empty() && !self.requests_with(&[]).is_empty()) {
            Some(own) => {
                format!("the quota allows no further lease: {}; after that, {hint}", quota::use_or_release(own))
            }
            None => hint,
        }
    }

    /// Returns the GPUs that the holder may lease, and that offer this kind; without a kind, any kind that the holder may
    /// lease.
    fn gpus_with(&self, kind: Option<LeaseKind>) -> Vec<String> {
        let requests = self.requests();
        let is_wanted = |offered: LeaseKind| kind.is_none_or(|kind| kind == offered) && requests.contains_key(&offered);
        let host = (self.offered)();
        let gpus = host.gpus.iter().filter(|gpu| self.allowed.contains(&gpu.index) && gpu.kinds().any(is_wanted));
        gpus.map(|gpu| gpu.index.to_string()).collect()
    }

    /// Returns the hint for a request for GPUs that are closed to the holder: other GPUs with this kind of lease, or another
    /// kind.
    pub(super) fn hint(&self, kind: Option<LeaseKind>) -> Option<String> {
        let gpus = self.gpus_with(kind);
        if !gpus.is_empty() {
            return Some(self.after_release(format!("choose a GPU that you may lease: `-g {}`", gpus.join(","))));
        }
        let (_, first) = self.requests().into_iter().next()?;
        let flags = request::flags(&first);
        Some(self.after_release(format!("request a share that you may lease: `gpushctl run {flags} -- COMMAND`")))
    }

    /// Returns the error for a request without a share, with the options for those that the holder may lease. `kinds` are
    /// the kinds that the selected GPUs offer.
    pub(super) fn with_requests(&self, error: RequestError, kinds: &[LeaseKind]) -> ApiError {
        let mut requests = self.requests();
        requests.retain(|kind, _| kinds.contains(kind));
        let requests = joined(requests.values());
        let error = ApiError::from(error);
        if requests.is_empty() { error } else { error.hint(self.after_release(format!("add {requests}"))) }
    }

    /// Returns the error for a request of a kind that the quota does not allow; `None` if the quota allows the kind. The
    /// hint names only kinds that the host offers to the holder.
    pub(super) fn denied_kind(&self, new: &NewLease, wanted: &PlacementRequest) -> Option<ApiError> {
        let kind = wanted.share.kind();
        let denial = quota::check_request(self.quota, &[], kind, new.request.duration_s).err()?;
        let Exceeded::Kind { .. } = denial.exceeded else { return None };
        let requests = self.requests();
        let exceeded = Exceeded::Kind { kind, allowed: requests.keys().copied().collect() };
        let instead = joined(requests.values());
        let mut error = denied(&Denial { exceeded, ..denial }, new, wanted, Some(&instead));
        error.hint = error.hint.map(|hint| if instead.is_empty() { hint } else { self.after_release(hint) });
        Some(error)
    }
}

impl Alternatives<'_> {
    /// Returns the error for a request that the host can never meet, even if nothing is occupied; `None` if it can.
    pub(super) fn impossible(&self, wanted: &PlacementRequest) -> Option<ApiError> {
        let host = (self.offered)();
        let why = place(&host, wanted, PlacementPolicy::Pack).err()?;
        let is_final = match &why {
            NoAssignment::NotOffered { .. } | NoAssignment::UnknownProfile { .. } | NoAssignment::TooLarge { .. } => {
                true
            }
            NoAssignment::SharedThroughMps(_) | NoAssignment::Busy { .. } => false,
        };
        let held = (self.held)();
        let allowance = Some(Allowance { effective: self.quota, held: &held });
        let (gpus, allowed) = (self.gpus, Some(self.allowed));
        is_final.then(|| why.error(wanted, ErrorContext { host: &host, gpus, allowed, duration: None, allowance }))
    }
}

/// Returns the options of requests: `--mig 1g.10gb` or `--mps 25`, in backticks.
fn joined<'r>(requests: impl Iterator<Item = &'r String>) -> String {
    requests.map(|request| format!("`{}`", request::flags(request))).collect::<Vec<_>>().join(" or ")
}
