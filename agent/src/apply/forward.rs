//! The steps of a plan on one GPU, each after the one before has landed, and the whole read back.

use gpush_api::{ApiError, Code};
use gpush_core::{geometry::Geometry, layout::Layout, plan};
use gpush_nvml::Reading;
use tokio_util::sync::CancellationToken;

use super::{
    Part,
    step::{self, Ground, Trouble},
};
use crate::{agent::Shared, operation::Ongoing};

/// How far one GPU came.
#[derive(Debug)]
pub(super) enum Forward {
    /// It is as planned, read back.
    Done,
    /// Stopped before a step because another GPU failed, or the operation was cancelled.
    Stopped,
    /// Something went wrong.
    Troubled(Trouble),
}

/// Carries out a plan, until its end, its first trouble, or `abort`.
pub(super) async fn forward(agent: &Shared, ongoing: &Ongoing, part: &Part, abort: &CancellationToken) -> Forward {
    match steps(agent, ongoing, part, abort).await {
        Ok(true) => Forward::Done,
        Ok(false) => Forward::Stopped,
        Err(trouble) => {
            ongoing.progress(part.position, |progress| {
                progress.doing = None;
                progress.error = Some(trouble.error().clone());
            });
            Forward::Troubled(trouble)
        }
    }
}

async fn steps(agent: &Shared, ongoing: &Ongoing, part: &Part, abort: &CancellationToken) -> Result<bool, Trouble> {
    let position = part.position;
    let mut ground = Ground::of(&part.found);
    for step in &part.plan.steps {
        if abort.is_cancelled() {
            return Ok(false);
        }
        let words = step::words(step);
        tracing::debug!(op = ongoing.id(), gpu = part.plan.uuid, "{words}");
        ongoing.progress(position, |progress| progress.doing = Some(words));
        step::take(agent, part, step, &mut ground).await?;
        ongoing.progress(position, |progress| progress.done += 1);
    }
    if part.plan.disables_mig {
        // What counts is read back once the mode is off.
        return Ok(true);
    }
    ongoing.progress(position, |progress| progress.doing = Some("reading the layout back".to_owned()));
    let reading = step::read(agent, part).await?;
    match difference(part, &reading) {
        None => {
            ongoing.progress(position, |progress| progress.doing = None);
            Ok(true)
        }
        Some(difference) => {
            let what = if part.is_empty() {
                "it was as wanted, and somebody else has changed it meanwhile"
            } else {
                "the driver reported success, but the layout is another"
            };
            let message = format!("{}: {what}", part.label());
            Err(Trouble::Failed(ApiError::new(Code::DriverError, message).cause(difference)))
        }
    }
}

/// How a reading differs from what the plan aimed at: it is as wanted when planning it again
/// would change nothing.
pub(super) fn difference(part: &Part, reading: &Reading) -> Option<String> {
    if !part.plan.changes_mig() && reading.mig.as_ref().is_none_or(|mig| !mig.enabled) {
        return None;
    }
    let Some(mig) = &reading.mig else { return Some("the GPU has no MIG any more".to_owned()) };
    if part.plan.disables_mig {
        return (mig.enabled || mig.pending).then(|| "MIG mode is on".to_owned());
    }
    if !mig.enabled {
        return Some("MIG mode is off".to_owned());
    }
    let layout = match Layout::parse_list(&part.plan.layout) {
        Ok(layout) => layout,
        Err(error) => return Some(ApiError::from(error).message),
    };
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    let again = plan::Target::resolve(&geometry, &layout).and_then(|t| plan::plan(&geometry, &mig.instances, &t));
    match again {
        Ok(plan) if plan.steps.is_empty() => None,
        Ok(plan) => Some(format!("still to do: {}", plan.steps.iter().map(step::words).collect::<Vec<_>>().join(", "))),
        Err(refusal) => Some(gpush_core::refusal::explain(&refusal, part.plan.gpu, &part.label()).message),
    }
}
