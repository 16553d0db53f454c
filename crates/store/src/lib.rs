//! Persistent state of `gpushd`: the journal of operations, overrides, conditions of GPUs, answers by idempotency key,
//! the audit trail, the last boot, MPS targets, leases, and what leases were used for.
//!
//! The state is one SQLite file in the state directory, owned by one thread. **Everything that the
//! store reports as recorded survives a power cut.** Transactions of several callers share one sync
//! ([`engine`]). The store reports a transaction as recorded only after its sync has returned.
//!
//! ```text
//! callers ──write(|tx| …)──► queue ──► one thread: BEGIN, each job in its savepoint, COMMIT (sync)
//!    ▲                                    │            │
//!    └────────────── reply ◄── same file?      ◄── watermark
//! ```
//!
//! Problems and their handling:
//!
//! | problem | handling |
//! |---|---|
//! | a second gpushd | [`OpenError::Held`] with the holder's pid, while the first one runs |
//! | a network file system | [`OpenError::NetworkFilesystem`]: its locks and syncs are not reliable |
//! | directory or file owned or writable by another user | [`OpenError::Untrusted`] with a command that solves it |
//! | tmpfs | allowed; [`Note::Volatile`] says that a reboot deletes the content |
//! | disk full | ordinary writes are refused; endings ([`Store::write_ending`]) use the [`reserve`] |
//! | a sync or write fails | the store is [`StoreError::Broken`] until it is reopened: the content of the disk is unknown |
//! | database deleted or replaced while open | [`StoreError::Gone`], before any success is reported |
//! | database damaged, deleted, or replaced by an older copy | renamed, [`Note::Lost`] until [`Tx::accept_loss`] |
//! | database of another machine (cloned disk) | renamed, [`Note::OtherHost`] |
//! | database written by a newer gpushd | opened read-only, [`Note::NewerSchema`] |
//! | clock set back | [`Note::ClockBack`]; records are ordered by sequence number |
//!
//! The store detects damage by SQLite's integrity check, a seal over every row ([`record`]), and a
//! comparison of the whole schema. A [`watermark`] and a marker outside the file record the
//! progress of the database, to detect missing commits.

mod account_limits;
mod answer;
mod audit;
mod audit_event;
mod check;
mod condition;
mod created;
mod engine;
mod error;
mod fact;
mod files;
mod filesystem;
mod head;
mod journal;
mod journal_rows;
mod lease;
mod lock;
mod mps;
mod note;
mod open;
mod operation;
mod overrides;
mod ownership;
mod provenance;
mod quarantine;
mod record;
mod reserve;
mod schema;
mod shared_gpu;
mod store;
mod tx;
mod usage;
mod watermark;

pub use answer::{Answer, NewAnswer, StoredAnswer};
pub use audit::{AuditQuery, AuditRecord, NewAudit};
pub use audit_event::{AuditEvent, AuditedDevices, AuditedGpu, AuditedPlan, AuditedTarget, DONE, EndedOverride};
pub use condition::{Condition, ConditionKind, NewCondition, Scope};
pub use created::CreatedInstances;
pub use error::{OpenError, StoreError, Untrusted};
pub use fact::{BootRecord, KnownSince, Lost};
pub use lease::{LeaseHistory, LeaseRecord, LeaseSource, LeaseTerms, NewLease};
pub use note::{AccountOf, Bounds, Note, Options};
pub use open::Opened;
pub use operation::{
    GpuIntent, Intent, IntentSummary, NewOperation, OperationId, OperationRecord, Undo, UnfinishedOperation, may_become,
};
pub use overrides::{NewOverride, Override};
pub use schema::KNOWN as SCHEMA;
pub use shared_gpu::{ComputeModeSet, LevelSet, SharedGpu};
pub use store::{Pending, Statistics, Store};
pub use tx::{Tx, View};
pub use usage::{BillCorrection, ClosedMonth, GpuModel, HoursPage, OwnedHour, RequestCount, UsageBounds, UsageRecord};
