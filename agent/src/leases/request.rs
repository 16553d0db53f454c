//! Resolves a request: determines the holder, the share, the GPUs and the binding of the lease.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{
    ApiError, Code, Gpu, GpuIndex, LeaseBinding, LeaseHolder, LeaseKind, LeaseRequest, LeaseShare, TargetUuid,
};
use gpush_core::{
    lease::{
        placement::{GpuOffer, Host, PlacementRequest, RequestedShare},
        quota, request,
    },
    quote::Quoted,
    sharing,
};
use gpush_host::proc;
use gpush_store::NewLease;
use jiff::Timestamp;

use super::{
    Leases,
    bind::{self, ResolvedBinding},
    job_terms::JobTerms,
    quotas,
    selection::{
        allowed, for_caller, is_offered_only_to_slurm, on_targets, selected, slurm_only_error, without_dynamic,
    },
};
use crate::{
    modes::mps,
    operations::scheduler::{self, LeaseDemand, denied},
    requests::caller::Caller,
    state::{HostState, LeaseTable, OpenLease},
};

/// A request that gpushd has checked and resolved.
#[derive(Debug, Clone)]
pub(super) struct Resolved {
    /// What the scheduler needs.
    pub(super) demand: Arc<LeaseDemand>,
    pub(super) bound: ResolvedBinding,
}

/// Checks a request and resolves it. `job` has the additional data of a request from Slurm's hooks.
///
/// # Errors
/// If the request is not valid, or the caller may not make it.
pub(super) async fn resolve(
    leases: &Leases,
    caller: &Caller,
    request: LeaseRequest,
    host: &HostState,
    gpus: &[Gpu],
    job: Option<&JobTerms>,
) -> Result<Resolved, ApiError> {
    let request = request::normalized(request)?;
    let holder = holder(caller, request.holder)?;
    let (mut selected, withheld) = for_caller(caller, host, selected(host, &request)?)?;
    if job.is_some() {
        selected = Some(without_dynamic(host, selected)?);
    }
    let now = leases.handles.context.state.now();
    let offered = || scheduler::offered_host(host, gpus, &now, &LeaseTable::default());
    let of_target = |text: &str| share_of_target(&now, gpus, text);
    let share = share(&request, selected.as_ref(), &withheld, job.is_some(), offered, of_target)?;
    let targets = match (&request.target, job) {
        (Some(text), _) => Some([target(&now, share.kind(), gpus, text)?].into()),
        (None, Some(job)) => job.targets.clone(),
        (None, None) => None,
    };
    if let Some(targets) = &targets {
        selected = on_targets(gpus, selected, targets, &withheld, job.is_some())?;
    }
    let bound = match job {
        Some(job) => ResolvedBinding::to_job(job.binding.clone()),
        None => {
            let named = named_binding(caller, holder, &request);
            bind::resolve(leases, caller, holder, &request, named).await?
        }
    };
    let binding = bound.binding.clone();
    let (uid, user) = (caller.uid(), &leases.handles.context.users);
    let asked_by = caller.actor(user.user(uid).await);
    let name = if holder == uid { asked_by.user.clone() } else { user.user(holder).await };
    let (account, mut quota) = quotas::quota(leases, caller, holder, gpus.len()).await?;
    if job.is_some_and(|job| job.has_gres) {
        // Slurm limits the time and the number of devices of a job. So gpushd never limits the time, and
        // limits the number only if the config has a quota for the user.
        quota.limits.longest_s = None;
        if quota.subject.is_none() {
            quota.limits = quota::Limits::default();
        }
    }
    if quota.limits != quota::Limits::default() {
        quotas::know_holders(leases).await?;
    }
    let allowed = allowed(caller, host, &quota, selected.as_ref());
    let selected = quota::allowed_gpus(&quota, selected.as_ref()).map_err(|denial| denied(&denial, &binding))?;
    let wanted = PlacementRequest { share, count: request.count as usize, holder, gpus: selected, targets };
    let kind = wanted.share.kind();
    let holder = LeaseHolder { uid: holder, user: name };
    let new = NewLease { holder, asked_by, kind, request, binding };
    Ok(Resolved { demand: Arc::new(LeaseDemand { new, wanted, allowed, account, quota }), bound })
}

/// Returns the share that a request means. `withheld` are the selected GPUs that only Slurm's hooks may lease. `offered`
/// composes what the host would offer if nothing were occupied. If the request names its share and `withheld` is empty,
/// `offered` is not called. `of_target` returns the share of the target that the request names.
///
/// # Errors
/// - If the request names neither a share nor a target, and the GPUs do not offer exactly one kind of lease.
/// - If the request names no share, and its target does not exist.
/// - If the request is not valid for the share that the function finds.
/// - If only `withheld` GPUs offer the kind.
fn share(
    request: &LeaseRequest,
    selected: Option<&BTreeSet<GpuIndex>>,
    withheld: &BTreeSet<GpuIndex>,
    is_job: bool,
    offered: impl FnOnce() -> Host,
    of_target: impl FnOnce(&str) -> Result<LeaseShare, ApiError>,
) -> Result<RequestedShare, ApiError> {
    let named = RequestedShare::of(&request.share);
    if let (Some(share), true) = (&named, withheld.is_empty()) {
        return Ok(share.clone());
    }
    let offered = offered();
    let share = match named {
        Some(share) => share,
        None => {
            let is_selected = |index: GpuIndex| selected.is_none_or(|selected| selected.contains(&index));
            let kinds: Vec<LeaseKind> =
                offered.gpus.iter().filter(|gpu| is_selected(gpu.index)).flat_map(GpuOffer::kinds).collect();
            let share = match &request.target {
                Some(text) => of_target(text)?,
                None => request::default_share(&kinds)?,
            };
            // Check again: the valid counts depend on the kind, and the kind is known only now.
            request::check(&LeaseRequest { share: share.clone(), ..request.clone() })?;
            RequestedShare::of(&share).ok_or(request::RequestError::NoDefault { offered: kinds })?
        }
    };
    if is_offered_only_to_slurm(&offered, share.kind(), selected, withheld) {
        return Err(slurm_only_error(is_job));
    }
    Ok(share)
}

/// Returns the uid of the holder: the caller, or the user that an administrator names. The endpoint has checked that the
/// caller may name another user.
fn holder(caller: &Caller, requested: Option<u32>) -> Result<u32, ApiError> {
    let own = caller.uid();
    match requested {
        // The kernel uses this uid for "no user".
        Some(u32::MAX) => Err(ApiError::new(Code::BadRequest, "4294967295 is not a user id")),
        Some(uid) => Ok(uid),
        None => Ok(own),
    }
}

/// Finds the UUID of the MPS target or MIG device that a text names.
fn target(now: &Arc<HostState>, kind: LeaseKind, gpus: &[Gpu], text: &str) -> Result<TargetUuid, ApiError> {
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
fn share_of_target(now: &Arc<HostState>, gpus: &[Gpu], text: &str) -> Result<LeaseShare, ApiError> {
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

/// Returns the binding that the request names: a process, an end time, or nothing.
fn named_binding(caller: &Caller, holder: u32, request: &LeaseRequest) -> Result<LeaseBinding, ApiError> {
    match (request.process, request.duration_s) {
        (Some(pid), _) => process(caller, holder, pid),
        (None, Some(_)) => Ok(LeaseBinding::Time),
        (None, None) => Ok(LeaseBinding::None),
    }
}

/// Returns the binding to a process that the request names. If another user runs the process, the caller gets the same
/// error as for a process that does not exist.
fn process(caller: &Caller, holder: u32, named: u32) -> Result<LeaseBinding, ApiError> {
    let bad = |why: &str| {
        Err(ApiError::new(Code::BadRequest, format!("a lease cannot be bound to process {named}: {why}"))
            .hint("name a process of your own that runs as long as you need the lease, or give a duration"))
    };
    let pid = match proc::local_pid(caller.peer.pid, named) {
        Ok(pid) => pid,
        Err(why) => return bad(why),
    };
    match (proc::owner(pid), proc::start(pid)) {
        (Some(uid), Some(start)) if caller.viewer.is_admin() || caller.runs_as(uid) && uid == holder => {
            Ok(LeaseBinding::Process { pid: Some(pid), start: Some(start) })
        }
        (_, _) if caller.viewer.is_admin() => bad("the process does not exist"),
        (_, _) => match caller.rank_unknown(&format!("bind a lease to process {named}")) {
            Some(unavailable) => Err(unavailable),
            None => bad("the process does not exist, or belongs to another user"),
        },
    }
}

/// Checks that a lease may last this many seconds from now.
///
/// # Errors
/// If the quota of the holder does not allow the duration.
pub(super) async fn check_duration(
    leases: &Leases,
    caller: &Caller,
    lease: &OpenLease,
    duration_s: u64,
) -> Result<(), ApiError> {
    let holder = &lease.record.holder;
    let gpus = leases.handles.context.state.now().gpus.len();
    let (_, quota) = quotas::quota(leases, caller, holder.uid, gpus).await?;
    // Check the whole duration of the existing lease, from the grant to the new end.
    let since = lease.record.granted_at.map_or(0, |at| Timestamp::now().duration_since(at).as_secs());
    let all = duration_s.saturating_add(u64::try_from(since).unwrap_or(0));
    quota::check_request(&quota, &[], lease.record.kind, Some(all)).map_err(|denial| denial.of_renewal(lease.id()))
}

#[cfg(test)]
mod tests {
    use gpush_core::lease::placement::WholeOffer;
    use gpush_host::{accounts::Account, peer::Peer};

    use super::*;
    use crate::requests::caller::Viewer;

    fn caller(uid: u32, viewer: Viewer) -> Caller {
        let (pid, groups) = (Some(std::process::id()), Vec::new());
        let peer = Peer { uid, pid, start: None, groups, is_on_this_host: true };
        Caller::with_viewer(peer, viewer, Ok(Account::User(uid)))
    }

    /// Fault: each request composed the offers of the host twice.
    #[test]
    fn named_share_needs_no_offers_unless_gpus_are_withheld() {
        let no_target = |_: &str| unreachable!("the request names no target");
        let named = LeaseRequest { share: LeaseShare::Whole {}, ..LeaseRequest::default() };
        let none = BTreeSet::new();
        let found = share(&named, None, &none, false, || unreachable!("the share is named"), no_target);
        assert_eq!(found, Ok(RequestedShare::Whole));
        let offer = |index| {
            let whole = Some(WholeOffer { free: true, leased: false });
            GpuOffer { index, whole, ..GpuOffer::default() }
        };
        let offered = || Host { gpus: vec![offer(GpuIndex(1))] };
        let unnamed = LeaseRequest::default();
        assert_eq!(share(&unnamed, None, &none, false, offered, no_target), Ok(RequestedShare::Whole));
        let (selected, withheld) = (BTreeSet::from([GpuIndex(0)]), BTreeSet::from([GpuIndex(1)]));
        let denied = share(&named, Some(&selected), &withheld, false, offered, no_target).unwrap_err();
        assert_eq!(denied.code, Code::Denied);
    }

    #[test]
    fn holder_is_the_caller_or_the_named_user() {
        let user = caller(1000, Viewer::User(1000));
        assert_eq!(holder(&user, None), Ok(1000));
        assert_eq!(holder(&user, Some(1000)), Ok(1000));
        let root = caller(0, Viewer::Admin);
        assert_eq!(holder(&root, Some(1000)), Ok(1000));
        assert_eq!(holder(&root, Some(u32::MAX)).unwrap_err().code, Code::BadRequest);
    }

    #[test]
    fn other_users_process_looks_like_no_process() {
        let own = std::process::id();
        let user = caller(4_000_000, Viewer::User(4_000_000));
        let refused = [own, u32::MAX / 2].map(|pid| {
            let error = process(&user, 4_000_000, pid).unwrap_err();
            (error.code, error.message.replace(&pid.to_string(), "PID"))
        });
        assert_eq!(refused[0], refused[1]);
        let admin = caller(0, Viewer::Admin);
        let bound = process(&admin, 1000, own).unwrap();
        assert!(matches!(bound, LeaseBinding::Process { pid: Some(pid), start: Some(_) } if pid == own), "{bound:?}");
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

    #[test]
    fn request_with_process_and_duration_is_bound_to_the_process() {
        let own = std::process::id();
        let admin = caller(0, Viewer::Admin);
        let bound = |process, duration_s| {
            named_binding(&admin, 0, &LeaseRequest { process, duration_s, ..LeaseRequest::default() }).unwrap()
        };
        assert!(matches!(bound(Some(own), Some(60)), LeaseBinding::Process { .. }));
        assert_eq!((bound(None, Some(60)), bound(None, None)), (LeaseBinding::Time, LeaseBinding::None));
    }
}
