//! Resolves a request: determines the holder, the share, the GPUs and the binding of the lease.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{
    ApiError, Code, Gpu, GpuIndex, LeaseBinding, LeaseHolder, LeaseKind, LeaseRequest, LeaseShare, TargetUuid,
};
use gpush_core::{
    duration,
    lease::{
        placement::{GpuOffer, Host, PlacementRequest, RequestedShare},
        quota::{self, Denial, Effective, Exceeded},
        request::{self, DefaultRequest},
    },
    quote::Quoted,
    sharing,
};
use gpush_host::proc;
use gpush_store::NewLease;
use jiff::Timestamp;

use super::{
    Leases,
    access::{self, closed_error},
    bind::{self, ResolvedBinding},
    holder_facts::HolderFacts,
    job_terms::JobTerms,
    quotas,
    selection::{
        Withheld, allowed, for_caller, offered_only_on, on_targets, selected, slurm_only_error, without_dynamic,
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
    /// What the quota has added to the request, one sentence each.
    pub(super) notes: Vec<String>,
    /// Who requests the lease.
    pub(super) caller: Caller,
    /// The additional data of a request from Slurm's hooks.
    pub(super) job: Option<JobTerms>,
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
    let mut request = request::normalized(request)?;
    let holder = holder(caller, request.holder)?;
    let facts = HolderFacts::of(leases, caller, holder).await?;
    let (account, mut quota) = (facts.account, facts.effective(gpus.len())?);
    if let Some(job) = job {
        // Slurm limits the time of a job, and the job names its share.
        (quota.limits.longest_s, quota.default) = (None, None);
        // Slurm also limits the number of devices that it allocates. So gpushd limits this number only if the config has a
        // quota for the user.
        if job.has_gres && quota.subject.is_none() {
            quota.limits = quota::Limits::default();
        }
    }
    let notes = apply_defaults(&mut request, &quota);
    // The valid counts depend on the share, which may come from the quota.
    request::check(&request)?;
    let closed = access::closed(host, &facts);
    let selected_by_request = selected(host, &request)?;
    let allowed = allowed(caller, host, &quota, selected_by_request.as_ref(), &closed);
    let (selected, slurm) = for_caller(caller, host, selected_by_request)?;
    let (mut selected, closed) = access::without_closed(host, selected, &closed, &allowed)?;
    let withheld = Withheld { slurm, closed };
    if job.is_some() {
        selected = Some(without_dynamic(host, selected)?);
    }
    let now = leases.handles.context.state.now();
    let offered = || scheduler::offered_host(host, gpus, &now, &LeaseTable::default());
    let of_target = |text: &str| share_of_target(&now, gpus, text);
    let (choice, is_job) =
        (Choice { selected: selected.as_ref(), withheld: &withheld, allowed: &allowed }, job.is_some());
    let share = share(&request, choice, quota.limits.kinds.as_ref(), is_job, offered, of_target)?;
    let targets = match (&request.target, job) {
        (Some(text), _) => Some([target(&now, share.kind(), gpus, text)?].into()),
        (None, Some(job)) => job.targets.clone(),
        (None, None) => None,
    };
    if let Some(targets) = &targets {
        selected = on_targets(gpus, selected, targets, &withheld, &allowed, is_job)?;
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
    if quota.limits != quota::Limits::default() {
        quotas::know_holders(leases).await?;
    }
    let kind = share.kind();
    let mut wanted = PlacementRequest { share, count: request.count as usize, holder, gpus: None, targets };
    let holder = LeaseHolder { uid: holder, user: name };
    let new = NewLease { holder, asked_by, kind, request, binding };
    wanted.gpus = quota::allowed_gpus(&quota, selected.as_ref()).map_err(|denial| {
        // The quota may also allow GPUs that a rule closes to the user.
        let denial = Denial { exceeded: Exceeded::Gpus { allowed: allowed.clone() }, ..denial };
        denied(&denial, &new, &wanted, None)
    })?;
    let config = Arc::clone(&host.config);
    let demand = Arc::new(LeaseDemand { new, wanted, allowed, account, quota, config });
    Ok(Resolved { demand, bound, notes, caller: caller.clone(), job: job.cloned() })
}

/// Sets what the request leaves out: the share that the quota has as its default, and the longest duration that the quota
/// allows. Returns a note about each.
fn apply_defaults(request: &mut LeaseRequest, quota: &Effective) -> Vec<String> {
    let span = |seconds| duration::format(Duration::from_secs(seconds));
    let mut notes = Vec::new();
    if let (Some(default), LeaseShare::Default {}, None) = (&quota.default, &request.share, &request.target) {
        request.share = default.share.clone();
        let text = match (request.duration_s, default.duration_s) {
            (Some(_), Some(_)) => DefaultRequest { duration_s: None, ..default.clone() }.text(),
            (None, _) | (_, None) => default.text(),
        };
        request.duration_s = request.duration_s.or(default.duration_s);
        notes.push(format!("the request names no share, so it is the default of the quota: {text}"));
    }
    if let (None, Some(longest_s)) = (request.duration_s, quota.limits.longest_s) {
        request.duration_s = Some(longest_s);
        notes.push(format!(
            "the request names no duration, so the lease lasts {}, the maximum of the quota",
            span(longest_s)
        ));
    }
    notes
}

/// The GPUs among which a request chooses.
#[derive(Debug, Clone, Copy)]
struct Choice<'a> {
    /// Indexes of the selected GPUs that the holder may lease; `None` for all GPUs.
    selected: Option<&'a BTreeSet<GpuIndex>>,
    /// The other selected GPUs.
    withheld: &'a Withheld,
    /// Indexes of all GPUs that the holder may lease.
    allowed: &'a BTreeSet<GpuIndex>,
}

/// Returns the share that a request means. `allowed_kinds` are the kinds that the quota allows; `None` for all kinds.
/// `offered` composes what the host would offer if nothing were occupied. If the request names its share and no selected
/// GPU is withheld, `offered` is not called. `of_target` returns the share of the target that the request names.
///
/// # Errors
/// - If the request names neither a share nor a target, and the GPUs do not offer exactly one kind of lease.
/// - If the request names no share, and its target does not exist.
/// - If the request is not valid for the share that the function finds.
/// - If only withheld GPUs offer the kind.
fn share(
    request: &LeaseRequest,
    Choice { selected, withheld, allowed }: Choice<'_>,
    allowed_kinds: Option<&BTreeSet<LeaseKind>>,
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
                None => request::default_share(&kinds)?,
            };
            // Check again: the valid counts depend on the kind, and the kind is known only now.
            request::check(&LeaseRequest { share: share.clone(), ..request.clone() })?;
            RequestedShare::of(&share).ok_or(request::RequestError::NoDefault { offered: kinds })?
        }
    };
    if !offered_only_on(&offered, share.kind(), selected, withheld.slurm.iter()).is_empty() {
        return Err(slurm_only_error(is_job));
    }
    let closed = offered_only_on(&offered, share.kind(), selected, withheld.closed.keys());
    if !closed.is_empty() {
        let closed = withheld.closed.iter().filter(|(index, _)| closed.contains(index));
        return Err(closed_error(&closed.map(|(index, why)| (*index, why.clone())).collect(), allowed));
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
/// If the holder's quota does not allow the duration or a GPU of the lease. If a rule closes one of its GPUs to the holder.
pub(super) async fn check_duration(
    leases: &Leases,
    caller: &Caller,
    lease: &OpenLease,
    duration_s: u64,
) -> Result<(), ApiError> {
    let holder = &lease.record.holder;
    let facts = HolderFacts::of(leases, caller, holder.uid).await?;
    let host = leases.handles.context.state.now();
    let quota = facts.effective(host.gpus.len())?;
    let lease_gpus: BTreeSet<GpuIndex> =
        lease.record.members.iter().filter_map(|member| host.gpu(&member.gpu_uuid).map(|gpu| gpu.gpu.index)).collect();
    let mut closed = access::closed(&host, &facts);
    closed.retain(|index, _| lease_gpus.contains(index));
    if !closed.is_empty() {
        return Err(closed_error(&closed, &BTreeSet::new()));
    }
    let since = lease.record.granted_at.map_or(0, |at| Timestamp::now().duration_since(at).as_secs());
    let since = u64::try_from(since).unwrap_or(0);
    for index in lease_gpus {
        quota::allowed_gpus(&quota, Some(&[index].into())).map_err(|denial| denial.of_renewal(lease.id(), since))?;
    }
    // Check the whole duration of the existing lease, from the grant to the new end.
    let all = duration_s.saturating_add(since);
    quota::check_request(&quota, &[], lease.record.kind, Some(all))
        .map_err(|denial| denial.of_renewal(lease.id(), since))
}

#[cfg(test)]
mod tests {
    use gpush_core::lease::placement::{TimesliceOffer, WholeOffer};
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
        let (none, all, zero) =
            (Withheld::default(), BTreeSet::from([0, 1].map(GpuIndex)), BTreeSet::from([GpuIndex(0)]));
        let any = Choice { selected: None, withheld: &none, allowed: &all };
        let found = share(&named, any, None, false, || unreachable!("the share is named"), no_target);
        assert_eq!(found, Ok(RequestedShare::Whole));
        let offer = |index| {
            let whole = Some(WholeOffer { free: true, leased: false });
            GpuOffer { index, whole, ..GpuOffer::default() }
        };
        let offered = || Host { gpus: vec![offer(GpuIndex(1))] };
        let unnamed = LeaseRequest::default();
        assert_eq!(share(&unnamed, any, None, false, offered, no_target), Ok(RequestedShare::Whole));
        let withheld = Withheld { slurm: BTreeSet::from([GpuIndex(1)]), ..Withheld::default() };
        let choice = Choice { selected: Some(&zero), withheld: &withheld, allowed: &zero };
        let denied = share(&named, choice, None, false, offered, no_target).unwrap_err();
        assert_eq!(denied.code, Code::Denied);
    }

    /// A request without a share gets the only kind that the GPUs offer and the quota allows.
    #[test]
    fn unnamed_share_is_of_a_kind_that_the_quota_allows() {
        let no_target = |_: &str| unreachable!("the request names no target");
        let whole = Some(WholeOffer { free: true, leased: false });
        let timeslice = TimesliceOffer {
            replicas: 2,
            level: gpush_api::TimesliceLevel::Default,
            compute_mode: None,
            taken: 0,
            excluding: 0,
        };
        let offered = || Host {
            gpus: vec![
                GpuOffer { index: GpuIndex(0), whole, ..GpuOffer::default() },
                GpuOffer { index: GpuIndex(1), timeslice: Some(timeslice), ..GpuOffer::default() },
            ],
        };
        let (none, all) = (Withheld::default(), BTreeSet::from([0, 1].map(GpuIndex)));
        let found = |kinds: Option<&[LeaseKind]>| {
            let kinds: Option<BTreeSet<LeaseKind>> = kinds.map(|kinds| kinds.iter().copied().collect());
            let any = Choice { selected: None, withheld: &none, allowed: &all };
            share(&LeaseRequest::default(), any, kinds.as_ref(), false, offered, no_target)
        };
        assert_eq!(found(None).unwrap_err().code, Code::BadRequest, "there are two kinds");
        assert_eq!(found(Some(&[LeaseKind::Whole, LeaseKind::Mig])), Ok(RequestedShare::Whole));
        assert_eq!(found(Some(&[LeaseKind::Timeslice])), Ok(RequestedShare::Timeslice));
        // The quota denies the request later, and names the kinds that it allows.
        assert_eq!(found(Some(&[LeaseKind::Mig])), Ok(RequestedShare::Whole));
    }

    #[test]
    fn quota_sets_only_what_the_request_leaves_out() {
        let limits = quota::Limits { longest_s: Some(43_200), ..quota::Limits::default() };
        let default = request::parse_default("mig=1g.10gb,for=4h").ok();
        let quota = Effective { default, ..Effective::without_quota(limits) };
        let applied = |mut request: LeaseRequest| {
            let notes = apply_defaults(&mut request, &quota);
            (request.share.kind(), request.duration_s, notes.len())
        };
        let whole = || LeaseRequest { share: LeaseShare::Whole {}, ..LeaseRequest::default() };
        assert_eq!(applied(LeaseRequest::default()), (Some(LeaseKind::Mig), Some(14_400), 1));
        let short = LeaseRequest { duration_s: Some(60), ..LeaseRequest::default() };
        assert_eq!(applied(short), (Some(LeaseKind::Mig), Some(60), 1));
        assert_eq!(applied(whole()), (Some(LeaseKind::Whole), Some(43_200), 1));
        assert_eq!(applied(LeaseRequest { duration_s: Some(60), ..whole() }), (Some(LeaseKind::Whole), Some(60), 0));
        let target = LeaseRequest { target: Some("0:1g.10gb@0".to_owned()), ..LeaseRequest::default() };
        assert_eq!(applied(target), (None, Some(43_200), 1), "the target decides about the share");
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
