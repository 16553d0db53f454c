//! MPS targets in the state of the host. Supervisor tasks report about their daemons, and the module `mps` stores what it
//! decides about targets.

use std::sync::Arc;

use gpush_api::{EventPayload, MpsChange, TargetUuid};
use gpush_core::mps::{DaemonReport, MpsTarget, MpsTargets};

use super::{AffectedGpus, State, sources::SnapshotSources};

impl SnapshotSources {
    /// Changes the MPS targets. Nothing counts as changed if the targets are the same as before.
    fn change_mps<T>(&mut self, change: impl FnOnce(&mut MpsTargets) -> T) -> (AffectedGpus, T) {
        let before = Arc::clone(&self.mps);
        let result = change(Arc::make_mut(&mut self.mps));
        if self.mps == before {
            self.mps = before;
            return (AffectedGpus::NoChange, result);
        }
        (AffectedGpus::Gpus(self.mps.changed_gpus(&before)), result)
    }
}

impl State {
    /// Returns the MPS targets.
    pub(crate) fn mps(&self) -> Arc<MpsTargets> {
        Arc::clone(&self.0.snapshot.borrow().mps)
    }

    /// Changes the MPS targets. If they stay the same, so does the snapshot.
    pub(crate) fn change_mps<T>(&self, change: impl FnOnce(&mut MpsTargets) -> T) -> T {
        self.update(|known| known.change_mps(change))
    }

    /// Adds an MPS target.
    pub(crate) fn add_mps_target(&self, target: MpsTarget) {
        self.update(|known| {
            known.mps_events.remove(&target.uuid);
            known.change_mps(|targets| targets.by_uuid.insert(target.uuid.clone(), Arc::new(target)))
        });
    }

    /// Removes an MPS target.
    pub(crate) fn remove_mps_target(&self, uuid: &TargetUuid) {
        self.update(|known| {
            known.mps_events.remove(uuid);
            known.change_mps(|targets| targets.by_uuid.remove(uuid))
        });
    }

    /// Stores the report of a supervisor task about the daemon of a target. If the report has changed, publishes an event,
    /// whose reasons end with `news`. Returns the event and whether it was published; `None` if there is no news, or if
    /// the task does not supervise the target any more.
    pub(crate) fn report_daemon(
        &self,
        (uuid, supervisor): (&TargetUuid, u64),
        report: DaemonReport,
        news: Option<Vec<String>>,
    ) -> Option<MpsChange> {
        let (event, is_new) = self.update(|known| {
            let report = |targets: &mut MpsTargets| Some(event(targets.report(uuid, supervisor, report)?, news?));
            let (affected, event) = known.change_mps(report);
            // The API has fewer states than the supervisor. So two states of the supervisor can give the same event.
            let is_new = event.as_ref().is_some_and(|event| known.mps_events.get(uuid) != Some(event));
            if let Some(event) = event.as_ref().filter(|_| is_new) {
                known.mps_events.insert(uuid.clone(), event.clone());
            }
            (affected, (event, is_new))
        });
        // Publish the event after the snapshot, because receivers of the event may read the target.
        if let Some(event) = event.as_ref().filter(|_| is_new) {
            self.0.events.publish(EventPayload::Mps(Box::new(event.clone())));
        }
        event
    }
}

/// Returns the event about a target. Its reasons end with `news`.
fn event(target: &MpsTarget, news: Vec<String>) -> MpsChange {
    let mut reasons = target.reasons();
    reasons.extend(news);
    MpsChange {
        target: target.short.clone(),
        uuid: target.uuid.clone(),
        gpu_uuid: target.gpu_uuid.clone(),
        gpu: target.desired.as_ref().map(|desired| desired.gpu),
        state: target.report.shown_state(),
        reasons,
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::MpsState;
    use gpush_core::{mps::MpsTargetRecord, supervisor::SupervisorState};
    use jiff::Timestamp;

    use super::*;
    use crate::state::{
        events::{Cursor, Next},
        tests::{list, read},
    };

    const READY: SupervisorState = SupervisorState::Ready { pid: 1, silences: 0 };

    fn report(state: SupervisorState) -> DaemonReport {
        DaemonReport {
            state,
            since: Timestamp::UNIX_EPOCH,
            wanted: true,
            multi_user: false,
            policy: None,
            pid: None,
            in_force: None,
            servers: Vec::new(),
            clients: Vec::new(),
            clients_known: true,
            waiting: Vec::new(),
            serves_leases: false,
            behind: false,
            until: None,
            failures: 0,
            next_start: None,
            trouble: Vec::new(),
            ear: std::collections::BTreeSet::new(),
            protocol: None,
            findings: Vec::new(),
            pipe: None,
            logs: None,
            user: None,
        }
    }

    /// Returns a state whose GPU 0 is an MPS target with supervisor task 1.
    fn state() -> (State, Cursor) {
        let state = State::empty();
        list(&state, &[0, 1]);
        read(&state, 0);
        read(&state, 1);
        let (uuid, gpu_uuid, short) = ("GPU-0".to_owned(), "GPU-0".to_owned(), "g0".to_owned());
        let report = DaemonReport { wanted: false, ..report(SupervisorState::Stopped) };
        state.add_mps_target(MpsTarget {
            uuid: uuid.into(),
            short,
            gpu_uuid: gpu_uuid.into(),
            desired: None,
            supervisor: 1,
            report,
        });
        let cursor = state.events().listen(None);
        (state, cursor)
    }

    fn events(cursor: &mut Cursor) -> Vec<(MpsState, Vec<String>)> {
        let mut found = Vec::new();
        while let Next::Events(events) = cursor.poll() {
            found.extend(events.iter().map(|event| match &event.what {
                EventPayload::Mps(change) => (change.state, change.reasons.clone()),
                other => panic!("{other:?}"),
            }));
        }
        found
    }

    #[test]
    fn unchanged_report_publishes_no_event() {
        let (state, mut cursor) = state();
        let before = state.now();
        let seen = DaemonReport { clients: vec![(1, 2)], ..report(SupervisorState::Stopped) };
        assert_eq!(state.report_daemon((&"GPU-0".into(), 1), seen.clone(), None), None);
        let now = state.now();
        assert_eq!(now.mps.by_uuid["GPU-0"].report, seen);
        assert_eq!((now.generation, now.changes), (before.generation, before.changes));
        assert!(events(&mut cursor).is_empty());
        assert!(Arc::ptr_eq(&before.gpus[1], &now.gpus[1]), "another GPU");
        assert_eq!(now.gpus[0].gpu.mps_daemons, ["GPU-0".into()].into());
    }

    #[test]
    fn equal_report_gets_no_new_snapshot() {
        let (state, _) = state();
        state.report_daemon((&"GPU-0".into(), 1), report(READY), Some(Vec::new()));
        let before = state.now();
        assert!(state.report_daemon((&"GPU-0".into(), 1), report(READY), Some(Vec::new())).is_some());
        assert_eq!(state.report_daemon((&"GPU-0".into(), 1), report(READY), None), None);
        assert!(Arc::ptr_eq(&before, &state.now()));
    }

    /// The supervisor has more states than the API, so two reports can give the same event.
    #[test]
    fn equal_events_of_a_target_are_published_once() {
        let (state, mut cursor) = state();
        let news = || Some(vec!["a server ended".to_owned()]);
        for _ in 0..2 {
            assert!(state.report_daemon((&"GPU-0".into(), 1), report(READY), news()).is_some());
        }
        state.report_daemon((&"GPU-0".into(), 1), report(READY), Some(Vec::new()));
        let published = events(&mut cursor);
        assert_eq!(published, [(MpsState::Ready, news().unwrap()), (MpsState::Ready, Vec::new())]);
    }

    #[test]
    fn receiver_of_an_event_finds_the_report_in_the_snapshot() {
        let (state, _) = state();
        let snapshots = state.watch();
        state.report_daemon((&"GPU-0".into(), 1), report(READY), Some(Vec::new()));
        let published = state.events().last_id();
        assert!(snapshots.borrow().mps.by_uuid["GPU-0"].report.admits());
        assert_ne!(snapshots.borrow().last_event, published, "the snapshot is older than the event");
    }

    #[test]
    fn report_of_an_earlier_supervisor_task_is_ignored() {
        let (state, mut cursor) = state();
        let before = state.now();
        assert_eq!(state.report_daemon((&"GPU-0".into(), 0), report(READY), Some(Vec::new())), None);
        state.remove_mps_target(&"GPU-0".into());
        assert_eq!(state.report_daemon((&"GPU-0".into(), 1), report(READY), Some(Vec::new())), None);
        assert!(events(&mut cursor).is_empty() && state.mps().by_uuid.is_empty());
        assert!(before.gpus[0].gpu.mps_daemons.is_empty());
    }

    #[test]
    fn removed_target_that_returns_publishes_its_event_again() {
        let (state, mut cursor) = state();
        state.report_daemon((&"GPU-0".into(), 1), report(READY), Some(Vec::new()));
        let target = MpsTarget::clone(&state.mps().by_uuid["GPU-0"]);
        state.remove_mps_target(&"GPU-0".into());
        state.add_mps_target(MpsTarget { supervisor: 2, ..target });
        state.report_daemon((&"GPU-0".into(), 2), report(READY), Some(Vec::new()));
        assert_eq!(events(&mut cursor).len(), 2);
    }

    /// The record that the daemon is in force decides about the drift of a GPU.
    #[test]
    fn record_of_a_target_changes_the_drift_of_its_gpu() {
        let (state, _) = state();
        let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";
        state.replace_config(Arc::new(gpush_core::config::Config::parse(config, "c").unwrap()), 1);
        assert_eq!(state.now().gpus[0].gpu.drift, ["it is not shared through MPS yet"]);
        let in_force = |record| MpsTargetRecord { in_force: Some(String::new()), ..record };
        state.change_mps(|targets| targets.change_record(&"GPU-0".into(), in_force));
        assert!(state.now().gpus[0].gpu.drift.is_empty());
    }
}
