//! Sets, replaces or ends overrides in a transaction, with the audit records.

use gpush_api::{Actor, ApiError, Code, Operation};
use gpush_store::{NewAudit, NewOverride, StoreError, Tx};

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
    lasting: &[(String, OverrideChange)],
) -> Result<Vec<OverrideEffect>, StoreError> {
    let mut effects = Vec::new();
    for (uuid, one) in lasting {
        match one {
            // Do not set the override if it has already expired while the operation waited or ran.
            OverrideChange::Make { expires_at: Some(at), .. } if *at <= tx.now() => {}
            OverrideChange::Make { rule, layout, expires_at } => {
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
                    "operation_id": operation.id, "rule": rule, "layout": layout, "reason": reason,
                    "expires_at": expires_at.map(gpush_api::whole_second),
                });
                tx.audit(audit(OverrideEffect::MAKE, Some(&operation.by), uuid, detail))?;
                effects.push(OverrideEffect::Made(made));
            }
            OverrideChange::End => {
                let why = serde_json::json!({ "operation_id": operation.id });
                effects.extend(end(tx, uuid, "override.clear", Some(&operation.by), &why)?);
            }
        }
    }
    Ok(effects)
}

/// Ends the override of a GPU. Returns `None` if the GPU had no override. The audit record also gets the fields of
/// `why`.
///
/// # Errors
/// If the write fails.
pub(crate) fn end(
    tx: &mut Tx<'_>,
    uuid: &str,
    action: &str,
    by: Option<&Actor>,
    why: &serde_json::Value,
) -> Result<Option<OverrideEffect>, StoreError> {
    let Some(ended) = tx.clear_override(uuid)? else { return Ok(None) };
    let mut detail = serde_json::json!({
        "layout": ended.layout, "author": ended.author, "reason": ended.reason,
    });
    if let (Some(detail), Some(why)) = (detail.as_object_mut(), why.as_object()) {
        detail.extend(why.clone());
    }
    tx.audit(audit(action, by, uuid, detail))?;
    let (generation, action) = (tx.generation(), action.to_owned());
    Ok(Some(OverrideEffect::Ended { one: ended, generation, action, by: by.cloned() }))
}

fn audit(action: &str, by: Option<&Actor>, uuid: &str, detail: serde_json::Value) -> NewAudit {
    NewAudit { by: by.cloned(), action: action.to_owned(), object: uuid.to_owned(), result: "done".to_owned(), detail }
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
