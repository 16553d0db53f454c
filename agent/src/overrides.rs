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

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use gpush_api::{Actor, ApiError, Change, Code, Gpu, GpuPlan, Happening, Operation};
use gpush_core::{
    config::Config,
    desired::{self, Standing},
};
use gpush_store::{NewAudit, NewOverride, Override, StoreError, Tx};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::{
    agent::{Agent, Shared},
    apply::Order,
    auth::Asker,
    events::Events,
    redact,
};

/// How the audit trail names the making of one.
const MAKE: &str = "override.make";

/// How late a clock that was set forward is noticed.
const LOOK: Duration = Duration::from_secs(30);

/// What an operation makes of the override of a GPU when it ends well. In its intent until then.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Lasting {
    /// This one stands.
    Make {
        /// Rule that claims the GPU.
        rule: Option<String>,
        /// Layout in canonical text.
        layout: Vec<String>,
        /// When it ends by itself.
        expires_at: Option<Timestamp>,
    },
    /// None stands.
    End,
}

/// What an order makes of the override of each GPU, in the order of its plans.
pub(crate) fn lasting(order: &Order, config: &Config, gpus: &[Gpu], plans: &[GpuPlan]) -> Vec<Option<Lasting>> {
    if order.once {
        return plans.iter().map(|_| None).collect();
    }
    let lasting = |standing| match standing {
        Standing::Stays => None,
        Standing::Made { rule, layout } => Some(Lasting::Make { rule, layout, expires_at: order.expires_at }),
        Standing::Ended => Some(Lasting::End),
    };
    desired::standing(config, gpus, &order.request, plans).into_iter().map(lasting).collect()
}

/// Refuses an expiry of which nobody knows what shall expire.
///
/// # Errors
/// When the order has one and makes no override.
pub(crate) fn expiry_has_an_object(order: &Order, lasting: &[Option<Lasting>]) -> Result<(), ApiError> {
    let makes = |one: &Option<Lasting>| matches!(one, Some(Lasting::Make { .. }));
    if order.expires_at.is_none() || lasting.iter().any(makes) {
        return Ok(());
    }
    Err(ApiError::new(Code::BadRequest, "there is nothing that could expire: this makes no override")
        .cause("an override is an explicit layout, other than its rule's own, on a GPU that a rule gives to mode mig")
        .hint("leave the expiry out; `gpushctl config show` says which rule claims which GPU"))
}

/// What a transaction did to the override of a GPU.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    /// This one stands.
    Made(Override),
    /// This one does no more.
    Ended {
        /// As it was.
        one: Override,
        /// Generation that this made.
        generation: u64,
        /// What ended it, as the audit trail names it.
        action: String,
        /// Who did; `None` for the agent itself.
        by: Option<Actor>,
    },
}

impl Effect {
    fn generation(&self) -> u64 {
        match self {
            Self::Made(one) => one.generation,
            Self::Ended { generation, .. } => *generation,
        }
    }

    fn uuid(&self) -> &str {
        match self {
            Self::Made(one) | Self::Ended { one, .. } => &one.gpu,
        }
    }

    /// As everybody is told who listens.
    fn told(&self) -> Change {
        let (action, one, by) = match self {
            Self::Made(one) => (MAKE, one, Some(one.author.clone())),
            Self::Ended { one, action, by, .. } => (action.as_str(), one, by.clone()),
        };
        Change {
            action: action.to_owned(),
            object: one.gpu.clone(),
            by,
            reason: Some(one.reason.clone()).filter(|reason| !reason.is_empty()),
            uuids: vec![one.gpu.clone()],
        }
    }
}

/// Records what an operation that ended well makes of overrides, given by UUID.
///
/// # Errors
/// When it can't be written.
pub(crate) fn settle(
    tx: &mut Tx<'_>,
    operation: &Operation,
    lasting: &[(String, Lasting)],
) -> Result<Vec<Effect>, StoreError> {
    let mut effects = Vec::new();
    for (uuid, one) in lasting {
        match one {
            // It waited for longer than it was to stand.
            Lasting::Make { expires_at: Some(at), .. } if *at <= tx.now() => {}
            Lasting::Make { rule, layout, expires_at } => {
                let reason = operation.reason.clone().unwrap_or_default();
                let made = tx.set_override(NewOverride {
                    gpu: uuid.clone(),
                    rule: rule.clone(),
                    layout: layout.clone(),
                    author: operation.by.clone(),
                    reason: reason.clone(),
                    expires_at: *expires_at,
                })?;
                let detail = serde_json::json!({
                    "operation": operation.id, "rule": rule, "layout": layout, "reason": reason,
                    "expires_at": expires_at,
                });
                tx.audit(audit(MAKE, Some(&operation.by), uuid, detail))?;
                effects.push(Effect::Made(made));
            }
            Lasting::End => {
                let why = serde_json::json!({ "operation": operation.id });
                effects.extend(end(tx, uuid, "override.clear", Some(&operation.by), &why)?);
            }
        }
    }
    Ok(effects)
}

/// Ends the override of a GPU, on record; `None` when there was none.
///
/// # Errors
/// When it can't be written.
pub(crate) fn end(
    tx: &mut Tx<'_>,
    uuid: &str,
    action: &str,
    by: Option<&Actor>,
    why: &serde_json::Value,
) -> Result<Option<Effect>, StoreError> {
    let Some(ended) = tx.clear_override(uuid)? else { return Ok(None) };
    let detail = serde_json::json!({
        "layout": ended.layout, "author": ended.author, "reason": ended.reason, "why": why,
    });
    tx.audit(audit(action, by, uuid, detail))?;
    let (generation, action) = (tx.generation(), action.to_owned());
    Ok(Some(Effect::Ended { one: ended, generation, action, by: by.cloned() }))
}

fn audit(action: &str, by: Option<&Actor>, uuid: &str, detail: serde_json::Value) -> NewAudit {
    NewAudit { by: by.cloned(), action: action.to_owned(), object: uuid.to_owned(), result: "done".to_owned(), detail }
}

/// Refuses when what is wanted is of another generation than the asker believes.
///
/// # Errors
/// When it is.
pub(crate) fn expect(tx: &Tx<'_>, expected: Option<u64>) -> Result<(), StoreError> {
    let generation = tx.generation();
    match expected.filter(|expected| *expected != generation) {
        None => Ok(()),
        Some(expected) => {
            let message = format!("what is wanted has changed: its generation is {generation}, not {expected}");
            let error = ApiError::new(Code::Conflict, message).cause("nothing was done");
            Err(error.hint("look again (`gpushctl config overrides`), then ask with the new generation").into())
        }
    }
}

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

/// Ends overrides when their time comes, until the agent stops.
pub(crate) async fn expire(agent: Shared) {
    let mut said = Vec::new();
    loop {
        let (over, next) = agent.overrides.come_to_an_end(Timestamp::now(), Instant::now());
        let mut pause = next.map(|next| next.min(LOOK));
        if !over.is_empty() {
            for one in over.iter().filter(|one| !said.contains(&one.sequence)) {
                tracing::info!(gpu = one.gpu, "the override of {} has expired", who(&one.author));
            }
            let known = over.iter().all(|one| said.contains(&one.sequence));
            said = over.iter().map(|one| one.sequence).collect();
            let ended = over.clone();
            let written = agent.store.write_ending(move |tx| {
                let mut effects = Vec::new();
                for one in &ended {
                    // Another may have taken its place meanwhile.
                    let same = |other: &Override| other.sequence == one.sequence;
                    let stands = tx.read(|view| Ok::<_, StoreError>(view.overrides()?.iter().any(same)))?;
                    if stands {
                        let why = serde_json::json!({ "expires_at": one.expires_at });
                        effects.extend(end(tx, &one.gpu, "override.expire", None, &why)?);
                    }
                }
                Ok(effects)
            });
            match written.await {
                Ok(effects) => {
                    agent.overrides.state().over.retain(|one| !said.contains(&one.sequence));
                    agent.overrides.take_in(&effects);
                    // The config's layout is wanted again.
                    agent.startup.reloaded();
                }
                Err(error) => {
                    if !known {
                        tracing::error!("that an override has expired can't be recorded: {error}");
                    }
                    pause = Some(LOOK);
                }
            }
        }
        tokio::select! {
            () = agent.stopping.cancelled() => return,
            () = agent.overrides.changed.notified() => {}
            () = tokio::time::sleep(pause.unwrap_or(LOOK)), if pause.is_some() => {}
        }
    }
}

/// Ends the override of a GPU because somebody wants it.
///
/// # Errors
/// When none stands, the generation is another, or it can't be recorded.
pub(crate) async fn clear(
    agent: &Shared,
    uuid: String,
    label: &str,
    by: Actor,
    expected: Option<u64>,
) -> Result<(Override, u64), ApiError> {
    let none = ApiError::new(Code::NotFound, format!("no override stands on {label}"))
        .hint("`gpushctl config overrides` shows those that stand");
    if agent.overrides.of(&uuid).is_none() {
        return Err(none);
    }
    let written = agent.store.write_ending(move |tx| {
        expect(tx, expected)?;
        end(tx, &uuid, "override.clear", Some(&by), &serde_json::Value::Null)
    });
    let Some(effect) = written.await? else { return Err(none) };
    agent.overrides.take_in(std::slice::from_ref(&effect));
    agent.startup.reloaded();
    match effect {
        Effect::Ended { one, generation, .. } => Ok((one, generation)),
        Effect::Made(one) => Ok((one.clone(), one.generation)),
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
