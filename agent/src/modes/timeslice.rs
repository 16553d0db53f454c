//! Steps of mode `timeslice`: time-slice levels and compute modes of whole GPUs.
//!
//! If a level cannot be set, the operation does not fail, because the reconciler tries again later. So these functions
//! return no errors, but one sentence for each GPU without the desired level.

use gpush_api::GpuPlan;

use crate::timeslice::{self, Timeslice};

/// Sets the time-slice levels that the rules require, and waits until the levels are read back.
pub(crate) async fn execute(timeslice: &Timeslice, uuids: &[String]) -> Vec<String> {
    timeslice::apply_and_read_back(timeslice, uuids).await
}

/// Before the first step of an operation, resets the time-slice levels that no rule requires any more.
pub(crate) async fn release(timeslice: &Timeslice, plans: &[GpuPlan]) -> Vec<String> {
    timeslice::apply_and_read_back(timeslice, &timeslice::gpus_to_release(timeslice, plans)).await
}
