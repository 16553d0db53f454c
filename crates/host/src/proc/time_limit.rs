//! A time limit for reads that can block: the memory of a process, and files on the file system of its program.
//!
//! Such a read can block for any time: the process may hang in the driver, and a file system in user space may not
//! answer. So each read runs on a separate thread. If a read exceeds the limit, gpushd abandons its thread, and does not
//! read from the same process or file again until the thread has ended.
//!
//! The number of hanging reads is limited per account. So the processes of one user, also those with the user's
//! subordinate uids, do not keep gpushd from reading the processes of other users. Exception: while the name service does
//! not answer, all uids that gpushd has not resolved yet share one limit.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc, LazyLock, OnceLock, Weak,
        mpsc::{RecvTimeoutError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use super::status;
use crate::accounts::{Account, Accounts};
use gpush_locked::Locked;

/// How long one read may take.
const LIMIT: Duration = Duration::from_millis(500);

/// Maximum number of gpushd's hanging reads from processes of one account. At this number, gpushd reads from no other
/// process of this account.
const MOST_OF_ACCOUNT: usize = 4;

/// Maximum number of hanging reads. Only 128 accounts together can reach it.
const MOST: usize = 128 * MOST_OF_ACCOUNT;

/// Finds the account of a uid. Without it, each uid is an account.
static ACCOUNTS: OnceLock<Accounts> = OnceLock::new();

/// The reads from processes.
static READS: LazyLock<Reads> = LazyLock::new(|| Reads::new(LIMIT));

/// The reads of files that belong to no process. Separate, so that they do not count for the limits of processes.
static FILES: LazyLock<Reads> = LazyLock::new(|| Reads::new(LIMIT));

/// What a read concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Subject {
    /// The process with this pid and the account of its user.
    Process(i32, Account),
    File(PathBuf),
}

impl Subject {
    /// Returns whether the other subject is the same process or file.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Process(pid, _), Self::Process(other, _)) => pid == other,
            (Self::File(_), _) | (_, Self::File(_)) => self == other,
        }
    }

    /// Returns the account of the process.
    fn account(&self) -> Option<Account> {
        match self {
            Self::Process(_, account) => Some(*account),
            Self::File(_) => None,
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid, _) => write!(f, "process {pid}"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Reads that can block, each on a separate thread.
#[derive(Debug)]
struct Reads {
    limit: Duration,
    running: Locked<Vec<RunningRead>>,
}

/// A read whose thread runs.
#[derive(Debug)]
struct RunningRead {
    subject: Subject,
    /// Time at which the read exceeds the limit.
    until: Instant,
    /// Shows whether the thread still runs: only the thread holds the value.
    thread: Weak<()>,
}

/// Counts hanging reads for these accounts from now on.
pub fn count_hanging_reads_by_account(accounts: Accounts) {
    let _the_first_call_counts = ACCOUNTS.set(accounts);
}

/// Returns the account for which hanging reads of a process count. A uid whose account is not known yet counts like all
/// unknown uids.
fn account_of(uid: u32) -> Account {
    ACCOUNTS.get().map_or(Account::User(uid), |accounts| accounts.last(uid).unwrap_or(Account::Unknown))
}

/// Reads something from a process on a separate thread, and waits until the read has ended.
///
/// # Errors
/// The thread cannot be started. [`io::ErrorKind::TimedOut`] if the read exceeds the limit, or an earlier read of the
/// process still hangs, or too many reads hang.
pub(super) fn within_limit<T: Send + 'static>(pid: i32, read: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    // Count the read for the real uid. A user can start setuid programs that hang. With the effective uid, these
    // programs would use up the limit `MOST_OF_ACCOUNT` of their owner, and gpushd could not read the owner's other
    // processes.
    let uid = status::try_uids(pid)?.map_or(u32::MAX, |[real, ..]| real);
    READS.within_limit(Subject::Process(pid, account_of(uid)), read)
}

/// Reads something about a file on a separate thread, and waits until the read has ended.
///
/// # Errors
/// As [`within_limit`].
pub(super) fn file_within_limit<T: Send + 'static>(
    path: &Path,
    read: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    FILES.within_limit(Subject::File(path.to_owned()), read)
}

impl Reads {
    fn new(limit: Duration) -> Self {
        Self { limit, running: Locked::default() }
    }

    fn within_limit<T: Send + 'static>(
        &self,
        subject: Subject,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (sender, result) = sync_channel(1);
        let running = Arc::new(());
        let (name, until) = (subject.to_string(), Instant::now() + self.limit);
        self.begin(RunningRead { subject, until, thread: Arc::downgrade(&running) })?;
        thread::Builder::new().name("read-process".to_owned()).spawn(move || {
            let _the_caller_may_be_gone = sender.send(read());
            drop(running);
        })?;
        match result.recv_timeout(self.limit) {
            Ok(found) => Ok(found),
            Err(RecvTimeoutError::Timeout) => {
                Err(timed_out(format!("{name} did not answer within {} ms", self.limit.as_millis())))
            }
            Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("the reading thread failed")),
        }
    }

    /// Adds a read, unless too many other reads hang. Check and addition are one step, so that simultaneous reads of
    /// one process all count.
    fn begin(&self, new: RunningRead) -> io::Result<()> {
        let mut running = self.running.lock();
        running.retain(|read| read.thread.strong_count() > 0);
        let now = Instant::now();
        let hanging = || running.iter().filter(|read| read.until <= now);
        let subject = &new.subject;
        if hanging().any(|read| read.subject.is_same(subject)) {
            return Err(timed_out(format!("an earlier read of {subject} still hangs")));
        }
        let of = |account: Account| hanging().filter(|read| read.subject.account() == Some(account)).count();
        if subject.account().is_some_and(|one| of(one) >= MOST_OF_ACCOUNT) || hanging().count() >= MOST {
            return Err(timed_out(format!("cannot read {subject}: other reads still hang")));
        }
        running.push(new);
        Ok(())
    }
}

fn timed_out(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, text)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::users::{Lookups, NameService};

    /// Returns a read that hangs until the sender is dropped.
    fn hanging() -> (Sender<()>, impl FnOnce() + Send + 'static) {
        let (sender, receiver): (Sender<()>, Receiver<()>) = channel();
        let read = move || {
            let _the_sender_was_dropped = receiver.recv();
        };
        (sender, read)
    }

    fn process(pid: i32, uid: u32) -> Subject {
        Subject::Process(pid, Account::User(uid))
    }

    fn kind<T>(result: io::Result<T>) -> Option<io::ErrorKind> {
        result.err().map(|error| error.kind())
    }

    /// Fault: when gpushd read the environment of a process that hung in the driver, the kernel did not answer. From
    /// then on, gpushd did not end any unleased process.
    #[test]
    fn read_that_hangs_is_abandoned_and_hides_no_other_process() {
        let reads = Reads::new(Duration::from_millis(20));
        let (answer, read) = hanging();
        assert_eq!(kind(reads.within_limit(process(7, 1000), read)), Some(io::ErrorKind::TimedOut));
        assert_eq!(kind(reads.within_limit(process(7, 1000), || 1)), Some(io::ErrorKind::TimedOut), "no second thread");
        assert_eq!(reads.running.lock().len(), 1);
        let patient = Reads { limit: Duration::from_secs(60), ..reads };
        assert_eq!(patient.within_limit(process(8, 1000), || 2).unwrap(), 2);
        drop(answer);
        while patient.within_limit(process(7, 1000), || 3).is_err() {
            thread::yield_now();
        }
    }

    /// Fault: of several reads of one process that hung at the same time, only one counted.
    #[test]
    fn simultaneous_reads_of_one_process_all_count() {
        let reads = Reads::new(Duration::from_secs(60));
        let (thread, until) = (Arc::new(()), Instant::now() + reads.limit);
        for _ in 0..3 {
            reads.begin(RunningRead { subject: process(7, 1000), until, thread: Arc::downgrade(&thread) }).unwrap();
        }
        assert_eq!(reads.running.lock().len(), 3);
        drop(thread);
        assert_eq!(reads.within_limit(process(7, 1000), || 1).unwrap(), 1);
    }

    /// Fault: 16 subordinate uids of one user with 4 hanging processes each kept gpushd from reading any other process,
    /// so the leases of all users stayed `releasing`.
    #[test]
    fn hanging_reads_of_one_account_block_no_other_account() {
        let user = |uid: &u32| Some((*uid == 1001).then(|| "bob".to_owned()));
        let lookups = Lookups { user: Box::new(user), ..Lookups::empty() };
        let accounts = Accounts::new(NameService::with(lookups).unwrap(), 990, Path::new("/nowhere"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let account = |uid| runtime.block_on(accounts.of(uid)).unwrap();
        let reads = Reads::new(Duration::from_millis(1));
        let mut answers = Vec::new();
        for pid in 0..80 {
            // Each process has another uid that belongs to no user.
            let subject = Subject::Process(pid, account(4_100_000 + pid.cast_unsigned()));
            let (answer, read) = hanging();
            assert!(reads.within_limit(subject, read).is_err());
            answers.push(answer);
        }
        assert_eq!(reads.running.lock().len(), MOST_OF_ACCOUNT);
        let patient = Reads { limit: Duration::from_secs(60), ..reads };
        assert_eq!(patient.within_limit(Subject::Process(99, account(1001)), || 2).unwrap(), 2);
        drop(answers);
    }

    #[test]
    fn user_with_many_hanging_processes_hides_only_own_ones() {
        let reads = Reads::new(Duration::from_millis(1));
        let answers: Vec<Sender<()>> = (0..4)
            .map(|pid| {
                let (answer, read) = hanging();
                assert!(reads.within_limit(process(pid, 1000), read).is_err());
                answer
            })
            .collect();
        let patient = Reads { limit: Duration::from_secs(60), ..reads };
        assert!(
            patient.within_limit(process(9, 1000), || 1).is_err()
                && patient.within_limit(process(9, 1001), || 2).is_ok()
        );
        drop(answers);
    }

    /// Fault: a network file system did not answer, and each lookup of a file on it took another thread.
    #[test]
    fn hanging_file_takes_one_thread_and_hides_no_other_file() {
        let reads = Reads::new(Duration::from_millis(1));
        let file = |number: i32| Subject::File(format!("/net/{number}").into());
        let answers: Vec<Sender<()>> = (0..8)
            .map(|number| {
                let (answer, read) = hanging();
                let error = reads.within_limit(file(number), read).unwrap_err().to_string();
                assert_eq!(error, format!("/net/{number} did not answer within 1 ms"));
                answer
            })
            .collect();
        let error = reads.within_limit(file(3), || 1).unwrap_err().to_string();
        assert_eq!(error, "an earlier read of /net/3 still hangs");
        assert_eq!(reads.running.lock().len(), 8);
        let patient = Reads { limit: Duration::from_secs(60), ..reads };
        assert_eq!(patient.within_limit(file(8), || 2).unwrap(), 2);
        drop(answers);
    }
}
