//! Ends overrides that expire, and overrides that an administrator clears.

use std::time::Duration;

use gpush_api::{Actor, ApiError, Code, GpuUuid};
use gpush_store::{AuditEvent, Override, Store, StoreError};
use tokio_util::sync::CancellationToken;

use super::effect::{check_generation, end};
use crate::state::{OverrideEffect, State, words};

/// Longest pause between two checks for expired overrides. gpushd does not simply sleep until the
/// next override expires, because the clock may be set forward.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Ends overrides when they expire, until gpushd stops.
pub(crate) async fn expire(state: State, store: Store, stopping: CancellationToken) {
    let mut logged: Vec<u64> = Vec::new();
    let mut snapshots = state.watch();
    loop {
        let generation = snapshots.borrow_and_update().generation;
        state.expire_overrides();
        let (over, next) = state.expired_overrides();
        let mut pause = next.map(|next| next.min(CHECK_INTERVAL));
        if !over.is_empty() {
            for one in over.iter().filter(|one| !logged.contains(&one.sequence)) {
                tracing::info!(
                    gpu = one.gpu_uuid.as_str(),
                    "GPU {}: the override by {} has expired",
                    one.gpu_uuid,
                    words::actor(&one.author)
                );
            }
            let known = over.iter().all(|one| logged.contains(&one.sequence));
            logged = over.iter().map(|one| one.sequence).collect();
            match record(&store, over.clone()).await {
                Ok(effects) => {
                    state.expiry_recorded(&over);
                    state.override_effects(&effects);
                }
                Err(error) => {
                    if !known {
                        tracing::error!("cannot record that an override has expired: {error}");
                    }
                    pause = Some(CHECK_INTERVAL);
                }
            }
        }
        tokio::select! {
            () = stopping.cancelled() => return,
            // Check again, because an override was set or has ended.
            _ = snapshots.wait_for(|host| host.generation != generation) => {}
            () = tokio::time::sleep(pause.unwrap_or(CHECK_INTERVAL)), if pause.is_some() => {}
        }
    }
}

/// Records that these overrides have expired.
async fn record(store: &Store, over: Vec<Override>) -> Result<Vec<OverrideEffect>, StoreError> {
    let written = store.write_ending(move |tx| {
        let mut effects = Vec::new();
        for one in &over {
            // Skip the override if a newer override has replaced it meanwhile.
            let same = |other: &Override| other.sequence == one.sequence;
            let on_record = tx.read(|view| Ok::<_, StoreError>(view.overrides()?.iter().any(same)))?;
            if on_record {
                let expires_at = one.expires_at;
                effects.extend(end(tx, &one.gpu_uuid, None, |ended| AuditEvent::OverrideExpire { ended, expires_at })?);
            }
        }
        Ok(effects)
    });
    written.await
}

/// Clears the override of a GPU for an administrator. Returns the cleared override, and the new
/// generation of the desired state.
///
/// # Errors
/// If there is no override, the generation is not `expected`, or the change cannot be recorded.
pub(crate) async fn clear(
    state: &State,
    store: &Store,
    uuid: GpuUuid,
    label: &str,
    by: Actor,
    expected: Option<u64>,
) -> Result<(Override, u64), ApiError> {
    let none = ApiError::new(Code::NotFound, format!("{label} has no override"))
        .hint("`gpushctl config overrides` shows the active overrides");
    if state.override_of(&uuid).is_none() {
        return Err(none);
    }
    let written = store.write_ending(move |tx| {
        check_generation(tx, expected)?;
        end(tx, &uuid, Some(&by), |ended| AuditEvent::OverrideClear { ended, operation_id: None, reload: None })
    });
    let Some(effect) = written.await? else { return Err(none) };
    state.override_effects(std::slice::from_ref(&effect));
    match effect {
        OverrideEffect::Ended { one, generation, .. } => Ok((one, generation)),
        OverrideEffect::Made(one) => Ok((one.clone(), one.generation)),
    }
}
