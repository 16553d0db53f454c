//! The types that a caller's closure receives: [`View`] for reading, [`Tx`] for reading and changing.

use jiff::Timestamp;
use rusqlite::Connection;

use crate::head::Head;

/// The state of the store at the last commit. Within a transaction, the view includes the
/// transaction's changes so far.
pub struct View<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) head: &'a Head,
    pub(crate) now: Timestamp,
    /// Whether the seals of rows can be checked. A newer schema may compute seals differently.
    pub(crate) sealed: bool,
}

/// A transaction. Either all of its changes are recorded or none.
pub struct Tx<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) head: &'a mut Head,
    pub(crate) now: Timestamp,
    pub(crate) instance: &'a str,
    pub(crate) boot_id: &'a str,
}

impl View<'_> {
    /// Returns the system time, truncated to milliseconds and constant during a transaction.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.now
    }

    /// Returns the sequence number of the last change. Sequence numbers order records even if the clock is set back.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.head.sequence
    }

    /// Returns the generation of the desired state outside the config. Each change of an override increments it.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.head.generation
    }
}

impl Tx<'_> {
    /// Increments and returns the sequence number. Each change of a record takes the next number.
    pub(crate) fn next_sequence(&mut self) -> u64 {
        self.head.sequence += 1;
        self.head.sequence
    }

    /// Increments the generation of the desired state, for example after a config reload. Functions
    /// that change overrides increment the generation themselves.
    pub fn next_generation(&mut self) -> u64 {
        self.next_sequence();
        self.head.generation += 1;
        self.head.generation
    }

    /// Returns the system time, truncated to milliseconds and constant during a transaction.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.now
    }

    /// Returns the generation of the desired state outside the config, including changes of this transaction.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.head.generation
    }

    /// Returns a view of the transaction.
    pub(crate) fn view(&self) -> View<'_> {
        View { connection: self.connection, head: self.head, now: self.now, sealed: true }
    }

    /// Runs `read` on the current state of the transaction.
    pub fn read<T>(&self, read: impl FnOnce(&View<'_>) -> T) -> T {
        read(&self.view())
    }
}
