//! Operations: from a request to an operation that ends in a layout read back.
//!
//! ```text
//! request ─► which GPUs ─► claim them ─► read each again ─► plan each ─► all feasible?
//!                              │                                            │ no: refused, nothing
//!                              └─ another operation has one: refused,       │ changed, or queued
//!                                 or queued                                 ▼ yes
//!                       journal ─► operation: brackets, then phase by phase on all GPUs
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `planner` | plans from fresh readings |
//! | `begin` | from a request to an operation on record |
//! | `queue` | operations that wait for GPUs, or for instances to be idle |
//! | `part` | one GPU's part of an operation |
//! | `engine` | the handles with which operations are queued and begun |
//! | `executor` | the operation as a whole: forward on all GPUs, or back on all |
//! | `phases` | the steps forward: brackets and phases |
//! | `services` | brackets that the journal notes: services and hooks |
//! | `rollback` | the previous layout on all GPUs |
//! | `back` | the previous layout on one GPU |
//! | `recover` | operations that an earlier gpushd left unfinished |
//! | `grant` | operations of dynamic grants |
//! | `leased` | what the end of an operation means for leases |
//! | `interrupted` | explanations of what became of one |
//! | `course` | what recovery does with one, from the facts alone |
//!
//! What a step does lies in [`crate::modes`], one folder per mode.

mod back;
mod begin;
mod course;
mod engine;
mod executor;
mod grant;
mod interrupted;
mod leased;
mod part;
mod phases;
mod planner;
pub(crate) mod queue;
mod recover;
mod rollback;
mod services;

pub(crate) use self::{
    begin::{Order, begin},
    engine::{Engine, EngineHandles},
    executor::Executor,
    grant::Creation,
    part::Part,
    planner::Planner,
    recover::Recovery,
    services::{Services, health as services_health},
};

use gpush_api::Gpu;

use crate::state::HostState;

/// Checks the operations that wait again, after one of them was cancelled.
pub(crate) fn queue_changed(engine: &Engine) {
    engine.queue.wake();
}

/// Returns whether no operation waits.
pub(crate) fn queue_is_empty(engine: &Engine) -> bool {
    engine.queue.is_empty()
}

/// Adds to the reasons of a GPU how far the operation is that changes it, and which operations wait for it.
pub(crate) fn add_progress(engine: &Engine, host: &HostState, gpu: &mut Gpu) {
    planner::add_progress(&engine.queue, &engine.operations, host, gpu);
}
