//! Steps of mode `timeslice`: time-slice levels and compute modes of whole GPUs.
//!
//! A level that cannot be set does not fail an operation, because the reconciler tries again later. So the functions
//! return sentences about deviations instead of errors.

use gpush_api::GpuPlan;

use crate::timeslice::{self, Timeslice};

/// Sets the levels of these GPUs as their rules require, and waits until the levels are read back.
pub(crate) async fn execute(timeslice: &Timeslice, uuids: &[String]) -> Vec<String> {
    timeslice::apply_and_read_back(timeslice, uuids).await
}

/// Resets the levels that no rule requires any more on the GPUs of an operation, before its first step.
pub(crate) async fn release(timeslice: &Timeslice, plans: &[GpuPlan]) -> Vec<String> {
    timeslice::apply_and_read_back(timeslice, &timeslice::gpus_to_release(timeslice, plans)).await
}
