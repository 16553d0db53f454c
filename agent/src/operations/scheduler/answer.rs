//! The answers of the scheduler to a waiting lease.

use std::fmt;

use gpush_api::{ApiError, LeaseQueuePosition};
use tokio::sync::oneshot;

use super::capacity::Reserved;
use crate::state::Observed;

/// An answer of the scheduler to a lease.
#[derive(Debug)]
pub(crate) enum LeaseAnswer {
    /// Record the grant: its capacity is reserved.
    Grant(Reserved),
    /// Show what the request waits for.
    Waits(LeaseQueuePosition),
    /// The request can never be granted.
    Never(ApiError),
    /// Resolve the request with these readings, if its client is not needed for this: the request is of an earlier gpushd,
    /// or the config has changed. Drop the sender afterwards.
    Resolve(Observed, oneshot::Sender<()>),
}

/// Delivers the answers to the task of a lease.
pub(crate) trait LeaseInbox: fmt::Debug + Send + Sync {
    /// Delivers an answer. If the lease has ended, drops it.
    fn answer(&self, answer: LeaseAnswer);
}
