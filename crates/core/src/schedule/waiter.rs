//! What waits in the queue, and its position.

use std::fmt;

/// A position in the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiter {
    /// The operation with this id.
    Operation(String),
    /// The lease with this id.
    Lease(String),
}

impl Waiter {
    /// Returns the id: `op-7`, `L17`.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Operation(id) | Self::Lease(id) => id,
        }
    }
}

impl fmt::Display for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operation(id) => write!(f, "operation {id}"),
            Self::Lease(id) => write!(f, "lease {id}"),
        }
    }
}
