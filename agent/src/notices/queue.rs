//! Notices that wait for the programs of `[notify]`.
//!
//! ```text
//! notice ─┬─► hook: in order, at most [`WAITING`]; a notice about the end of a lease is never left out
//!         └─► comment of the Slurm job: only the newest notice of each lease
//! ```
//!
//! The two wait separately, so a hook that hangs delays no comment.

use std::collections::{BTreeMap, VecDeque};

use gpush_api::{LeaseId, NoticeChange};
use gpush_core::config::Notify;

/// Maximum number of notices that wait for the hook, apart from those about the end of a lease.
pub(super) const WAITING: usize = 64;

/// A notice that waits for the hook, and the settings with which the hook runs.
#[derive(Debug, Clone)]
pub(super) struct HookRun {
    pub(super) notify: Notify,
    pub(super) change: NoticeChange,
}

/// The comment of a Slurm job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JobComment {
    pub(super) lease: LeaseId,
    pub(super) job: u32,
    pub(super) text: String,
}

/// The queues.
#[derive(Debug, Default)]
pub(super) struct NoticeQueue {
    hook: VecDeque<HookRun>,
    comments: BTreeMap<LeaseId, JobComment>,
}

impl NoticeQueue {
    /// Adds a run of the hook. Returns whether there was room.
    pub(super) fn add_run(&mut self, run: HookRun) -> bool {
        let has_room = self.hook.len() < WAITING || run.change.notice.kind.is_about_end();
        if has_room {
            self.hook.push_back(run);
        }
        has_room
    }

    /// Adds a comment, in place of one that waits for the same lease.
    pub(super) fn add_comment(&mut self, comment: JobComment) {
        self.comments.insert(comment.lease, comment);
    }

    /// Takes the next run of the hook.
    pub(super) fn next_run(&mut self) -> Option<HookRun> {
        self.hook.pop_front()
    }

    /// Takes a comment.
    pub(super) fn next_comment(&mut self) -> Option<JobComment> {
        self.comments.pop_first().map(|(_, comment)| comment)
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{LeaseHolder, LeaseNotice, NoticeKind};

    use super::*;

    fn run(kind: NoticeKind) -> HookRun {
        let at = jiff::Timestamp::UNIX_EPOCH;
        let notice = LeaseNotice { at, kind, text: "exam".to_owned(), ends_at: None, terminals: None };
        let holder = LeaseHolder { uid: 1000, user: None };
        let change = NoticeChange { lease_id: LeaseId(1), holder, gpu_uuids: Vec::new(), notice };
        HookRun { notify: Notify::default(), change }
    }

    /// Fault: while the hook hung, the notice of an end was left out.
    #[test]
    fn only_notices_that_are_not_about_an_end_are_left_out() {
        let mut queue = NoticeQueue::default();
        let added = (0..1000).filter(|_| queue.add_run(run(NoticeKind::Cordoned))).count();
        assert_eq!(added, WAITING);
        assert!(queue.add_run(run(NoticeKind::Revoked)) && !queue.add_run(run(NoticeKind::MpsFault)));
        let kinds: Vec<NoticeKind> =
            std::iter::from_fn(|| queue.next_run()).map(|run| run.change.notice.kind).collect();
        assert_eq!((kinds.len(), kinds.last()), (WAITING + 1, Some(&NoticeKind::Revoked)));
    }

    #[test]
    fn comment_of_a_job_has_the_newest_notice() {
        let mut queue = NoticeQueue::default();
        for (lease, text) in [(2, "ends in 1h"), (1, "a"), (2, "has ended")] {
            queue.add_comment(JobComment { lease: LeaseId(lease), job: 7, text: text.to_owned() });
        }
        let texts: Vec<String> = std::iter::from_fn(|| queue.next_comment()).map(|comment| comment.text).collect();
        assert_eq!(texts, ["a", "has ended"]);
    }
}
