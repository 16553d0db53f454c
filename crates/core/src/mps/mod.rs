//! The MPS targets of a host as plain data, and what follows from one state of them.
//!
//! ```text
//! supervisor task ─► report ──────────────┐
//! store ─► records ───────────────────────┤
//! operations ─► daemons kept stopped ─────┼─► MpsTargets ──┐
//! reconciler ─► findings, bypass reasons ─┘                ├─► DesiredTargets ─► serves, offers, a name's target
//! config, GPUs of the same snapshot ───────────────────────┘
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `report` | what gpushd knows about a daemon |
//! | `reasons` | why a daemon is in its state |
//! | `record` | what is recorded about a target |
//! | `target` | a target with the last report about its daemon, and the errors that follow from the report |
//! | `targets` | all targets of the host |
//! | `desired_targets` | the targets that the config requires; which targets serve clients |
//! | `client_settings` | the settings for the clients of a lease |
//! | `offers` | what the GPUs offer to leases |
//! | `summary`, `describe` | targets as the API shows them: from the report alone; completely |

mod client_settings;
mod describe;
mod desired_targets;
mod not_serving;
mod offers;
mod reasons;
mod record;
mod report;
mod summary;
mod target;
mod targets;

pub use self::{
    client_settings::client_settings,
    describe::{ShownFacts, describe},
    desired_targets::{DesiredTargets, is_reading_conclusive},
    not_serving::NotServing,
    offers::{OfferInputs, offers},
    reasons::reasons,
    record::{MpsSet, MpsStopped, MpsTargetRecord},
    report::DaemonReport,
    summary::in_order,
    target::MpsTarget,
    targets::{MpsTargets, MultiUserSupport, OperationDaemons, SupervisedTargets},
};

#[cfg(test)]
mod scene;
