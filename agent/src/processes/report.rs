//! Reports what gpushd does about unleased processes: in the log, as events, and in the audit
//! trail.

use gpush_api::{EventPayload, GpuProcess, UnleasedChange, UnleasedStep};
use gpush_store::{AuditEvent, NewAudit};

use super::Unleased;

/// Logs a warning about an unleased process. `done` says what gpushd did about the process.
pub(super) fn warn(one: &GpuProcess, done: &str) {
    let process = &one.process;
    tracing::warn!(
        gpu = one.gpu_uuid.as_str(),
        uid = process.uid,
        "process {} ({}) has no lease: {}{done}",
        process.pid.unwrap_or_default(),
        process.command.as_deref().unwrap_or("?"),
        one.unleased.as_deref().unwrap_or("?")
    );
}

/// Records in the audit trail what gpushd is about to do with processes, all in one commit.
///
/// # Errors
/// If the records cannot be written. The text says why.
pub(super) async fn record<'a>(
    unleased: &Unleased,
    steps: impl Iterator<Item = (&'a GpuProcess, UnleasedStep)>,
) -> Result<(), String> {
    if let Some(why) = &unleased.context.read_only {
        return Err(why.message.clone());
    }
    let records: Vec<NewAudit> = steps.map(|(one, step)| audit(one, step)).collect();
    if records.is_empty() {
        return Ok(());
    }
    let write =
        unleased.context.store.write(move |tx| records.iter().try_for_each(|one| tx.audit(one.clone()).map(|_| ())));
    write.await.map_err(|error| error.to_string())
}

fn audit(one: &GpuProcess, step: UnleasedStep) -> NewAudit {
    let process = &one.process;
    let event = AuditEvent::ProcessEnd {
        gpu: one.gpu,
        device: one.device.clone(),
        pid: process.pid,
        uid: process.uid,
        user: process.user.clone(),
        command: process.command.clone(),
        reason: one.unleased.clone(),
    };
    event.record(None, &one.gpu_uuid, step.log_text())
}

/// Publishes as an event what gpushd did with a process.
pub(super) fn publish(unleased: &Unleased, one: &GpuProcess, step: UnleasedStep) {
    let process = &one.process;
    unleased.context.state.events().publish(EventPayload::Unleased(Box::new(UnleasedChange {
        gpu: one.gpu,
        gpu_uuid: one.gpu_uuid.clone(),
        device: one.device.clone(),
        pid: process.pid,
        uid: process.uid,
        user: process.user.clone(),
        command: process.command.clone(),
        why: one.unleased.clone().unwrap_or_default(),
        step,
    })));
}
