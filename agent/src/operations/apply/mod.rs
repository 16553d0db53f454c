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
//! | `order` | a requested change, and what the journal records about it |
//! | `begin` | turns a request into a recorded operation |
//! | `ready` | checks whether an operation can begin now |
//! | `queued_operation` | an operation that waits for GPUs, or for instances to become idle |
//! | `progress` | shows waiting operations and progress on a GPU |
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
mod order;
mod part;
mod phases;
mod planner;
mod progress;
mod queued_operation;
mod ready;
mod recover;
mod recovery_action;
mod restore;
mod rollback;
mod services;

use crate::{
    modes::{mig::MigMode, mps::Mps, timeslice::Timeslice},
    operations::operation::Operations,
    system::tasks::Tasks,
};

pub(crate) use self::{
    begin::begin,
    engine::{Engine, EngineHandles},
    grant::Creation,
    order::Order,
    part::Part,
    planner::Planner,
    progress::add_progress,
    queued_operation::QueuedOperation,
    recover::Recovery,
    services::{Services, health as services_health},
};

/// Executes operations. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Executor {
    pub(crate) mig: MigMode,
    pub(crate) mps: Mps,
    pub(crate) timeslice: Timeslice,
    /// Stops services and runs hooks around an operation. Records these actions in the journal.
    pub(crate) services: Services,
    pub(crate) operations: Operations,
    pub(crate) tasks: Tasks,
}
