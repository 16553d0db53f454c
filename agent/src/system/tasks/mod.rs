//! The background tasks of gpushd. gpushd logs a failure of each task and shows it in health, and starts the task again
//! if it can.
//!
//! ```text
//! spawn, once, … ─► future ─► end ─► policy ─┬─ expected, or gpushd stops ─► nothing
//!                      ▲                     ├─ failed, first time ────────► log, health ─► future again
//!                      └─────────────────────┤
//!                                            ├─ OneShot failed ────────────► log, health, an error for the caller
//!                                            └─ failed again, or Final ────► log; gpushd exits with an error
//! ```
//!
//! systemd restarts a gpushd that exits. Leases, MPS daemons and operations survive this. From the fatal failure on,
//! gpushd does not notify the watchdog of systemd, so systemd also ends a gpushd that hangs while it exits.
//!
//! | file | subject |
//! |---|---|
//! | `name` | the names and kinds of all tasks |
//! | `policy` | what gpushd does when a task ends |
//! | `failures` | the failures so far, for health |
//! | `faults` | injected panics, for tests |
//!
//! Other modules must not start tasks in another way: `agent/clippy.toml` forbids it. The panic of a subtask belongs to
//! the task that awaits it ([`gpush_host::subtask`]).

mod failures;
#[cfg(any(test, debug_assertions))]
mod faults;
mod name;
mod policy;

use std::{
    any::Any,
    fmt,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{Arc, MutexGuard},
    task::{Context, Poll},
    time::Instant,
};

use futures_util::FutureExt as _;
use gpush_api::{ApiError, TaskHealth, TaskKind};
use gpush_host::subtask;
use gpush_locked::Locked;
use tokio::{runtime::Handle, sync::watch, task::JoinHandle};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker, task_tracker::TaskTrackerToken},
};

pub(crate) use self::name::TaskName;
use self::{
    failures::{FailureRecord, TaskId},
    policy::{TaskEnd, TaskState},
};

/// Starts background tasks, and knows their failures. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Tasks(Arc<TaskParts>);

#[derive(Debug)]
struct TaskParts {
    /// Cancelled when gpushd stops.
    stopping: CancellationToken,
    /// Tasks that must end before gpushd exits.
    unfinished: TaskTracker,
    failures: Locked<FailureRecord>,
    /// Why gpushd must exit.
    fatal: watch::Sender<Option<String>>,
    #[cfg(any(test, debug_assertions))]
    faults: faults::Faults,
}

/// The error of a caller whose task has failed. It does not repeat the text of a panic, which may contain data of other
/// users.
#[derive(Debug)]
pub(crate) struct TaskFailure(TaskName);

impl fmt::Display for TaskFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpushd's task `{}` has failed", self.0.text())
    }
}

/// A task that runs once. Await it for its result, or drop it: the task continues.
#[derive(Debug)]
pub(crate) struct OneShot<T> {
    name: TaskName,
    task: JoinHandle<Result<T, TaskFailure>>,
}

impl<T> OneShot<T> {
    /// Aborts the task when the returned value is dropped.
    pub(crate) fn abort_on_drop(self) -> AbortOnDropHandle<Result<T, TaskFailure>> {
        AbortOnDropHandle::new(self.task)
    }
}

impl<T> Future for OneShot<T> {
    type Output = Result<T, TaskFailure>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let name = self.name;
        Pin::new(&mut self.task).poll(context).map(|ended| ended.unwrap_or(Err(TaskFailure(name))))
    }
}

#[expect(clippy::disallowed_methods, reason = "all tasks start here")]
impl Tasks {
    /// Creates the handle. `stopping` is cancelled when gpushd stops.
    pub(crate) fn new(stopping: CancellationToken) -> Self {
        Self(Arc::new(TaskParts {
            stopping,
            unfinished: TaskTracker::new(),
            failures: Locked::default(),
            fatal: watch::Sender::default(),
            #[cfg(any(test, debug_assertions))]
            faults: faults::Faults::from_environment(),
        }))
    }

    /// Returns the token that is cancelled when gpushd stops.
    pub(crate) fn stopping(&self) -> &CancellationToken {
        &self.0.stopping
    }

    /// Starts a task that runs until gpushd stops. `make` is called now, and after each failure.
    pub(crate) fn spawn<F: Future<Output = ()> + Send + 'static>(
        &self,
        name: TaskName,
        make: impl FnMut() -> F + Send + 'static,
    ) -> JoinHandle<()> {
        debug_assert_eq!(name.kind(), TaskKind::Service);
        tokio::spawn(self.clone().supervise((name, String::new()), make))
    }

    /// Starts a task for an object, such as a lease. The task returns when it has nothing left to do for the object.
    pub(crate) fn spawn_for<F: Future<Output = ()> + Send + 'static>(
        &self,
        name: TaskName,
        object: impl Into<String>,
        make: impl FnMut() -> F + Send + 'static,
    ) -> JoinHandle<()> {
        debug_assert_eq!(name.kind(), TaskKind::PerObject);
        tokio::spawn(self.clone().supervise((name, object.into()), make))
    }

    /// Does the same as [`Tasks::spawn_for`]. The task must end before gpushd exits.
    pub(crate) fn spawn_for_before_exit<F: Future<Output = ()> + Send + 'static>(
        &self,
        name: TaskName,
        object: impl Into<String>,
        make: impl FnMut() -> F + Send + 'static,
    ) {
        debug_assert_eq!(name.kind(), TaskKind::PerObject);
        self.0.unfinished.spawn(self.clone().supervise((name, object.into()), make));
    }

    /// Executes an operation. If its future panics, starts the task [`TaskName::OperationCleanup`]. Both end before
    /// gpushd exits.
    pub(crate) fn execute<F: Future<Output = ()> + Send + 'static>(
        &self,
        operation: String,
        future: impl Future<Output = ()> + Send + 'static,
        cleanup: impl FnMut() -> F + Send + 'static,
    ) {
        let tasks = self.clone();
        self.0.unfinished.spawn(async move {
            if tasks.clone().run_once(TaskName::Operation, future).await.is_err() {
                tasks.supervise((TaskName::OperationCleanup, operation), cleanup).await;
            }
        });
    }

    /// Starts a task that gpushd cannot start again, because the task owns its inputs.
    pub(crate) fn spawn_final(
        &self,
        name: TaskName,
        future: impl Future<Output = Result<(), String>> + Send + 'static,
    ) -> JoinHandle<()> {
        tokio::spawn(self.clone().supervise_final(name, future))
    }

    /// Starts such a task on a separate thread of `runtime`.
    pub(crate) fn spawn_final_thread(
        &self,
        name: TaskName,
        runtime: Handle,
        future: impl Future<Output = Result<(), String>> + Send + 'static,
    ) -> JoinHandle<()> {
        let task = self.clone().supervise_final(name, future);
        tokio::task::spawn_blocking(move || runtime.block_on(task))
    }

    /// Starts a task that runs once. gpushd does not wait for the task before it exits.
    pub(crate) fn once<T: Send + 'static>(
        &self,
        name: TaskName,
        future: impl Future<Output = T> + Send + 'static,
    ) -> OneShot<T> {
        OneShot { name, task: tokio::spawn(self.clone().run_once(name, future)) }
    }

    /// Starts a task that runs once and ends before gpushd exits.
    pub(crate) fn once_before_exit<T: Send + 'static>(
        &self,
        name: TaskName,
        future: impl Future<Output = T> + Send + 'static,
    ) -> OneShot<T> {
        self.once_tracked(&self.0.unfinished, name, future)
    }

    /// Starts a task that runs once, and that `tracker` waits for.
    pub(crate) fn once_tracked<T: Send + 'static>(
        &self,
        tracker: &TaskTracker,
        name: TaskName,
        future: impl Future<Output = T> + Send + 'static,
    ) -> OneShot<T> {
        OneShot { name, task: tracker.spawn(self.clone().run_once(name, future)) }
    }

    /// Runs a future in the current task, as a task that runs once.
    pub(crate) async fn run_once<T>(self, name: TaskName, future: impl Future<Output = T>) -> Result<T, TaskFailure> {
        debug_assert_eq!(name.kind(), TaskKind::OneShot);
        self.run(name, future).await.map_err(|why| {
            self.ended(&(name, String::new()), TaskEnd::Failed, &why);
            TaskFailure(name)
        })
    }

    /// Returns a guard: gpushd does not exit before it is dropped.
    pub(crate) fn unfinished(&self) -> TaskTrackerToken {
        self.0.unfinished.token()
    }

    /// Runs `work` on a blocking thread. It ends before gpushd exits, even if the caller is dropped.
    ///
    /// # Panics
    /// If `work` panics.
    pub(crate) async fn blocking_before_exit<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        subtask::output(self.0.unfinished.spawn_blocking(work).await)
    }

    /// Waits until all tasks that must end before gpushd exits have ended. The caller starts no more such tasks.
    pub(crate) async fn finish(&self) {
        self.0.unfinished.close();
        self.0.unfinished.wait().await;
    }

    /// Waits until gpushd must exit because of a failure, and returns the reason.
    pub(crate) async fn fatal(&self) -> String {
        let mut fatal = self.0.fatal.subscribe();
        let reason = fatal.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        match reason {
            Some(reason) => reason,
            None => std::future::pending().await,
        }
    }

    /// Returns whether no fatal failure has occurred, and failures can be recorded.
    pub(crate) fn are_alive(&self) -> bool {
        drop(self.failures());
        self.0.fatal.borrow().is_none()
    }

    /// Returns an error for each task that has failed recently.
    pub(crate) fn health(&self) -> Vec<ApiError> {
        self.failures().errors(Instant::now())
    }

    /// Returns all tasks with their failures since gpushd started. `with_texts` is for administrators.
    pub(crate) fn report(&self, with_texts: bool) -> Vec<TaskHealth> {
        self.failures().report(with_texts)
    }

    fn failures(&self) -> MutexGuard<'_, FailureRecord> {
        self.0.failures.lock()
    }

    /// Runs a task, and runs it again after a failure.
    fn supervise<F: Future<Output = ()> + Send + 'static>(
        self,
        id: TaskId,
        mut make: impl FnMut() -> F + Send + 'static,
    ) -> impl Future<Output = ()> + Send {
        // Call `make` now, so that the task misses no event that follows.
        let mut first = Some(make());
        async move {
            loop {
                let future = first.take();
                let future = async {
                    match future {
                        Some(future) => future.await,
                        None => make().await,
                    }
                };
                let (end, why) = match self.run(id.0, future).await {
                    Ok(()) => (TaskEnd::Returned, "it returned too early".to_owned()),
                    Err(why) => (TaskEnd::Failed, why),
                };
                match self.ended(&id, end, &why) {
                    TaskState::Restarted(_) => {}
                    TaskState::Running | TaskState::Ended | TaskState::Fatal => return,
                }
            }
        }
    }

    async fn supervise_final(self, name: TaskName, future: impl Future<Output = Result<(), String>>) {
        debug_assert_eq!(name.kind(), TaskKind::Final);
        let (end, why) = match self.run(name, future).await {
            Ok(Ok(())) => (TaskEnd::Returned, "it returned too early".to_owned()),
            Ok(Err(why)) | Err(why) => (TaskEnd::Failed, why),
        };
        self.ended(&(name, String::new()), end, &why);
    }

    /// Runs the future of a task. Returns the text of a panic as an error.
    async fn run<T>(&self, name: TaskName, future: impl Future<Output = T>) -> Result<T, String> {
        #[cfg(any(test, debug_assertions))]
        let future = self.0.faults.apply(name, future);
        #[cfg(not(any(test, debug_assertions)))]
        let _ = name;
        AssertUnwindSafe(future).catch_unwind().await.map_err(|panic| panic_text(&*panic))
    }

    /// Records and logs the end of a task's future.
    fn ended(&self, id: &TaskId, end: TaskEnd, why: &str) -> TaskState {
        let stopping = self.0.stopping.is_cancelled();
        let state = self.failures().task_ended(id, end, why, stopping);
        if !policy::is_failure(id.0.kind(), end, stopping) {
            return state;
        }
        let object = if id.1.is_empty() { String::new() } else { format!(" of {}", id.1) };
        let task = format!("the task `{}`{object}", id.0.text());
        match state {
            TaskState::Restarted(_) => tracing::error!("{task} has failed, and gpushd has restarted the task: {why}"),
            TaskState::Fatal => {
                let again =
                    if id.0.kind() == TaskKind::Final { "and cannot be restarted" } else { "twice within a minute" };
                let reason = format!("{task} has failed {again}: {why}");
                tracing::error!("gpushd exits: {reason}");
                self.0.fatal.send_if_modified(|fatal| fatal.is_none() && fatal.replace(reason).is_none());
            }
            TaskState::Running | TaskState::Ended => tracing::error!("{task} has failed: {why}"),
        }
        state
    }
}

/// Returns the text of a panic.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("it panicked: {}", text.unwrap_or("no text"))
}

#[cfg(test)]
mod tests;
