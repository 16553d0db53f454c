//! What prevents the use of a GPU as a whole: MIG mode.

use gpush_api::{Gpu, Mode};

/// Returns the obstacles to using the whole GPU, one sentence each.
pub(crate) fn whole_gpu_obstacles(mode: Mode, gpu: &Gpu) -> Vec<String> {
    let wanted = mode.name();
    let Some(mig) = &gpu.mig else { return Vec::new() };
    let event = mode_event(gpu);
    match (mig.enabled, mig.pending_mode()) {
        (true, true) => vec![format!("MIG mode is on, but mode `{wanted}` needs the whole GPU")],
        (true, false) => {
            vec![format!("MIG mode is on until the next {event}, but mode `{wanted}` needs the whole GPU")]
        }
        (false, true) => vec![format!("the next {event} enables MIG mode, but mode `{wanted}` needs the whole GPU")],
        (false, false) => Vec::new(),
    }
}

/// Returns the event that makes a pending MIG mode effective.
pub(super) fn mode_event(gpu: &Gpu) -> &'static str {
    if gpu.passed_through { "reboot of this virtual machine" } else { "GPU reset" }
}
