//! Cordons: GPUs that take no new work, by an administrator's word or by a fault that the driver
//! reported.
//!
//! ```text
//! administrator ── POST cordon ───────────────► admin      ─┐
//! driver ──────── an Xid of cordon_xids ──────► xid-<n>     ├─► cordoned, on record ── POST uncordon ─► none
//! a reading ───── a row remap waits or failed ► row-remap  ─┘        ▲                                   │
//!                                                                    └── reported anew ──────────────────┘
//! ```
//!
//! A fault that lasts, such as a row that waits for a reset, is noticed once and on record: neither
//! the next reading nor the next agent undoes an `uncordon`. To drain a GPU is to cordon it and to
//! wait: whoever wants that waits for the GPU's readings to show nobody, which changes nothing and
//! needs no operation.

use gpush_api::{ApiError, Cordon};
use gpush_nvml::{Event, EventKind, RemappedRows};
use gpush_store::{ConditionKind, NewAudit, NewCondition, Scope};

use crate::{
    agent::{Agent, Shared},
    conditions::Change,
    request::Request,
};

/// Cause of a cordon that somebody set.
const ADMIN: &str = "admin";

/// Cause of one for rows of memory.
const ROW_REMAP: &str = "row-remap";

/// A cordon in a sentence.
pub(crate) fn sentence(cordon: &Cordon) -> String {
    match (&cordon.by, cordon.reason.is_empty()) {
        (Some(by), true) => format!("cordoned by {}", crate::request::who(by)),
        (Some(by), false) => format!("cordoned by {}: {}", crate::request::who(by), cordon.reason),
        (None, _) => format!("cordoned by gpushd: {}", cordon.reason),
    }
}

/// Cordons a GPU for an administrator, in place of what an administrator said before; without a reason that
/// one's stays.
///
/// # Errors
/// When it can't be recorded.
pub(crate) async fn set(agent: &Shared, uuid: String, request: Request) -> Result<(), ApiError> {
    let standing = agent.conditions.cordons(&uuid).into_iter().find(|cordon| cordon.cause == ADMIN);
    let given = request.reason.clone().filter(|reason| !reason.is_empty());
    let new = NewCondition {
        scope: Scope::Gpu(uuid.clone()),
        kind: ConditionKind::Cordon,
        cause: ADMIN.to_owned(),
        reason: given.or_else(|| standing.map(|cordon| cordon.reason)).unwrap_or_default(),
        by: Some(request.by.clone()),
    };
    tracing::info!(gpu = uuid, uid = request.by.uid, "cordoned: {}", new.reason);
    agent.conditions.change(Change::Set(new), request.recorded("gpu.cordon", uuid)).await
}

/// Takes all cordons off a GPU.
///
/// # Errors
/// When it can't be recorded.
pub(crate) async fn clear(agent: &Shared, uuid: String, request: Request) -> Result<(), ApiError> {
    let change = Change::Clear(Scope::Gpu(uuid.clone()), ConditionKind::Cordon, None);
    tracing::info!(gpu = uuid, uid = request.by.uid, "uncordoned");
    agent.conditions.change(change, request.recorded("gpu.uncordon", uuid)).await?;
    // Its layout may have waited for this.
    agent.startup.look_again();
    Ok(())
}

/// Takes an event of the driver in: it may cordon its GPU.
pub(crate) fn heard(agent: &Agent, event: &Event) {
    let EventKind::Xid(xid) = event.kind else { return };
    let at = match (event.gi, event.ci) {
        (Some(gi), Some(ci)) => format!(", in GPU instance {gi}, compute instance {ci}"),
        (Some(gi), None) => format!(", in GPU instance {gi}"),
        (None, _) => String::new(),
    };
    let known = words(xid).map_or_else(String::new, |words| format!(" ({words})"));
    tracing::warn!(gpu = event.uuid, "the driver reports Xid {xid}{known}{at}");
    let listed = |wanted: &u32| u64::from(*wanted) == xid;
    if event.uuid.is_empty() || !agent.settings.config().health.cordon_xids.iter().any(listed) {
        return;
    }
    by_agent(agent, &event.uuid, &format!("xid-{xid}"), format!("the driver reported Xid {xid}{known}{at}"), None);
}

/// Takes in what a reading says of a GPU's memory rows: those that wait for a reset, or could not be
/// replaced, cordon it when they are new.
pub(crate) fn read(agent: &Agent, uuid: &str, rows: RemappedRows) {
    let before = agent.conditions.notice(uuid, rows);
    if before == rows {
        return;
    }
    let more = (rows.correctable, rows.uncorrectable) != (before.correctable, before.uncorrectable);
    let reason = if rows.failed && !before.failed {
        "a bad row of its memory could not be replaced: no spare row is left, or the remapper failed"
    } else if rows.pending && (!before.pending || more) {
        "a bad row of its memory is replaced with the next reset, and in use until then"
    } else {
        agent.conditions.record_notice(uuid, rows);
        return;
    };
    by_agent(agent, uuid, ROW_REMAP, reason.to_owned(), Some(rows));
}

/// Cordons a GPU in the agent's own name. It is in force at once: not to be able to record it is no
/// reason to hand out a GPU that is broken.
fn by_agent(agent: &Agent, uuid: &str, cause: &str, reason: String, noticed: Option<RemappedRows>) {
    if agent.conditions.cordons(uuid).iter().any(|cordon| cordon.cause == cause) {
        if let Some(rows) = noticed {
            agent.conditions.record_notice(uuid, rows);
        }
        return;
    }
    tracing::warn!(gpu = uuid, "cordoned: {reason}");
    let audit = NewAudit {
        by: None,
        action: "gpu.cordon".to_owned(),
        object: uuid.to_owned(),
        result: "done".to_owned(),
        detail: serde_json::json!({ "cause": cause, "reason": reason }),
    };
    let new = NewCondition {
        scope: Scope::Gpu(uuid.to_owned()),
        kind: ConditionKind::Cordon,
        cause: cause.to_owned(),
        reason,
        by: None,
    };
    let uuid = uuid.to_owned();
    agent.conditions.change_at_once(Change::Set(new), move |tx| {
        if let Some(rows) = noticed {
            tx.notice(&uuid, serde_json::to_value(rows).unwrap_or_default())?;
        }
        tx.audit(audit.clone()).map(|_| ())
    });
}

/// What an Xid means, in NVIDIA's words (the Xid catalogue of the driver's documentation).
fn words(xid: u64) -> Option<&'static str> {
    Some(match xid {
        13 => "graphics engine exception, of a program",
        31 => "memory page fault, of a program",
        43 => "a program made the GPU stop processing",
        45 => "preemptive cleanup, after an earlier error",
        46 => "the GPU stopped processing",
        48 => "double-bit ECC error",
        62 => "internal microcontroller halt",
        63 => "row remapping event",
        64 => "row remapping failure",
        74 => "NVLink error",
        79 => "the GPU has fallen off the bus",
        92 => "high rate of single-bit ECC errors",
        94 => "contained memory error",
        95 => "uncontained memory error",
        119 => "the GPU's system processor did not answer",
        120 => "error of the GPU's system processor",
        140 => "unrecovered ECC error",
        _ => return None,
    })
}
