//! Why the store cannot be opened, or why a change was not recorded. Each message names the file, the cause and a
//! command that helps.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use gpush_api::{ApiError, Code, LeaseId, LeaseState, OperationState};

use crate::operation::OperationId;

/// Why the store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The state directory cannot be created, or gpushd cannot write to it.
    #[error("cannot use the state directory: {}: {}", path.display(), unusable(path, cause))]
    Unusable {
        /// The directory, or the file in it.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// Another user owns the state directory or a file in it, or users other than the owner have write access to the
    /// directory or file.
    #[error("{} {why}, so the records of gpushd are not safe: {}; or give another directory with \
        --state-dir", path.display(), why.way_out(path))]
    Untrusted {
        /// The directory, or the file in it.
        path: PathBuf,
        /// The reason.
        why: Untrusted,
    },
    /// Another gpushd holds the lock of the state directory.
    #[error("another gpushd {}uses the state directory {}; stop that gpushd (`systemctl stop gpushd`{}), or give \
             another directory with --state-dir", by(*.holder, "(pid ", ") "), path.display(),
             by(*.holder, " or `kill ", "`"))]
    Held {
        /// The directory.
        path: PathBuf,
        /// Pid of the other gpushd, if it could be read.
        holder: Option<u32>,
    },
    /// The directory is on a network file system.
    #[error("the state directory {} is on {kind}, whose locks and syncs are not reliable enough; give a local \
        directory with --state-dir", path.display())]
    NetworkFilesystem {
        /// The directory.
        path: PathBuf,
        /// Name of the file system.
        kind: &'static str,
    },
    /// There is no space to create or migrate the database.
    #[error("no space left on the disk of {}; free some space (`df -h {}` shows the disk), then start gpushd again",
            path.display(), path.display())]
    Full {
        /// The directory.
        path: PathBuf,
    },
    /// The database cannot be opened or read. Its content is not the cause.
    #[error("cannot open the database {}: {cause}; check the disk with `dmesg`, and the permissions of the file with \
    `ls -l {}`", file.display(), file.display())]
    Database {
        /// The file.
        file: PathBuf,
        /// SQLite's message.
        cause: String,
    },
}

/// Returns why a path cannot be used, and what an administrator can do.
fn unusable(path: &Path, cause: &io::Error) -> String {
    let shown = path.display();
    match cause.kind() {
        io::ErrorKind::ReadOnlyFilesystem => {
            let directory = path.ancestors().find(|path| path.is_dir()).unwrap_or(path).display();
            format!(
                "its file system is mounted read-only; `findmnt -T {directory}` shows the mount point, and `mount -o \
                 remount,rw MOUNTPOINT` makes it writable"
            )
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "this path, or a part of it, is not a directory; move the file away, or give another directory with \
             --state-dir"
                .to_owned()
        }
        _ => format!("{cause}; check it with `ls -la {shown}`, or give another directory with --state-dir"),
    }
}

/// Why a directory or a file is not trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Untrusted {
    /// Another user owns the directory or file.
    Owner {
        /// The owner.
        uid: u32,
        /// gpushd's own uid.
        own: u32,
    },
    /// Users other than the owner have write access to the directory or file.
    Mode {
        /// The owner.
        uid: u32,
        /// Permissions of the directory or file.
        mode: u32,
    },
    /// The path is a symbolic link.
    Link,
    /// The path does not lead to a regular file.
    NoFile,
}

impl fmt::Display for Untrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owner { uid, own } => {
                write!(
                    f,
                    "belongs to uid {uid}, but gpushd runs as {}",
                    if *own == 0 { "root" } else { "another user" }
                )
            }
            Self::Mode { uid, mode } => {
                write!(f, "can be written by users other than its owner (uid {uid}, mode {mode:04o})")
            }
            Self::Link => write!(f, "is a symbolic link"),
            Self::NoFile => write!(f, "is not a regular file"),
        }
    }
}

impl Untrusted {
    /// Returns the command with which an administrator solves the problem.
    fn way_out(self, path: &Path) -> String {
        let path = path.display();
        match self {
            Self::Owner { own, .. } => {
                format!("check its content with `ls -la {path}`, then run `chown {own} {path}` and `chmod go-w {path}`")
            }
            Self::Mode { .. } => format!("run `chmod go-w {path}`"),
            Self::Link | Self::NoFile => format!("run `ls -l {path}` to see who put it there, then `rm {path}`"),
        }
    }
}

fn by(pid: Option<u32>, before: &str, after: &str) -> String {
    pid.map_or_else(String::new, |pid| format!("{before}{pid}{after}"))
}

/// Why a transaction failed. Nothing of the transaction is recorded, with two exceptions: after
/// [`StoreError::Uncertain`] and [`StoreError::Gone`], only a restart shows whether the transaction
/// was recorded.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StoreError {
    /// The disk is full. The ends of operations and leases can still be recorded.
    #[error("no space left on the disk of {}: gpushd can record only the end of operations and leases, and refuses \
    new ones; free some space (`df -h {}` shows the disk)",
            path.display(), path.display())]
    Full {
        /// The state directory.
        path: PathBuf,
    },
    /// The database was written by a newer gpushd.
    #[error("the database {} was written by a newer gpushd (it has schema {found}, this gpushd supports {known}): \
    gpushd only reads the database; install the newer version of gpushd again", file.display())]
    ReadOnly {
        /// The file.
        file: PathBuf,
        /// Schema of the file.
        found: u32,
        /// Newest schema that this build supports.
        known: u32,
    },
    /// The database was deleted or replaced while gpushd was running.
    #[error("{} was deleted or replaced while gpushd was running, so records may be lost; run `systemctl restart \
    gpushd`: gpushd then reports the loss", file.display())]
    Gone {
        /// The missing file.
        file: PathBuf,
    },
    /// The disk failed during this transaction. Only a restart shows whether the transaction was
    /// recorded.
    #[error("it is not known whether the change is recorded in {}: {cause}; check the disk with `dmesg`, then run \
    `systemctl restart gpushd`", file.display())]
    Uncertain {
        /// The file.
        file: PathBuf,
        /// SQLite's message.
        cause: String,
    },
    /// The disk failed in an earlier transaction.
    #[error("the database {} failed: {cause}; check the disk with `dmesg`, then run `systemctl restart gpushd`",
        file.display())]
    Broken {
        /// The file.
        file: PathBuf,
        /// The cause.
        cause: String,
    },
    /// A record is damaged.
    #[error(
        "a record of {table} is damaged: {what}; run `systemctl restart gpushd`: gpushd then renames the damaged \
        database and creates a new one"
    )]
    Corrupt {
        /// Table.
        table: String,
        /// The damage.
        what: String,
    },
    /// A record about the use of GPUs is damaged. Leases and operations are not affected.
    #[error("a record of {table} is damaged: {what}; the figures of its period are lost, leases are not affected")]
    DamagedUse {
        /// Table.
        table: String,
        /// The damage.
        what: String,
    },
    /// The operation cannot change from its current state to the requested state.
    #[error("operation {operation} is {from} and can't become {to}")]
    Transition {
        /// The operation.
        operation: OperationId,
        /// Current stage of the operation.
        from: OperationState,
        /// The stage that was requested.
        to: OperationState,
    },
    /// There is no such operation, or its record was deleted.
    #[error("there is no operation {0}; `gpushctl operation list` shows the known operations")]
    NoSuchOperation(OperationId),
    /// The lease cannot change from its current state to the requested state.
    #[error("lease {lease} is {from} and can't become {to}")]
    LeaseTransition {
        /// The lease.
        lease: LeaseId,
        /// Current state of the lease.
        from: LeaseState,
        /// The state that was requested.
        to: LeaseState,
    },
    /// There is no such lease, or its record was deleted.
    #[error("there is no lease {0}; list the leases with `gpushctl lease list`")]
    NoSuchLease(LeaseId),
    /// A record is too large to be stored.
    #[error("a record of {table} would take {bytes} bytes; {most} are allowed")]
    TooLarge {
        /// Table.
        table: &'static str,
        /// Size of the record.
        bytes: usize,
        /// Maximum size.
        most: usize,
    },
    /// The record was not stored, because it could not be read back: its JSON is nested too deeply.
    #[error("cannot store a record of {table}, because gpushd could not read this record later: {cause}")]
    Unreadable {
        /// Table.
        table: &'static str,
        /// The cause.
        cause: String,
    },
    /// SQLite refused a statement because of a bug in gpush.
    #[error("the database returned an error: {0}")]
    Internal(String),
    /// The queue is full.
    #[error("gpushd cannot record this change now: {waiting} other changes are waiting; try again")]
    Busy {
        /// Number of queued jobs.
        waiting: usize,
    },
    /// The store was closed, or its thread has ended.
    #[error("gpushd is stopping and records no more changes")]
    Closed,
    /// The caller's closure returned an error.
    #[error("{0}")]
    Refused(Box<ApiError>),
}

impl StoreError {
    /// Returns whether the same change may be recorded later, without an action of an administrator on the database.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Full { .. } | Self::Busy { .. } | Self::Closed => true,
            Self::Refused(own) => own.retryable,
            Self::ReadOnly { .. }
            | Self::Gone { .. }
            | Self::Uncertain { .. }
            | Self::Broken { .. }
            | Self::Corrupt { .. }
            | Self::DamagedUse { .. }
            | Self::Transition { .. }
            | Self::NoSuchOperation(_)
            | Self::LeaseTransition { .. }
            | Self::NoSuchLease(_)
            | Self::TooLarge { .. }
            | Self::Unreadable { .. }
            | Self::Internal(_) => false,
        }
    }
}

impl From<ApiError> for StoreError {
    fn from(error: ApiError) -> Self {
        Self::Refused(Box::new(error))
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let code = match &error {
            StoreError::Refused(own) => return (**own).clone(),
            StoreError::NoSuchOperation(_) | StoreError::NoSuchLease(_) => Code::NotFound,
            StoreError::Transition { .. } | StoreError::LeaseTransition { .. } => Code::Conflict,
            StoreError::TooLarge { .. } | StoreError::Unreadable { .. } => Code::BadRequest,
            StoreError::Full { .. }
            | StoreError::Busy { .. }
            | StoreError::Closed
            | StoreError::ReadOnly { .. }
            | StoreError::Gone { .. }
            | StoreError::Broken { .. } => Code::Unavailable,
            StoreError::Uncertain { .. }
            | StoreError::Corrupt { .. }
            | StoreError::DamagedUse { .. }
            | StoreError::Internal(_) => Code::Internal,
        };
        // Some messages end with a semicolon and the hint.
        let text = error.to_string();
        let mut api = match text.rsplit_once("; ") {
            Some((message, hint)) => ApiError::new(code, message).hint(hint),
            None => ApiError::new(code, text),
        };
        api.retryable = error.is_temporary();
        api
    }
}

/// Converts SQLite's error to a [`StoreError`]. Do not use this function for an error of a commit.
pub(crate) fn from_sqlite(error: &rusqlite::Error) -> StoreError {
    use rusqlite::ErrorCode;
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => StoreError::Full { path: PathBuf::new() },
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            StoreError::Corrupt { table: "the database".to_owned(), what: error.to_string() }
        }
        // The content of the file does not cause these errors. The machine or another program does.
        Some(
            ErrorCode::SystemIoFailure
            | ErrorCode::CannotOpen
            | ErrorCode::ReadOnly
            | ErrorCode::PermissionDenied
            | ErrorCode::DatabaseBusy
            | ErrorCode::DatabaseLocked
            | ErrorCode::FileLockingProtocolFailed
            | ErrorCode::OutOfMemory,
        ) => StoreError::Broken { file: PathBuf::new(), cause: error.to_string() },
        Some(_) | None => StoreError::Internal(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Earlier fault: each message asked for another directory, which is no use for the service.
    #[test]
    fn unusable_directory_is_reported_with_its_cause() {
        let shown = |path: &str, kind: io::ErrorKind| {
            OpenError::Unusable { path: PathBuf::from(path), cause: kind.into() }.to_string()
        };
        let printed = shown("/no-such-directory/gpush/lock", io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(
            printed,
            "cannot use the state directory: /no-such-directory/gpush/lock: its file system is mounted read-only; \
             `findmnt -T /` shows the mount point, and `mount -o remount,rw MOUNTPOINT` makes it writable"
        );
        let printed = shown("/var/lib/gpush", io::ErrorKind::NotADirectory);
        assert!(printed.contains("/var/lib/gpush: this path, or a part of it, is not a directory"), "{printed}");
        let printed = shown("/var/lib/gpush/lock", io::ErrorKind::PermissionDenied);
        assert!(printed.contains("permission denied; check it with `ls -la /var/lib/gpush/lock`"), "{printed}");
    }

    #[test]
    fn api_errors_keep_the_remedy_as_their_hint() {
        let error = ApiError::from(StoreError::Full { path: PathBuf::from("/var/lib/gpush") });
        assert_eq!((error.code, error.retryable), (Code::Unavailable, true));
        assert_eq!(error.hint.as_deref(), Some("free some space (`df -h /var/lib/gpush` shows the disk)"));
        let own = ApiError::new(Code::Blocked, "GPU 0 is in use");
        assert_eq!(ApiError::from(StoreError::from(own.clone())), own);
    }
}
