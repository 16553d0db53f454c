//! Decides after which changes gpushd tries again immediately to apply layouts.

use gpush_api::GpuUuid;
use std::{collections::BTreeSet, sync::Arc};

use gpush_core::config::Config;

use crate::state::HostState;

/// The last config, and what currently prevents gpushd from applying layouts, such as cordons.
///
/// gpushd applies layouts again at once after a reload, or when one of these obstacles ends: maintenance, a lost
/// database, a cordon, an override, or leases that delay a change. A new cordon causes no attempt. Such an attempt would
/// begin before the end of the pause after a failure, and each attempt may destroy instances.
#[derive(Debug)]
pub(super) struct Trigger {
    /// Compared by its address, because each reload creates a new config.
    config: Arc<Config>,
    in_maintenance: bool,
    is_lost: bool,
    cordoned: BTreeSet<GpuUuid>,
    overridden: BTreeSet<GpuUuid>,
    /// GPUs with a change that leases delay.
    delayed: BTreeSet<GpuUuid>,
}

impl Trigger {
    pub(super) fn new(host: &HostState) -> Self {
        let with = |matches: fn(&gpush_api::Gpu) -> bool| {
            host.gpus.iter().map(|gpu| &gpu.gpu).filter(|gpu| matches(gpu)).map(|gpu| gpu.uuid.clone()).collect()
        };
        Self {
            config: Arc::clone(&host.config),
            in_maintenance: host.maintenance.is_some(),
            is_lost: host.lost.is_some(),
            cordoned: with(|gpu| !gpu.cordons.is_empty()),
            overridden: with(|gpu| gpu.overridden.is_some()),
            delayed: with(|gpu| gpu.pending.iter().any(|change| !change.leases.is_empty())),
        }
    }

    /// Stores a snapshot. Returns whether gpushd must try again at once: a condition has ended, or
    /// the config was reloaded.
    pub(super) fn fires(&mut self, host: &HostState) -> bool {
        let now = Self::new(host);
        let fires = !Arc::ptr_eq(&self.config, &now.config)
            || self.in_maintenance && !now.in_maintenance
            || self.is_lost && !now.is_lost
            || !self.cordoned.is_subset(&now.cordoned)
            || !self.overridden.is_subset(&now.overridden)
            || !self.delayed.is_subset(&now.delayed);
        *self = now;
        fires
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{Actor, Maintenance};

    use super::*;
    use crate::state::{
        OverrideEffect, State,
        tests::{cordon, list, override_of, uncordon},
    };

    /// Returns a state with one GPU, and its trigger.
    fn one_gpu() -> (State, Trigger) {
        let state = State::empty();
        list(&state, &[0]);
        let trigger = Trigger::new(&state.now());
        (state, trigger)
    }

    #[test]
    fn trigger_fires_when_a_cordon_ends_not_when_it_begins() {
        let (state, mut trigger) = one_gpu();
        state.apply(&[cordon("GPU-0")]);
        assert!(!trigger.fires(&state.now()), "a cordon is made");
        assert!(!trigger.fires(&state.now()), "nothing has changed");
        state.apply(&[uncordon("GPU-0")]);
        assert!(trigger.fires(&state.now()), "the cordon has ended");
        assert!(!trigger.fires(&state.now()), "nothing has changed");
    }

    #[test]
    fn trigger_fires_when_an_override_ends_not_when_it_begins() {
        let (state, mut trigger) = one_gpu();
        let by = Actor { uid: 0, user: None, pid: None };
        let one = override_of("GPU-0", 1);
        state.override_effects(&[OverrideEffect::Made(one.clone())]);
        assert!(!trigger.fires(&state.now()), "an override is made");
        let action = "override.clear".to_owned();
        state.override_effects(&[OverrideEffect::Ended { one, generation: 2, action, by: Some(by) }]);
        assert!(trigger.fires(&state.now()), "the override has ended");
    }

    #[test]
    fn trigger_fires_after_maintenance_and_on_a_reload() {
        let (state, _) = one_gpu();
        let plain = HostState::clone(&state.now());
        let maintenance = Maintenance { reason: None, by: None, since: jiff::Timestamp::UNIX_EPOCH };
        let closed = HostState { maintenance: Some(maintenance), ..plain.clone() };
        let mut trigger = Trigger::new(&plain);
        assert!(!trigger.fires(&closed));
        assert!(trigger.fires(&plain));
        // A reload causes a new attempt even if the config is equal, because files that it names
        // may have changed.
        assert!(trigger.fires(&HostState { config: Arc::new(Config::default()), ..plain.clone() }));
    }
}
