//! How overrides end: their time comes, or somebody clears one.

use std::time::{Duration, Instant};

use gpush_api::{Actor, ApiError, Code};
use gpush_store::{Override, StoreError};
use jiff::Timestamp;

use super::{
    effect::{Effect, end, expect},
    who,
};
use crate::agent::Shared;

/// How late a clock that was set forward is noticed.
const LOOK: Duration = Duration::from_secs(30);

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
