//! Results of `gpu cordon`, `drain` and `uncordon`, one line per GPU.

use gpush_api::Gpu;

use super::{Appearance, gpu};

/// Draws the result of `gpu cordon`.
pub(crate) fn cordoned(gpus: &[Gpu], look: &Appearance) -> String {
    lines(gpus, look, |gpu| match gpu.cordons.iter().map(|cordon| cordon.reason.as_str()).find(|why| !why.is_empty()) {
        Some(reason) => format!("cordoned: {reason}"),
        None => "cordoned".to_owned(),
    })
}

/// Draws the result of `gpu drain`, when the GPUs are idle.
pub(crate) fn drained(gpus: &[Gpu], look: &Appearance) -> String {
    lines(gpus, look, |_| "cordoned, and nothing uses it".to_owned())
}

/// Draws the result of `gpu uncordon`.
pub(crate) fn uncordoned(gpus: &[Gpu], look: &Appearance) -> String {
    lines(gpus, look, |one| format!("not cordoned; it is {}", gpu::state(one.state).0))
}

/// Draws why a drain is still waiting for a GPU.
pub(crate) fn waits(index: u32, why: &str, look: &Appearance) -> String {
    look.wrap(&format!("GPU {index}  "), &format!("waiting: {}", look.clean(why))).join("\n") + "\n"
}

fn lines(gpus: &[Gpu], look: &Appearance, what: impl Fn(&Gpu) -> String) -> String {
    let line = |gpu: &Gpu| look.wrap(&format!("GPU {}  ", gpu.index), &look.clean(&what(gpu))).join("\n") + "\n";
    gpus.iter().map(line).collect()
}
