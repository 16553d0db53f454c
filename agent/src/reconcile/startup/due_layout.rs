//! Applies the layout of one GPU, if the GPU does not have it yet and its state permits the operation.

use gpush_api::{ApiError, Code, Gpu, GpuState, Mode};

use super::{
    StartupHandles,
    attempt::{self, LayoutResult},
};
use crate::operations::operation;

/// Returns whether gpushd needs an operation to set up the mode of a GPU's rule.
pub(super) fn needs_operation(gpu: &Gpu) -> bool {
    match gpu.mode {
        Mode::Mig | Mode::Mps => true,
        // These modes need the whole GPU, so an operation turns MIG mode off.
        Mode::Exclusive | Mode::Timeslice => gpu.mig.as_ref().is_some_and(|mig| !mig.is_off()),
        Mode::NoRule | Mode::Unmanaged => false,
    }
}

/// Applies the layout of a GPU if the GPU does not have it yet.
pub(super) async fn apply_if_due(handles: &StartupHandles, gpu: &Gpu) -> LayoutResult {
    let is_changed_by_caller =
        handles.startup.is_changed_by_caller(&gpu.uuid) || handles.operations.began_on(&gpu.uuid);
    // While a GPU cannot be read, gpushd does not know whether its MIG mode is on.
    let is_unread = gpu.mode.is_managed() && gpu.state == GpuState::Unknown;
    if !needs_operation(gpu) && !is_unread || is_changed_by_caller {
        return LayoutResult::Given;
    }
    let not_yet = |what: &str| {
        let mut error = ApiError::new(Code::DriverError, format!("GPU {} ({}) {what}", gpu.index, gpu.uuid));
        error.causes.extend(gpu.reasons.iter().cloned());
        LayoutResult::NotYet(error.hint(format!("`gpushctl gpu show {}` shows its state", gpu.index)))
    };
    if handles.operations.is_being_recovered(&gpu.uuid) {
        return not_yet("has an operation that the previous gpushd did not finish");
    }
    if !gpu.cordons.is_empty() && !gpu.drift.is_empty() {
        return not_yet("is cordoned, so gpushd does not apply its layout");
    }
    match gpu.state {
        GpuState::Maintenance => not_yet("is in maintenance, so gpushd does not apply its layout"),
        GpuState::Held => not_yet("is held, so gpushd does not apply its layout"),
        GpuState::Unknown => not_yet("can't be read, so gpushd does not apply its layout"),
        GpuState::Ready | GpuState::Cordoned | GpuState::Changing | GpuState::Degraded
            if gpu.drift.is_empty() && gpu.stale =>
        {
            not_yet("has not been read lately, so gpushd does not know whether it has the desired layout")
        }
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded if gpu.drift.is_empty() => LayoutResult::Given,
        GpuState::Ready | GpuState::Cordoned | GpuState::Changing | GpuState::Degraded | GpuState::Lost => {
            attempt::apply_layout(handles, operation::START, gpu).await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: rules of the modes `exclusive` and `timeslice` left MIG on, a rule of mode `mps` turned it off.
    #[test]
    fn every_mode_for_whole_gpus_turns_mig_off() {
        let mut gpu = gpush_core::preset::gpus("dgx-h100").unwrap().remove(0);
        for mode in [Mode::Mps, Mode::Exclusive, Mode::Timeslice, Mode::NoRule, Mode::Unmanaged] {
            gpu.mode = mode;
            gpu.mig.as_mut().unwrap().set_mode(true, true);
            assert_eq!(needs_operation(&gpu), mode.is_managed(), "{mode:?}");
            gpu.mig.as_mut().unwrap().set_mode(false, false);
            assert_eq!(needs_operation(&gpu), mode == Mode::Mps, "{mode:?}");
        }
    }
}
