//! The GPUs that a request selects and that its caller may lease.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, Gpu, GpuIndex, LeaseKind, LeaseRequest, LeaseShare, Mode, TargetUuid};
use gpush_core::{
    config::Rule,
    lease::{placement::Host, quota::Effective, request},
};

use super::{
    access::{ClosedGpus, closed_error},
    alternatives::Alternatives,
};
use crate::{
    operations::scheduler::slurm_gpus,
    requests::caller::{Caller, Viewer},
    state::{GpuSnapshot, HostState},
};

/// The selected GPUs that the holder may not lease.
#[derive(Debug, Clone, Default)]
pub(super) struct Withheld {
    /// GPUs that only Slurm's hooks may lease.
    pub(super) slurm: BTreeSet<GpuIndex>,
    /// The command line with which a job requests the share of the request.
    pub(super) slurm_job: String,
    /// GPUs whose rules permit only other users.
    pub(super) closed: ClosedGpus,
}

impl Withheld {
    pub(super) fn is_empty(&self) -> bool {
        self.slurm.is_empty() && self.closed.is_empty()
    }
}

/// Returns the indexes of the GPUs that the request selects; `None` if the request does not select GPUs, so that any
/// GPU is possible.
pub(super) fn selected(host: &HostState, request: &LeaseRequest) -> Result<Option<BTreeSet<GpuIndex>>, ApiError> {
    if request.gpus.is_empty() {
        return Ok(None);
    }
    let texts: Vec<&str> = request.gpus.iter().map(String::as_str).collect();
    let positions = host.positions(&texts)?;
    Ok(Some(positions.into_iter().map(|at| host.gpus[at].gpu.index).collect()))
}

/// Excludes the GPUs that only Slurm's hooks may lease. Returns the other GPUs, and the selected GPUs that are excluded.
///
/// # Errors
/// If all selected GPUs are excluded.
pub(super) fn for_caller(
    caller: &Caller,
    host: &HostState,
    selected: Option<BTreeSet<GpuIndex>>,
    slurm_job: &str,
) -> Result<(Option<BTreeSet<GpuIndex>>, BTreeSet<GpuIndex>), ApiError> {
    let slurms = slurm_gpus(host);
    // A hook that selects GPUs may lease them, because Slurm allocated them. If Slurm allocated no GPU to a job, the
    // hook selects no GPU, and the job gets no GPU that only hooks may lease.
    if slurms.is_empty() || caller.viewer == Viewer::Hook && selected.is_some() {
        return Ok((selected, BTreeSet::new()));
    }
    let selected = selected.unwrap_or_else(|| host.gpus.iter().map(|gpu| gpu.gpu.index).collect());
    let (left, withheld) = (&selected - &slurms, &selected & &slurms);
    if left.is_empty() && !selected.is_empty() {
        return Err(slurm_only_error(caller.viewer == Viewer::Hook, slurm_job));
    }
    Ok((Some(left), withheld))
}

/// Returns the command line with which a Slurm job requests the share of a request. If the GPUs of Slurm do not offer the
/// kind, or without a share, requests one that all GPUs of Slurm offer: in mode `mps` or `timeslice`, a job must request a
/// share. Requests no more GPUs than Slurm has on this host.
pub(super) fn slurm_job(host: &HostState, request: &LeaseRequest) -> String {
    let slurms = slurm_gpus(host);
    let mode = |gpu: &Arc<GpuSnapshot>| gpu.rule.and_then(|rule| host.config.rules.get(rule)).map(|rule| rule.mode);
    let mut modes = host.gpus.iter().filter(|gpu| slurms.contains(&gpu.gpu.index)).map(mode);
    let first = modes.next().flatten();
    let is_one_mode = modes.all(|mode| mode == first);
    let offers = |kind: LeaseKind| {
        let mut rules = host.gpus.iter().filter(|gpu| slurms.contains(&gpu.gpu.index)).filter_map(|gpu| gpu.rule);
        rules.any(|rule| host.config.rules.get(rule).is_some_and(|rule| offers_kind(rule, kind)))
    };
    let named = if request.share.kind().is_none_or(offers) { &request.share } else { &LeaseShare::Default {} };
    let count = usize::try_from(request.count).unwrap_or(usize::MAX).min(slurms.len().max(1));
    let share = match (named, first.filter(|_| is_one_mode)) {
        (LeaseShare::Default {}, Some(Mode::Mps)) => "mps".to_owned(),
        (LeaseShare::Default {}, Some(Mode::Timeslice)) => "timeslice".to_owned(),
        // A job without a request for a share gets whole GPUs.
        (LeaseShare::Whole {}, _) => String::new(),
        (share, _) => request::spec(&LeaseRequest { share: share.clone(), ..LeaseRequest::default() }),
    };
    let share = if share.is_empty() { share } else { format!(" --comment=gpush:{share}") };
    // Slurm counts the time limit in minutes.
    let limit = request.duration_s.map_or_else(String::new, |seconds| format!(" --time={}", seconds.div_ceil(60)));
    format!("srun --gres=gpu:{count}{share}{limit} COMMAND")
}

/// Returns whether the GPUs of a rule offer leases of a kind.
fn offers_kind(rule: &Rule, kind: LeaseKind) -> bool {
    match rule.mode {
        Mode::Mig => kind == LeaseKind::Mig || (kind == LeaseKind::Mps && rule.mps.is_some()),
        Mode::Mps => kind == LeaseKind::Mps,
        Mode::Timeslice => kind == LeaseKind::Timeslice,
        Mode::Exclusive => kind == LeaseKind::Whole,
        Mode::NoRule | Mode::Unmanaged => false,
    }
}

/// Returns the withheld GPUs that offer this kind of lease, if no other selected GPU offers it. `selected` are the other
/// selected GPUs.
pub(super) fn offered_only_on<'w>(
    offered: &Host,
    kind: LeaseKind,
    selected: Option<&BTreeSet<GpuIndex>>,
    withheld: impl Iterator<Item = &'w GpuIndex>,
) -> BTreeSet<GpuIndex> {
    let offering = offered.gpus.iter().filter(|gpu| gpu.kinds().any(|offered| offered == kind));
    let offering: BTreeSet<GpuIndex> = offering.map(|gpu| gpu.index).collect();
    let mut others = offering.iter().filter(|index| selected.is_none_or(|selected| selected.contains(index)));
    if others.next().is_some() {
        BTreeSet::new()
    } else {
        withheld.copied().filter(|index| offering.contains(index)).collect()
    }
}

/// Returns the indexes of the GPUs that the holder may lease. A hook may lease the GPUs that it selects, except `closed`.
pub(super) fn allowed(
    caller: &Caller,
    host: &HostState,
    quota: &Effective,
    selected: Option<&BTreeSet<GpuIndex>>,
    closed: &ClosedGpus,
) -> BTreeSet<GpuIndex> {
    let mut all: BTreeSet<GpuIndex> = host.gpus.iter().map(|gpu| gpu.gpu.index).collect();
    match (caller.viewer, selected) {
        (Viewer::Hook, Some(selected)) => all.clone_from(selected),
        _ => all = &all - &slurm_gpus(host),
    }
    all.retain(|index| !closed.contains_key(index));
    if let Some(of_quota) = &quota.limits.gpus {
        all.retain(|index| of_quota.contains(index));
    }
    all
}

/// Limits the selected GPUs to those of the targets.
///
/// # Errors
/// If no selected GPU has one of the targets.
pub(super) fn on_targets(
    gpus: &[Gpu],
    selected: Option<BTreeSet<GpuIndex>>,
    targets: &BTreeSet<TargetUuid>,
    withheld: &Withheld,
    (alternatives, kind): (&Alternatives<'_>, LeaseKind),
    is_job: bool,
) -> Result<Option<BTreeSet<GpuIndex>>, ApiError> {
    let has_target = |gpu: &&Gpu| {
        let devices = gpu.mig.iter().flat_map(|mig| &mig.instances).flat_map(|instance| &instance.compute);
        targets.contains(gpu.uuid.as_target())
            || devices.filter_map(|one| one.uuid.as_ref()).any(|uuid| targets.contains(uuid))
    };
    let theirs: BTreeSet<GpuIndex> = gpus.iter().filter(has_target).map(|gpu| gpu.index).collect();
    let left = match &selected {
        Some(selected) => selected & &theirs,
        None => theirs.clone(),
    };
    match theirs.first() {
        // The devices do not exist any more.
        None => Ok(selected),
        Some(_) if !left.is_empty() => Ok(Some(left)),
        Some(index) if withheld.slurm.contains(index) => Err(slurm_only_error(is_job, &withheld.slurm_job)),
        Some(index) if withheld.closed.contains_key(index) => {
            let closed = withheld.closed.iter().filter(|(one, _)| theirs.contains(one));
            Err(closed_error(&closed.map(|(one, why)| (*one, why.clone())).collect(), Some((alternatives, Some(kind)))))
        }
        Some(index) => {
            let message = format!("the target is on GPU {index}, which the request does not select");
            Err(ApiError::new(Code::BadRequest, message).hint(format!("add `-g {index}`, or name only the target")))
        }
    }
}

/// Excludes the GPUs with the layout `dynamic`, because gpushd does not create MIG devices in Prolog.
///
/// # Errors
/// If all selected GPUs are excluded.
pub(super) fn without_dynamic(
    host: &HostState,
    selected: Option<BTreeSet<GpuIndex>>,
) -> Result<BTreeSet<GpuIndex>, ApiError> {
    let is_dynamic = |gpu: &&Arc<GpuSnapshot>| {
        let rule = gpu.rule.and_then(|rule| host.config.rules.get(rule));
        rule.is_some_and(Rule::is_dynamic) && gpu.gpu.overridden.is_none()
    };
    let dynamic: BTreeSet<GpuIndex> = host.gpus.iter().filter(is_dynamic).map(|gpu| gpu.gpu.index).collect();
    let mut left = selected.unwrap_or_else(|| host.gpus.iter().map(|gpu| gpu.gpu.index).collect());
    let were_there = !left.is_empty();
    left.retain(|index| !dynamic.contains(index));
    if left.is_empty() && were_there {
        return Err(ApiError::new(Code::Unsupported, "Slurm jobs cannot use GPUs with a dynamic layout")
            .cause("Slurm knows MIG devices only from gres.conf, so gpushd does not create any for a job")
            .hint("ask the administrator to give the GPUs of Slurm a static layout"));
    }
    Ok(left)
}

/// Returns the error for GPUs that only Slurm can allocate. `is_job` is true if the request is for a Slurm job to which
/// Slurm allocated no GPU. Otherwise, names the command line of a job.
pub(super) fn slurm_only_error(is_job: bool, job: &str) -> ApiError {
    if is_job {
        return ApiError::new(Code::Denied, "Slurm allocated no GPU to the job")
            .cause("the config rule of the GPUs has `owner = \"slurm\"`, so a job can lease only GPUs that Slurm \
                allocated to it")
            .hint("ask Slurm for a GPU too: submit the job with --gres=gpu:1, or with --gres=mps:25 on nodes with gres/mps");
    }
    ApiError::new(Code::Denied, "only Slurm jobs can lease these GPUs")
        .cause("the config rule of these GPUs has `owner = \"slurm\"`")
        .hint(format!("submit a job with `sbatch` or `srun`, for example `{job}`"))
}

#[cfg(test)]
mod tests {
    use gpush_core::{
        config::Config,
        lease::{
            placement::{GpuOffer, WholeOffer},
            quota,
        },
        preset,
    };
    use gpush_host::{accounts::Account, peer::Peer};

    use super::*;
    use crate::state::{
        OverrideEffect, State,
        tests::{list, override_of, read},
    };

    /// Returns a host with three GPUs. Only Slurm may lease GPU 1, and GPU 2 has the layout `dynamic`.
    fn host() -> State {
        let config = "[[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n\
            [[gpu]]\nmatch = [\"2\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";
        let state = State::empty();
        list(&state, &[0, 1, 2]);
        (0..3).for_each(|gpu| read(&state, gpu));
        state.replace_config(Arc::new(Config::parse(config, "c").unwrap()), 1);
        state
    }

    fn caller(viewer: Viewer) -> Caller {
        let peer = Peer { uid: 1000, pid: None, start: None, groups: Vec::new(), is_on_this_host: true };
        Caller::with_viewer(peer, viewer, Ok(Account::User(1000)))
    }

    fn set<const N: usize>(indexes: [u32; N]) -> BTreeSet<GpuIndex> {
        indexes.map(GpuIndex).into()
    }

    /// Faults: the hint named a command that a host in this mode refuses, and lost the count, the time and the share.
    #[test]
    fn hint_for_gpus_of_slurm_is_the_same_request_as_a_job() {
        let state = State::empty();
        list(&state, &[0, 1]);
        (0..2).for_each(|gpu| read(&state, gpu));
        let whole =
            LeaseRequest { share: LeaseShare::Whole {}, count: 2, duration_s: Some(90), ..LeaseRequest::default() };
        let share = request::parse("mps=25,memory=8G").unwrap().share;
        let of_mps = LeaseRequest { share, ..LeaseRequest::default() };
        for (mode, request, expected) in [
            ("mps", LeaseRequest::default(), "srun --gres=gpu:1 --comment=gpush:mps COMMAND"),
            ("timeslice", LeaseRequest::default(), "srun --gres=gpu:1 --comment=gpush:timeslice COMMAND"),
            ("exclusive", LeaseRequest::default(), "srun --gres=gpu:1 COMMAND"),
            ("exclusive", whole.clone(), "srun --gres=gpu:2 --time=2 COMMAND"),
            // Fault: the job requested a kind that these GPUs do not offer, and more GPUs than Slurm has.
            ("exclusive", of_mps.clone(), "srun --gres=gpu:1 COMMAND"),
            ("exclusive", LeaseRequest { count: 5, ..whole.clone() }, "srun --gres=gpu:2 --time=2 COMMAND"),
            ("timeslice", of_mps.clone(), "srun --gres=gpu:1 --comment=gpush:timeslice COMMAND"),
            ("mps", of_mps, "srun --gres=gpu:1 --comment=gpush:mps=25,memory=8G COMMAND"),
        ] {
            let replicas = if mode == "timeslice" { "timeslice.replicas = 4\n" } else { "" };
            let config = format!("[[gpu]]\nmatch = [\"0-1\"]\nmode = \"{mode}\"\nowner = \"slurm\"\n{replicas}");
            state.replace_config(Arc::new(Config::parse(&config, "c").unwrap()), 1);
            let job = slurm_job(&state.now(), &request);
            assert_eq!(job, expected, "{mode}");
            let error = for_caller(&caller(Viewer::User(1000)), &state.now(), None, &job).unwrap_err();
            assert!(error.hint.unwrap().contains(expected), "{mode}");
        }
    }

    #[test]
    fn gpus_of_slurm_are_withheld_from_other_callers() {
        let host = host().now();
        for viewer in [Viewer::User(1000), Viewer::Admin] {
            let select = |selected| for_caller(&caller(viewer), &host, selected, "");
            assert_eq!(select(None), Ok((Some(set([0, 2])), set([1]))), "{viewer:?}");
            assert_eq!(select(Some(set([0, 1]))), Ok((Some(set([0])), set([1]))), "{viewer:?}");
            assert_eq!(select(Some(set([0]))), Ok((Some(set([0])), set([]))), "{viewer:?}");
            assert!(select(Some(set([1]))).unwrap_err().message.starts_with("only Slurm jobs"), "{viewer:?}");
        }
    }

    /// If Slurm allocated no GPU to a job, the hook selects none.
    #[test]
    fn hook_may_lease_the_gpus_that_slurm_allocated() {
        let (state, hook) = (host(), caller(Viewer::Hook));
        let host = state.now();
        assert_eq!(for_caller(&hook, &host, Some(set([1])), ""), Ok((Some(set([1])), set([]))));
        assert_eq!(for_caller(&hook, &host, None, ""), Ok((Some(set([0, 2])), set([1]))));
        let quota = |gpus| Effective::without_quota(quota::Limits { gpus, ..quota::Limits::default() });
        let open = ClosedGpus::new();
        assert_eq!(allowed(&hook, &host, &quota(None), Some(&set([1])), &open), set([1]));
        assert_eq!(allowed(&hook, &host, &quota(None), None, &open), set([0, 2]));
        let user = caller(Viewer::User(1000));
        assert_eq!(allowed(&user, &host, &quota(None), Some(&set([1])), &open), set([0, 2]));
        assert_eq!(allowed(&user, &host, &quota(Some(set([1, 2]))), None, &open), set([2]));
    }

    #[test]
    fn job_gets_no_gpu_with_a_dynamic_layout() {
        let state = host();
        let without = |selected| without_dynamic(&state.now(), selected);
        assert_eq!(without(None), Ok(set([0, 1])));
        assert_eq!(without(Some(set([1, 2]))), Ok(set([1])));
        assert!(without(Some(set([2]))).is_err());
        assert_eq!(without(Some(set([]))), Ok(set([])), "the request selects no GPU");
        // An override gives the GPU a static layout.
        state.override_effects(&[OverrideEffect::Made(override_of("GPU-2", 1))]);
        assert_eq!(without(Some(set([2]))), Ok(set([2])));
    }

    /// Only Slurm jobs can lease GPU 1, and GPU 6 has no rule. Fault: the error for a request for GPU 6 said that only
    /// Slurm jobs can lease GPU 6.
    #[test]
    fn slurm_error_needs_a_selected_gpu_that_only_slurm_may_lease() {
        let whole = Some(WholeOffer { free: true, leased: false, end: None });
        let offered = Host {
            gpus: vec![
                GpuOffer { index: GpuIndex(1), whole, ..GpuOffer::default() },
                GpuOffer { index: GpuIndex(6), ..GpuOffer::default() },
            ],
        };
        let is_slurms = |selected: u32, withheld: &[u32]| {
            let withheld: Vec<GpuIndex> = withheld.iter().copied().map(GpuIndex).collect();
            let selected = BTreeSet::from([GpuIndex(selected)]);
            !offered_only_on(&offered, LeaseKind::Whole, Some(&selected), withheld.iter()).is_empty()
        };
        assert!(!is_slurms(6, &[]), "-g 6");
        assert!(is_slurms(6, &[1]), "-g 1,6");
        assert!(!is_slurms(1, &[]), "a hook");
    }

    /// Fault: the refusal of a request for a MIG device explained all GPUs of the host.
    #[test]
    fn target_selects_its_gpu() {
        let mut gpus = preset::gpus("dgx-a100").expect("a preset");
        gpus.truncate(3);
        let found = |target: &str, selected: Option<u32>| {
            let selected = selected.map(|index| BTreeSet::from([GpuIndex(index)]));
            let withheld = Withheld { slurm: BTreeSet::from([GpuIndex(2)]), ..Withheld::default() };
            let quota = Effective::without_quota(quota::Limits::default());
            let (allowed, offered) = (BTreeSet::new(), Host::default);
            let alternatives =
                Alternatives { gpus: &gpus, allowed: &allowed, quota: &quota, held: &Vec::new, offered: &offered };
            let targets = BTreeSet::from([target.into()]);
            on_targets(&gpus, selected, &targets, &withheld, (&alternatives, LeaseKind::Mig), false)
        };
        let one = |index: u32| Ok(Some(BTreeSet::from([GpuIndex(index)])));
        assert_eq!(found(gpus[1].uuid.as_str(), None), one(1));
        assert_eq!(found(gpus[1].uuid.as_str(), Some(1)), one(1));
        assert_eq!(found("MIG-gone", Some(0)), one(0));
        let error = found(gpus[1].uuid.as_str(), Some(0)).unwrap_err();
        assert_eq!(error.message, "the target is on GPU 1, which the request does not select");
        assert_eq!(found(gpus[2].uuid.as_str(), Some(0)).unwrap_err().code, Code::Denied);
    }
}
