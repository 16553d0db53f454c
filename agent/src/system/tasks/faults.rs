//! Injected panics, for tests. A release build of gpushd does not contain this module.
//!
//! A test writes the name of a task to the FIFO in [`VARIABLE`]. A running task with this name panics at once. If none
//! runs, the next one panics.

use std::{collections::BTreeSet, fs, path::PathBuf, pin::pin, thread};

use tokio::sync::watch;

use super::TaskName;

/// The environment variable with the path of the FIFO.
const VARIABLE: &str = "GPUSH_TEST_TASK_FAULTS";

/// The tasks that are to panic. Each name causes one panic.
#[derive(Debug, Clone)]
pub(super) struct Faults(Option<watch::Sender<BTreeSet<TaskName>>>);

impl Faults {
    /// Follows the FIFO, if there is one.
    pub(super) fn from_environment() -> Self {
        let Some(path) = std::env::var_os(VARIABLE).map(PathBuf::from) else { return Self(None) };
        let faults = Self::injectable();
        let followed = faults.clone();
        thread::spawn(move || {
            // The read ends when the writer closes the FIFO.
            while let Ok(names) = fs::read_to_string(&path) {
                names.lines().filter_map(TaskName::named).for_each(|name| followed.inject(name));
            }
        });
        faults
    }

    /// Returns faults without a FIFO.
    pub(super) fn injectable() -> Self {
        Self(Some(watch::Sender::default()))
    }

    /// Makes a task panic.
    pub(super) fn inject(&self, name: TaskName) {
        if let Some(names) = &self.0 {
            names.send_if_modified(|names| names.insert(name));
        }
    }

    /// Runs the future of a task, which panics if a fault is injected.
    pub(super) async fn apply<T>(&self, name: TaskName, future: impl Future<Output = T>) -> T {
        let Some(names) = &self.0 else { return future.await };
        let mut changes = names.subscribe();
        let injected = async {
            while !names.send_if_modified(|names| names.remove(&name)) {
                let _ = changes.changed().await;
            }
        };
        let (mut injected, mut future) = (pin!(injected), pin!(future));
        tokio::select! {
            biased;
            () = &mut injected => panic!("injected fault"),
            output = &mut future => output,
        }
    }
}
