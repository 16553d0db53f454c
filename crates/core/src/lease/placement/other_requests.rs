//! Hints for refused requests: the same request on other GPUs, and a smaller one.

use super::{
    GpuOffer, PlacementPolicy, PlacementRequest, RequestedDevice, RequestedShare, error_context::ErrorContext, gang,
    nominal_mib,
};
use crate::lease::quota::Size;

/// Returns the hint that names GPUs that the request does not select, but that can meet it now; `None` if there is none.
pub(super) fn free_elsewhere(wanted: &PlacementRequest, context: ErrorContext<'_>) -> Option<String> {
    if wanted.gpus.is_none() || wanted.targets.is_some() {
        return None;
    }
    let selected = context.host.selected(wanted);
    let elsewhere = PlacementRequest { gpus: None, ..wanted.clone() };
    let can_meet = |gpu: &&GpuOffer| {
        gpu.closed.is_none()
            && context.allowed.is_none_or(|allowed| allowed.contains(&gpu.index))
            && selected.gpus.iter().all(|one| one.index != gpu.index)
            && gang::capacity(gpu, &elsewhere, PlacementPolicy::Pack) >= wanted.count
    };
    let others: Vec<String> = context.host.gpus.iter().filter(can_meet).map(|gpu| gpu.index.to_string()).collect();
    let gpus = if others.len() == 1 { "a GPU that is free" } else { "one of the GPUs that are free" };
    (!others.is_empty()).then(|| format!("choose {gpus}: `-g {}`", others.join(",")))
}

/// Returns the hint for a request for more members than the GPUs have. Names no number that the quota does not allow.
pub(super) fn fewer(most: usize, wanted: &PlacementRequest, context: ErrorContext<'_>) -> String {
    let Some(allowance) = context.allowance else { return format!("request {most} or fewer") };
    let selected = context.host.selected(wanted);
    let kind = wanted.share.kind();
    let of_gpu = |gpu: &GpuOffer| {
        let gpu_mib = context.gpus.iter().find(|one| one.index == gpu.index).map_or(0, |gpu| gpu.memory.total_mib);
        let memory_mib = match &wanted.share {
            RequestedShare::Mig(RequestedDevice::Profile(profile)) => nominal_mib(profile).unwrap_or_default(),
            RequestedShare::Mig(RequestedDevice::AtLeast { memory_mib, .. }) => *memory_mib,
            RequestedShare::Mps { .. } | RequestedShare::Timeslice => 0,
            RequestedShare::Whole => gpu_mib,
        };
        Size::of_one(memory_mib, gpu_mib, 0)
    };
    let Some(one) = selected.gpus.iter().map(of_gpu).min_by_key(|size| size.memory_mib) else {
        return format!("request {most} or fewer");
    };
    match (1..=most).rev().find(|count| allowance.permits(kind, one.times(*count))) {
        Some(count) => format!("request {count} or fewer"),
        None => {
            allowance.denial(kind, one).map_or_else(|| format!("request {most} or fewer"), |denial| denial.hint(None))
        }
    }
}
