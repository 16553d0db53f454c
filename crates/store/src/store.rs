//! The handle of the store, which is cheap to clone. The methods of the handle do not block the
//! caller, except [`Pending::wait`].

use std::{
    fmt,
    future::Future,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, atomic::Ordering, mpsc::Sender},
    task::{Context, Poll},
    thread::JoinHandle,
};

use tokio::sync::oneshot;

use crate::{
    engine::{Class, Counters, Job, Write},
    error::StoreError,
    tx::{Tx, View},
};

/// Maximum queue length; further jobs are refused with [`StoreError::Busy`].
const MOST_WAITING: usize = 4096;

/// The open store. Dropping the last handle waits for the queued jobs and closes the database.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<Counters>,
    directory: PathBuf,
    instance: String,
    epoch: String,
}

/// The future result of a transaction. Outside an async runtime, use [`Pending::wait`]. The
/// transaction is executed even if this value is dropped.
#[must_use = "whether it is recorded is known only from its outcome"]
#[derive(Debug)]
pub struct Pending<T> {
    outcome: oneshot::Receiver<Result<T, StoreError>>,
}

/// Counters since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    /// Jobs in the queue.
    pub waiting: usize,
    /// Commits. Each has one sync.
    pub commits: u64,
    /// Writes in all commits so far.
    pub writes: u64,
}

impl<T> Pending<T> {
    /// Blocks the thread until the result arrives. Do not call this from async code.
    ///
    /// # Errors
    /// Errors of the transaction.
    pub fn wait(self) -> Result<T, StoreError> {
        self.outcome.blocking_recv().unwrap_or(Err(StoreError::Closed))
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.outcome).poll(context).map(|outcome| outcome.unwrap_or(Err(StoreError::Closed)))
    }
}

struct Typed<T, F> {
    class: Class,
    change: F,
    made: Option<T>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<T, F> Write for Typed<T, F>
where
    T: Send,
    F: FnMut(&mut Tx<'_>) -> Result<T, StoreError> + Send,
{
    fn class(&self) -> Class {
        self.class
    }

    fn run(&mut self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        self.made = None;
        self.made = Some((self.change)(tx)?);
        Ok(())
    }

    fn reply(self: Box<Self>, outcome: Result<(), StoreError>) {
        let Self { made, reply, .. } = *self;
        // The caller may have stopped waiting.
        let _ = reply.send(outcome.and_then(|()| made.ok_or(StoreError::Closed)));
    }
}

impl Store {
    pub(crate) fn new(
        jobs: Sender<Job>,
        thread: JoinHandle<()>,
        counters: Arc<Counters>,
        directory: PathBuf,
        instance: String,
        epoch: String,
    ) -> Self {
        let (jobs, thread) = (Some(jobs), Some(thread));
        Self { inner: Arc::new(Inner { jobs, thread, counters, directory, instance, epoch }) }
    }

    /// Records the changes of `change`, all or nothing, and returns its value when they are
    /// durable. If the closure returns an error, nothing changes. The closure runs on the store's
    /// thread, and must not block or use the store. The store may call the closure more than once.
    /// In that case, the store discards the changes of the earlier calls.
    pub fn write<T, F>(&self, change: F) -> Pending<T>
    where
        T: Send + 'static,
        F: FnMut(&mut Tx<'_>) -> Result<T, StoreError> + Send + 'static,
    {
        self.submit(Class::Ordinary, change)
    }

    /// Records an end: an operation that finished or was rolled back, a lease that was released, or
    /// an override that expired. Works like [`Store::write`], but on a full disk it may use the
    /// reserve.
    pub fn write_ending<T, F>(&self, change: F) -> Pending<T>
    where
        T: Send + 'static,
        F: FnMut(&mut Tx<'_>) -> Result<T, StoreError> + Send + 'static,
    {
        self.submit(Class::Ending, change)
    }

    /// Reads from the store. The read sees exactly the changes that were reported as recorded.
    pub fn read<T, F>(&self, look: F) -> Pending<T>
    where
        T: Send + 'static,
        F: FnOnce(&View<'_>) -> Result<T, StoreError> + Send + 'static,
    {
        let (reply, outcome) = oneshot::channel();
        let job = Job::Read(Box::new(move |view| {
            let _ = reply.send(look(view));
        }));
        // The queue has no limit for reads, because they do not wait for the disk.
        self.send(job);
        Pending { outcome }
    }

    /// Sends an empty read to the thread. The result arrives when the thread has processed the read. A watchdog calls
    /// this method.
    pub fn ping(&self) -> Pending<()> {
        self.read(|_| Ok(()))
    }

    fn submit<T, F>(&self, class: Class, change: F) -> Pending<T>
    where
        T: Send + 'static,
        F: FnMut(&mut Tx<'_>) -> Result<T, StoreError> + Send + 'static,
    {
        let (reply, outcome) = oneshot::channel();
        let waiting = self.inner.counters.waiting.load(Ordering::Relaxed);
        if waiting >= MOST_WAITING && class == Class::Ordinary {
            let _ = reply.send(Err(StoreError::Busy { waiting }));
        } else {
            self.send(Job::Write(Box::new(Typed { class, change, made: None, reply })));
        }
        Pending { outcome }
    }

    fn send(&self, job: Job) {
        if let Some(jobs) = &self.inner.jobs {
            self.inner.counters.waiting.fetch_add(1, Ordering::Relaxed);
            // If the thread has ended, the reply's sender is dropped too, and the caller receives `Closed`.
            let _ = jobs.send(job);
        }
    }

    /// Returns the state directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.inner.directory
    }

    /// Returns the id of this run of gpushd, which is recorded with each operation that this run
    /// changes.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.inner.instance
    }

    /// Returns the epoch of this database: 8 hexadecimal digits. A database that replaces a lost
    /// database has another epoch. Names outside the database, such as the names of scopes, contain
    /// the epoch, so no name is ever used for two leases.
    #[must_use]
    pub fn epoch(&self) -> &str {
        &self.inner.epoch
    }

    /// Returns why changes are refused now: the disk is full, or the database has failed. Returns `None` if they are
    /// not refused.
    #[must_use]
    pub fn refusal(&self) -> Option<StoreError> {
        self.inner.counters.trouble.lock().clone()
    }

    /// Returns the counters since the store was opened.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let counters = &self.inner.counters;
        Statistics {
            waiting: counters.waiting.load(Ordering::Relaxed),
            commits: counters.commits.load(Ordering::Relaxed),
            writes: counters.writes.load(Ordering::Relaxed),
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("directory", &self.inner.directory).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            // If a closure owned the last handle, the store's thread drops that handle. The thread must not wait for
            // its own end.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
