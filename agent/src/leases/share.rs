//! The share that a request means, and the target that it names.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, Gpu, GpuIndex, LeaseKind, LeaseRequest, LeaseShare, TargetUuid};
use gpush_core::{
    lease::{
        placement::{GpuOffer, RequestedShare},
        request::{self, RequestError},
    },
    quote::Quoted,
    sharing,
};

use super::{
    access::closed_error,
    alternatives::Alternatives,
    selection::{Withheld, offered_only_on, slurm_only_error},
};
use crate::{modes::mps, state::HostState};

/// The GPUs among which a request chooses.
#[derive(Clone, Copy)]
pub(super) struct Choice<'a> {
    /// Indexes of the selected GPUs that the holder may lease; `None` for all GPUs.
    pub(super) selected: Option<&'a BTreeSet<GpuIndex>>,
    /// The other selected GPUs.
    pub(super) withheld: &'a Withheld,
    /// What the holder may lease on this host.
    pub(super) alternatives: &'a Alternatives<'a>,
}

/// Returns the share that a request means. If the request names its share and no selected GPU is withheld, the offers of
/// the host are not composed. `of_target` returns the share of the target that the request names.
///
/// # Errors
/// - If the request names neither a share nor a target, and the GPUs do not offer exactly one kind of lease.
/// - If the request names no share, and its target does not exist.
/// - If the request is not valid for the share that the function finds.
/// - If only withheld GPUs offer the kind.
pub(super) fn share(
    request: &LeaseRequest,
    Choice { selected, withheld, alternatives }: Choice<'_>,
    is_job: bool,
    of_target: impl FnOnce(&str) -> Result<LeaseShare, ApiError>,
) -> Result<RequestedShare, ApiError> {
    let named = RequestedShare::of(&request.share);
    if let (Some(share), true) = (&named, withheld.is_empty()) {
        return Ok(share.clone());
    }
    let offered = (alternatives.offered)();
    let allowed_kinds = alternatives.quota.limits.kinds.as_ref();
    let share = match named {
        Some(share) => share,
        None => {
            let is_selected = |index: GpuIndex| selected.is_none_or(|selected| selected.contains(&index));
            let mut kinds: Vec<LeaseKind> =
                offered.gpus.iter().filter(|gpu| is_selected(gpu.index)).flat_map(GpuOffer::kinds).collect();
            let is_allowed = |kind: &LeaseKind| allowed_kinds.is_none_or(|allowed| allowed.contains(kind));
            if kinds.iter().any(is_allowed) {
                kinds.retain(is_allowed);
            } else {
                // The quota then denies the request, and names the kinds that it allows.
                kinds.truncate(1);
            }
            let share = match &request.target {
                Some(text) => of_target(text)?,
                None => request::default_share(&kinds).map_err(|error| alternatives.with_requests(error, &kinds))?,
            };
            // Check again: the valid counts depend on the kind, and the kind is known only now.
            request::check(&LeaseRequest { share: share.clone(), ..request.clone() })?;
            RequestedShare::of(&share).ok_or(RequestError::NoDefault { offered: kinds })?
        }
    };
    if !offered_only_on(&offered, share.kind(), selected, withheld.slurm.iter()).is_empty() {
        return Err(slurm_only_error(is_job, &withheld.slurm_job));
    }
    let closed = offered_only_on(&offered, share.kind(), selected, withheld.closed.keys());
    if !closed.is_empty() {
        let closed = withheld.closed.iter().filter(|(index, _)| closed.contains(index));
        return Err(closed_error(
            &closed.map(|(index, why)| (*index, why.clone())).collect(),
            Some((alternatives, Some(share.kind()))),
        ));
    }
    Ok(share)
}

/// Finds the UUID of the MPS target or MIG device that a text names.
pub(super) fn target(now: &Arc<HostState>, kind: LeaseKind, gpus: &[Gpu], text: &str) -> Result<TargetUuid, ApiError> {
    match kind {
        LeaseKind::Mps => {
            let found = mps::find(now, text).map(|target| target.uuid.clone());
            found.or_else(|unknown| sharing::pending_target(text, gpus).ok_or(unknown))
        }
        LeaseKind::Mig => mig_device(gpus, text).map(|(uuid, _)| uuid).ok_or_else(|| {
            let error = ApiError::new(Code::NotFound, format!("no MIG device is named {}", Quoted(text.trim())));
            error.hint(stale_hint(text).unwrap_or_else(|| "list them with `gpushctl mig list`".to_owned()))
        }),
        LeaseKind::Timeslice | LeaseKind::Whole => {
            Err(ApiError::new(Code::BadRequest, format!("a lease of kind `{kind}` takes no target"))
                .hint("leave out the target, and name the GPU: `-g GPU`, or `selectors` in the API"))
        }
    }
}

/// Returns the UUID and the profile of the MIG device that a text names.
fn mig_device(gpus: &[Gpu], text: &str) -> Option<(TargetUuid, String)> {
    let typed = text.trim();
    let instances =
        gpus.iter().flat_map(|gpu| gpu.mig.iter().flat_map(move |mig| mig.instances.iter().map(move |i| (gpu, i))));
    let mut devices = instances.flat_map(|(gpu, one)| {
        one.compute.iter().filter_map(move |compute| {
            let name = format!("{}:{}", gpu.index, sharing::device_name(one, compute));
            Some((compute.uuid.clone()?, name, compute.profile.clone()))
        })
    });
    let found =
        devices.find(|(uuid, name, _)| uuid.as_str().eq_ignore_ascii_case(typed) || name.eq_ignore_ascii_case(typed));
    found.map(|(uuid, _, profile)| (uuid, profile))
}

/// Returns the share of a request that names only an MPS target or a MIG device.
pub(super) fn share_of_target(now: &Arc<HostState>, gpus: &[Gpu], text: &str) -> Result<LeaseShare, ApiError> {
    if target(now, LeaseKind::Mps, gpus, text).is_ok() {
        return Ok(LeaseShare::Mps { percentage: None, memory_limit_mib: None, priority: None });
    }
    mig_device(gpus, text).map(|(_, profile)| LeaseShare::MigProfile { profile }).ok_or_else(|| {
        let error =
            ApiError::new(Code::NotFound, format!("no MIG device or MPS target is named {}", Quoted(text.trim())));
        let list = || "list them with `gpushctl mig list` and `gpushctl mps list`".to_owned();
        error.hint(stale_hint(text).unwrap_or_else(list))
    })
}

/// Returns the hint for the UUID of a MIG device that does not exist now; `None` for other texts.
fn stale_hint(text: &str) -> Option<String> {
    let uuid = text.trim();
    let is_uuid = uuid.starts_with("MIG-") && uuid.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    is_uuid.then(|| {
        format!("`gpushctl explain {uuid}` says what happened to the device; `gpushctl mig list` lists the devices")
    })
}

#[cfg(test)]
mod tests {
    use gpush_core::lease::{
        placement::{Host, TimesliceOffer, WholeOffer},
        quota::{Effective, Limits},
    };

    use super::*;

    /// Returns the share of a request of a user with this quota for these GPUs, on a host with these offers.
    fn found(
        request: &LeaseRequest,
        (selected, withheld): (Option<&BTreeSet<GpuIndex>>, &Withheld),
        limits: Limits,
        offered: &(dyn Fn() -> Host + Sync),
    ) -> Result<RequestedShare, ApiError> {
        let (allowed, quota) = (BTreeSet::from([0, 1].map(GpuIndex)), Effective::without_quota(limits));
        let alternatives = Alternatives { gpus: &[], allowed: &allowed, quota: &quota, held: &Vec::new, offered };
        let choice = Choice { selected, withheld, alternatives: &alternatives };
        share(request, choice, false, |_| unreachable!("the request names no target"))
    }

    /// Fault: each request composed the offers of the host twice.
    #[test]
    fn named_share_needs_no_offers_unless_gpus_are_withheld() {
        let named = LeaseRequest { share: LeaseShare::Whole {}, ..LeaseRequest::default() };
        let (none, zero) = (Withheld::default(), BTreeSet::from([GpuIndex(0)]));
        let whole = Ok(RequestedShare::Whole);
        let of_named = found(&named, (None, &none), Limits::default(), &|| unreachable!("the share is named"));
        assert_eq!(of_named, whole);
        let offer = |index| {
            let whole = Some(WholeOffer { free: true, leased: false, end: None });
            GpuOffer { index, whole, ..GpuOffer::default() }
        };
        let offered = || Host { gpus: vec![offer(GpuIndex(1))] };
        assert_eq!(found(&LeaseRequest::default(), (None, &none), Limits::default(), &offered), whole);
        let withheld = Withheld { slurm: BTreeSet::from([GpuIndex(1)]), ..Withheld::default() };
        let denied = found(&named, (Some(&zero), &withheld), Limits::default(), &offered).unwrap_err();
        assert_eq!(denied.code, Code::Denied);
    }

    /// A request without a share gets the only kind that the GPUs offer and the quota allows.
    #[test]
    fn unnamed_share_is_of_a_kind_that_the_quota_allows() {
        let whole = Some(WholeOffer { free: true, leased: false, end: None });
        let timeslice = TimesliceOffer {
            replicas: 2,
            level: gpush_api::TimesliceLevel::Default,
            compute_mode: None,
            taken: 0,
            excluding: 0,
            first_end: None,
        };
        let offered = || Host {
            gpus: vec![
                GpuOffer { index: GpuIndex(0), whole, ..GpuOffer::default() },
                GpuOffer { index: GpuIndex(1), timeslice: Some(timeslice), ..GpuOffer::default() },
            ],
        };
        let none = Withheld::default();
        let of = |kinds: Option<&[LeaseKind]>| {
            let kinds: Option<BTreeSet<LeaseKind>> = kinds.map(|kinds| kinds.iter().copied().collect());
            let limits = Limits { kinds, ..Limits::default() };
            found(&LeaseRequest::default(), (None, &none), limits, &offered)
        };
        let two = of(None).unwrap_err();
        assert_eq!((two.code, two.hint.as_deref()), (Code::BadRequest, Some("add `--timeslice` or `--whole`")));
        assert_eq!(of(Some(&[LeaseKind::Whole, LeaseKind::Mig])), Ok(RequestedShare::Whole));
        assert_eq!(of(Some(&[LeaseKind::Timeslice])), Ok(RequestedShare::Timeslice));
        // The quota denies the request later, and names the kinds that it allows.
        assert_eq!(of(Some(&[LeaseKind::Mig])), Ok(RequestedShare::Whole));
    }

    #[test]
    fn mig_device_is_found_by_uuid_and_by_place() {
        let gpus = [crate::modes::scene::mig_gpu(&["3g.40gb@4", "2g.20gb@0"])];
        let second = Some(("MIG-1".into(), "3g.40gb".to_owned()));
        for text in ["MIG-1", "mig-1", " 0:3g.40gb@4 ", "0:3G.40GB@4"] {
            assert_eq!(mig_device(&gpus, text), second, "{text}");
        }
        for text in ["", "MIG-2", "3g.40gb@4", "1:3g.40gb@4", "0:3g.40gb"] {
            assert_eq!(mig_device(&gpus, text), None, "{text}");
        }
    }

    #[test]
    fn uuid_of_a_missing_device_gets_the_command_that_explains_it() {
        assert!(stale_hint(" MIG-0a1b-2c ").unwrap().contains("`gpushctl explain MIG-0a1b-2c`"));
        // The hint is a command, so it must not contain other characters of the request.
        for text in ["0:3g.40gb@4", "MIG", "MIG-1; rm x", "MIG-1`"] {
            assert_eq!(stale_hint(text), None, "{text}");
        }
    }
}
