//! Checks whether an operation can begin now.

use std::sync::Arc;

use gpush_api::{ApiError, Code, GpuPlan, GpuUuid, Mig};
use gpush_core::desired::check_mps_entries;
use gpush_nvml::Reading;

use super::{Engine, order::Order, part::Part, planner::unreadable};
use crate::{operations::operation, requests::caller::Viewer, state::lanes::Claim};

/// Returns an error if no operation may begin at the moment.
pub(super) fn refuse_now(engine: &Engine) -> Result<(), ApiError> {
    engine.operations.not_stopping(&engine.context.stopping)?;
    match engine.context.read_only.clone().or_else(|| engine.operations.closed()) {
        Some(why) => Err(why),
        None => Ok(()),
    }
}

/// An operation that can begin. It has claimed its GPUs, and its plans are based on readings made after the claim.
pub(super) struct Ready {
    pub(super) parts: Vec<Part>,
    pub(super) claim: Claim,
}

impl Ready {
    /// Reads the GPUs that were claimed for the plans `meant`, and plans these GPUs again.
    ///
    /// # Errors
    /// If a GPU cannot be read, or cannot get the planned layout. After an error, the claim is
    /// released.
    pub(super) async fn plan_again(
        engine: &Engine,
        viewer: Viewer,
        order: &Order,
        meant: &[GpuPlan],
        claim: Claim,
    ) -> Result<Self, ApiError> {
        claim.wait_until_alone().await;
        let uuids: Vec<GpuUuid> = meant.iter().map(|plan| plan.gpu_uuid.clone()).collect();
        let mut readings = Vec::new();
        for ((_, outcome), plan) in engine.context.readings.now(&uuids).await.into_iter().zip(meant) {
            readings.push(outcome.map_err(|error| unreadable(plan, error.to_api()))?);
        }
        let gpus = engine.planner.gpus_with(viewer, &readings).await?;
        let config = engine.context.settings.config();
        let mut plans = engine.planner.planned(&gpus, &order.request, order.once).await?;
        // Other GPUs may be reset together with a requested GPU. If the claim does not include them all, the request is
        // refused.
        let claimed = operation::gpus(meant);
        let more = operation::gpus(&plans).iter().any(|gpu| !claimed.contains(gpu));
        if more || plans.iter().map(|plan| &plan.gpu_uuid).ne(&uuids) {
            let error =
                ApiError::new(Code::Conflict, "the set of selected GPUs changed while gpushd planned the operation");
            return Err(error.hint("repeat the request").retryable());
        }
        check_mps_entries(&config, &gpus, &order.request, &plans, order.once)?;
        engine.planner.refuse_blocked(viewer, &gpus, &mut plans).await;
        if let Some(error) = refusal(&plans) {
            return Err(error);
        }
        let mut lasting = order.override_changes(&config, &gpus, &plans).into_iter();
        let parts = std::iter::zip(plans, &readings).enumerate();
        let parts = parts.map(|(at, (plan, reading))| Part {
            lasting: lasting.next().flatten(),
            ..Part::new(at, plan, bare(reading), reading)
        });
        Ok(Self { parts: parts.collect(), claim })
    }
}

/// Returns an error if any plan is refused. One refusal is returned unchanged; several are summarized in one error.
pub(super) fn refusal(plans: &[GpuPlan]) -> Option<ApiError> {
    let refused: Vec<&GpuPlan> = plans.iter().filter(|plan| plan.error.is_some()).collect();
    let mut errors: Vec<ApiError> = refused.iter().filter_map(|plan| plan.error.clone()).collect();
    let whole = match errors.len() {
        0 => return None,
        1 => errors.remove(0),
        count => {
            let indexes: Vec<String> = refused.iter().map(|plan| plan.gpu.to_string()).collect();
            let message = format!("{count} of {} GPUs cannot be changed: GPUs {}", plans.len(), indexes.join(", "));
            ApiError::several(message, errors)
        }
    };
    Some(if plans.len() > 1 {
        whole.outcome("no GPU was changed, because gpushd changes either all selected GPUs or none")
    } else {
        whole
    })
}

/// Returns the MIG state in a reading, without the profiles, processes and memory use, which a rollback does not need.
pub(super) fn bare(reading: &Reading) -> Option<Mig> {
    let mut mig = reading.mig.clone()?;
    mig.profiles = Arc::default();
    for instance in &mut mig.instances {
        instance.processes.clear();
        instance.memory = None;
        instance.compute.iter_mut().for_each(|compute| compute.processes.clear());
    }
    Some(mig)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modes::scene::{mig_gpu, process, reading};
    use gpush_api::GpuIndex;

    fn plan(gpu: u32, error: Option<&str>) -> GpuPlan {
        let error = error.map(|message| ApiError::new(Code::Blocked, message));
        GpuPlan { gpu: GpuIndex(gpu), error, ..GpuPlan::default() }
    }

    #[test]
    fn plans_without_an_error_are_not_refused() {
        assert_eq!(refusal(&[]), None);
        assert_eq!(refusal(&[plan(0, None), plan(1, None)]), None);
    }

    #[test]
    fn single_refused_gpu_gives_its_own_error() {
        let alone = refusal(&[plan(0, Some("GPU 0 is in use"))]).unwrap();
        assert_eq!((alone.message.as_str(), alone.outcome), ("GPU 0 is in use", None));
        // The caller must learn that the other GPU was not changed either.
        let of_two = refusal(&[plan(0, None), plan(1, Some("GPU 1 is in use"))]).unwrap();
        assert_eq!(of_two.message, "GPU 1 is in use");
        assert!(of_two.outcome.unwrap().starts_with("no GPU was changed"));
    }

    #[test]
    fn several_refused_gpus_are_named_in_one_error() {
        let plans = [plan(0, Some("GPU 0 is in use")), plan(1, None), plan(5, Some("GPU 5 is cordoned"))];
        let error = refusal(&plans).unwrap();
        assert_eq!(error.message, "2 of 3 GPUs cannot be changed: GPUs 0, 5");
        assert_eq!(error.sentences()[1..], ["GPU 0 is in use", "GPU 5 is cordoned"]);
        assert!(error.outcome.unwrap().starts_with("no GPU was changed"));
    }

    /// Every user may read an operation, and the journal keeps its record.
    #[test]
    fn recorded_state_of_a_gpu_names_no_process() {
        let mut gpu = mig_gpu(&["3g.40gb", "2g.20gb"]);
        for instance in &mut gpu.mig.as_mut().unwrap().instances {
            instance.processes.push(process(7));
            instance.compute[0].processes.push(process(8));
        }
        let recorded = bare(&reading(&gpu)).unwrap();
        assert_eq!(recorded.instances.len(), 2);
        let text = serde_json::to_string(&recorded).unwrap();
        assert!(!text.contains("alice") && !text.contains("train") && recorded.profiles.is_empty(), "{text}");
    }
}
