//! Resolves a request: determines the holder, the share, the GPUs and the binding of the lease.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, Gpu, GpuIndex, LeaseBinding, LeaseHolder, LeaseRequest, LeaseShare};
use gpush_core::{
    duration,
    lease::{
        placement::PlacementRequest,
        quota::{self, Denial, Effective, Exceeded},
        request::{self, DefaultRequest},
    },
};
use gpush_host::proc;
use gpush_store::NewLease;
use jiff::Timestamp;

use super::{
    Leases,
    access::{self, closed_error},
    alternatives::Alternatives,
    bind::{self, ResolvedBinding},
    holder_facts::HolderFacts,
    job_terms::JobTerms,
    quotas,
    selection::{Withheld, allowed, for_caller, on_targets, selected, slurm_job, without_dynamic},
    share::{Choice, share, share_of_target, target},
};
use crate::{
    operations::scheduler::{self, HeldLeases, LeaseDemand, denied},
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
    let mut closed = access::closed(host, &facts);
    if leases.handles.enforcement.is_wanted() {
        leases.handles.enforcement.known().await;
    }
    let is_session = job.is_none() && access::stays_in_session(caller, &request);
    for (index, why) in access::closed_by_enforcement(leases, host, is_session) {
        closed.entry(index).or_insert(why);
    }
    let selected_by_request = selected(host, &request)?;
    let allowed = allowed(caller, host, &quota, selected_by_request.as_ref(), &closed);
    let now = leases.handles.context.state.now();
    let offered = || scheduler::offered_host(host, gpus, &now, &LeaseTable::default());
    let users = &leases.handles.context.users;
    let held = || match job {
        // A job cannot release leases.
        Some(_) => Vec::new(),
        None => HeldLeases::of(users.accounts(), &host.leases).of_caller(account, holder, caller.uid()),
    };
    let alternatives = Alternatives { gpus, allowed: &allowed, quota: &quota, held: &held, offered: &offered };
    let slurm_job = slurm_job(host, &request);
    let (selected, slurm) = for_caller(caller, host, selected_by_request, &slurm_job)?;
    let (mut selected, closed) =
        access::without_closed(host, selected, &closed, (&alternatives, request.share.kind()))?;
    let withheld = Withheld { slurm, closed, slurm_job };
    if job.is_some() {
        selected = Some(without_dynamic(host, selected)?);
    }
    let of_target = |text: &str| share_of_target(&now, gpus, text);
    let choice = Choice { selected: selected.as_ref(), withheld: &withheld, alternatives: &alternatives };
    let share = share(&request, choice, job.is_some(), of_target)?;
    let targets = match (&request.target, job) {
        (Some(text), _) => Some([target(&now, share.kind(), gpus, text)?].into()),
        (None, Some(job)) => job.targets.clone(),
        (None, None) => None,
    };
    if let Some(targets) = &targets {
        selected = on_targets(gpus, selected, targets, &withheld, (&alternatives, share.kind()), job.is_some())?;
    }
    let bound = match job {
        Some(job) => Ok(ResolvedBinding::to_job(job.binding.clone())),
        None => {
            let named = named_binding(caller, holder, &request);
            bind::resolve(leases, caller, holder, &request, named).await
        }
    };
    let binding = bound.as_ref().map_or(LeaseBinding::None, |bound| bound.binding.clone());
    let uid = caller.uid();
    let asked_by = caller.actor(users.user(uid).await);
    let name = if holder == uid { asked_by.user.clone() } else { users.user(holder).await };
    if quota.limits != quota::Limits::default() {
        quotas::know_holders(leases).await?;
    }
    let kind = share.kind();
    let mut wanted = PlacementRequest { share, count: request.count as usize, holder, gpus: None, targets };
    let holder = LeaseHolder { uid: holder, user: name };
    let new = NewLease { holder, asked_by, kind, request, binding };
    if let Some(error) = alternatives.denied_kind(&new, &wanted) {
        return Err(error);
    }
    wanted.gpus = quota::allowed_gpus(&quota, selected.as_ref()).map_err(|denial| {
        // The quota may also allow GPUs that a rule closes to the user.
        let denial = Denial { exceeded: Exceeded::Gpus { allowed: allowed.clone() }, ..denial };
        let mut error = denied(&denial, &new, &wanted, None);
        error.hint = error.hint.map(|hint| if allowed.is_empty() { hint } else { alternatives.after_release(hint) });
        error
    })?;
    // A request that the host can never meet needs no end. So this refusal comes before that of the binding.
    let bound = match bound {
        Ok(bound) => bound,
        Err(unbound) => return Err(alternatives.impossible(&wanted).unwrap_or(unbound)),
    };
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
        return Err(closed_error(&closed, None));
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
    use gpush_api::LeaseKind;
    use gpush_host::{accounts::Account, peer::Peer};

    use super::*;
    use crate::requests::caller::Viewer;

    fn caller(uid: u32, viewer: Viewer) -> Caller {
        let (pid, groups) = (Some(std::process::id()), Vec::new());
        let peer = Peer { uid, pid, start: None, groups, is_on_this_host: true };
        Caller::with_viewer(peer, viewer, Ok(Account::User(uid)))
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
