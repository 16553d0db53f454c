//! The failures of all tasks since gpushd started, and the errors in health.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use gpush_api::{ApiError, Code, TaskHealth, TaskKind, text};
use jiff::Timestamp;

use super::{
    TaskName,
    policy::{self, TaskEnd, TaskState},
};

/// How long a failure degrades health.
const RECENT: Duration = Duration::from_secs(600);

/// Maximum length of the description of a failure, in bytes.
const MOST_BYTES: usize = 512;

/// A task: its name, and its object, such as the id of a lease. The object is empty if there is only one such task.
pub(super) type TaskId = (TaskName, String);

/// The failures of the tasks with one name.
#[derive(Debug)]
struct Failures {
    count: u64,
    restarts: u64,
    at: Timestamp,
    /// Time of the last failure, for [`RECENT`].
    last: Instant,
    text: String,
}

/// The failures so far, and the tasks that have failed and run again.
#[derive(Debug, Default)]
pub(super) struct FailureRecord {
    failures: BTreeMap<TaskName, Failures>,
    restarted: HashMap<TaskId, TaskState>,
}

impl FailureRecord {
    /// Notes the end of a task's future, and returns the new state of the task. `text` says how the future ended.
    pub(super) fn task_ended(&mut self, id: &TaskId, end: TaskEnd, text: &str, stopping: bool) -> TaskState {
        let (kind, now) = (id.0.kind(), Instant::now());
        let before = self.restarted.remove(id).unwrap_or(TaskState::Running);
        let state = policy::step(kind, before, end, stopping, now);
        if let TaskState::Restarted(_) = state {
            self.restarted.insert(id.clone(), state);
        }
        if policy::is_failure(kind, end, stopping) {
            let (count, restarts) =
                self.failures.get(&id.0).map_or((0, 0), |failures| (failures.count, failures.restarts));
            let restarts = restarts + u64::from(matches!(state, TaskState::Restarted(_)));
            let (at, text) = (Timestamp::now(), bounded(text));
            self.failures.insert(id.0, Failures { count: count + 1, restarts, at, last: now, text });
        }
        state
    }

    /// Returns all tasks with their failures. A failure may contain data of any user, so its text is only for
    /// administrators.
    pub(super) fn report(&self, with_texts: bool) -> Vec<TaskHealth> {
        let task = |name: &TaskName| {
            let failures = self.failures.get(name);
            TaskHealth {
                name: name.text().to_owned(),
                kind: name.kind(),
                failures: failures.map_or(0, |failures| failures.count),
                restarts: failures.map_or(0, |failures| failures.restarts),
                failed_at: failures.map(|failures| failures.at),
                failure: failures.filter(|_| with_texts).map(|failures| failures.text.clone()),
            }
        };
        TaskName::ALL.iter().map(task).collect()
    }

    /// Returns an error for each task that has failed recently.
    pub(super) fn errors(&self, now: Instant) -> Vec<ApiError> {
        let recent = self.failures.iter().filter(|(_, of)| now.saturating_duration_since(of.last) < RECENT);
        recent.map(|(name, failures)| error(*name, failures)).collect()
    }
}

fn error(name: TaskName, failures: &Failures) -> ApiError {
    let times = if failures.count == 1 { String::new() } else { format!(" {} times", failures.count) };
    let then = match name.kind() {
        TaskKind::Service | TaskKind::PerObject => "; gpushd restarted the task",
        TaskKind::Final => "; gpushd must restart",
        TaskKind::OneShot => "",
    };
    ApiError::new(Code::Internal, format!("gpushd's task `{}` has failed{times}{then}", name.text())).hint(
        "see the log of gpushd: `journalctl -u gpushd`; report the fault with the output of `gpushctl support-bundle`",
    )
}

/// Returns the text as one line of at most [`MOST_BYTES`].
fn bounded(failure: &str) -> String {
    let mut line = text::plain(failure);
    line.truncate(line.floor_char_boundary(MOST_BYTES));
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(record: &mut FailureRecord, name: TaskName, object: &str, text: &str) -> TaskState {
        record.task_ended(&(name, object.to_owned()), TaskEnd::Failed, text, false)
    }

    #[test]
    fn tasks_of_two_objects_are_restarted_separately() {
        let mut record = FailureRecord::default();
        assert!(matches!(fail(&mut record, TaskName::Lease, "L1", ""), TaskState::Restarted(_)));
        assert!(matches!(fail(&mut record, TaskName::Lease, "L2", ""), TaskState::Restarted(_)));
        record.task_ended(&(TaskName::Lease, "L2".to_owned()), TaskEnd::Returned, "", false);
        assert_eq!(record.restarted.len(), 1, "the lease has ended");
        assert_eq!(fail(&mut record, TaskName::Lease, "L1", ""), TaskState::Fatal);
    }

    #[test]
    fn failure_degrades_health_for_a_while() {
        let mut record = FailureRecord::default();
        let now = Instant::now();
        assert!(record.errors(now).is_empty());
        fail(&mut record, TaskName::Request, "", "index out of bounds");
        fail(&mut record, TaskName::Request, "", "index out of bounds");
        let errors = record.errors(now);
        assert_eq!((errors.len(), errors[0].message.as_str()), (1, "gpushd's task `request` has failed 2 times"));
        assert!(record.errors(now + RECENT * 2).is_empty());
    }

    #[test]
    fn failure_text_is_bounded_and_only_for_administrators() {
        let mut record = FailureRecord::default();
        fail(&mut record, TaskName::Scheduler, "", &"é\n".repeat(MOST_BYTES));
        let of_queue =
            |with_texts| record.report(with_texts).into_iter().find(|task| task.name == "scheduler").unwrap();
        let shown = of_queue(true);
        assert_eq!((shown.failures, shown.restarts, shown.failed_at.is_some()), (1, 1, true));
        let text = shown.failure.unwrap();
        assert!((MOST_BYTES - 3..=MOST_BYTES).contains(&text.len()) && !text.contains('\n'), "{text}");
        assert_eq!(of_queue(false).failure, None);
        assert_eq!(record.report(true).len(), TaskName::ALL.len());
    }
}
