//! Sets, replaces or ends overrides in a transaction, with the audit records.

use gpush_api::{Actor, ApiError, Code, GpuUuid, Operation};
use gpush_store::{AuditEvent, DONE, EndedOverride, NewOverride, StoreError, Tx};

use super::OverrideChange;
use crate::state::OverrideEffect;

/// Records the changes of overrides after an operation has succeeded. `lasting` contains the UUID of each GPU and the
/// change of its override.
///
/// # Errors
/// If the write fails.
pub(crate) fn record_changes(
    tx: &mut Tx<'_>,
    operation: &Operation,
    lasting: &[(GpuUuid, OverrideChange)],
) -> Result<Vec<OverrideEffect>, StoreError> {
    let mut effects = Vec::new();
    for (uuid, one) in lasting {
        match one {
            // Do not set the override if it has already expired while the operation waited or ran.
            OverrideChange::Make { expires_at: Some(at), .. } if *at <= tx.now() => {}
            OverrideChange::Make { rule, layout, expires_at } => {
                let reason = operation.reason.clone().unwrap_or_default();
                let made = tx.set_override(NewOverride {
                    gpu_uuid: uuid.clone(),
                    rule: rule.clone(),
                    layout: layout.clone(),
                    author: operation.by.clone(),
                    reason: reason.clone(),
                    expires_at: *expires_at,
                })?;
                let event = AuditEvent::OverrideMake {
                    operation_id: operation.id.clone(),
                    rule: rule.clone(),
                    layout: layout.clone(),
                    reason,
                    expires_at: *expires_at,
                };
                tx.audit(event.record(Some(operation.by.clone()), uuid, DONE))?;
                effects.push(OverrideEffect::Made(made));
            }
            OverrideChange::End => {
                effects.extend(end(tx, uuid, Some(&operation.by), |ended| AuditEvent::OverrideClear {
                    ended,
                    operation_id: Some(operation.id.clone()),
                    reload: None,
                })?);
            }
        }
    }
    Ok(effects)
}

/// Ends the override of a GPU. Returns `None` if the GPU had no override. `event` makes the event of the audit record.
///
/// # Errors
/// If the write fails.
pub(crate) fn end(
    tx: &mut Tx<'_>,
    uuid: &GpuUuid,
    by: Option<&Actor>,
    event: impl FnOnce(EndedOverride) -> AuditEvent,
) -> Result<Option<OverrideEffect>, StoreError> {
    let Some(one) = tx.clear_override(uuid)? else { return Ok(None) };
    let (layout, author, reason) = (one.layout.clone(), one.author.clone(), one.reason.clone());
    let audit = event(EndedOverride { layout, author, reason }).record(by.cloned(), uuid, DONE);
    let (generation, action) = (tx.generation(), audit.action.clone());
    tx.audit(audit)?;
    Ok(Some(OverrideEffect::Ended { one, generation, action, by: by.cloned() }))
}

/// Checks that the desired state still has the generation that the caller expects.
///
/// # Errors
/// If the generation differs.
pub(crate) fn check_generation(tx: &Tx<'_>, expected: Option<u64>) -> Result<(), StoreError> {
    let generation = tx.generation();
    match expected.filter(|expected| *expected != generation) {
        None => Ok(()),
        Some(expected) => {
            let message = format!(
                "the desired state has changed: its generation is {generation}, but the request expects {expected}"
            );
            let error = ApiError::new(Code::Conflict, message).cause("nothing was changed");
            Err(error
                .hint(
                    "check the overrides (`gpushctl config overrides`), then repeat the request with the new \
                generation",
                )
                .into())
        }
    }
}
