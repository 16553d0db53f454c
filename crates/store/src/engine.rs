//! The thread that owns the database, and reports success only after the sync.
//!
//! ```text
//!          ┌────────────────────────── wait for jobs ◄─────────────────────────┐
//!          ▼                                                                   │
//!  take all queued   ─► reads ─► BEGIN ─► each write in a savepoint ─► COMMIT = write log, sync
//!                                                                │             │
//!          quiet: sync watermark, checkpoint, prune              │         watermark, do the files
//!                                                                │         still exist? ─► replies
//!                                                                ▼
//!                      full: rolled back; endings are retried with the reserve released
//!                      any other failure: rolled back, `Broken` until reopened
//! ```
//!
//! The store is fine, broken, gone, or read-only. A fine store can change to another state; the
//! other states are final until gpushd restarts. The store does not repeat a failed sync: the
//! kernel may have dropped the unwritten pages, and a second sync could then report success.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use gpush_locked::Locked;
use jiff::Timestamp;
use rusqlite::{Connection, ErrorCode};

use crate::{
    error::{StoreError, from_sqlite},
    files::Files,
    head::Head,
    lock::Lock,
    note::{Bounds, Clock},
    record,
    reserve::Reserve,
    tx::{Tx, View},
    watermark::Watermarks,
};

/// Maximum number of jobs in one commit.
const LARGEST_BATCH: usize = 128;
/// Time without a job after which the thread does housekeeping.
const QUIET: Duration = Duration::from_millis(200);
/// Number of commits after which the thread checkpoints the log even without a quiet moment.
const COMMITS_A_CHECKPOINT: u64 = 256;
/// Number of commits after which the thread checkpoints the log if the disk is full.
const COMMITS_A_CHECKPOINT_WHEN_FULL: u64 = 8;
/// Minimum time between two deletions of old records, unless there were many commits.
const PRUNE_EVERY: Duration = Duration::from_secs(3600);
/// Number of commits after which old records are deleted at the next quiet moment.
const COMMITS_A_PRUNE: u64 = 256;
/// Number of commits after which old records are deleted even without a quiet moment.
const MOST_COMMITS_A_PRUNE: u64 = 1024;

/// Time between two checks for space on a full disk. Because of these checks, the store becomes healthy again even if
/// no write arrives.
const SPACE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The kind of a write, which decides whether the store accepts the write on a full disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Any change that does not end something.
    Ordinary,
    /// The end of an operation, a lease or an override. May use the reserve.
    Ending,
}

/// A write and its reply.
pub(crate) trait Write: Send {
    fn class(&self) -> Class;
    /// Executes the write. The store calls this method again if the first transaction was rolled back because another
    /// write failed.
    fn run(&mut self, tx: &mut Tx<'_>) -> Result<(), StoreError>;
    /// Reports the outcome to the caller.
    fn reply(self: Box<Self>, outcome: Result<(), StoreError>);
}

/// A read that sends its result to the caller.
pub(crate) type Read = Box<dyn FnOnce(&View<'_>) + Send>;

/// A job for the store's thread.
pub(crate) enum Job {
    Read(Read),
    Write(Box<dyn Write>),
}

/// Counters that other threads read.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Jobs in the queue.
    pub(crate) waiting: AtomicUsize,
    /// Commits. Each has one sync.
    pub(crate) commits: AtomicU64,
    /// Writes in all commits so far.
    pub(crate) writes: AtomicU64,
    /// Error that the store returns for each write; `None` while it accepts writes.
    pub(crate) trouble: Locked<Option<StoreError>>,
}

impl Counters {
    /// Sets the reason why writes are refused now. Logs once when the disk becomes full, and once when the disk has
    /// space again.
    pub(crate) fn set_refusal(&self, refusal: Option<StoreError>) {
        let is_full = |trouble: &Option<StoreError>| matches!(trouble, Some(StoreError::Full { .. }));
        let mut known = self.trouble.lock();
        match (is_full(&known), &refusal) {
            (false, Some(full @ StoreError::Full { .. })) => tracing::error!("{full}"),
            (true, None) => tracing::info!("the disk of the state directory has space again"),
            _ => {}
        }
        *known = refusal;
    }

    fn is_full(&self) -> bool {
        let trouble = self.trouble.lock();
        matches!(*trouble, Some(StoreError::Full { .. }))
    }
}

/// Which jobs the store accepts.
#[derive(Debug, Clone)]
pub(crate) enum EngineCondition {
    /// Reads and writes.
    Fine,
    /// Only reads. Writes fail with this error.
    Refusing(StoreError),
}

/// The store's thread, which owns the database.
pub(crate) struct Engine {
    pub(crate) connection: Connection,
    pub(crate) files: Files,
    pub(crate) head: Head,
    pub(crate) condition: EngineCondition,
    pub(crate) sealed: bool,
    pub(crate) watermarks: Watermarks,
    pub(crate) reserve: Reserve,
    pub(crate) bounds: Bounds,
    pub(crate) clock: Clock,
    pub(crate) instance: String,
    pub(crate) boot_id: String,
    pub(crate) counters: Arc<Counters>,
    pub(crate) commits_since_checkpoint: u64,
    pub(crate) commits_since_prune: u64,
    pub(crate) pruned: Option<Instant>,
    /// The lock of the state directory. This field is dropped last, because another process may open the database as
    /// soon as the lock is free.
    pub(crate) _lock: Lock,
}

/// A write in a batch.
struct Entry {
    job: Box<dyn Write>,
    outcome: Result<(), StoreError>,
}

/// Why a batch failed.
enum Failure {
    Full,
    Broken(StoreError),
}

impl Engine {
    /// Serves jobs until all senders are dropped.
    pub(crate) fn run(mut self, jobs: &Receiver<Job>) {
        let mut looked = Instant::now();
        loop {
            if self.counters.is_full() && looked.elapsed() >= SPACE_CHECK_INTERVAL {
                self.check_for_space();
                looked = Instant::now();
            }
            let patience = match (self.commits_since_checkpoint > 0, self.counters.is_full()) {
                (true, _) => Some(QUIET),
                (false, true) => Some(SPACE_CHECK_INTERVAL),
                (false, false) => None,
            };
            let first = match patience {
                Some(patience) => match jobs.recv_timeout(patience) {
                    Ok(job) => job,
                    Err(RecvTimeoutError::Timeout) => {
                        if self.commits_since_checkpoint > 0 {
                            self.do_housekeeping();
                        }
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                },
                None => match jobs.recv() {
                    Ok(job) => job,
                    Err(_) => break,
                },
            };
            let mut batch = vec![first];
            while batch.len() < LARGEST_BATCH
                && let Ok(job) = jobs.try_recv()
            {
                batch.push(job);
            }
            self.counters.waiting.fetch_sub(batch.len(), Ordering::Relaxed);
            self.serve(batch);
            if self.commits_since_prune >= MOST_COMMITS_A_PRUNE {
                // Do housekeeping even without a quiet moment. Otherwise, a user who keeps the store busy could prevent
                // the deletion of old records.
                self.do_housekeeping();
            } else if self.commits_since_checkpoint >= self.commits_a_checkpoint() {
                self.checkpoint();
            }
        }
        if self.commits_since_checkpoint > 0 {
            self.do_housekeeping();
        }
    }

    fn serve(&mut self, batch: Vec<Job>) {
        let mut writes = Vec::new();
        let now = (self.clock)();
        for job in batch {
            match job {
                Job::Read(read) => {
                    let view = View { connection: &self.connection, head: &self.head, now, sealed: self.sealed };
                    // If the read panics, its reply channel closes, and the caller gets an error.
                    let _ = catch_unwind(AssertUnwindSafe(|| read(&view)));
                }
                Job::Write(job) => writes.push(Entry { job, outcome: Ok(()) }),
            }
        }
        if !writes.is_empty() {
            self.write(&mut writes, now);
            for entry in writes {
                let outcome = entry.outcome.map_err(|error| self.files.locate(error));
                entry.job.reply(outcome);
            }
        }
    }

    /// Executes a batch of writes and stores each outcome in its entry.
    fn write(&mut self, entries: &mut [Entry], now: Timestamp) {
        let full = StoreError::Full { path: self.files.directory.clone() };
        if let EngineCondition::Refusing(error) = &self.condition {
            return refuse(entries, |_| true, error);
        }
        if !self.reserve.restore() {
            // Refuse ordinary writes, because the remaining disk space is reserved for the ends of operations and
            // leases.
            self.counters.set_refusal(Some(full.clone()));
            refuse(entries, |entry| entry.job.class() == Class::Ordinary, &full);
        }
        match self.attempt(entries, |entry| entry.outcome.is_ok(), now) {
            Ok(()) => {
                if self.reserve.is_reserved() {
                    self.counters.set_refusal(None);
                }
                return;
            }
            Err(Failure::Broken(error)) => return refuse(entries, |entry| entry.outcome.is_ok(), &error),
            Err(Failure::Full) => self.counters.set_refusal(Some(full.clone())),
        }
        refuse(entries, |entry| entry.job.class() == Class::Ordinary && entry.outcome.is_ok(), &full);
        if !entries.iter().any(|entry| entry.job.class() == Class::Ending) {
            return;
        }
        tracing::debug!("using the reserve of disk space to record the end of operations and leases");
        self.reserve.release();
        // Now there is enough space to checkpoint the log. After the checkpoint, SQLite reuses the log from its
        // beginning.
        self.checkpoint();
        let ending = |entry: &Entry| entry.job.class() == Class::Ending;
        match self.attempt(entries, ending, now) {
            Ok(()) => {}
            Err(Failure::Full) => refuse(entries, ending, &full),
            Err(Failure::Broken(error)) => refuse(entries, ending, &error),
        }
    }

    /// Executes the selected entries in one transaction. If that fails, nothing has changed.
    fn attempt(
        &mut self,
        entries: &mut [Entry],
        meant: impl Fn(&Entry) -> bool,
        now: Timestamp,
    ) -> Result<(), Failure> {
        let before = self.head.clone();
        let done = self.transact(entries, meant, now);
        if done.is_err() {
            self.head = before;
            if !self.connection.is_autocommit() {
                // Ignore an error: if the rollback also fails, closing the connection ends the transaction.
                let _ = self.connection.execute_batch("ROLLBACK");
            }
        }
        if let Err(Failure::Broken(error)) = &done {
            let cause = error.to_string();
            tracing::error!(cause, "the store failed");
            let error = match error {
                StoreError::Uncertain { file, cause } => {
                    StoreError::Broken { file: file.clone(), cause: cause.clone() }
                }
                other => self.files.locate(other.clone()),
            };
            self.refuse_from_now_on(error);
        }
        done
    }

    fn transact(
        &mut self,
        entries: &mut [Entry],
        meant: impl Fn(&Entry) -> bool,
        now: Timestamp,
    ) -> Result<(), Failure> {
        let before = self.head.sequence;
        self.sql("BEGIN IMMEDIATE")?;
        let mut successes = 0;
        for entry in entries.iter_mut().filter(|entry| meant(entry)) {
            let head = self.head.clone();
            self.sql("SAVEPOINT job")?;
            let mut tx = Tx {
                connection: &self.connection,
                head: &mut self.head,
                now,
                instance: &self.instance,
                boot_id: &self.boot_id,
            };
            let ran = catch_unwind(AssertUnwindSafe(|| entry.job.run(&mut tx)));
            entry.outcome = ran.unwrap_or_else(|_| Err(StoreError::Internal("the change panicked".to_owned())));
            match &entry.outcome {
                Ok(()) => successes += 1,
                Err(StoreError::Full { .. }) => return Err(Failure::Full),
                Err(error @ (StoreError::Broken { .. } | StoreError::Corrupt { .. })) => {
                    return Err(Failure::Broken(error.clone()));
                }
                Err(_) => {
                    self.sql("ROLLBACK TO job")?;
                    self.head = head;
                }
            }
            self.sql("RELEASE job")?;
        }
        if self.head.sequence == before {
            // Every change takes a sequence number. This transaction took none, so it changed nothing.
            return self.sql("ROLLBACK");
        }
        self.head.at = now;
        record::put(&self.connection, &self.head).map_err(failure)?;
        if let Err(error) = self.connection.execute_batch("COMMIT") {
            return Err(match error.sqlite_error_code() {
                Some(ErrorCode::DiskFull) => Failure::Full,
                Some(_) | None => Failure::Broken(StoreError::Uncertain {
                    file: self.files.database.clone(),
                    cause: error.to_string(),
                }),
            });
        }
        self.watermarks.set(self.head.sequence);
        if let Some(path) = self.files.find_missing_or_replaced() {
            return Err(Failure::Broken(StoreError::Gone { file: path.to_owned() }));
        }
        self.counters.commits.fetch_add(1, Ordering::Relaxed);
        self.counters.writes.fetch_add(successes, Ordering::Relaxed);
        self.commits_since_checkpoint += 1;
        self.commits_since_prune += 1;
        Ok(())
    }

    /// Returns the number of commits after which the log is checkpointed. On a full disk, the
    /// number is small, so that the log stays short and the reserve suffices to record the ends of
    /// many operations.
    fn commits_a_checkpoint(&self) -> u64 {
        if self.counters.is_full() { COMMITS_A_CHECKPOINT_WHEN_FULL } else { COMMITS_A_CHECKPOINT }
    }

    /// Checks whether a disk that was full has space again.
    fn check_for_space(&mut self) {
        if matches!(self.condition, EngineCondition::Fine)
            && self.reserve.restore()
            && self.reserve.has_room_for_writes()
        {
            self.counters.set_refusal(None);
        }
    }

    fn refuse_from_now_on(&mut self, error: StoreError) {
        self.counters.set_refusal(Some(error.clone()));
        self.condition = EngineCondition::Refusing(error);
    }

    fn sql(&self, sql: &str) -> Result<(), Failure> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|error| failure(from_sqlite(&error)))?;
        statement.execute([]).map(|_| ()).map_err(|error| failure(from_sqlite(&error)))
    }

    /// Does the housekeeping for a quiet moment.
    fn do_housekeeping(&mut self) {
        let due =
            self.commits_since_prune >= COMMITS_A_PRUNE || self.pruned.is_none_or(|last| last.elapsed() >= PRUNE_EVERY);
        if due && matches!(self.condition, EngineCondition::Fine) && self.reserve.restore() {
            let mut entries = [Entry { job: Box::new(Prune { bounds: self.bounds }), outcome: Ok(()) }];
            let now = (self.clock)();
            self.write(&mut entries, now);
            self.commits_since_prune = 0;
            self.pruned = Some(Instant::now());
        }
        self.watermarks.sync();
        self.checkpoint();
    }

    /// Checkpoints the log. If the disk is too full for a checkpoint, the log continues to grow.
    fn checkpoint(&mut self) {
        self.commits_since_checkpoint = 0;
        if matches!(self.condition, EngineCondition::Refusing(_)) {
            return;
        }
        let done = self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
        if let Err(error) = done {
            if error.sqlite_error_code() == Some(ErrorCode::DiskFull) {
                tracing::debug!("no space to write the log into the database");
            } else {
                tracing::warn!(%error, "cannot write the log into the database");
                // Do not repeat the checkpoint: the kernel may have dropped the unwritten pages, and a second sync
                // could then report success.
                let file = self.files.database.clone();
                self.refuse_from_now_on(StoreError::Broken { file, cause: error.to_string() });
            }
        }
    }
}

fn failure(error: StoreError) -> Failure {
    match error {
        StoreError::Full { .. } => Failure::Full,
        other => Failure::Broken(other),
    }
}

fn refuse(entries: &mut [Entry], which: impl Fn(&Entry) -> bool, error: &StoreError) {
    for entry in entries.iter_mut().filter(|entry| which(entry)) {
        entry.outcome = Err(error.clone());
    }
}

/// The deletion of old records, executed like any other write.
struct Prune {
    bounds: Bounds,
}

impl Write for Prune {
    fn class(&self) -> Class {
        Class::Ordinary
    }

    fn run(&mut self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        tx.prune(&self.bounds).map(|_| ())
    }

    fn reply(self: Box<Self>, _outcome: Result<(), StoreError>) {}
}

impl Tx<'_> {
    /// Deletes records beyond the limits and returns their number.
    pub(crate) fn prune(&mut self, bounds: &Bounds) -> Result<usize, StoreError> {
        let operations = self.prune_operations(bounds.operations)?;
        let leases = self.prune_leases(bounds)? + self.prune_notices_and_keeps()?;
        let answers = self.prune_answers(bounds)?;
        let audit = self.prune_audit(bounds)?;
        let forgotten = operations + leases + answers + audit;
        if forgotten > 0 {
            self.next_sequence();
        }
        Ok(forgotten)
    }
}
