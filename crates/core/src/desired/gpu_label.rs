//! The name of a GPU in messages.

use gpush_api::Gpu;

use crate::preset::UUID_PREFIX;

/// Returns a GPU's name for messages. Omits the UUID if the GPU is from a preset.
pub(super) fn label(gpu: &Gpu) -> String {
    if gpu.uuid.as_str().starts_with(UUID_PREFIX) {
        return format!("GPU {}", gpu.index);
    }
    format!("GPU {} ({})", gpu.index, gpu.uuid)
}
