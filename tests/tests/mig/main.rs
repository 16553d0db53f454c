//! MIG through the real gpushd and gpushctl, on simulated hardware: layouts, changes of MIG mode with resets, services and
//! hooks, a killed gpushd or driver worker, mig-parted files. `agent/src/lifecycle/in_process` tests the policies.

mod crash;
mod double_memory;
mod driver_answers;
mod dynamic;
mod faults;
mod layouts;
mod mode;
mod mode_crash;
mod mode_recover;
mod parted;
mod partly_back;
mod refusals;
mod rollback;
mod start;
mod together;
mod trace;
