//! Overrides: layouts that stand above the config's rules until somebody ends them or their time
//! comes.
//!
//! ```text
//!                      begin                         end of the operation
//! asked for ─► in the operation's intent ─┬─ done ──────────► stands, recorded with that end
//!                                         └─ anything else ─► never was; what stood before stands
//! stands ─┬─ another one made ────────────► replaced
//!         ├─ cleared, or the rule's own layout applied
//!         ├─ a reload that was told to ───► ended, on record
//!         └─ its time has come ───────────┘
//! ```
//!
//! Memory is what the agent works by, the store what the next one starts with. An override ends for
//! good: once its time was seen to have come it does not come back, whatever the clock does. The
//! clock on the wall says when that is; set back, it does not lengthen what was to last two hours:
//! the time that this agent itself has seen pass counts as well.
//!
//! | file | subject |
//! |---|---|
//! | `lasting` | what an order will make of them |
//! | `effect` | what a transaction makes of them, on record |
//! | `end` | how they end |

mod effect;
mod end;
mod lasting;

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use gpush_api::{Actor, Gpu, Happening};
use gpush_store::Override;
use jiff::Timestamp;
use tokio::sync::Notify;

pub(crate) use self::{
    effect::{Effect, end, expect, settle},
    end::{clear, expire},
    lasting::{Lasting, expiry_has_an_object, lasting},
};
use crate::{agent::Agent, auth::Asker, events::Events, redact};

/// Those that stand.
#[derive(Debug)]
pub(crate) struct Overrides {
    state: Mutex<State>,
    events: Events,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    generation: u64,
    standing: BTreeMap<String, Kept>,
    /// Their time has come, and that is not on record yet.
    over: Vec<Override>,
    /// Generation of the last effect on each GPU: effects may arrive out of their order.
    latest: BTreeMap<String, u64>,
}

#[derive(Debug)]
struct Kept {
    one: Override,
    /// Its end by the time that passes here.
    deadline: Option<Instant>,
}

impl Kept {
    fn new(one: Override, now: Timestamp, at: Instant) -> Self {
        let left = one.expires_at.map(|expires| Duration::try_from(expires.duration_since(now)).unwrap_or_default());
        let deadline = left.and_then(|left| at.checked_add(left));
        Self { one, deadline }
    }

    fn is_over(&self, now: Timestamp, at: Instant) -> bool {
        self.one.expires_at.is_some_and(|expires| expires <= now) || self.deadline.is_some_and(|end| end <= at)
    }
}

impl Overrides {
    /// Those on record.
    pub(crate) fn of_the_store(generation: u64, recorded: Vec<Override>, events: Events) -> Self {
        let (now, at) = (Timestamp::now(), Instant::now());
        let standing = recorded.into_iter().map(|one| (one.gpu.clone(), Kept::new(one, now, at))).collect();
        let state = Mutex::new(State { generation, standing, ..State::default() });
        Self { state, events, changed: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Generation of what is wanted.
    pub(crate) fn generation(&self) -> u64 {
        self.state().generation
    }

    /// The one that stands on a GPU.
    pub(crate) fn of(&self, uuid: &str) -> Option<Override> {
        let (now, at) = (Timestamp::now(), Instant::now());
        self.state().standing.get(uuid).filter(|one| !one.is_over(now, at)).map(|one| one.one.clone())
    }

    /// All that stand, in the order in which they were made.
    pub(crate) fn all(&self) -> Vec<Override> {
        let (now, at) = (Timestamp::now(), Instant::now());
        let state = self.state();
        let mut all: Vec<Override> =
            state.standing.values().filter(|one| !one.is_over(now, at)).map(|one| one.one.clone()).collect();
        all.sort_by_key(|one| one.sequence);
        all
    }

    /// Takes in what is on record by now, and tells whoever listens.
    pub(crate) fn take_in(&self, effects: &[Effect]) {
        let mut state = self.state();
        for effect in effects {
            let generation = effect.generation();
            state.generation = state.generation.max(generation);
            let latest = state.latest.entry(effect.uuid().to_owned()).or_default();
            if *latest >= generation {
                continue;
            }
            *latest = generation;
            match effect {
                Effect::Made(one) => {
                    let standing = Kept::new(one.clone(), Timestamp::now(), Instant::now());
                    state.standing.insert(one.gpu.clone(), standing);
                }
                Effect::Ended { one, .. } => drop(state.standing.remove(&one.gpu)),
            }
        }
        drop(state);
        effects.iter().for_each(|effect| self.events.publish(Happening::Change(effect.told())));
        if !effects.is_empty() {
            self.events.look_again();
        }
        self.changed.notify_one();
    }

    /// Takes in a generation that no override made.
    pub(crate) fn is_at(&self, generation: u64) {
        let mut state = self.state();
        state.generation = state.generation.max(generation);
    }

    /// Moves those whose time has come out of those that stand; all that are not on record as
    /// ended, and how long the next one has.
    fn come_to_an_end(&self, now: Timestamp, at: Instant) -> (Vec<Override>, Option<Duration>) {
        let mut state = self.state();
        let over: Vec<String> =
            state.standing.iter().filter(|(_, one)| one.is_over(now, at)).map(|(uuid, _)| uuid.clone()).collect();
        for uuid in over {
            if let Some(one) = state.standing.remove(&uuid) {
                state.over.push(one.one);
            }
        }
        let left = |one: &Kept| {
            let wall = Duration::try_from(one.one.expires_at?.duration_since(now)).unwrap_or_default();
            Some(one.deadline.map_or(wall, |end| wall.min(end.saturating_duration_since(at))))
        };
        (state.over.clone(), state.standing.values().filter_map(left).min())
    }
}

/// As the API shows it to `asker`; `gpu` is its index.
pub(crate) fn view(one: Override, gpu: Option<u32>, asker: &Asker) -> gpush_api::Override {
    let mut by = one.author;
    redact::actor(&mut by, asker);
    gpush_api::Override {
        uuid: one.gpu,
        gpu,
        rule: one.rule,
        layout: one.layout,
        by,
        reason: one.reason,
        created_at: one.created_at,
        expires_at: one.expires_at,
        generation: one.generation,
    }
}

/// All that stand, as `asker` may see them; `gpus` are those that the driver shows.
pub(crate) fn all(agent: &Agent, gpus: &[Gpu], asker: &Asker) -> Vec<gpush_api::Override> {
    let index = |uuid: &str| gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| gpu.index);
    agent.overrides.all().into_iter().map(|one| view(one.clone(), index(&one.gpu), asker)).collect()
}

/// The author in a sentence.
pub(crate) fn who(by: &Actor) -> String {
    by.user.clone().unwrap_or_else(|| format!("uid {}", by.uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(gpu: &str, generation: u64, expires_at: Option<Timestamp>) -> Override {
        Override {
            gpu: gpu.to_owned(),
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
    fn an_override_ends_when_the_clock_or_the_time_that_passed_says_so_and_stays_ended() {
        let (now, at) = (Timestamp::now(), Instant::now());
        let hours = |hours: i64| now + jiff::SignedDuration::from_hours(hours);
        let later = |hours: u64| at + Duration::from_secs(hours * 3600 + 60);
        let two_hours = || {
            Overrides::of_the_store(
                1,
                vec![one("GPU-0", 1, Some(hours(2))), one("GPU-1", 1, None)],
                Events::new("test"),
            )
        };
        let ended = |overrides: &Overrides, now, at| {
            let (over, next) = overrides.come_to_an_end(now, at);
            (over.len(), next.is_some())
        };
        assert_eq!(ended(&two_hours(), hours(1), later(1)), (0, true));
        assert_eq!(ended(&two_hours(), hours(2), later(1)), (1, false), "the clock was set forward");
        assert_eq!(ended(&two_hours(), hours(-20), later(2)), (1, false), "the clock was set back");
        let overrides = two_hours();
        assert_eq!(ended(&overrides, hours(2), later(2)), (1, false));
        assert_eq!(ended(&overrides, hours(-20), at), (1, false), "it is still to be recorded, and does not come back");
        assert!(overrides.of("GPU-0").is_none() && overrides.of("GPU-1").is_some());
    }

    #[test]
    fn effects_count_in_the_order_of_their_generations() {
        let overrides = Overrides::of_the_store(3, Vec::new(), Events::new("test"));
        let action = "override.clear".to_owned();
        overrides.take_in(&[Effect::Ended { one: one("GPU-0", 4, None), generation: 5, action, by: None }]);
        overrides.take_in(&[Effect::Made(one("GPU-0", 4, None))]);
        assert!(overrides.of("GPU-0").is_none(), "it was ended after it was made");
        assert_eq!(overrides.generation(), 5);
        overrides.take_in(&[Effect::Made(one("GPU-0", 6, None))]);
        assert_eq!(overrides.all().len(), 1);
        overrides.is_at(9);
        assert_eq!(overrides.generation(), 9);
    }
}
