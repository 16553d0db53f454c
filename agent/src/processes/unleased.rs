//! What gpushd did about each unleased process.
//!
//! ```text
//! seen ─► warned about: one log line
//!      ├► exempt, with the reason; checked again in each round
//!      └► asked to end (SIGTERM, with the time of SIGKILL) ─► killed
//! ```
//!
//! If a process has a lease now, or its GPU was not read, gpushd forgets what it did about the
//! process. If the process is unleased again later, gpushd treats it like a process that it has not
//! seen before.

use std::{
    collections::{BTreeSet, HashMap},
    ops::Deref,
    sync::{Arc, MutexGuard},
    time::Duration,
};

use gpush_api::{ApiError, GpuProcess, UnleasedStep};
use gpush_host::{proc, process_facts::LeaseNames};
use gpush_locked::Locked;
use tokio::time::Instant;

use super::{allow::AllowList, identity::OpenedProcess};
use crate::{modes::mps::Mps, state::context::HostContext, system::coalesced::Coalesced};

/// Remembers what gpushd did about each unleased process. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Unleased(Arc<UnleasedParts>);

impl Deref for Unleased {
    type Target = UnleasedParts;

    fn deref(&self) -> &UnleasedParts {
        &self.0
    }
}

#[derive(Debug)]
pub(crate) struct UnleasedParts {
    pub(super) context: Arc<HostContext>,
    pub(super) mps: Mps,
    /// The leases that processes name in their environments.
    pub(super) lease_names: Arc<LeaseNames>,
    /// For each pid, the start time of the process and what gpushd did about it.
    actions: Locked<HashMap<u32, (u64, Action)>>,
    /// The processes on devices of others that gpushd has reported: pid and start time.
    trespassers: Locked<BTreeSet<(u32, u64)>>,
    /// The lookup of the files in `processes.allow`.
    allow: Coalesced<Option<Arc<AllowList>>>,
    /// Errors about files in `processes.allow` that gpushd cannot see.
    invisible: Locked<Vec<ApiError>>,
}

/// What gpushd did about a process.
#[derive(Debug, Clone)]
pub(super) enum Action {
    Warned,
    /// gpushd does not end the process. The text says why.
    Exempt(String),
    Asked {
        process: Arc<OpenedProcess>,
        kill_at: Instant,
    },
    Killed,
}

impl Unleased {
    /// Creates the handle. gpushd has not done anything about a process yet.
    pub(crate) fn new(context: Arc<HostContext>, mps: Mps, lease_names: Arc<LeaseNames>) -> Self {
        Self(Arc::new(UnleasedParts {
            context,
            mps,
            lease_names,
            actions: Locked::default(),
            trespassers: Locked::default(),
            allow: Coalesced::default(),
            invisible: Locked::default(),
        }))
    }

    /// Returns the entries of `processes.allow` in the current config, with their files. Concurrent callers share a
    /// lookup. Returns `None` if gpushd is stopping.
    pub(super) async fn allow_list(&self) -> Option<Arc<AllowList>> {
        self.allow.after_now(|| AllowList::look_up(self.context.state.config().processes.allow.clone())).await
    }

    fn actions(&self) -> MutexGuard<'_, HashMap<u32, (u64, Action)>> {
        self.actions.lock()
    }

    /// Adds to an unleased process what gpushd did about it.
    pub(super) fn describe(&self, one: &mut GpuProcess) {
        let Some(action) = one.process.pid.filter(|_| one.unleased.is_some()).and_then(|pid| self.action(pid)) else {
            return;
        };
        let (step, text) = match action {
            Action::Exempt(why) => (UnleasedStep::Exempt, format!("not ended: {why}")),
            Action::Warned => (UnleasedStep::Warned, "warning in the log".to_owned()),
            Action::Asked { kill_at, .. } => {
                // Round up to whole seconds, so that the text never says 0 s while the process
                // still has time.
                let rest = kill_at.saturating_duration_since(Instant::now()) + Duration::from_millis(999);
                (UnleasedStep::Asked, format!("asked to end (SIGTERM), will be killed in {}s", rest.as_secs()))
            }
            Action::Killed => (UnleasedStep::Killed, "killed".to_owned()),
        };
        (one.unleased_step, one.unleased_action) = (Some(step), Some(text));
    }

    /// Returns what gpushd did about the process with this pid. If another process had the pid
    /// before, ignores what gpushd did about that other process.
    pub(super) fn action(&self, pid: u32) -> Option<Action> {
        let start = proc::start(pid)?;
        self.actions().get(&pid).filter(|(of, _)| *of == start).map(|(_, action)| action.clone())
    }

    /// Stores what gpushd did about a process. Returns whether the action is new.
    pub(super) fn note(&self, pid: u32, start: u64, action: Action) -> bool {
        let before = self.actions().insert(pid, (start, action.clone()));
        match (before.filter(|(of, _)| *of == start).map(|(_, action)| action), action) {
            (Some(Action::Exempt(before)), Action::Exempt(now)) => before != now,
            (Some(Action::Warned), Action::Warned) | (Some(Action::Killed), Action::Killed) => false,
            _ => true,
        }
    }

    /// Returns whether two uids belong to one account, such as subordinate uids of one user. Returns `false` while the name
    /// service does not answer.
    pub(super) fn is_same_user(&self, one: u32, other: u32) -> bool {
        let account = |uid| self.context.readings.accounts().last(uid).ok();
        one == other || account(one).is_some_and(|first| account(other) == Some(first))
    }

    /// Forgets a process.
    pub(super) fn forget(&self, pid: u32) {
        self.actions().remove(&pid);
    }

    /// Forgets all processes except these. If not all GPUs could be read, also keeps the processes that have not ended.
    pub(super) fn retain(&self, pids: &[u32], all_read: bool) {
        let lives = |pid: u32, start: u64| !all_read && proc::start(pid) == Some(start);
        self.actions().retain(|pid, (start, _)| pids.contains(pid) || lives(*pid, *start));
    }

    /// Notes a process on a device of others. Returns whether gpushd has not reported this process yet.
    pub(super) fn is_new_trespasser(&self, pid: u32, start: u64) -> bool {
        self.trespassers.lock().insert((pid, start))
    }

    /// Forgets all processes on devices of others except these. If not all GPUs could be read, also keeps the processes
    /// that have not ended.
    pub(super) fn retain_trespassers(&self, present: &[(u32, u64)], all_read: bool) {
        let lives = |(pid, start): (u32, u64)| !all_read && proc::start(pid) == Some(start);
        let mut known = self.trespassers.lock();
        known.retain(|one| present.contains(one) || lives(*one));
    }

    /// Returns the next time after `now` at which gpushd must kill a process.
    pub(super) fn next_kill(&self, now: Instant) -> Option<Instant> {
        let times = |(_, action): &(u64, Action)| match action {
            Action::Asked { kill_at, .. } => Some(*kill_at).filter(|at| *at > now),
            Action::Warned | Action::Exempt(_) | Action::Killed => None,
        };
        self.actions().values().filter_map(times).min()
    }

    /// Returns an error for each file in `processes.allow` that gpushd cannot see.
    pub(super) fn invisible(&self) -> Vec<ApiError> {
        self.invisible.lock().clone()
    }

    /// Replaces the errors about files in `processes.allow` that gpushd cannot see. Logs the new
    /// errors.
    pub(super) fn note_invisible(&self, invisible: Vec<ApiError>) {
        let mut known = self.invisible.lock();
        for error in invisible.iter().filter(|error| !known.contains(error)) {
            tracing::warn!("{error}");
        }
        *known = invisible;
    }
}
