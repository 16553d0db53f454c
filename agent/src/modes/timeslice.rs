//! Steps of mode `timeslice`: time-slice levels and compute modes of whole GPUs.
//!
//! If a level cannot be set, the operation does not fail, because the reconciler tries again later. So the functions
//! return sentences about deviations instead of errors.

use gpush_api::GpuPlan;

use crate::timeslice::{self, Timeslice};

/// Sets the levels of these GPUs as their rules require, and waits until the levels are read back.
pub(crate) async fn execute(timeslice: &Timeslice, uuids: &[String]) -> Vec<String> {
    timeslice::apply_and_read_back(timeslice, uuids).await
}

/// Before the first step of an operation, resets the levels on its GPUs that no rule requires any more.
pub(crate) async fn release(timeslice: &Timeslice, plans: &[GpuPlan]) -> Vec<String> {
    timeslice::apply_and_read_back(timeslice, &timeslice::gpus_to_release(timeslice, plans)).await
}
