//! The execution of the policy, with injected panics.

use std::sync::atomic::{AtomicUsize, Ordering};

use gpush_api::TaskHealth;
use tokio::sync::mpsc;

use super::*;

impl Tasks {
    /// Returns a handle whose tasks a test can let panic.
    pub(crate) fn for_tests() -> Self {
        let mut tasks = Self::new(CancellationToken::new());
        Arc::get_mut(&mut tasks.0).unwrap().faults = faults::Faults::injectable();
        tasks
    }

    fn shown(&self, name: TaskName) -> TaskHealth {
        self.report(true).into_iter().find(|task| task.name == name.text()).unwrap()
    }
}

/// A task that reports each of its starts, and then runs until it is stopped.
fn start(tasks: &Tasks, name: TaskName) -> mpsc::UnboundedReceiver<usize> {
    let (started, starts) = mpsc::unbounded_channel();
    let stopping = tasks.stopping().clone();
    let mut count = 0;
    let make = move || {
        count += 1;
        started.send(count).unwrap();
        stopping.clone().cancelled_owned()
    };
    match name.kind() {
        TaskKind::Service => drop(tasks.spawn(name, make)),
        TaskKind::PerObject => drop(tasks.spawn_for(name, "object", make)),
        TaskKind::Final | TaskKind::OneShot => panic!("{name:?} is never started again"),
    }
    starts
}

fn names(kind: TaskKind) -> impl Iterator<Item = TaskName> {
    TaskName::ALL.iter().copied().filter(move |name| name.kind() == kind)
}

#[tokio::test]
async fn task_that_panics_is_restarted_and_shown() {
    for name in names(TaskKind::Service).chain(names(TaskKind::PerObject)) {
        let tasks = Tasks::for_tests();
        let mut starts = start(&tasks, name);
        assert_eq!(starts.recv().await, Some(1));
        assert!(tasks.health().is_empty());
        tasks.0.faults.inject(name);
        assert_eq!(starts.recv().await, Some(2), "{name:?}");
        let shown = tasks.shown(name);
        assert_eq!((shown.failures, shown.restarts), (1, 1));
        assert_eq!(shown.failure.as_deref(), Some("it panicked: injected fault"));
        let errors = tasks.health();
        assert!(errors[0].message.contains(name.text()) && errors[0].hint.is_some(), "{errors:?}");
        assert!(tasks.are_alive());
        tasks.stopping().cancel();
        assert_eq!(starts.recv().await, None, "it ends when gpushd stops");
        assert_eq!(tasks.shown(name).failures, 1);
    }
}

#[tokio::test]
async fn second_failure_within_a_minute_is_fatal() {
    let tasks = Tasks::for_tests();
    let mut starts = start(&tasks, TaskName::Scheduler);
    starts.recv().await;
    tasks.0.faults.inject(TaskName::Scheduler);
    starts.recv().await;
    tasks.0.faults.inject(TaskName::Scheduler);
    let reason = tasks.fatal().await;
    assert_eq!(reason, "the task `scheduler` has failed twice within a minute: it panicked: injected fault");
    assert!(!tasks.are_alive(), "the watchdog is not notified");
    assert_eq!(starts.recv().await, None);
}

#[tokio::test]
async fn failure_of_a_final_task_is_fatal() {
    for name in names(TaskKind::Final) {
        let on_threads: [fn(&Tasks, TaskName) -> JoinHandle<()>; 3] = [
            |tasks, name| tasks.spawn_final(name, std::future::pending()),
            |tasks, name| tasks.spawn_final_thread(name, Handle::current(), std::future::pending()),
            |tasks, name| tasks.spawn_final(name, async { Err("its socket is gone".to_owned()) }),
        ];
        for start in on_threads {
            let tasks = Tasks::for_tests();
            let task = start(&tasks, name);
            tasks.0.faults.inject(name);
            let reason = tasks.fatal().await;
            assert!(reason.starts_with(&format!("the task `{}` has failed and cannot", name.text())), "{reason}");
            task.await.unwrap();
        }
    }
}

#[tokio::test]
async fn failed_task_that_runs_once_gives_its_caller_an_error() {
    for name in names(TaskKind::OneShot) {
        let tasks = Tasks::for_tests();
        tasks.0.faults.inject(name);
        let failed = tasks.once(name, async { 7 }).await.unwrap_err();
        assert_eq!(failed.to_string(), format!("gpushd's task `{}` has failed", name.text()));
        assert_eq!(tasks.once_before_exit(name, async { 7 }).await.unwrap(), 7, "the next one runs");
        assert_eq!((tasks.shown(name).failures, tasks.shown(name).restarts), (1, 0));
        assert!(tasks.are_alive());
        tasks.finish().await;
    }
}

/// Without the restart of the cleanup, the operation would stay `running`.
#[tokio::test]
async fn operation_that_panics_is_cleaned_up_even_if_the_cleanup_panics() {
    let tasks = Tasks::for_tests();
    let (cleaned, mut cleanups) = mpsc::unbounded_channel();
    tasks.0.faults.inject(TaskName::Operation);
    tasks.0.faults.inject(TaskName::OperationCleanup);
    tasks.execute("operation op-1".to_owned(), std::future::pending(), move || {
        let cleaned = cleaned.clone();
        async move { cleaned.send(()).unwrap() }
    });
    assert_eq!(cleanups.recv().await, Some(()));
    tasks.finish().await;
    assert_eq!((tasks.shown(TaskName::Operation).failures, tasks.shown(TaskName::OperationCleanup).restarts), (1, 1));
    assert!(tasks.are_alive());
}

#[tokio::test]
async fn service_that_returns_early_is_restarted() {
    let tasks = Tasks::for_tests();
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let task = tasks.spawn(TaskName::Monitor, move || {
        counted.fetch_add(1, Ordering::Relaxed);
        std::future::ready(())
    });
    assert!(tasks.fatal().await.ends_with("it returned too early"));
    task.await.unwrap();
    assert_eq!((runs.load(Ordering::Relaxed), tasks.shown(TaskName::Monitor).failures), (2, 2));
}

#[tokio::test]
async fn panic_while_a_restart_creates_the_future_is_fatal() {
    let tasks = Tasks::for_tests();
    let mut is_first = true;
    tasks.spawn(TaskName::Monitor, move || {
        assert!(std::mem::take(&mut is_first), "no inputs");
        std::future::ready(())
    });
    assert!(tasks.fatal().await.ends_with("it panicked: no inputs"));
}

#[tokio::test]
async fn failure_while_gpushd_stops_is_shown_but_not_fatal() {
    let tasks = Tasks::for_tests();
    let task = tasks.spawn_final(TaskName::PublicSocket, std::future::pending());
    tasks.stopping().cancel();
    tasks.0.faults.inject(TaskName::PublicSocket);
    task.await.unwrap();
    assert_eq!(tasks.shown(TaskName::PublicSocket).failures, 1);
    assert!(tasks.are_alive());
}
