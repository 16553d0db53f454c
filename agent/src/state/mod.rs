//! The state of the host. Everything that gpushd knows about the host is here.
//!
//! ```text
//! readings   ── GPUs listed, GPUs read, worker's unsettled calls ──┐
//! commits    ── conditions, overrides, config, a loss accepted ────┤   one short lock
//! lanes      ── which operation has which GPU ─────────────────────┼─► sources ─► HostState ─► watch channel
//! modes      ── MPS targets with their daemons, time-slice levels ─┘                │
//!                                                              difference from the one before ─► GPU events
//! ```
//!
//! A snapshot, a [`HostState`], is immutable. Each change replaces the current snapshot. While the lock is still held,
//! gpushd publishes how the GPUs differ from the previous snapshot. So no difference is skipped, and each snapshot has
//! the id of the last event before it.
//!
//! Code that holds the lock never awaits. Changes that a user requests are committed first (`commit`), and applied in
//! the order of the commits. A change that gpushd itself detects, such as a fault that cordons a GPU, takes effect at
//! once and is recorded later. Otherwise a full disk would keep a broken GPU in use.
//!
//! A reading may change conditions, but a response never changes conditions.
//!
//! | file | subject |
//! |---|---|
//! | `host` | a snapshot |
//! | `sources` | the source data of snapshots |
//! | `snapshot` | composes a snapshot from its sources |
//! | `holder` | the operation that has claimed a GPU |
//! | `gpu` | one GPU of a snapshot: its state and the reasons |
//! | `reason` | why a GPU is in its state, as a type |
//! | `context` | the handles of the host, for all layers above |
//! | `conditions` | cordons, maintenance, degraded GPUs |
//! | `faults` | cordons because of faults that gpushd detects |
//! | `leases` | leases that have not ended |
//! | `lease_changes` | changes of these leases |
//! | `pending` | changes that leases delay |
//! | `delayed` | remembers these changes |
//! | `lanes` | the lane of each GPU: only its owner changes the GPU |
//! | `overrides` | layouts that take precedence over the config |
//! | `levels` | time-slice levels |
//! | `mps` | MPS targets |
//! | `refused_requests` | the refused requests of each user, until they are recorded |
//! | `request_counts` | how many requests for leases were granted and refused |
//! | `commit` | changes that are recorded before they are applied |
//! | `xids` | Xid errors that the driver reported |
//! | `view` | a snapshot as a caller may see it |
//! | `redact` | removes what a viewer may not see |
//! | `readings` | reading the hardware; the only part that awaits the driver |
//! | `events` | events and their listeners |
//! | `words` | conditions as text |

mod commit;
mod conditions;
pub(crate) mod context;
mod delayed;
pub(crate) mod events;
mod faults;
mod gpu;
mod holder;
mod host;
pub(crate) mod lanes;
mod lease_changes;
pub(crate) mod leases;
mod levels;
mod mps;
mod overrides;
mod pending;
pub(crate) mod readings;
mod reason;
pub(crate) mod redact;
pub(crate) mod refused_requests;
pub(crate) mod request_counts;
mod snapshot;
mod sources;
mod view;
pub(crate) mod words;
mod xids;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, MutexGuard},
    time::{Duration, Instant},
};

use gpush_api::{DeviceEnforcement, EventPayload, GpuIndex, GpuUuid, Maintenance};
use gpush_core::{
    config::Config,
    mps::{MpsTargetRecord, MpsTargets},
};
use gpush_locked::Locked;
use gpush_nvml::{Listed, Reading};
use gpush_store::{CreatedInstances, LeaseRecord, Lost, Override, Scope, Store};
use jiff::Timestamp;
use tokio::sync::watch;

pub(crate) use self::{
    commit::Commits,
    conditions::{Change, Conditions, Recorded, RecoveryCheck},
    events::Events,
    gpu::{GpuSnapshot, is_managed},
    holder::Holder,
    host::HostState,
    lease_changes::OutdatedPlacement,
    leases::{LeaseTable, OpenLease, OperationLeaseEffects, Reservation, ReservationId},
    levels::{Level, LevelRound},
    overrides::{OverrideEffect, Overrides, overridden},
    reason::Reason,
    view::{Observed, no_driver, unidentified},
    xids::XidErrors,
};
use self::{
    readings::{LastReading, Moment},
    snapshot::difference,
    sources::{ListedGpu, Loss, SnapshotSources},
};

/// The state of the host. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct State(Arc<StateParts>);

#[derive(Debug)]
struct StateParts {
    store: Store,
    events: Events,
    known: Locked<SnapshotSources>,
    snapshot: watch::Sender<Arc<HostState>>,
}

/// What the state contains when gpushd starts, from the store and the config.
#[derive(Debug)]
pub(crate) struct Initial {
    /// The active config.
    pub(crate) config: Arc<Config>,
    /// Whether gpushd could read the rules.
    pub(crate) rules_are_known: bool,
    /// Recorded conditions.
    pub(crate) conditions: Conditions,
    /// Recorded overrides.
    pub(crate) overrides: Overrides,
    /// A loss of the database that no administrator has accepted yet.
    pub(crate) lost: Option<Lost>,
    /// Time at which an administrator last accepted a loss of the database, in clock ticks since boot. `None` if this
    /// did not happen on this boot.
    pub(crate) known_since: Option<u64>,
    /// Records of MPS targets.
    pub(crate) mps_records: Vec<MpsTargetRecord>,
    /// Recorded leases that have not ended.
    pub(crate) leases: Vec<LeaseRecord>,
    /// The instances that gpushd has created on this boot.
    pub(crate) created: CreatedInstances,
}

/// The GPUs whose data a change may affect.
enum AffectedGpus {
    /// Nothing has changed, so the current snapshot stays.
    NoChange,
    None,
    Gpus(BTreeSet<GpuUuid>),
    All,
}

impl State {
    /// Creates the state from recorded data. gpushd knows no GPU yet.
    pub(crate) fn new(store: Store, events: Events, initial: Initial) -> Self {
        let Initial { config, rules_are_known, conditions, overrides, lost, known_since, mps_records, leases, created } =
            initial;
        let records = mps_records.into_iter().map(|record| (record.target.clone(), record)).collect();
        let mps = MpsTargets { records, ..MpsTargets::default() };
        let known = SnapshotSources {
            config,
            rules_are_known,
            claims: BTreeMap::new(),
            loss: Loss { lost, known_since },
            conditions,
            overrides,
            list: LastReading::default(),
            sights: BTreeMap::new(),
            nameless: Vec::new(),
            unsettled: BTreeSet::new(),
            lanes: BTreeMap::new(),
            levels: Arc::default(),
            mps: Arc::new(mps),
            mps_events: BTreeMap::new(),
            unleased: BTreeMap::new(),
            blocked_by: BTreeMap::new(),
            reported: BTreeMap::new(),
            leases: Arc::new(LeaseTable::new(leases, created)),
            delayed: BTreeMap::new(),
            xids: Arc::default(),
            enforcement: Arc::default(),
        };
        let first = known.snapshot(Vec::new(), events.last_id(), 0);
        Self(Arc::new(StateParts {
            store,
            events,
            known: Locked::new(known),
            snapshot: watch::Sender::new(Arc::new(first)),
        }))
    }

    fn sources(&self) -> MutexGuard<'_, SnapshotSources> {
        self.0.known.lock()
    }

    /// Returns the current snapshot.
    pub(crate) fn now(&self) -> Arc<HostState> {
        Arc::clone(&self.0.snapshot.borrow())
    }

    /// Subscribes to snapshots. A subscriber may miss some of them. Only the events are complete.
    pub(crate) fn watch(&self) -> watch::Receiver<Arc<HostState>> {
        self.0.snapshot.subscribe()
    }

    /// Returns the active config.
    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.0.snapshot.borrow().config)
    }

    /// Returns the current maintenance.
    pub(crate) fn maintenance(&self) -> Option<Maintenance> {
        self.0.snapshot.borrow().maintenance.clone()
    }

    /// Returns the handle to publish an event that does not come from a snapshot.
    pub(crate) fn events(&self) -> &Events {
        &self.0.events
    }

    /// Returns the index that a GPU had when it was last listed.
    pub(crate) fn index_of(&self, uuid: &GpuUuid) -> Option<GpuIndex> {
        self.sources().sights.get(uuid).map(|sight| sight.identity.index)
    }

    /// Returns the current snapshot, but with the GPUs in `readings` as these readings show them. Used to make plans.
    pub(crate) fn with(&self, readings: &[Arc<Reading>]) -> Observed {
        self.expire_overrides();
        let known = self.sources();
        let mut host = HostState::clone(&self.now());
        for reading in readings {
            let Some(gpu) = host.gpus.iter_mut().find(|gpu| gpu.gpu.uuid == reading.identity.uuid) else { continue };
            let Some(sight) = known.sights.get(&reading.identity.uuid) else { continue };
            let at = sight.last.good.as_ref().map_or_else(Moment::now, |(_, at)| *at);
            let last = LastReading { good: Some((Arc::clone(reading), at)), error: None, stale: false };
            *gpu = known.compose(&ListedGpu { last, ..sight.clone() });
        }
        Observed { host: Arc::new(host), late: BTreeSet::new() }
    }

    /// Changes the data behind the snapshots, creates a new snapshot, and publishes how the GPUs have changed.
    fn update<T>(&self, change: impl FnOnce(&mut SnapshotSources) -> (AffectedGpus, T)) -> T {
        let mut known = self.sources();
        let (touched, result) = change(&mut known);
        let before = self.now();
        let gpus = match touched {
            AffectedGpus::NoChange => return result,
            AffectedGpus::None => before.gpus.clone(),
            AffectedGpus::All => known.sights.values().map(|sight| known.compose(sight)).collect(),
            AffectedGpus::Gpus(uuids) => {
                let kept = before.gpus.iter().filter(|gpu| !uuids.contains(&gpu.gpu.uuid)).cloned();
                let composed = uuids.iter().filter_map(|uuid| known.sights.get(uuid)).map(|sight| known.compose(sight));
                kept.chain(composed).collect()
            }
        };
        known.note_delayed(&gpus);
        let mut next = known.snapshot(gpus, String::new(), before.changes);
        // Without a driver, GPUs cannot be compared. A separate event reports the loss of the driver.
        if next.driver.is_none() {
            let reported = &mut known.reported;
            for gpu in &next.gpus {
                let Some(change) = difference(reported.get(&gpu.gpu.uuid), &gpu.reported) else { continue };
                reported.insert(gpu.gpu.uuid.clone(), gpu.reported.clone());
                self.0.events.publish(EventPayload::Gpu(Box::new(change)));
                next.changes += 1;
            }
        }
        next.last_event = self.0.events.last_id();
        self.0.snapshot.send_replace(Arc::new(next));
        result
    }

    /// Stores the driver's list of GPUs, or why the driver could not list them.
    fn set_list(&self, list: LastReading<Arc<Vec<Listed>>>) {
        self.update(|known| {
            known.list = list;
            known.match_list();
            (AffectedGpus::All, ())
        });
    }

    /// Stores a reading of a GPU, or the error. A reading may cordon the GPU, or clear its degraded state.
    fn set_reading(&self, uuid: &GpuUuid, last: LastReading<Arc<Reading>>) {
        self.update(|known| {
            // Ignore a stale reading, because it may show the GPU as it was before a change.
            let fresh = if last.error.is_none() && !last.stale { last.good.clone() } else { None };
            let Some(sight) = known.sights.get_mut(uuid) else { return (AffectedGpus::None, ()) };
            let listed = sight.listed && sight.list_error.is_none();
            sight.last = last;
            let Some((reading, at)) = fresh else { return (AffectedGpus::Gpus(BTreeSet::from([uuid.clone()])), ()) };
            let settled = listed && !known.unsettled.contains(uuid) && !known.lanes.contains_key(uuid);
            if settled {
                for change in known.conditions.check_recovery(&reading, at.own) {
                    // Do not wait for the write. If the write is lost, the next gpushd detects this change with its
                    // first reading.
                    drop(self.0.store.write_ending(move |tx| change.record(tx)));
                }
            }
            if let Some(rows) = reading.rows {
                self.apply_rows(known, uuid, rows);
            }
            (AffectedGpus::Gpus(BTreeSet::from([uuid.clone()])), ())
        });
    }

    /// Stores on which GPUs a driver call has not returned, and may therefore still take effect.
    pub(crate) fn set_unsettled(&self, uuids: &[GpuUuid]) {
        let now: BTreeSet<GpuUuid> = uuids.iter().cloned().collect();
        if self.sources().unsettled == now {
            return;
        }
        self.update(|known| {
            known.unsettled = now;
            known.match_list();
            (AffectedGpus::All, ())
        });
    }

    /// Applies changes of conditions. The caller must record them.
    pub(crate) fn apply(&self, changes: &[Change]) {
        if changes.is_empty() {
            return;
        }
        self.update(|known| {
            changes.iter().for_each(|change| known.conditions.apply(change));
            let gpus = changes.iter().map(|change| match change.scope() {
                Scope::Host => None,
                Scope::Gpu(uuid) => Some(uuid.clone()),
            });
            let gpus: Option<BTreeSet<GpuUuid>> = gpus.collect();
            (gpus.map_or(AffectedGpus::All, AffectedGpus::Gpus), ())
        });
    }

    /// Applies recorded changes of overrides, and publishes these changes.
    pub(crate) fn override_effects(&self, effects: &[OverrideEffect]) {
        if effects.is_empty() {
            return;
        }
        self.update(|known| {
            known.overrides.apply(effects);
            effects.iter().for_each(|effect| self.0.events.publish(EventPayload::Change(effect.event())));
            (AffectedGpus::Gpus(effects.iter().map(|effect| effect.uuid().clone()).collect()), ())
        });
    }

    /// Returns all active overrides, in the order in which they were set.
    pub(crate) fn overrides(&self) -> Vec<Override> {
        self.expire_overrides();
        self.sources().overrides.all()
    }

    /// Returns the active override of a GPU, whether or not the driver lists the GPU.
    pub(crate) fn override_of(&self, uuid: &GpuUuid) -> Option<Override> {
        self.expire_overrides();
        self.sources().overrides.of(uuid).cloned()
    }

    /// Ends the overrides that have expired. gpushd records their ends later, with [`State::expired_overrides`].
    pub(crate) fn expire_overrides(&self) {
        let (now, at) = (Timestamp::now(), Instant::now());
        let over = self.sources().overrides.expire(now, at);
        if !over.is_empty() {
            self.update(|_| (AffectedGpus::Gpus(over.into_iter().collect()), ()));
        }
    }

    /// Returns the overrides whose end must be recorded, and the time until the next override expires.
    pub(crate) fn expired_overrides(&self) -> (Vec<Override>, Option<Duration>) {
        self.sources().overrides.to_record(Timestamp::now(), Instant::now())
    }

    /// Call this when the ends of these overrides are recorded.
    pub(crate) fn expiry_recorded(&self, ended: &[Override]) {
        self.sources().overrides.recorded(ended);
    }

    /// Activates a config. `generation` is the new generation of the desired state.
    pub(crate) fn replace_config(&self, config: Arc<Config>, generation: u64) {
        self.update(|known| {
            (known.config, known.rules_are_known) = (config, true);
            known.overrides.raise_generation(generation);
            known.claim();
            // A reload requests the changes of all GPUs that are not leased.
            known.delayed.clear();
            known.blocked_by.clear();
            (AffectedGpus::All, ())
        });
    }

    /// Accepts a loss of the database. `known_since` is the current time, in clock ticks since boot.
    pub(crate) fn accept_loss(&self, known_since: u64) {
        self.update(|known| {
            known.loss = Loss { lost: None, known_since: Some(known_since) };
            (AffectedGpus::All, ())
        });
    }

    /// Accepts a loss of the database if no GPU is held because of it.
    pub(crate) fn acknowledge_loss(&self) {
        self.update(|known| {
            known.loss.lost = None;
            (AffectedGpus::All, ())
        });
    }

    /// Returns whether a process may have had a grant that was lost with the database. `start` is the start time of the
    /// process or of a parent, in clock ticks since boot.
    pub(crate) fn may_have_forgotten(&self, start: u64) -> bool {
        self.sources().loss.known_since.is_some_and(|since| start <= since)
    }

    /// Stores which operation has claimed these GPUs. `None` if no operation has.
    pub(crate) fn set_lane(&self, uuids: &[GpuUuid], holder: Option<&Holder>) {
        self.update(|known| {
            for uuid in uuids {
                match holder {
                    Some(holder) => known.lanes.insert(uuid.clone(), holder.clone()),
                    None => known.lanes.remove(uuid),
                };
            }
            (AffectedGpus::Gpus(uuids.iter().cloned().collect()), ())
        });
    }

    /// Stores the processes that must not use their GPUs, by UUID of the GPU.
    pub(crate) fn set_unleased(&self, unleased: BTreeMap<GpuUuid, Vec<gpush_api::UnleasedProcess>>) {
        if self.sources().unleased == unleased {
            return;
        }
        self.update(|known| {
            let before = std::mem::replace(&mut known.unleased, unleased);
            let uuids = before.into_keys().chain(known.unleased.keys().cloned()).collect();
            (AffectedGpus::Gpus(uuids), ())
        });
    }

    /// Stores the result of a check of the device access.
    pub(crate) fn set_enforcement(&self, enforcement: DeviceEnforcement) {
        self.update(|known| {
            known.enforcement = Arc::new(enforcement);
            (AffectedGpus::None, ())
        });
    }

    /// Counts an Xid error that the driver has reported now. The UUID is empty if the driver did not name the GPU.
    pub(crate) fn count_xid(&self, uuid: &GpuUuid, xid: u64) {
        self.update(|known| {
            Arc::make_mut(&mut known.xids).count(uuid, xid, Timestamp::now());
            (AffectedGpus::None, ())
        });
    }

    /// Stores what prevents gpushd from applying the rule of a GPU. Returns whether it has changed.
    pub(crate) fn set_blocked_by(&self, uuid: &GpuUuid, holders: Vec<gpush_api::Holder>) -> bool {
        if self.sources().blocked_by.get(uuid).map_or(&[][..], Vec::as_slice) == holders {
            return false;
        }
        self.update(|known| {
            let _ = if holders.is_empty() {
                known.blocked_by.remove(uuid)
            } else {
                known.blocked_by.insert(uuid.clone(), holders)
            };
            (AffectedGpus::Gpus(BTreeSet::from([uuid.clone()])), true)
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
