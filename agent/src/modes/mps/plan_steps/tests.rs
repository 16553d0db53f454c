//! Which MPS daemons a plan stops and starts, and what it needs exclusively.

use gpush_api::{Architecture, PendingAim, PendingChange, TargetUuid};
use gpush_core::{
    mps::{DaemonReport, MpsTargetRecord},
    supervisor::SupervisorState,
};

use super::*;
use crate::{
    modes::scene::{READY, daemon_report, mig_gpu, mps_target, plan_layout, plan_mig_off, process, whole_gpu},
    state::{State, leases::tests::record},
};

const STOPPED: SupervisorState = SupervisorState::Stopped;

fn stopped() -> DaemonReport {
    DaemonReport { wanted: false, ..daemon_report(STOPPED) }
}

/// Returns targets. An operation has started the daemons of those in `active`.
fn targets(all: &[(&str, DaemonReport)], active: &[&str]) -> MpsTargets {
    let mut targets = MpsTargets::default();
    for (uuid, report) in all {
        targets.by_uuid.insert((*uuid).into(), Arc::new(mps_target(uuid, report.clone())));
    }
    for uuid in active {
        targets.change_record(&(*uuid).into(), |record| MpsTargetRecord { in_force: Some(String::new()), ..record });
    }
    targets
}

fn ready(uuids: &[&'static str]) -> MpsTargets {
    targets(&uuids.iter().map(|uuid| (*uuid, daemon_report(READY))).collect::<Vec<_>>(), &[])
}

fn layout(entries: &[&str]) -> Layout {
    Layout::parse_list(&entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>()).unwrap()
}

/// Returns the targets that the plan stops, whether it starts the daemon of the whole GPU, and the devices that it starts.
fn changes(
    targets: &MpsTargets,
    gpu: &Gpu,
    plan: &GpuPlan,
    layout: Option<&Layout>,
) -> (Vec<TargetUuid>, bool, Vec<String>) {
    let DaemonChanges { stops, starts_whole, starts } = DaemonChanges::of(targets, gpu, plan, layout);
    let stops = stops.iter().map(|target| target.uuid.clone()).collect();
    (stops, starts_whole, starts.into_iter().map(|one| one.device).collect())
}

#[test]
fn daemon_of_a_whole_gpu_starts_once_for_its_rule() {
    let (whole, mig) = (whole_gpu(), mig_gpu(&["3g.40gb@4"]));
    let active = targets(&[("GPU-0", daemon_report(READY))], &["GPU-0"]);
    let mps = |gpu: &Gpu| Gpu { mode: Mode::Mps, ..gpu.clone() };
    for (gpu, plan, targets, expected) in [
        (mps(&whole), plan_mig_off(&whole), MpsTargets::default(), true),
        (mps(&mig), plan_mig_off(&mig), MpsTargets::default(), true),
        (mps(&whole), plan_mig_off(&whole), active, false),
        (mps(&mig), plan_layout(&mig, &["2g.20gb"]), MpsTargets::default(), false),
        (whole.clone(), plan_mig_off(&whole), MpsTargets::default(), false),
    ] {
        assert_eq!(changes(&targets, &gpu, &plan, None).1, expected, "{:?} {:?}", gpu.mode, plan.steps);
    }
}

#[test]
fn daemon_of_a_whole_gpu_stops_for_another_mode_or_mig() {
    let gpu = |mode| Gpu { mode, ..whole_gpu() };
    let running = ready(&["GPU-0"]);
    let (same, mig) = (plan_mig_off(&whole_gpu()), plan_layout(&whole_gpu(), &["7g.80gb"]));
    for (mode, plan, is_stopped) in [
        (Mode::Mps, &same, false),
        (Mode::Mps, &mig, true),
        (Mode::Exclusive, &same, true),
        (Mode::Timeslice, &same, true),
        (Mode::NoRule, &same, true),
    ] {
        assert_eq!(!changes(&running, &gpu(mode), plan, None).0.is_empty(), is_stopped, "{mode:?} {:?}", plan.steps);
    }
    // The target of a daemon that has exited has nothing to stop, unless its record must be removed.
    let exited = targets(&[("GPU-0", stopped())], &[]);
    assert_eq!(changes(&exited, &gpu(Mode::Exclusive), &same, None).0, [] as [&str; 0]);
    let recorded = targets(&[("GPU-0", stopped())], &["GPU-0"]);
    assert_eq!(changes(&recorded, &gpu(Mode::Exclusive), &same, None).0, ["GPU-0"]);
}

#[test]
fn daemon_of_a_mig_device_stops_with_its_device_or_its_sharing() {
    // MIG-0 is 2g.20gb@0, MIG-1 is 3g.40gb@4.
    let gpu = mig_gpu(&["3g.40gb@4", "2g.20gb@0"]);
    let running = ready(&["MIG-0", "MIG-1"]);
    let stops = |entries: &[&str], shared: Option<&[&str]>| {
        changes(&running, &gpu, &plan_layout(&gpu, entries), shared.map(layout).as_ref()).0
    };
    // The layout of the request does not say which devices are shared: that is unknown.
    assert_eq!(stops(&["3g.40gb@4", "1g.10gb@0"], None), ["MIG-0"]);
    assert_eq!(stops(&["3g.40gb@4", "2g.20gb@0"], None), [] as [&str; 0]);
    assert_eq!(stops(&["3g.40gb@4", "2g.20gb@0"], Some(&["3g.40gb:mps", "2g.20gb"])), ["MIG-0"]);
    assert_eq!(stops(&["3g.40gb@4", "2g.20gb@0"], Some(&["3g.40gb:mps", "2g.20gb:mps"])), [] as [&str; 0]);
    assert_eq!(changes(&running, &gpu, &plan_mig_off(&gpu), None).0, ["MIG-0", "MIG-1"]);
}

#[test]
fn daemon_starts_for_each_newly_shared_device() {
    let gpu = mig_gpu(&["3g.40gb@4"]);
    let starts = |targets: &MpsTargets, entries: &[&str], shared: &[&str]| {
        changes(targets, &gpu, &plan_layout(&gpu, entries), Some(&layout(shared))).2
    };
    let none = MpsTargets::default();
    assert_eq!(starts(&none, &["3g.40gb@4"], &["3g.40gb@4:mps"]), ["3g.40gb@4"]);
    assert_eq!(starts(&ready(&["MIG-0"]), &["3g.40gb@4"], &["3g.40gb@4:mps"]), [] as [&str; 0]);
    assert_eq!(starts(&none, &["3g.40gb@4", "2g.20gb@0"], &["3g.40gb@4", "2g.20gb@0:mps"]), ["2g.20gb@0"]);
    // A refused plan changes nothing.
    let refused = plan_layout(&gpu, &["3g.40gb@4"]).refused(ApiError::new(Code::Conflict, "cordoned"));
    assert_eq!(changes(&none, &gpu, &refused, Some(&layout(&["3g.40gb@4:mps"]))).2, [] as [&str; 0]);
}

#[test]
fn operation_reserves_the_whole_gpu_or_the_targets_that_change() {
    let (whole, mig) = (whole_gpu(), mig_gpu(&["3g.40gb@4", "2g.20gb@0"]));
    let none = MpsTargets::default();
    let only = |uuids: &[&str]| ClaimedTargets::Targets(uuids.iter().map(|uuid| (*uuid).into()).collect());
    assert_eq!(claimed(&none, &whole, &plan_layout(&whole, &["7g.80gb"]), None), ClaimedTargets::Gpu, "MIG mode");
    assert_eq!(claimed(&none, &mig, &plan_mig_off(&mig), None), ClaimedTargets::Gpu, "MIG mode");
    let mps = Gpu { mode: Mode::Mps, ..whole.clone() };
    assert_eq!(claimed(&none, &mps, &plan_mig_off(&whole), None), ClaimedTargets::Gpu, "the daemon starts");
    let aim = PendingAim::Mode { from: Mode::Timeslice, mode: Mode::Exclusive };
    let pending = Gpu { pending: vec![PendingChange { aim, leases: Vec::new() }], ..whole.clone() };
    assert_eq!(claimed(&none, &pending, &plan_mig_off(&whole), None), ClaimedTargets::Gpu, "the GPU changes its mode");
    // The instance at 4 stays, so its leases do not matter.
    let plan = plan_layout(&mig, &["3g.40gb@4", "1g.10gb@0"]);
    assert_eq!(claimed(&none, &mig, &plan, None), only(&["MIG-0"]));
    // No instance changes, but a daemon starts on MIG-1.
    let same = plan_layout(&mig, &["3g.40gb@4", "2g.20gb@0"]);
    assert_eq!(claimed(&none, &mig, &same, None), only(&[]));
    let shared = layout(&["3g.40gb@4:mps", "2g.20gb@0"]);
    assert_eq!(claimed(&none, &mig, &same, Some(&shared)), only(&["MIG-1"]));
    let refused = plan.refused(ApiError::new(Code::Conflict, "cordoned"));
    assert_eq!(claimed(&none, &mig, &refused, None), only(&[]));
}

#[test]
fn daemon_in_use_is_not_stopped_and_its_lease_is_named() {
    let (gpu, plan) = (Gpu { mode: Mode::Exclusive, ..whole_gpu() }, plan_mig_off(&whole_gpu()));
    let refused = |state: &State| {
        let host = state.now();
        used_daemon_error(&host, &gpu, &DaemonChanges::of(&host.mps, &gpu, &plan, None))
    };
    let state = State::empty();
    state.add_mps_target(mps_target("GPU-0", daemon_report(READY)));
    assert_eq!(refused(&state), None);
    state.change_leases(|table| table.insert(record(1, 1000, "GPU-0")));
    let error = refused(&state).unwrap();
    assert_eq!(error.message, "GPU 0 is shared through MPS, and in use");
    assert!(error.causes.iter().any(|cause| cause.contains("L1")) && error.hint.unwrap().contains("L1"));
    let clients = DaemonReport { clients: vec![(2, 3)], ..daemon_report(READY) };
    let state = State::empty();
    state.add_mps_target(mps_target("GPU-0", clients));
    let error = refused(&state).unwrap();
    assert_eq!(error.causes, ["GPU 0 has 1 client"]);
    assert!(error.hint.unwrap().contains("`gpushctl mps show 0`"));
}

#[test]
fn daemon_starts_only_on_an_idle_gpu_that_supports_mps() {
    let plan = plan_mig_off(&whole_gpu());
    let start = |gpu: &Gpu| {
        let gpu = Gpu { mode: Mode::Mps, ..gpu.clone() };
        let changes = DaemonChanges::of(&MpsTargets::default(), &gpu, &plan, None);
        starts(&gpu, &plan, &changes).map_err(|refused| refused.error.unwrap())
    };
    assert_eq!(start(&whole_gpu()), Ok(vec![Step::Mps(MpsStep::StartDaemon { device: None })]));
    assert!(start(&Gpu { processes: vec![process(7)], ..whole_gpu() }).is_err());
    let old = start(&Gpu { architecture: Architecture::Legacy, ..whole_gpu() }).unwrap_err();
    assert_eq!(
        (old.message.as_str(), old.hint.as_deref()),
        ("GPU 0 can't be shared through MPS", Some(view::OTHER_MODE))
    );
}

#[test]
fn process_blocks_only_the_daemon_of_its_mig_device() {
    let mut gpu = mig_gpu(&["3g.40gb@4", "2g.20gb@0"]);
    gpu.mig.as_mut().unwrap().instances[0].compute[0].processes.push(process(7));
    let plan = plan_layout(&gpu, &["3g.40gb@4", "2g.20gb@0"]);
    let start = |shared: &[&str]| {
        let changes = DaemonChanges::of(&MpsTargets::default(), &gpu, &plan, Some(&layout(shared)));
        starts(&gpu, &plan, &changes).map(|steps| steps.len())
    };
    assert_eq!(start(&["3g.40gb@4:mps", "2g.20gb@0"]), Ok(1));
    let refused = start(&["3g.40gb@4", "2g.20gb@0:mps"]).unwrap_err();
    assert!(refused.error.unwrap().message.contains("2g.20gb@0"));
}

#[test]
fn plan_that_disables_mig_removes_all_targets_of_the_gpu() {
    let gpu = mig_gpu(&["3g.40gb@4", "2g.20gb@0"]);
    let removed =
        |plan: &GpuPlan| ["GPU-0", "MIG-0", "MIG-1", "MIG-9"].map(|uuid| is_removed(&gpu, plan, &uuid.into()));
    assert_eq!(removed(&plan_mig_off(&gpu)), [true, true, true, false]);
    assert_eq!(removed(&plan_layout(&gpu, &["3g.40gb@4", "1g.10gb@0"])), [true, true, false, false]);
    // A refused plan has no steps that show what it would remove.
    let refused = plan_layout(&gpu, &["none"]).without_steps().refused(ApiError::new(Code::Blocked, "in use"));
    assert_eq!(removed(&refused), [true; 4]);
}
