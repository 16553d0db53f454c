//! What `gpushd` must not forget: the journal of operations, overrides, conditions of GPUs,
//! answers already given, the audit trail, the boot it last ran in, MPS targets, leases.
//!
//! One SQLite file in the state directory, one thread that owns it, and one rule: **whoever is
//! told that something is recorded may pull the plug**. Many callers' transactions share one sync
//! ([`engine`]); none of them hears of success before that sync has returned.
//!
//! ```text
//! callers ──write(|tx| …)──► queue ──► one thread: BEGIN, each job in its savepoint, COMMIT (sync)
//!    ▲                                    │            │
//!    └────────────── reply ◄── still our file? ◄── watermark
//! ```
//!
//! What can go wrong, and what then:
//!
//! | trouble | what happens |
//! |---|---|
//! | a second agent | [`OpenError::Held`] with the holder's pid, for as long as the first lives |
//! | a network file system | [`OpenError::NetworkFilesystem`]: its locks and syncs promise too little |
//! | somebody else's, or others may write it | [`OpenError::Untrusted`] with what to type |
//! | tmpfs | allowed; [`Note::Volatile`] says that a reboot forgets |
//! | disk full | ordinary writes are refused; endings ([`Store::write_ending`]) use the [`reserve`] |
//! | a sync or write fails | the store is [`StoreError::Broken`] until it is opened anew: what the disk holds is not known before it is read again |
//! | deleted or replaced under us | [`StoreError::Gone`] before anybody is told of success |
//! | damaged, deleted, or older than it was | set aside under a dated name, [`Note::Lost`] until [`Tx::accept_loss`] |
//! | of another machine (cloned disk) | set aside under a dated name, [`Note::OtherHost`] |
//! | written by a newer gpushd | opened read-only, [`Note::NewerSchema`] |
//! | clock set back | order is by sequence number; [`Note::ClockBack`] says so |
//!
//! Damage is found by SQLite's integrity check, a seal over every row ([`record`]), a comparison
//! of the whole schema, and its progress recorded in a [`watermark`] and a marker outside of the file.

mod answer;
mod aside;
mod audit;
mod condition;
mod engine;
mod error;
mod fact;
mod files;
mod filesystem;
mod journal;
mod lease;
mod lock;
mod mps;
mod note;
mod open;
mod operation;
mod overrides;
mod own;
mod provenance;
mod record;
mod reserve;
mod schema;
mod shared_gpu;
mod store;
mod tx;
mod watermark;

pub use answer::{Answer, NewAnswer, StoredAnswer};
pub use audit::{AuditQuery, AuditRecord, DENIED, NewAudit};
pub use condition::{Condition, ConditionKind, NewCondition, Scope};
pub use error::{OpenError, StoreError, Untrusted};
pub use fact::{BootRecord, KnownSince, Lost};
pub use lease::{LeaseHistory, LeaseRecord, LeaseSource, LeaseTerms, NewLease};
pub use mps::{MpsSet, MpsStopped, MpsTarget};
pub use note::{Bounds, Note, Opened, Options};
pub use operation::{
    GpuIntent, Intent, NewOperation, OperationId, OperationRecord, Undo, UnfinishedOperation, may_become,
};
pub use overrides::{NewOverride, Override};
pub use schema::KNOWN as SCHEMA;
pub use shared_gpu::{ComputeModeSet, LevelSet, SharedGpu};
pub use store::{Pending, Statistics, Store};
pub use tx::{Tx, View};
