//! Tests of the state without a driver: inputs, snapshots and events.

use std::{sync::Arc, time::Duration};

use gpush_api::{Actor, Architecture, Gpu, GpuAspect, GpuIndex, GpuState, Maintenance, Memory};
use gpush_nvml::{DriverError, ErrorKind, Identity, RemappedRows};
use gpush_store::{ConditionKind, NewCondition, Options};

use super::{events::Next, readings::Cached, *};
use crate::requests::caller::Viewer;

impl State {
    /// Returns a state without GPUs, with a temporary store.
    pub(crate) fn empty() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let store = Store::open(scratch.path(), Options::default()).unwrap().store;
        let initial = Initial {
            config: Arc::new(Config::default()),
            rules_are_known: true,
            conditions: Conditions::default(),
            overrides: Overrides::default(),
            lost: None,
            known_since: None,
            mps_records: Vec::new(),
            leases: Vec::new(),
            created: CreatedInstances::new(),
        };
        Self::new(store, Events::new("test"), initial)
    }
}

/// Returns a snapshot with these GPUs, which have no rules.
pub(crate) fn host_of(gpus: Vec<Gpu>) -> HostState {
    let gpus = gpus.into_iter().map(|gpu| Arc::new(GpuSnapshot::of(gpu))).collect();
    HostState { gpus, ..HostState::clone(&State::empty().now()) }
}

fn identity(index: u32) -> Identity {
    Identity {
        index: GpuIndex(index),
        uuid: format!("GPU-{index}").into(),
        pci: format!("0000:{index:02}:00.0"),
        pci_id: 0x20b2_10de,
        pci_subsystem: None,
        minor: index,
        name: "NVIDIA A100-SXM4-80GB".to_owned(),
        architecture: Architecture::Ampere,
        passed_through: false,
    }
}

fn reading(index: u32) -> Reading {
    Reading {
        identity: identity(index),
        memory: Memory::default(),
        mig: None,
        compute_mode: None,
        processes: Vec::new(),
        processes_known: true,
        nvlink: None,
        sensors: gpush_api::Sensors::default(),
        rows: None,
        warnings: Vec::new(),
    }
}

fn good<V>(value: V) -> LastReading<Arc<V>> {
    LastReading { good: Some((Arc::new(value), Moment::now())), error: None, stale: false }
}

fn failed<V>(kind: ErrorKind) -> LastReading<Arc<V>> {
    LastReading { good: None, error: Some(DriverError::new(kind, "reading")), stale: true }
}

pub(crate) fn list(state: &State, indexes: &[u32]) {
    let listed = indexes.iter().map(|index| Listed { index: GpuIndex(*index), identity: Ok(identity(*index)) });
    state.set_list(good(listed.collect()));
}

/// Stores a reading of a GPU.
pub(crate) fn read(state: &State, index: u32) {
    state.set_reading(&format!("GPU-{index}").into(), good(reading(index)));
}

/// Returns a state in which GPUs 0 and 1 were read, and a listener that starts after these
/// readings.
fn two_gpus() -> (State, events::Cursor) {
    let state = State::empty();
    list(&state, &[0, 1]);
    state.set_reading(&"GPU-0".into(), good(reading(0)));
    state.set_reading(&"GPU-1".into(), good(reading(1)));
    let cursor = state.events().listen(None);
    (state, cursor)
}

/// Returns the GPU events since the last call: index, state, changed aspects.
fn gpu_events(cursor: &mut events::Cursor) -> Vec<(GpuIndex, GpuState, Vec<GpuAspect>)> {
    let mut reported = Vec::new();
    while let Next::Events(events) = cursor.poll() {
        for event in events {
            if let EventPayload::Gpu(change) = &event.what {
                reported.push((change.gpu, change.state, change.changed.clone()));
            }
        }
    }
    reported
}

pub(crate) fn cordon(uuid: &str) -> Change {
    Change::Set(NewCondition {
        scope: Scope::Gpu(uuid.into()),
        kind: ConditionKind::Cordon,
        cause: "admin".to_owned(),
        reason: "fan".to_owned(),
        by: Some(Actor { uid: 0, user: Some("root".to_owned()), pid: None }),
    })
}

pub(crate) fn uncordon(uuid: &str) -> Change {
    Change::Clear(Scope::Gpu(uuid.into()), ConditionKind::Cordon, None)
}

/// Returns an override without expiry, set at this generation.
pub(crate) fn override_of(uuid: &str, generation: u64) -> Override {
    Override {
        gpu_uuid: uuid.into(),
        rule: None,
        layout: vec!["7g.80gb".to_owned()],
        author: Actor { uid: 1000, user: None, pid: None },
        reason: String::new(),
        created_at: Timestamp::UNIX_EPOCH,
        expires_at: None,
        generation,
        sequence: generation,
    }
}

fn maintenance() -> Change {
    Change::Set(NewCondition {
        scope: Scope::Host,
        kind: ConditionKind::Maintenance,
        cause: "admin".to_owned(),
        reason: String::new(),
        by: None,
    })
}

fn states(state: &State) -> Vec<GpuState> {
    state.now().gpus.iter().map(|gpu| gpu.gpu.state).collect()
}

#[test]
fn gpu_appears_unknown_and_is_ready_once_read() {
    let state = State::empty();
    let mut cursor = state.events().listen(None);
    assert!(state.now().driver.is_some() && !state.now().was_listed);
    list(&state, &[0]);
    assert!(state.now().driver.is_none());
    state.set_reading(&"GPU-0".into(), good(reading(0)));
    let reported = gpu_events(&mut cursor);
    assert_eq!(
        reported,
        [
            (GpuIndex(0), GpuState::Unknown, vec![GpuAspect::Appeared]),
            (GpuIndex(0), GpuState::Ready, vec![GpuAspect::State]),
        ]
    );
    assert_eq!(state.now().changes, 2);
    assert!(state.now().last_event.ends_with("-2"));
}

#[test]
fn cordon_is_published_without_a_reader() {
    let (state, mut cursor) = two_gpus();
    state.apply(&[cordon("GPU-1")]);
    assert_eq!(gpu_events(&mut cursor), [(GpuIndex(1), GpuState::Cordoned, vec![GpuAspect::State])]);
    state.apply(&[uncordon("GPU-1")]);
    assert_eq!(gpu_events(&mut cursor), [(GpuIndex(1), GpuState::Ready, vec![GpuAspect::State])]);
}

#[test]
fn composing_an_answer_changes_nothing() {
    let (state, mut cursor) = two_gpus();
    let before = state.now();
    let observed = || Observed { host: state.now(), late: BTreeSet::new() };
    let first = observed();
    for _ in 0..3 {
        let _ = before.gpus(Viewer::Agent);
        let _ = state.with(&[Arc::new(Reading { rows: Some(rows(true)), ..reading(0) })]).gpus(Viewer::Admin);
    }
    assert!(Arc::ptr_eq(&before, &state.now()) && observed().is_same(&first));
    assert_eq!((gpu_events(&mut cursor), states(&state)), (Vec::new(), vec![GpuState::Ready; 2]));
    state.apply(&[cordon("GPU-1")]);
    assert!(!observed().is_same(&first));
}

fn rows(pending: bool) -> RemappedRows {
    RemappedRows { correctable: 1, uncorrectable: 0, pending, failed: false }
}

#[test]
fn reading_of_a_pending_row_cordons_its_gpu_once() {
    let (state, mut cursor) = two_gpus();
    for _ in 0..2 {
        state.set_reading(&"GPU-0".into(), good(Reading { rows: Some(rows(true)), ..reading(0) }));
    }
    assert_eq!(gpu_events(&mut cursor), [(GpuIndex(0), GpuState::Cordoned, vec![GpuAspect::State])]);
    assert_eq!(state.now().gpus[0].gpu.cordons[0].cause, "row-remap");
}

#[test]
fn stale_reading_does_not_change_conditions() {
    let (state, _) = two_gpus();
    let pending = Reading { rows: Some(rows(true)), ..reading(0) };
    state.set_reading(&"GPU-0".into(), LastReading { stale: true, ..good(pending) });
    assert_eq!(states(&state)[0], GpuState::Ready);
}

#[tokio::test(start_paused = true)]
async fn reading_begun_before_a_restart_changes_no_condition() {
    let (state, _) = two_gpus();
    let to = state.clone();
    let cache = Cached::new(
        crate::system::tasks::Tasks::for_tests(),
        Box::new(move |last| to.set_reading(&"GPU-0".into(), last)),
    );
    let pending = || Ok(Arc::new(Reading { rows: Some(rows(true)), ..reading(0) }));
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    cache.refresh(|| async move {
        let _ = ended.await;
        pending()
    });
    // The worker restarts during the reading.
    cache.invalidate();
    end.send(()).unwrap();
    assert!(!cache.wait(Duration::from_secs(1)).await, "the reading has ended");
    assert_eq!(states(&state)[0], GpuState::Ready);
    tokio::time::advance(Duration::from_millis(1)).await;
    cache.refresh(|| async move { pending() });
    cache.wait(Duration::from_secs(1)).await;
    assert_eq!(states(&state)[0], GpuState::Cordoned);
}

#[test]
fn expired_override_is_in_no_answer() {
    let (state, _) = two_gpus();
    let expired = Override { expires_at: Some(Timestamp::UNIX_EPOCH), ..override_of("GPU-0", 1) };
    let overridden = |state: &State| state.now().gpus[0].gpu.overridden.is_some();
    let make = |state: &State| state.override_effects(&[OverrideEffect::Made(expired.clone())]);
    make(&state);
    assert!(state.overrides().is_empty() && !overridden(&state));
    let (state, _) = two_gpus();
    make(&state);
    assert!(state.override_of(&"GPU-0".into()).is_none() && !overridden(&state));
    let (state, _) = two_gpus();
    make(&state);
    let planned_on = state.with(&[Arc::new(reading(0))]);
    assert!(planned_on.host.gpus[0].gpu.overridden.is_none() && !overridden(&state));
}

#[test]
fn maintenance_outranks_every_state_and_hides_driver_errors() {
    let (state, mut cursor) = two_gpus();
    state.apply(&[cordon("GPU-0")]);
    state.set_reading(&"GPU-1".into(), failed(ErrorKind::GpuIsLost));
    assert_eq!(states(&state), [GpuState::Cordoned, GpuState::Lost]);
    state.apply(&[maintenance()]);
    assert_eq!(states(&state), [GpuState::Maintenance; 2]);
    let host = state.now();
    assert!(host.gpus.iter().all(|gpu| gpu.gpu.stale && gpu.reasons.len() == 1), "{:?}", host.gpus);
    assert!(matches!(&host.gpus[0].reasons[0], Reason::Maintenance(Maintenance { .. })));
    assert_eq!(gpu_events(&mut cursor).len(), 4);
}

#[test]
fn operation_on_a_gpu_is_a_typed_reason_and_ends_with_the_lane() {
    let (state, mut cursor) = two_gpus();
    let uuids = ["GPU-0".into()];
    let holder = |begun| if begun { Holder::Operation("op-1".to_owned()) } else { Holder::Planning };
    state.set_lane(&uuids, Some(&holder(false)));
    assert_eq!(states(&state)[0], GpuState::Ready, "it is only planned");
    state.set_lane(&uuids, Some(&holder(true)));
    assert!(state.now().gpus[0].is_changing());
    state.set_lane(&uuids, None);
    let reported: Vec<GpuState> = gpu_events(&mut cursor).into_iter().map(|(_, state, _)| state).collect();
    assert_eq!(reported, [GpuState::Changing, GpuState::Ready]);
}

#[test]
fn gpu_that_is_not_listed_is_lost_and_sorts_last() {
    let (state, mut cursor) = two_gpus();
    list(&state, &[1]);
    let host = state.now();
    let order: Vec<(GpuIndex, GpuState)> = host.gpus.iter().map(|gpu| (gpu.gpu.index, gpu.gpu.state)).collect();
    assert_eq!(order, [(GpuIndex(1), GpuState::Ready), (GpuIndex(0), GpuState::Lost)]);
    // If the driver cannot identify GPU 0, gpushd assumes that it is the GPU that last had index 0.
    let nameless = Listed { index: GpuIndex(0), identity: Err(DriverError::new(ErrorKind::Garbled, "identifying")) };
    state.set_list(good(vec![nameless, Listed { index: GpuIndex(1), identity: Ok(identity(1)) }]));
    assert_eq!(states(&state), [GpuState::Unknown, GpuState::Ready]);
    assert!(state.now().nameless.is_empty());
    assert_eq!(gpu_events(&mut cursor).len(), 2);
}

#[test]
fn gpu_events_pause_while_there_is_no_driver() {
    let (state, mut cursor) = two_gpus();
    state.set_list(LastReading {
        error: Some(DriverError::new(ErrorKind::LibraryNotFound, "listing")),
        stale: true,
        ..good(vec![Listed { index: GpuIndex(0), identity: Ok(identity(0)) }])
    });
    state.apply(&[cordon("GPU-0")]);
    assert!(state.now().driver.is_some());
    assert_eq!(gpu_events(&mut cursor), []);
    list(&state, &[0, 1]);
    assert_eq!(
        gpu_events(&mut cursor),
        [(GpuIndex(0), GpuState::Cordoned, vec![GpuAspect::State])],
        "reported when the GPU is back"
    );
}

#[test]
fn every_change_is_an_event_even_if_a_watcher_skips_snapshots() {
    let (state, mut cursor) = two_gpus();
    let mut snapshots = state.watch();
    snapshots.borrow_and_update();
    for _ in 0..50 {
        state.apply(&[cordon("GPU-0")]);
        state.apply(&[Change::Clear(Scope::Gpu("GPU-0".into()), ConditionKind::Cordon, None)]);
    }
    assert_eq!(gpu_events(&mut cursor).len(), 100);
    assert!(snapshots.has_changed().unwrap());
    assert_eq!(snapshots.borrow_and_update().last_event, state.now().last_event);
    assert!(!snapshots.has_changed().unwrap());
}

#[test]
fn loss_holds_managed_gpus_until_it_is_accepted() {
    let state = State::empty();
    let config = Config::from_bytes(b"[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n", "config.toml");
    let lost =
        Lost { at: Timestamp::now(), boot_id: "b".to_owned(), cause: "damaged".to_owned(), kept: None, holds: true };
    state.update(|known| {
        known.loss.lost = Some(lost);
        (AffectedGpus::All, ())
    });
    list(&state, &[0, 1]);
    for index in [0, 1] {
        state.set_reading(&format!("GPU-{index}").into(), good(reading(index)));
    }
    state.replace_config(Arc::new(config.unwrap()), 1);
    assert_eq!(states(&state), [GpuState::Held, GpuState::Ready]);
    state.accept_loss(7);
    assert_eq!(states(&state), [GpuState::Ready; 2]);
    assert!(state.may_have_forgotten(7) && !state.may_have_forgotten(8));
}

#[test]
fn unknown_rules_hold_all_gpus_until_a_config_is_active() {
    let state = State::empty();
    state.update(|known| {
        known.rules_are_known = false;
        (AffectedGpus::All, ())
    });
    list(&state, &[0, 1]);
    state.set_reading(&"GPU-0".into(), good(reading(0)));
    state.set_reading(&"GPU-1".into(), failed(ErrorKind::GpuIsLost));
    assert_eq!(states(&state), [GpuState::Held, GpuState::Lost]);
    assert_eq!(state.now().gpus[0].gpu.reasons, ["gpushd can't use its config, so it does not know the rules"]);
    state.replace_config(Arc::new(Config::default()), 1);
    assert_eq!(states(&state), [GpuState::Ready, GpuState::Lost]);
}

#[test]
fn gpu_with_several_sources_appears_once_in_a_snapshot() {
    let (state, _) = two_gpus();
    for _ in 0..2 {
        let mut round = state.begin_level_round();
        round.set(&"GPU-0".into(), Level::Known(gpush_api::TimesliceLevel::Default));
        state.report_levels(round);
    }
    state.apply(&[cordon("GPU-0"), cordon("GPU-0")]);
    assert_eq!(states(&state).len(), 2);
    assert_eq!(state.now().position("0").unwrap(), 0);
}

#[test]
fn idle_processes_are_left_out_for_every_viewer() {
    let (state, _) = two_gpus();
    let process = |pid| gpush_api::Process {
        pid: Some(pid),
        uid: Some(1000),
        user: None,
        command: None,
        kind: gpush_api::ProcessKind::Compute,
        memory_mib: None,
        unidentified: false,
    };
    state.set_reading(&"GPU-0".into(), good(Reading { processes: vec![process(7), process(8)], ..reading(0) }));
    let observed = state.with(&[]);
    for (viewer, pid) in [(Viewer::Agent, None), (Viewer::Admin, Some(8)), (Viewer::User(1001), None)] {
        let gpus = observed.gpus_for_plans(viewer, &BTreeSet::from([7]));
        assert_eq!(gpus[0].processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [pid], "{viewer:?}");
    }
}
