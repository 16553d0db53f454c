//! MIG through the real gpushd and gpushctl, on simulated hardware: layouts, changes of MIG mode with resets, services and
//! hooks, a killed gpushd or driver worker, mig-parted files. `agent/src/lifecycle/in_process` tests the policies.

mod crash;
mod double_memory;
mod driver_answers;
mod faults;
mod mode;
mod mode_crash;
mod mode_recover;
mod parted;
mod refusals;
mod rollback;
mod start;
mod together;
mod trace;

/// Returns the distance between the writes of the store at which a test kills gpushd: `usual`, or the number in
/// `GPUSH_TEST_WRITE_STEP`. `cargo xtask soak` sets 1, to kill gpushd at every write.
fn write_step(usual: usize) -> usize {
    let number = std::env::var("GPUSH_TEST_WRITE_STEP").ok().and_then(|text| text.parse().ok());
    number.unwrap_or(usual).max(1)
}
