//! Compute modes of GPUs that are shared by turns.

use gpush_api::{ApiError, Code, Gpu, Mode};

use super::{Subject, Timeslice, pace::Pace, settle::Aim};

/// Sees to them; of those that are let go, the mode from before is put back.
pub(super) async fn tend(timeslice: &Timeslice, pace: &mut Pace, aims: &[Aim]) {
    for aim in aims {
        let subject = Subject::ComputeMode(aim.gpu.uuid.clone());
        if !pace.may_try(&subject) {
            continue;
        }
        let done = match &aim.policy {
            Some(policy) => match policy.compute_mode {
                Some(wanted) => keep(timeslice, &aim.gpu, wanted).await,
                None => Ok(()),
            },
            None => let_go(timeslice, &aim.gpu).await,
        };
        match done {
            Ok(()) => {
                pace.well(&subject);
                timeslice.well(&subject);
            }
            Err(why) => {
                pace.failed(subject.clone());
                timeslice.note(subject, &error(&aim.gpu, &why));
            }
        }
    }
}

async fn keep(timeslice: &Timeslice, gpu: &Gpu, wanted: gpush_api::ComputeMode) -> Result<(), String> {
    let ours = timeslice.shared_gpus.compute_mode(&gpu.uuid, Mode::Timeslice);
    // A driver that does not say what it is can't be asked for another.
    if gpu.compute_mode.is_none_or(|now| now == wanted && ours.is_none_or(|ours| ours.set == wanted)) {
        return Ok(());
    }
    let taken = timeslice.shared_gpus.take(&gpu.uuid, wanted, Mode::Timeslice, || true).await?;
    match (taken, ours) {
        (None, _) => {}
        (Some(now), Some(ours)) if ours.set == wanted => tracing::warn!(
            gpu = gpu.uuid,
            "its compute mode was {now} against the config, by somebody else or since the driver forgot it: it is {wanted} again"
        ),
        (Some(before), _) => tracing::info!(gpu = gpu.uuid, "its compute mode is {wanted} now, it was {before}"),
    }
    Ok(())
}

async fn let_go(timeslice: &Timeslice, gpu: &Gpu) -> Result<(), String> {
    if let Some(before) = timeslice.shared_gpus.put_back(&gpu.uuid, Mode::Timeslice).await? {
        tracing::info!(gpu = gpu.uuid, "it is not shared by turns any more: its compute mode is {before} again");
    }
    Ok(())
}

fn error(gpu: &Gpu, why: &str) -> ApiError {
    let message = format!("GPU {} ({}) has not the compute mode that it shall have", gpu.index, gpu.uuid);
    ApiError::new(Code::DriverError, message)
        .cause(why.to_owned())
        .hint("gpushd tries again by itself, at once with `gpushctl config reload`")
        .retryable()
}
