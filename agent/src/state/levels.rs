//! The time-slice levels of GPUs, as gpushd last read them.
//!
//! Two tasks read and set levels: the reconciler, and an operation for its GPUs. Each of them collects what it finds in a
//! [`LevelRound`], and reports the round when it ends. So no snapshot shows a level that gpushd is about to correct.
//!
//! ```text
//! snapshot ──► round: levels read, set, read back ──► report ──► next snapshot
//!                                                       └─ for each GPU, the latest reading counts
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{GpuUuid, TimesliceLevel, TimesliceState, TimesliceView};
use jiff::Timestamp;

use super::{AffectedGpus, State, readings::Moment};

/// A level, or why gpushd does not know a level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Level {
    Known(TimesliceLevel),
    /// The driver has no levels for this GPU. The text says why.
    Unsupported(String),
    /// gpushd could not read the level. The text says why.
    Unknown(String),
}

/// The level of a GPU as gpushd last read it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LevelState {
    level: Level,
    since: Timestamp,
    /// When gpushd last tried to read the level.
    read_at: Moment,
    /// Why gpushd could not set the desired level.
    failed: Option<String>,
    /// The desired level that this gpushd last set on the GPU, or found to be set already. Any other level is drift.
    kept: Option<TimesliceLevel>,
}

/// The levels of all time-sliced GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Levels {
    /// The levels, by UUID of the GPU.
    known: BTreeMap<GpuUuid, LevelState>,
    /// UUIDs of GPUs that are known to support levels, because their level was read at least once. Support cannot change
    /// while the host is up, so entries are never removed.
    supporting: BTreeSet<GpuUuid>,
}

impl Levels {
    /// Returns the level of a GPU for the API. The caller must add the desired level, which comes from the config.
    pub(super) fn view(&self, uuid: &GpuUuid) -> Option<TimesliceView> {
        let LevelState { level, since, read_at, failed, kept: _ } = self.known.get(uuid)?.clone();
        let (state, level, reason) = match level {
            Level::Known(level) => (TimesliceState::Known, Some(level), failed),
            Level::Unsupported(why) => (TimesliceState::Unsupported, None, Some(why)),
            Level::Unknown(why) => (TimesliceState::Unknown, None, Some(why)),
        };
        let (replicas, wanted, read_at) = (0, TimesliceLevel::Default, Some(read_at.wall));
        Some(TimesliceView { replicas, wanted, state, level, reason, since: Some(since), read_at })
    }

    /// Takes over the results of a round. For each GPU, the latest reading counts.
    fn apply(&mut self, round: LevelRound) {
        let LevelRound { mut levels, changed, began } = round;
        for uuid in changed {
            let read_at = self.known.get(&uuid).map(|known| known.read_at.own);
            match levels.known.remove(&uuid) {
                Some(level) if read_at.is_none_or(|at| at <= level.read_at.own) => {
                    self.known.insert(uuid, level);
                }
                None if read_at.is_some_and(|at| at <= began.own) => {
                    self.known.remove(&uuid);
                }
                Some(_) | None => {}
            }
        }
        self.supporting.append(&mut levels.supporting);
    }

    /// Returns the UUIDs of the GPUs whose levels differ.
    fn changed_gpus(&self, before: &Self) -> BTreeSet<GpuUuid> {
        let all = self.known.keys().chain(before.known.keys());
        all.filter(|uuid| self.known.get(*uuid) != before.known.get(*uuid)).cloned().collect()
    }
}

/// The levels that one task reads and sets, until it reports them.
#[derive(Debug)]
pub(crate) struct LevelRound {
    levels: Levels,
    /// UUIDs of the GPUs whose levels this round has read or removed.
    changed: BTreeSet<GpuUuid>,
    began: Moment,
}

impl LevelRound {
    /// Begins a round with the levels that are known now.
    pub(crate) fn new(levels: &Levels) -> Self {
        Self { levels: levels.clone(), changed: BTreeSet::new(), began: Moment::now() }
    }

    /// Stores the level of a GPU. Returns the previous level.
    pub(crate) fn set(&mut self, uuid: &GpuUuid, level: Level) -> Option<Level> {
        let before = self.levels.known.remove(uuid);
        let same = before.as_ref().filter(|before| before.level == level);
        let read_at = Moment::now();
        let since = same.map_or(read_at.wall, |before| before.since);
        let failed = same.and_then(|before| before.failed.clone());
        let kept = before.as_ref().and_then(|before| before.kept);
        self.levels.known.insert(uuid.clone(), LevelState { level, since, read_at, failed, kept });
        self.changed.insert(uuid.clone());
        before.map(|before| before.level)
    }

    /// Stores why gpushd could not set the desired level.
    pub(crate) fn failed(&mut self, uuid: &GpuUuid, why: String) {
        if let Some(known) = self.levels.known.get_mut(uuid) {
            known.failed = Some(why);
            self.changed.insert(uuid.clone());
        }
    }

    /// Stores that a GPU has its desired level.
    pub(crate) fn mark_set(&mut self, uuid: &GpuUuid, level: TimesliceLevel) {
        if let Some(known) = self.levels.known.get_mut(uuid) {
            (known.failed, known.kept) = (None, Some(level));
            self.changed.insert(uuid.clone());
        }
    }

    /// Remembers that a GPU supports levels, because its level was read.
    pub(crate) fn mark_supporting(&mut self, uuid: &GpuUuid) {
        self.levels.supporting.insert(uuid.clone());
    }

    /// Removes the levels of the GPUs for which `is_kept` returns `false`.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(&GpuUuid) -> bool) {
        let removed = self.levels.known.extract_if(.., |uuid, _| !is_kept(uuid)).map(|(uuid, _)| uuid);
        self.changed.extend(removed);
    }

    /// Returns whether this is the desired level that gpushd last set or found on a GPU.
    pub(crate) fn was_set(&self, uuid: &GpuUuid, level: TimesliceLevel) -> bool {
        self.kept(uuid) == Some(level)
    }

    /// Returns whether the desired level that gpushd last set or found on a GPU was not the driver's default.
    pub(crate) fn was_set_before(&self, uuid: &GpuUuid) -> bool {
        self.kept(uuid).is_some_and(|kept| kept != TimesliceLevel::Default)
    }

    fn kept(&self, uuid: &GpuUuid) -> Option<TimesliceLevel> {
        self.levels.known.get(uuid)?.kept
    }

    /// Returns whether a GPU is known to support levels.
    pub(crate) fn is_supporting(&self, uuid: &GpuUuid) -> bool {
        self.levels.supporting.contains(uuid)
    }

    /// Returns whether the driver reports no levels for a GPU.
    pub(crate) fn is_unsupported(&self, uuid: &GpuUuid) -> bool {
        matches!(self.levels.known.get(uuid), Some(LevelState { level: Level::Unsupported(_), .. }))
    }
}

impl State {
    /// Begins a round of readings of levels.
    pub(crate) fn begin_level_round(&self) -> LevelRound {
        LevelRound::new(&self.now().levels)
    }

    /// Stores the levels that a round has read, set or removed.
    pub(crate) fn report_levels(&self, round: LevelRound) {
        self.update(|known| {
            let before = Arc::clone(&known.levels);
            Arc::make_mut(&mut known.levels).apply(round);
            let gpus = known.levels.changed_gpus(&before);
            let is_same = gpus.is_empty() && known.levels == before;
            (if is_same { AffectedGpus::NoChange } else { AffectedGpus::Gpus(gpus) }, ())
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LONG: Level = Level::Known(TimesliceLevel::Long);
    const SHORT: Level = Level::Known(TimesliceLevel::Short);

    fn reported(levels: &Levels, uuid: &str) -> Option<TimesliceLevel> {
        levels.view(&uuid.into())?.level
    }

    #[test]
    fn unchanged_level_keeps_its_since_time() {
        let mut round = LevelRound::new(&Levels::default());
        assert_eq!(round.set(&"GPU-0".into(), LONG), None);
        let since = |round: &LevelRound| round.levels.view(&"GPU-0".into()).unwrap().since;
        let first = since(&round);
        assert_eq!(round.set(&"GPU-0".into(), LONG), Some(LONG));
        assert_eq!(since(&round), first);
        assert_eq!(round.set(&"GPU-0".into(), SHORT), Some(LONG));
        assert!(since(&round) >= first && round.levels.view(&"GPU-0".into()).unwrap().read_at >= first);
    }

    #[test]
    fn failure_is_shown_until_the_level_changes_or_is_set() {
        let mut round = LevelRound::new(&Levels::default());
        let reason = |round: &LevelRound| round.levels.view(&"GPU-0".into()).unwrap().reason;
        round.failed(&"GPU-0".into(), "no level is known yet".to_owned());
        assert_eq!(round.levels.view(&"GPU-0".into()), None);
        round.set(&"GPU-0".into(), LONG);
        round.failed(&"GPU-0".into(), "denied".to_owned());
        round.set(&"GPU-0".into(), LONG);
        assert_eq!(reason(&round).as_deref(), Some("denied"));
        round.mark_set(&"GPU-0".into(), TimesliceLevel::Long);
        assert_eq!(reason(&round), None);
        round.failed(&"GPU-0".into(), "denied".to_owned());
        round.set(&"GPU-0".into(), SHORT);
        assert_eq!(reason(&round), None);
        assert!(round.was_set(&"GPU-0".into(), TimesliceLevel::Long) && round.was_set_before(&"GPU-0".into()));
    }

    /// An operation sets a level while the reconciler reads the levels of all GPUs.
    #[test]
    fn earlier_reading_does_not_replace_a_later_one() {
        let mut levels = Levels::default();
        let mut reconciler = LevelRound::new(&levels);
        reconciler.set(&"GPU-0".into(), SHORT);
        reconciler.set(&"GPU-1".into(), SHORT);
        let mut operation = LevelRound::new(&levels);
        operation.set(&"GPU-0".into(), LONG);
        levels.apply(operation);
        levels.apply(reconciler);
        assert_eq!(reported(&levels, "GPU-0"), Some(TimesliceLevel::Long));
        assert_eq!(reported(&levels, "GPU-1"), Some(TimesliceLevel::Short));
    }

    #[test]
    fn round_removes_only_levels_from_before_its_begin() {
        let mut first = LevelRound::new(&Levels::default());
        first.set(&"GPU-0".into(), LONG);
        first.set(&"GPU-1".into(), LONG);
        let mut levels = Levels::default();
        levels.apply(first);
        let mut reconciler = LevelRound::new(&levels);
        reconciler.retain(|_| false);
        let mut operation = LevelRound::new(&levels);
        operation.set(&"GPU-0".into(), SHORT);
        levels.apply(operation);
        levels.apply(reconciler);
        assert_eq!(reported(&levels, "GPU-0"), Some(TimesliceLevel::Short));
        assert_eq!(levels.view(&"GPU-1".into()), None);
    }

    /// Fault to prevent: if the driver temporarily reports no levels, gpushd would forget that it has set one.
    #[test]
    fn support_for_levels_is_remembered_when_the_level_is_removed() {
        let mut levels = Levels::default();
        let mut round = LevelRound::new(&levels);
        round.mark_supporting(&"GPU-0".into());
        levels.apply(round);
        let mut round = LevelRound::new(&levels);
        round.retain(|_| false);
        levels.apply(round);
        assert!(LevelRound::new(&levels).is_supporting(&"GPU-0".into()));
        assert!(!LevelRound::new(&levels).is_supporting(&"GPU-1".into()));
    }

    #[test]
    fn state_without_a_new_level_gets_no_new_snapshot() {
        let state = State::empty();
        let before = state.now();
        state.report_levels(state.begin_level_round());
        assert!(Arc::ptr_eq(&before, &state.now()));
        let mut round = state.begin_level_round();
        round.mark_supporting(&"GPU-0".into());
        state.report_levels(round);
        assert!(!Arc::ptr_eq(&before, &state.now()));
    }

    proptest! {
        /// Rounds that end one after the other, without an overlap, give what one task would give.
        #[test]
        fn rounds_without_overlap_give_the_last_level(
            rounds in prop::collection::vec(prop::collection::btree_map(0..4_u8, any::<bool>(), 0..4), 0..6),
        ) {
            let (mut levels, mut expected) = (Levels::default(), BTreeMap::new());
            for set in rounds {
                let mut round = LevelRound::new(&levels);
                for (gpu, is_long) in set {
                    let level = if is_long { TimesliceLevel::Long } else { TimesliceLevel::Short };
                    round.set(&format!("GPU-{gpu}").into(), Level::Known(level));
                    expected.insert(GpuUuid::from(format!("GPU-{gpu}")), level);
                }
                levels.apply(round);
            }
            let found: BTreeMap<GpuUuid, TimesliceLevel> =
                levels.known.keys().filter_map(|uuid| Some((uuid.clone(), reported(&levels, uuid.as_str())?))).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
