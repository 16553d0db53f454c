//! Wire types of the gpush API: the JSON that `gpushd` and its clients exchange.
//!
//! The crate contains serde types, error codes with their exit statuses, and the rule that decides
//! which characters of foreign text are shown. `gpush-core` uses the same types, so that offline
//! plans can read the host from a saved answer of gpushd (`gpushctl gpu list --json`). Within `v1`,
//! JSON fields are added, but never renamed or removed.

pub mod actor;
pub mod audit;
mod bill;
pub mod compute;
pub mod device;
mod enforcement;
pub mod error;
pub mod event;
pub mod gpu;
pub mod health;
pub mod holder;
pub mod ids;
pub mod lease;
pub mod mode;
pub mod mps;
pub mod operation;
pub mod overrides;
pub mod pending;
pub mod placement;
pub mod plan;
pub mod policy;
pub mod process;
pub mod quota;
pub mod refusal;
pub mod slurm;
pub mod step;
pub mod text;
pub mod timeslice;
mod timestamp;
pub mod usage;
mod usage_history;
mod usage_report;

pub use actor::*;
pub use audit::*;
pub use bill::{Bill, BillLine, BillModel, BillState, BillSums};
pub use compute::*;
pub use device::*;
pub use enforcement::*;
pub use error::*;
pub use event::*;
pub use gpu::*;
pub use health::*;
pub use holder::*;
pub use ids::*;
pub use lease::*;
pub use mode::*;
pub use mps::*;
pub use operation::*;
pub use overrides::*;
pub use pending::*;
pub use placement::*;
pub use plan::*;
pub use policy::*;
pub use process::*;
pub use quota::*;
pub use refusal::*;
pub use slurm::*;
pub use step::*;
pub use timeslice::*;
pub use timestamp::whole_second;
pub use usage::*;
pub use usage_history::*;
pub use usage_report::*;
