//! Applies changes: plans a request, executes it as an operation, and reads the layouts back.
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
//! | `begin` | turns a request into a recorded operation |
//! | `queue` | operations that wait for GPUs, or for instances to become idle |
//! | `part` | the data of an operation about one of its GPUs |
//! | `engine` | the handles that are needed to queue and begin operations |
//! | `executor` | executes an operation on all its GPUs, or restores all of them |
//! | `phases` | executes the forward steps: brackets and phases |
//! | `services` | brackets recorded in the journal: services and hooks |
//! | `rollback` | restores the previous layout on all GPUs |
//! | `restore` | restores the previous layout on one GPU |
//! | `recover` | operations that a previous gpushd left unfinished |
//! | `grant` | operations of dynamic grants |
//! | `lease_changes` | effects of an operation's end on leases |
//! | `interrupted` | errors of interrupted operations |
//! | `recovery_action` | how recovery continues an interrupted operation |
//!
//! [`crate::modes`] implements the steps, with one folder for each mode.

mod begin;
mod engine;
mod executor;
mod grant;
mod interrupted;
mod lease_changes;
mod part;
mod phases;
mod planner;
pub(crate) mod queue;
mod recover;
mod recovery_action;
mod restore;
mod rollback;
mod services;

pub(crate) use self::{
    begin::{Order, begin},
    engine::{Engine, EngineHandles},
    executor::Executor,
    grant::Creation,
    part::Part,
    planner::{Planner, add_progress},
    recover::Recovery,
    services::{Services, health as services_health},
};
