//! MIG through the real gpushd and gpushctl: plans, layouts, MIG mode, rollback, recovery,
//! overrides, mig-parted files.

mod crash;
mod double_memory;
mod dynamic;
mod faults;
mod layouts;
mod mode;
mod mode_crash;
mod mode_recover;
mod overrides;
mod parted;
mod partly_back;
mod peers;
mod plan;
mod queue;
mod recover;
mod refusals;
mod rollback;
mod start;
mod together;
mod trace;
mod unknown_users;
