//! Remembers the changes of rules that leases delay from one snapshot to the next. A reload, an operation on the GPU, or
//! `auto_reconcile` makes gpushd forget them.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{GpuState, GpuUuid, PendingAim};

use super::{AffectedGpus, GpuSnapshot, State, sources::SnapshotSources};

impl SnapshotSources {
    /// Remembers the changes of these GPUs that leases delay. After the leases have ended, these changes wait for an apply.
    pub(super) fn note_delayed(&mut self, gpus: &[Arc<GpuSnapshot>]) {
        for gpu in gpus.iter().map(|gpu| &gpu.gpu) {
            let is_read = match gpu.state {
                GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => !gpu.stale,
                GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => {
                    false
                }
            };
            if !gpu.pending.is_empty() {
                // A grant that is only being recorded may fail. Then the change must take effect at once, so do not
                // remember it because of the grant.
                let before = self.delayed.get(&gpu.uuid);
                let was_delayed = |aim: &PendingAim| before.is_some_and(|aims: &Vec<PendingAim>| aims.contains(aim));
                let delayed = gpu.pending.iter().filter(|change| !change.leases.is_empty() || was_delayed(&change.aim));
                let aims = delayed.map(|change| change.aim.clone()).collect();
                self.delayed.insert(gpu.uuid.clone(), aims);
            } else if is_read {
                self.delayed.remove(&gpu.uuid);
            }
        }
    }
}

impl State {
    /// Notes that an operation has brought these GPUs to the states that their rules require, so that no change of them
    /// waits any more, and nothing blocks them.
    pub(crate) fn rules_applied(&self, uuids: impl Iterator<Item = GpuUuid>) {
        let uuids: BTreeSet<GpuUuid> = uuids.collect();
        self.update(|known| {
            known.delayed.retain(|uuid, _| !uuids.contains(uuid));
            known.blocked_by.retain(|uuid, _| !uuids.contains(uuid));
            (AffectedGpus::Gpus(uuids), ())
        });
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{GpuIndex, LeaseId, LeaseKind, LeaseMember, LeaseState, MemberShare, PendingChange};
    use gpush_core::config::Config;
    use gpush_store::LeaseRecord;

    use super::*;
    use crate::state::{
        OutdatedPlacement, Reservation,
        leases::tests::record,
        tests::{list, read},
    };

    fn rule(mode: &str) -> Arc<Config> {
        Arc::new(Config::parse(&format!("[[gpu]]\nmatch = [\"0\"]\n{mode}"), "c").unwrap())
    }

    const WHOLE: &str = "mode = \"exclusive\"\n";
    const TIMESLICE: &str = "mode = \"timeslice\"\ntimeslice = { replicas = 2 }\n";

    fn member() -> LeaseMember {
        let (target, gpu, share) = ("GPU-0".to_owned(), "GPU-0".to_owned(), MemberShare::Whole);
        LeaseMember { target: target.into(), gpu_uuid: gpu.into(), share, memory_mib: 1, gpu_memory_mib: 1 }
    }

    fn whole(id: u64) -> LeaseRecord {
        LeaseRecord { kind: LeaseKind::Whole, members: vec![member()], ..record(id, 1000, "GPU-0") }
    }

    /// GPU 0 with mode `exclusive`.
    fn state() -> State {
        let state = State::empty();
        state.replace_config(rule(WHOLE), 1);
        list(&state, &[0]);
        read(&state, 0);
        state
    }

    fn pending(state: &State) -> Vec<String> {
        state.now().gpus[0].gpu.pending.iter().map(|change: &PendingChange| change.describe(GpuIndex(0))).collect()
    }

    fn end(state: &State, id: u64) {
        state.change_leases(|table| drop(table.open.remove(&LeaseId(id))));
    }

    #[test]
    fn change_waits_for_the_leases_and_then_for_an_apply() {
        let state = state();
        state.change_leases(|table| {
            table.insert(whole(1));
            table.insert(whole(2));
        });
        assert!(pending(&state).is_empty());
        state.replace_config(rule(TIMESLICE), 2);
        assert_eq!(pending(&state), ["GPU 0 changes from mode `exclusive` to `timeslice` when L1 and L2 end"]);
        end(&state, 1);
        assert_eq!(pending(&state), ["GPU 0 changes from mode `exclusive` to `timeslice` when L2 ends"]);
        end(&state, 2);
        let waits = "GPU 0 changes from mode `exclusive` to `timeslice` with `gpushctl apply 0` (administrator)";
        assert_eq!(pending(&state), [waits]);
        assert!(state.now().gpus[0].gpu.drift.contains(&waits.to_owned()));
        state.rules_applied(["GPU-0".into()].into_iter());
        assert!(pending(&state).is_empty() && state.now().gpus[0].gpu.drift.is_empty());
    }

    #[test]
    fn reload_or_auto_reconcile_ends_the_wait_for_an_apply() {
        for text in [TIMESLICE.to_owned(), format!("{TIMESLICE}\n")] {
            let state = state();
            state.change_leases(|table| table.insert(whole(1)));
            state.replace_config(rule(&text), 2);
            end(&state, 1);
            assert_eq!(pending(&state).len(), 1);
            state.replace_config(rule(&text), 3);
            assert!(pending(&state).is_empty());
        }
        let state = state();
        state.change_leases(|table| table.insert(whole(1)));
        let auto = Config { auto_reconcile: true, ..rule(TIMESLICE).as_ref().clone() };
        state.replace_config(Arc::new(auto), 2);
        assert_eq!(pending(&state).len(), 1, "the lease is still active");
        end(&state, 1);
        assert!(pending(&state).is_empty());
    }

    #[test]
    fn rule_that_is_changed_back_leaves_nothing_pending() {
        let state = state();
        state.change_leases(|table| table.insert(whole(1)));
        state.replace_config(rule(TIMESLICE), 2);
        state.replace_config(rule(WHOLE), 3);
        assert!(pending(&state).is_empty());
        end(&state, 1);
        assert!(pending(&state).is_empty());
    }

    /// Case: a reload and a grant at the same moment. Either the placement is outdated, or the change waits for the grant.
    #[test]
    fn grant_that_is_being_recorded_delays_a_reload_or_is_placed_again() {
        let state = state();
        let seen = state.now();
        let reservation = || Reservation { holder: 1000, members: vec![member()], lease: None, end: None };
        let id = state.reserve(&seen, &state.leases(), reservation()).unwrap();
        state.replace_config(rule(TIMESLICE), 2);
        assert_eq!(state.now().gpus[0].gpu.pending.len(), 1, "the reservation counts as a lease");
        assert!(state.now().gpus[0].gpu.leases.is_empty(), "it has no id yet");
        state.change_leases(|table| {
            table.reserved.remove(&id);
            table.insert(whole(1));
        });
        assert_eq!(pending(&state), ["GPU 0 changes from mode `exclusive` to `timeslice` when L1 ends"]);
        assert_eq!(state.leases().open[&LeaseId(1)].state.name(), LeaseState::Active);
        let outdated = state.reserve(&seen, &state.leases(), reservation());
        assert_eq!(outdated, Err(OutdatedPlacement::DesiredState), "the config has changed since");
    }

    #[test]
    fn of_two_grants_placed_at_the_same_moment_one_is_placed_again() {
        let state = state();
        let (seen, table) = (state.now(), state.leases());
        let reservation = || Reservation { holder: 1000, members: vec![member()], lease: None, end: None };
        let id = state.reserve(&seen, &table, reservation()).unwrap();
        assert_eq!(state.reserve(&seen, &table, reservation()), Err(OutdatedPlacement::Capacity));
        // Freed capacity does not make a placement outdated. A failed grant frees its capacity, but came first.
        state.change_leases(|table| drop(table.reserved.remove(&id)));
        assert_eq!(state.reserve(&seen, &table, reservation()), Err(OutdatedPlacement::Capacity));
        let table = state.leases();
        state.change_leases(|table| table.entering.clear());
        assert!(state.reserve(&seen, &table, reservation()).is_ok());
    }

    /// Fault: gpushd remembered a change that only a grant without an id had delayed. After the commit of the grant had
    /// failed, the change waited for an apply, although no lease had delayed it.
    #[test]
    fn change_takes_effect_at_once_when_a_grant_fails() {
        let state = state();
        let id = state.reserve(
            &state.now(),
            &state.leases(),
            Reservation { holder: 1000, members: vec![member()], lease: None, end: None },
        );
        let id = id.unwrap();
        state.replace_config(rule(TIMESLICE), 2);
        assert_eq!(state.now().gpus[0].gpu.pending.len(), 1, "the reservation delays the change");
        state.change_leases(|table| drop(table.reserved.remove(&id)));
        assert!(pending(&state).is_empty(), "{:?}", pending(&state));
    }
}
