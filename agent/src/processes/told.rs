//! Reports actions on strays: to the log, to subscribers of events, and to the audit trail.

use gpush_api::{GpuProcess, Happening, StrayChange, StrayStep};
use gpush_store::NewAudit;

use super::Strays;

/// Warns of a stray in the log.
pub(super) fn warn(one: &GpuProcess, done: &str) {
    let process = &one.process;
    tracing::warn!(
        gpu = one.gpu_uuid,
        uid = process.uid,
        "stray process {} ({}): {}{done}",
        process.pid.unwrap_or_default(),
        process.command.as_deref().unwrap_or("?"),
        one.stray.as_deref().unwrap_or("?")
    );
}

/// Records an action in the audit trail before it is executed.
///
/// # Errors
/// Why it cannot be recorded.
pub(super) async fn record(strays: &Strays, one: &GpuProcess, step: StrayStep) -> Result<(), String> {
    if let Some(why) = &strays.read_only {
        return Err(why.message.clone());
    }
    let process = &one.process;
    let audit = NewAudit {
        by: None,
        action: "process.end".to_owned(),
        object: one.gpu_uuid.clone(),
        result: step.words().to_owned(),
        detail: serde_json::json!({
            "gpu": one.gpu,
            "device": one.device,
            "pid": process.pid,
            "uid": process.uid,
            "user": process.user,
            "command": process.command,
            "reason": one.stray,
        }),
    };
    strays.store.write(move |tx| tx.audit(audit.clone()).map(|_| ())).await.map_err(|error| error.to_string())
}

/// Publishes an action as an event.
pub(super) fn publish(strays: &Strays, one: &GpuProcess, step: StrayStep) {
    let process = &one.process;
    strays.state.events().publish(Happening::Stray(Box::new(StrayChange {
        gpu: one.gpu,
        gpu_uuid: one.gpu_uuid.clone(),
        device: one.device.clone(),
        pid: process.pid,
        uid: process.uid,
        user: process.user.clone(),
        command: process.command.clone(),
        why: one.stray.clone().unwrap_or_default(),
        step,
    })));
}
