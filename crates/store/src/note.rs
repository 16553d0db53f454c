//! Options for opening the store, and the notes that opening returns.

use std::{fmt, path::PathBuf, sync::Arc};

use jiff::{SignedDuration, Timestamp};

use crate::fact::Lost;

/// A function that returns the number of the account of a uid: a user with all subordinate uids. `None` if the account
/// is not known yet.
pub type AccountOf = Arc<dyn Fn(u32) -> Option<i64> + Send + Sync>;

/// A function that returns the time.
pub(crate) type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// Limits on stored records.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Maximum size in bytes of the records of one account, without ended leases. Answers, and the audit records about
    /// leases, about refused attempts, and about ended processes each get a quarter.
    pub account_bytes: usize,
    /// Maximum size in bytes of the records of all accounts, with the same quarters.
    pub all_bytes: usize,
    /// Maximum size in bytes of the ended leases of one account.
    pub account_lease_bytes: usize,
    /// Maximum size in bytes of all ended leases.
    pub lease_bytes: usize,
    /// Disk space in bytes that is reserved for recording the ends of operations and leases.
    pub reserve: u64,
    /// Maximum number of ended operations.
    pub operations: usize,
    /// Maximum number of ended leases of one account.
    pub leases_per_account: usize,
    /// Maximum number of ended leases of all users.
    pub leases: usize,
    /// Maximum number of answers under idempotency keys of one account.
    pub answers_per_account: usize,
    /// Maximum number of answers of all users, except root and gpushd's own user.
    pub answers: usize,
    /// Maximum number of audit records, without the records that every user can cause.
    pub audit_most: usize,
    /// Maximum number of one account's audit records about leases. The same limit applies to records about refused
    /// administrator requests, and to records about signals to the account's processes.
    pub audit_shares_per_account: usize,
    /// Maximum number of all users' audit records about leases. The same limit applies to each of the other kinds of
    /// records.
    pub audit_shares: usize,
    /// Minimum number of audit records that are kept at any age.
    pub audit_least: usize,
    /// Age beyond which audit records are deleted.
    pub audit_age: SignedDuration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            account_bytes: 1 << 20,
            all_bytes: 64 << 20,
            account_lease_bytes: 64 << 20,
            lease_bytes: 128 << 20,
            reserve: 4 << 20,
            operations: 1000,
            leases_per_account: 50_000,
            leases: 100_000,
            answers_per_account: 1000,
            answers: 10_000,
            audit_most: 20_000,
            audit_shares_per_account: 1000,
            audit_shares: 10_000,
            audit_least: 1000,
            audit_age: SignedDuration::from_hours(24 * 400),
        }
    }
}

/// Options for opening.
#[derive(Clone)]
pub struct Options {
    /// Boot on which gpushd runs, which is recorded with operations, conditions and losses.
    pub boot_id: String,
    /// Limits on stored records.
    pub bounds: Bounds,
    /// The marker: a file in a directory that a reboot clears. With the marker, the store can
    /// distinguish an emptied state directory from a first start. Without a marker, the store
    /// checks only the state directory itself.
    pub marker: Option<PathBuf>,
    /// Id of the machine, if it has one. With this id, the store recognizes the database of a
    /// cloned file system, and does not use that database.
    pub machine_id: Option<String>,
    /// A function that returns the time.
    pub clock: Arc<dyn Fn() -> Timestamp + Send + Sync>,
    /// Finds the account of a uid. Limits for records count per account. The records of a uid whose account is not known
    /// yet do not count for these limits.
    pub account_of: AccountOf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            boot_id: String::new(),
            bounds: Bounds::default(),
            marker: None,
            machine_id: None,
            clock: Arc::new(Timestamp::now),
            account_of: Arc::new(|uid| Some(uid.into())),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options").field("boot_id", &self.boot_id).field("bounds", &self.bounds).finish_non_exhaustive()
    }
}

/// An observation made while opening.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// There was no database: a first start.
    Created,
    /// The directory is in memory.
    Volatile {
        /// The directory.
        directory: PathBuf,
        /// Name of the file system.
        kind: &'static str,
    },
    /// The directory is on a file system whose storage is unknown.
    Opaque {
        /// The directory.
        directory: PathBuf,
        /// Name of the file system.
        kind: &'static str,
    },
    /// The database was migrated.
    Migrated {
        /// The old schema.
        from: u32,
        /// The new schema.
        to: u32,
    },
    /// A newer gpushd wrote the database, so it is read-only.
    NewerSchema {
        /// The file.
        file: PathBuf,
        /// Schema of the database.
        found: u32,
        /// Newest schema that this build supports.
        known: u32,
    },
    /// Recorded state was lost. If [`Lost::holds`] is set, the managed GPUs are `held`.
    Lost(Lost),
    /// The database belonged to another machine, because the file system was cloned or moved. The
    /// store has set the database aside.
    OtherHost {
        /// The original path.
        file: PathBuf,
        /// The new path.
        kept: Option<PathBuf>,
    },
    /// There is no space for the reserve. Until there is space, the store records only the ends of
    /// operations and leases.
    NoReserve {
        /// The directory.
        directory: PathBuf,
    },
    /// The clock is earlier than at the last commit.
    ClockBack {
        /// Clock at the last commit.
        last: Timestamp,
        /// Clock now.
        now: Timestamp,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Created => write!(f, "the state directory was empty; created a database"),
            Self::Volatile { directory, kind } => {
                write!(f, "the state directory {} is on {kind}: a reboot deletes its content", directory.display())
            }
            Self::Opaque { directory, kind } => write!(
                f,
                "the state directory {} is on {kind}: its content may not survive a power failure",
                directory.display()
            ),
            Self::Migrated { from, to } => write!(f, "the database was upgraded from schema {from} to {to}"),
            Self::NewerSchema { file, found, known } => write!(
                f,
                "the database {} was written by a newer gpushd (it has schema {found}, this gpushd supports {known}): \
                gpushd only reads the database and refuses changes; install the newer version of gpushd again",
                file.display()
            ),
            Self::Lost(lost) => {
                write!(f, "the database was lost: {}", lost.cause)?;
                if let Some(kept) = &lost.kept {
                    write!(f, "; the old database is kept as {}", kept.display())?;
                }
                match lost.holds {
                    true => write!(f, "; managed GPUs are held until `gpushctl recover` (administrator) or a reboot"),
                    false => write!(
                        f,
                        "; overrides and cordons are lost; `gpushctl recover` (administrator) acknowledges the loss"
                    ),
                }
            }
            Self::OtherHost { file, kept } => {
                write!(f, "the database {} belongs to another host (another machine-id)", file.display())?;
                if let Some(kept) = kept {
                    write!(f, "; the old database is kept as {}", kept.display())?;
                }
                write!(f, "; gpushd starts with an empty database")
            }
            Self::NoReserve { directory } => write!(
                f,
                "no space left on the disk of {}: gpushd can record only the end of operations and leases, and \
                refuses new ones; free some space (`df -h {}` shows the disk)",
                directory.display(),
                directory.display()
            ),
            Self::ClockBack { last, now } => {
                write!(f, "the clock was set back, from {last} to {now}: overrides expire later")
            }
        }
    }
}
