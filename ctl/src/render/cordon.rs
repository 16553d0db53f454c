//! What `gpu cordon`, `drain` and `uncordon` came to, a line a GPU.

use gpush_api::Gpu;

use super::{Look, gpu};

/// `gpu cordon`.
pub(crate) fn cordoned(gpus: &[Gpu], look: &Look) -> String {
    lines(gpus, look, |gpu| match gpu.cordons.iter().map(|cordon| cordon.reason.as_str()).find(|why| !why.is_empty()) {
        Some(reason) => format!("cordoned: {reason}"),
        None => "cordoned".to_owned(),
    })
}

/// `gpu drain`, once nobody is left.
pub(crate) fn drained(gpus: &[Gpu], look: &Look) -> String {
    lines(gpus, look, |_| "cordoned, and nothing uses it".to_owned())
}

/// `gpu uncordon`.
pub(crate) fn uncordoned(gpus: &[Gpu], look: &Look) -> String {
    lines(gpus, look, |one| format!("not cordoned; it is {}", gpu::state(one.state).0))
}

/// A GPU that is waited for, and why.
pub(crate) fn waits(index: u32, why: &str, look: &Look) -> String {
    look.wrap(&format!("GPU {index}  "), &format!("waiting: {}", look.clean(why))).join("\n") + "\n"
}

fn lines(gpus: &[Gpu], look: &Look, what: impl Fn(&Gpu) -> String) -> String {
    let line = |gpu: &Gpu| look.wrap(&format!("GPU {}  ", gpu.index), &look.clean(&what(gpu))).join("\n") + "\n";
    gpus.iter().map(line).collect()
}
