//! Leases as the API shows them.

use gpush_api::{
    ApiError, Code, Lease, LeaseBinding, LeaseGrant, LeaseId, LeaseKind, LeaseMember, LeaseShare, LeaseState,
    MemberShare,
};
use gpush_core::{
    lease::environment::{DeviceUuid, Environment, MpsClient, NoticeFile, PipeDirectory},
    quote::Quoted,
};
use gpush_store::{LeaseHistory, LeaseRecord};

use super::{
    Leases,
    filter::{LeaseFilter, Whose, is_of_caller},
    holder_facts::unknown_account,
    notices_and_keeps, scope_devices,
};
use crate::{
    modes::mps,
    requests::caller::{Caller, Viewer},
    state::{OpenLease, leases::to_api},
};

/// Maximum number of ended leases in one answer.
pub(crate) const MOST_ENDED: usize = 100;

/// Parses a lease id.
///
/// # Errors
/// If the text is not a lease id.
pub(crate) fn id(text: &str) -> Result<LeaseId, ApiError> {
    text.parse().map_err(|error| {
        ApiError::new(Code::BadRequest, format!("{} is not a lease: {error}", Quoted(text)))
            .hint("list the leases with `gpushctl lease list`")
    })
}

/// Returns whether the viewer may read a lease of `holder` in full: an administrator, the holder, and the owner of the
/// holder's subordinate uid. If the name service does not answer about this owner, the lease is shown as that of another
/// user: an error would tell the viewer that there is an ended lease of another user.
async fn may_read(leases: &Leases, viewer: Viewer, holder: u32) -> bool {
    match viewer {
        Viewer::User(own) if !viewer.may_see(Some(holder)) => {
            leases.handles.context.users.accounts().owns(own, holder).await == Ok(true)
        }
        Viewer::Agent | Viewer::Log | Viewer::Admin | Viewer::Hook | Viewer::User(_) => viewer.may_see(Some(holder)),
    }
}

/// Returns whether `holder` is a subordinate uid of the user `owner`.
///
/// # Errors
/// If the name service does not answer.
pub(super) async fn owns(leases: &Leases, owner: u32, holder: u32) -> Result<bool, ApiError> {
    let owns = leases.handles.context.users.accounts().owns(owner, holder).await;
    owns.map_err(|unanswered| unknown_account(holder, unanswered))
}

/// Returns the viewer as which `viewer` reads the leases of `holder`. Does not wait for the name service: until it has
/// answered, the leases of subordinate uids are shown as those of another user.
fn reader(leases: &Leases, viewer: Viewer, holder: u32) -> Viewer {
    match viewer {
        Viewer::User(own) if leases.handles.context.users.accounts().last_owns(own, holder) == Ok(true) => {
            Viewer::User(holder)
        }
        Viewer::Agent | Viewer::Log | Viewer::Admin | Viewer::Hook | Viewer::User(_) => viewer,
    }
}

/// Lists the open leases in order of arrival, then the last `ended` ended leases, the latest first. A user sees only
/// their own ended leases, and those of their subordinate uids.
///
/// # Errors
/// If the store cannot be read.
pub(crate) async fn all(
    leases: &Leases,
    caller: &Caller,
    filter: LeaseFilter,
    ended: usize,
) -> Result<Vec<Lease>, ApiError> {
    let table = leases.handles.context.state.leases();
    let is_shown =
        |record: &LeaseRecord| filter.has_holder(leases, caller, record.holder.uid) && filter.has_job(&record.binding);
    let open = table.open.values().filter(|lease| is_shown(&lease.record));
    let mut all: Vec<Lease> =
        open.map(|lease| lease.to_api(reader(leases, caller.viewer, lease.record.holder.uid))).collect();
    if ended > 0 {
        let ended = history(leases, caller, filter, None, ended).await?;
        // Skip a lease that ended between the two reads, because it is already in the list.
        all.extend(ended.iter().filter(|record| !table.open.contains_key(&record.id)).map(in_full));
        notices_and_keeps::add_to_ended(leases, &mut all).await?;
    }
    scope_devices::add_device_access(leases, &mut all);
    add_accounts(leases, &mut all).await;
    Ok(all)
}

/// Adds the owners of subordinate uids to leases.
async fn add_accounts(leases: &Leases, shown: &mut [Lease]) {
    let holders = shown.iter().map(|lease| &lease.holder).filter(|holder| holder.user.is_none());
    let owners = leases.handles.context.users.owners(holders.map(|holder| holder.uid).collect()).await;
    for lease in shown.iter_mut().filter(|lease| lease.holder.user.is_none()) {
        lease.account = owners.get(&lease.holder.uid).cloned();
    }
}

/// Lists at most `limit` leases that ended before the ended lease `before`, the latest first. A user sees only their own
/// leases.
///
/// # Errors
/// If there is no such ended lease, or if the store cannot be read.
pub(crate) async fn ended_before(
    leases: &Leases,
    caller: &Caller,
    filter: LeaseFilter,
    before: LeaseId,
    limit: usize,
) -> Result<Vec<Lease>, ApiError> {
    let record = leases.handles.context.store.read(move |view| view.lease(before)).await?;
    let record = record.filter(|record| record.state == LeaseState::Ended).ok_or_else(|| unknown(before))?;
    if !may_read(leases, caller.viewer, record.holder.uid).await {
        return Err(unknown(before));
    }
    let ended = history(leases, caller, filter, Some(record.sequence), limit).await?;
    let mut ended: Vec<Lease> = ended.iter().map(in_full).collect();
    notices_and_keeps::add_to_ended(leases, &mut ended).await?;
    add_accounts(leases, &mut ended).await;
    Ok(ended)
}

fn in_full(record: &LeaseRecord) -> Lease {
    to_api(record, Viewer::Log)
}

/// Returns ended leases that the caller may read in full.
async fn history(
    leases: &Leases,
    caller: &Caller,
    filter: LeaseFilter,
    before: Option<u64>,
    limit: usize,
) -> Result<Vec<LeaseRecord>, ApiError> {
    let is_user = matches!(caller.viewer, Viewer::User(_));
    let is_selected =
        |uid: u32| filter.has_holder(leases, caller, uid) && (!is_user || is_of_caller(leases, caller, uid));
    let limit = limit.min(MOST_ENDED);
    if let Some(job) = filter.job {
        let mut of_job =
            leases.handles.context.store.read(move |view| view.ended_leases_of_job(job, before, limit)).await?;
        of_job.retain(|record| is_selected(record.holder.uid));
        return Ok(of_job);
    }
    let uids = match filter.whose {
        Whose::All if !is_user => None,
        Whose::All | Whose::Caller | Whose::Holder(_) => {
            #[expect(
                clippy::redundant_closure_for_method_calls,
                reason = "the method accepts only one lifetime of `View`"
            )]
            let holders = leases.handles.context.store.read(|view| view.ended_holders()).await?;
            Some(holders.into_iter().filter(|uid| is_selected(*uid)).collect())
        }
    };
    let history = LeaseHistory { uids, before, limit };
    Ok(leases.handles.context.store.read(move |view| view.ended_leases(&history)).await?)
}

/// Returns one lease. An ended lease is available as long as the store keeps it.
///
/// # Errors
/// If there is no lease with this id that the viewer may see, or if the store cannot be read.
pub(crate) async fn one(leases: &Leases, viewer: Viewer, text: &str) -> Result<Lease, ApiError> {
    let mut lease = without_account(leases, viewer, text).await?;
    scope_devices::add_device_access(leases, std::slice::from_mut(&mut lease));
    add_accounts(leases, std::slice::from_mut(&mut lease)).await;
    Ok(lease)
}

async fn without_account(leases: &Leases, viewer: Viewer, text: &str) -> Result<Lease, ApiError> {
    let id = id(text)?;
    let open = leases.handles.context.state.leases().open.get(&id).cloned();
    if let Some(lease) = open {
        let is_readable = may_read(leases, viewer, lease.record.holder.uid).await;
        return Ok(lease.to_api(if is_readable { Viewer::Log } else { viewer }));
    }
    let record = leases.handles.context.store.read(move |view| view.lease(id)).await?.ok_or_else(|| unknown(id))?;
    // Users do not see ended leases of other users.
    match may_read(leases, viewer, record.holder.uid).await {
        true => {
            let mut ended = in_full(&record);
            notices_and_keeps::add_to_ended(leases, std::slice::from_mut(&mut ended)).await?;
            Ok(ended)
        }
        false => Err(unknown(id)),
    }
}

/// Returns the error for an id that no lease has.
pub(super) fn unknown(id: LeaseId) -> ApiError {
    ApiError::new(Code::NotFound, format!("there is no lease {id}")).hint("list the leases with `gpushctl lease list`")
}

/// Returns an active lease with the environment of its processes.
///
/// # Errors
/// If there is no lease with this id, if another user holds it, or if it is not active.
pub(crate) async fn environment(leases: &Leases, caller: &Caller, text: &str) -> Result<LeaseGrant, ApiError> {
    let id = id(text)?;
    let table = leases.handles.context.state.leases();
    let Some(lease) = table.open.get(&id) else { return Err(ended(&one(leases, caller.viewer, text).await?)) };
    if !caller.viewer.is_admin() && !caller.holds(lease.record.holder.uid) {
        return Err(denied(lease, caller, "use"));
    }
    if let Some(denied) = job_denied(&lease.record, caller, "use") {
        return Err(denied);
    }
    if lease.state.name() != LeaseState::Active {
        let state = lease.state.name();
        return Err(ApiError::new(
            Code::Conflict,
            format!("lease {id} has no environment variables, because it is {state}"),
        )
        .hint(format!("see `gpushctl lease show {id}`")));
    }
    granted(leases, lease, caller.viewer)
}

/// Returns the error for a caller that requests the environment of an ended lease.
fn ended(lease: &Lease) -> ApiError {
    let reason = lease.reason.map_or_else(String::new, |reason| format!(": {}", reason.name().replace('_', " ")));
    ApiError::new(Code::Conflict, format!("lease {} has ended{reason}", lease.id))
        .hint("request another lease with `gpushctl lease request`")
}

/// Returns the error for a caller who is neither the holder nor an administrator: `unavailable` if gpushd cannot determine
/// whether the caller is an administrator.
pub(super) fn denied(lease: &OpenLease, caller: &Caller, what: &str) -> ApiError {
    if let Some(unavailable) = caller.rank_unknown(&format!("{what} lease {}", lease.id())) {
        return unavailable;
    }
    let holder = &lease.record.holder;
    let who = holder.user.clone().unwrap_or_else(|| format!("uid {}", holder.uid));
    if caller.runs_as(holder.uid) && !caller.holds(holder.uid) {
        return ApiError::new(Code::Denied, format!("you may not {what} lease {}", lease.id()))
            .cause("root of a container may not change or use leases of uid 0, because the host's root may hold them")
            .hint("the lease of a container ends with its process, or at its end time");
    }
    let who_may = match what {
        "use" => "the holder and administrators",
        _ => "the holder, the owner of the holder's subordinate uid, and administrators",
    };
    ApiError::new(Code::Denied, format!("you may not {what} lease {}: {who} holds it", lease.id()))
        .cause(format!("only {who_may} may {what} a lease"))
}

/// Returns the error for a user who may not change or use the lease of a Slurm job. Returns `None` for administrators,
/// and for other leases.
pub(super) fn job_denied(record: &LeaseRecord, caller: &Caller, what: &str) -> Option<ApiError> {
    let LeaseBinding::Job { job, .. } = &record.binding else { return None };
    if caller.viewer.is_admin() {
        return None;
    }
    if let Some(unavailable) = caller.rank_unknown(&format!("{what} lease {}", record.id)) {
        return Some(unavailable);
    }
    let message = format!("you may not {what} lease {}: it belongs to Slurm job {job}", record.id);
    let hint = match what {
        "use" => format!(
            "in the job, run the command without gpushctl; outside the job, run `srun --jobid={job} --overlap COMMAND`"
        ),
        "renew" => format!(
            "the lease ends with the job, whose time limit an administrator can extend: \
            `scontrol update JobId={job} TimeLimit=+60` adds 60 minutes"
        ),
        _ => format!("end the job with `scancel {job}`: the lease ends with it"),
    };
    Some(ApiError::new(Code::Denied, message).cause("Slurm's hooks begin and end this lease").hint(hint))
}

/// Returns an active lease and its environment, in the form of the answer to a granted request.
///
/// # Errors
/// If the lease has an MPS daemon without a pipe directory.
pub(super) fn granted(leases: &Leases, lease: &OpenLease, viewer: Viewer) -> Result<LeaseGrant, ApiError> {
    let record = &lease.record;
    let environment = variables(leases, record)?;
    let driver = leases.handles.context.hardware.status().driver.map(|driver| driver.version);
    let environment = environment.variables().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Ok(LeaseGrant {
        lease: lease.to_api(viewer),
        environment,
        warnings: warnings(record, driver.as_deref()),
        quota_notes: Vec::new(),
        binding_reason: None,
    })
}

fn variables(leases: &Leases, record: &LeaseRecord) -> Result<Environment, ApiError> {
    let fault = |what: &str| {
        ApiError::new(Code::Unavailable, format!("lease {} has no environment variables: {what}", record.id))
            .retryable()
    };
    let device =
        |member: &LeaseMember| DeviceUuid::new(member.target.as_str()).map_err(|error| fault(&error.to_string()));
    let devices = record.members.iter().map(device).collect::<Result<_, _>>()?;
    let client = |member: &LeaseMember| match &member.share {
        MemberShare::Mps { percentage, memory_limit_mib, priority } => {
            Some((member.target.clone(), *percentage, *memory_limit_mib, *priority))
        }
        MemberShare::Mig { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => None,
    };
    let mps = match record.members.iter().find_map(client) {
        None => None,
        Some((target, percentage, memory_limit, priority)) => {
            let path = mps::pipe_directory(&leases.handles.mps, &target)
                .ok_or_else(|| fault("its MPS daemon is not running"))?;
            let pipe_directory = PipeDirectory::new(&path).map_err(|error| fault(&error.to_string()))?;
            Some(MpsClient { pipe_directory, percentage, memory_limit, priority })
        }
    };
    let notice = leases.handles.notices.path(record.id).and_then(|path| NoticeFile::new(&path).ok());
    Ok(Environment { lease: record.id, devices, mps, notice })
}

/// First branch of the driver with which a process can use several MIG devices.
const SEVERAL_DEVICES: u32 = 570;

/// Returns warnings for the holder about what the share does not limit, and about what the driver cannot do. `driver` is the
/// version of the driver, if it is known.
fn warnings(record: &LeaseRecord, driver: Option<&str>) -> Vec<String> {
    let mut warnings = Vec::new();
    let branch = driver.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    match record.kind {
        LeaseKind::Mig if record.members.len() > 1 && branch.is_none_or(|branch| branch < SEVERAL_DEVICES) => {
            warnings.push(format!(
                "with a driver older than R{SEVERAL_DEVICES}, a process can use only one MIG device: start one process \
                for each device"
            ));
        }
        LeaseKind::Mig | LeaseKind::Whole => {}
        LeaseKind::Mps => {
            warnings.extend(takes_everything(record));
            warnings.push(
                "the percentage and memory limit of the lease are not enforced: a process can change them in its \
                environment, up to the limits of the MPS daemon"
                    .to_owned(),
            );
        }
        LeaseKind::Timeslice => warnings.push(
            "a time-slice replica limits neither memory nor compute time: gpushd only counts replicas".to_owned(),
        ),
    }
    warnings
}

/// Returns a warning if a request without a percentage got all of an MPS target, so that nothing is left for others.
fn takes_everything(record: &LeaseRecord) -> Option<String> {
    let names_none = match &record.request.share {
        LeaseShare::Mps { percentage, .. } => percentage.is_none(),
        LeaseShare::Default {} => true,
        LeaseShare::MigProfile { .. }
        | LeaseShare::MigSize { .. }
        | LeaseShare::Timeslice {}
        | LeaseShare::Whole {} => false,
    };
    let is_all = |member: &LeaseMember| match &member.share {
        MemberShare::Mps { percentage, .. } => percentage.tenths() >= 1000,
        MemberShare::Mig { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => false,
    };
    let warning = "the request names no percentage, so the lease takes 100 %; `--mps 25` takes a quarter";
    (names_none && record.members.iter().any(is_all)).then(|| warning.to_owned())
}

#[cfg(test)]
mod tests;
