//! The active overrides. An override replaces the layout from the config's rule until the override is cleared or
//! expires.
//!
//! ```text
//!                      begin                         end of the operation
//! request ──► in the operation's intent ─┬─ done ──────────► active, recorded with that end
//!                                        └─ anything else ─► never active; the previous one stays
//! active ───┬─ another one set ─────────────► replaced
//!           ├─ cleared, or the rule's own layout applied
//!           ├─ cleared by a reload ──────────► ended, recorded
//!           └─ expired ─────────────────────┘
//! ```
//!
//! Expiry is final: an expired override does not return if the system clock is set back. An override also expires by
//! the monotonic clock of this process, so it does not last longer if the system clock is set back.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use gpush_api::{Actor, Change, GpuIndex, GpuUuid};
use gpush_store::Override;
use jiff::Timestamp;

/// How a transaction has changed the override of a GPU.
#[derive(Debug, Clone)]
pub(crate) enum OverrideEffect {
    /// The operation that sets this override has succeeded, so the override is active.
    Made(Override),
    /// This override has ended.
    Ended {
        one: Override,
        /// The generation of the desired state after the end of this override.
        generation: u64,
        /// The action that ended the override, as the audit trail names it.
        action: String,
        /// The user who ended the override; `None` if gpushd ended it.
        by: Option<Actor>,
    },
}

impl OverrideEffect {
    /// The action that sets an override, as the audit trail names it.
    pub(crate) const MAKE: &str = "override.make";

    fn generation(&self) -> u64 {
        match self {
            Self::Made(one) => one.generation,
            Self::Ended { generation, .. } => *generation,
        }
    }

    /// Returns the UUID of the override's GPU.
    pub(super) fn uuid(&self) -> &GpuUuid {
        match self {
            Self::Made(one) | Self::Ended { one, .. } => &one.gpu_uuid,
        }
    }

    /// Returns the event that reports the effect.
    pub(super) fn event(&self) -> Change {
        let (action, one, by) = match self {
            Self::Made(one) => (Self::MAKE, one, Some(one.author.clone())),
            Self::Ended { one, action, by, .. } => (action.as_str(), one, by.clone()),
        };
        Change {
            action: action.to_owned(),
            object: one.gpu_uuid.to_string(),
            by,
            reason: Some(one.reason.clone()).filter(|reason| !reason.is_empty()),
            gpu_uuids: vec![one.gpu_uuid.clone()],
        }
    }
}

/// The active overrides.
#[derive(Debug, Default)]
pub(crate) struct Overrides {
    generation: u64,
    in_force: BTreeMap<GpuUuid, ActiveOverride>,
    /// Overrides that have expired and whose end is not recorded yet.
    expired: Vec<Override>,
    /// For each GPU, the generation of the last applied change, because changes may arrive out of order.
    latest: BTreeMap<GpuUuid, u64>,
}

#[derive(Debug)]
struct ActiveOverride {
    one: Override,
    /// Time at which the override expires, by the monotonic clock.
    deadline: Option<Instant>,
}

impl ActiveOverride {
    fn new(one: Override, now: Timestamp, at: Instant) -> Self {
        let left = one.expires_at.map(|expires| Duration::try_from(expires.duration_since(now)).unwrap_or_default());
        let deadline = left.and_then(|left| at.checked_add(left));
        Self { one, deadline }
    }

    fn has_expired(&self, now: Timestamp, at: Instant) -> bool {
        self.one.expires_at.is_some_and(|expires| expires <= now) || self.deadline.is_some_and(|end| end <= at)
    }
}

impl Overrides {
    /// Restores the overrides that an earlier gpushd recorded.
    pub(crate) fn new(generation: u64, recorded: Vec<Override>) -> Self {
        let (now, at) = (Timestamp::now(), Instant::now());
        let in_force =
            recorded.into_iter().map(|one| (one.gpu_uuid.clone(), ActiveOverride::new(one, now, at))).collect();
        Self { generation, in_force, ..Self::default() }
    }

    /// Returns the generation of the desired state.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the override of a GPU.
    pub(super) fn of(&self, uuid: &GpuUuid) -> Option<&Override> {
        self.in_force.get(uuid).map(|kept| &kept.one)
    }

    /// Returns all active overrides, in the order in which they were set.
    pub(super) fn all(&self) -> Vec<Override> {
        let mut all: Vec<Override> = self.in_force.values().map(|kept| kept.one.clone()).collect();
        all.sort_by_key(|one| one.sequence);
        all
    }

    /// Applies recorded changes. Ignores a change if a newer change of the same GPU is already applied, because changes
    /// may arrive out of order.
    pub(super) fn apply(&mut self, effects: &[OverrideEffect]) {
        for effect in effects {
            let generation = effect.generation();
            self.raise_generation(generation);
            let latest = self.latest.entry(effect.uuid().clone()).or_default();
            if *latest >= generation {
                continue;
            }
            *latest = generation;
            match effect {
                OverrideEffect::Made(one) => {
                    let kept = ActiveOverride::new(one.clone(), Timestamp::now(), Instant::now());
                    self.in_force.insert(one.gpu_uuid.clone(), kept);
                }
                OverrideEffect::Ended { one, .. } => {
                    self.in_force.remove(&one.gpu_uuid);
                    self.expired.retain(|other| other.sequence != one.sequence);
                }
            }
        }
    }

    /// Sets the generation, unless the present generation is higher. Called after a reload, for example.
    pub(super) fn raise_generation(&mut self, generation: u64) {
        self.generation = self.generation.max(generation);
    }

    /// Ends the overrides that have expired. Returns the UUIDs of their GPUs. The ended overrides stay in `expired`
    /// until their end is recorded.
    pub(super) fn expire(&mut self, now: Timestamp, at: Instant) -> Vec<GpuUuid> {
        let over = self.in_force.iter().filter(|(_, kept)| kept.has_expired(now, at));
        let over: Vec<GpuUuid> = over.map(|(uuid, _)| uuid.clone()).collect();
        self.expired.extend(over.iter().filter_map(|uuid| self.in_force.remove(uuid)).map(|kept| kept.one));
        over
    }

    /// Returns the overrides whose end is not recorded yet, and the time until the next override expires.
    pub(super) fn to_record(&self, now: Timestamp, at: Instant) -> (Vec<Override>, Option<Duration>) {
        let left = |kept: &ActiveOverride| {
            let wall = Duration::try_from(kept.one.expires_at?.duration_since(now)).unwrap_or_default();
            Some(kept.deadline.map_or(wall, |end| wall.min(end.saturating_duration_since(at))))
        };
        (self.expired.clone(), self.in_force.values().filter_map(left).min())
    }

    /// Removes expired overrides whose end is now recorded.
    pub(super) fn recorded(&mut self, ended: &[Override]) {
        self.expired.retain(|one| ended.iter().all(|other| other.sequence != one.sequence));
    }
}

/// Converts an override for the API. `gpu` is the index of the override's GPU.
pub(crate) fn overridden(one: Override, gpu: Option<GpuIndex>) -> gpush_api::Override {
    gpush_api::Override {
        gpu_uuid: one.gpu_uuid,
        gpu,
        rule: one.rule,
        layout: one.layout,
        by: one.author,
        reason: one.reason,
        created_at: one.created_at,
        expires_at: one.expires_at,
        generation: one.generation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(gpu: &str, generation: u64, expires_at: Option<Timestamp>) -> Override {
        Override {
            gpu_uuid: gpu.into(),
            rule: None,
            layout: vec!["7g.80gb".to_owned()],
            author: Actor { uid: 1000, user: None, pid: None },
            reason: String::new(),
            created_at: Timestamp::UNIX_EPOCH,
            expires_at,
            generation,
            sequence: generation,
        }
    }

    #[test]
    fn override_expires_by_either_clock_and_stays_expired() {
        let (now, at) = (Timestamp::now(), Instant::now());
        let hours = |hours: i64| now + jiff::SignedDuration::from_hours(hours);
        let later = |hours: u64| at + Duration::from_secs(hours * 3600 + 60);
        let two_hours = || Overrides::new(1, vec![one("GPU-0", 1, Some(hours(2))), one("GPU-1", 1, None)]);
        let ended = |overrides: &mut Overrides, now, at| {
            overrides.expire(now, at);
            let (over, next) = overrides.to_record(now, at);
            (over.len(), next.is_some())
        };
        assert_eq!(ended(&mut two_hours(), hours(1), later(1)), (0, true));
        assert_eq!(ended(&mut two_hours(), hours(2), later(1)), (1, false), "the clock was set forward");
        assert_eq!(ended(&mut two_hours(), hours(-20), later(2)), (1, false), "the clock was set back");
        let mut overrides = two_hours();
        assert_eq!(ended(&mut overrides, hours(2), later(2)), (1, false));
        assert_eq!(ended(&mut overrides, hours(-20), at), (1, false), "its end is not recorded, it does not come back");
        assert!(overrides.of(&"GPU-0".into()).is_none() && overrides.of(&"GPU-1".into()).is_some());
        let (over, _) = overrides.to_record(now, at);
        overrides.recorded(&over);
        assert_eq!(ended(&mut overrides, now, at), (0, false));
    }

    #[test]
    fn effects_apply_in_the_order_of_their_generations() {
        let mut overrides = Overrides::new(3, Vec::new());
        let action = "override.clear".to_owned();
        overrides.apply(&[OverrideEffect::Ended { one: one("GPU-0", 4, None), generation: 5, action, by: None }]);
        overrides.apply(&[OverrideEffect::Made(one("GPU-0", 4, None))]);
        assert!(overrides.of(&"GPU-0".into()).is_none(), "it was ended after it was made");
        assert_eq!(overrides.generation(), 5);
        overrides.apply(&[OverrideEffect::Made(one("GPU-0", 6, None))]);
        assert_eq!(overrides.all().len(), 1);
        overrides.raise_generation(9);
        assert_eq!(overrides.generation(), 9);
    }
}
