//! Faults of single driver calls, and the resets in a trace.

use gpush_tests::host::{Host, Traced};

/// Returns a fault rule that takes effect once: at call number `k` (counted from 0) of `calls`, on
/// GPU 0.
pub(crate) fn fault_at(calls: &[Traced], k: usize, what: &str) -> String {
    let function = &calls[k].function;
    let before = calls[..k].iter().filter(|call| call.function == *function).count();
    format!("{function} --gpu 0 --after {before} --times 1 {what}")
}

/// Returns for each reset in the trace the index of its GPU.
pub(crate) fn resets(host: &Host) -> Vec<Option<u32>> {
    host.trace().iter().filter(|call| call.function == "gpu-reset").map(|call| call.gpu).collect()
}
