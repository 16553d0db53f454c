//! Steps of mode `timeslice`: time-slice levels and compute modes of whole GPUs.
//!
//! A level that cannot be set does not fail an operation: the reconciler tries again, as after any drift. So both
//! functions return sentences on what is not as the rules ask, and no error.

use gpush_api::GpuPlan;

use crate::timeslice::{self, Timeslice};

/// Sets the levels of these GPUs as their rules ask and waits until they were read back.
pub(crate) async fn execute(timeslice: &Timeslice, uuids: &[String]) -> Vec<String> {
    timeslice::settled(timeslice, uuids).await
}

/// Resets the levels that no rule asks for any more on the GPUs of an operation, before its first step.
pub(crate) async fn release(timeslice: &Timeslice, plans: &[GpuPlan]) -> Vec<String> {
    timeslice::settled(timeslice, &timeslice::to_let_go(timeslice, plans)).await
}
