//! Names of GPUs and of their states.

use anstyle::Style;
use gpush_api::GpuState;

use super::appearance::{BAD, NOTE, PLAIN};

/// Returns a state as text, with its style.
pub(crate) fn state(state: GpuState) -> (&'static str, Style) {
    match state {
        GpuState::Ready => ("ready", PLAIN),
        GpuState::Cordoned => ("cordoned", NOTE),
        GpuState::Changing => ("changing", NOTE),
        GpuState::Held => ("held", BAD),
        GpuState::Maintenance => ("maintenance", NOTE),
        GpuState::Degraded => ("degraded", BAD),
        GpuState::Unknown => ("unknown", BAD),
        GpuState::Lost => ("lost", BAD),
    }
}

/// Returns `GPU 3` or `GPUs 0-3, 5`.
pub(crate) fn gpu_numbers(indexes: &[u32]) -> String {
    let mut sorted = indexes.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let text = gpush_core::selector::ranges(sorted).join(", ");
    if indexes.len() == 1 { format!("GPU {text}") } else { format!("GPUs {text}") }
}
