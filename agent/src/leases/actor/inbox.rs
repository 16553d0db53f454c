//! The inboxes of leases: how other parts of gpushd reach the task of a lease.

use std::{collections::BTreeMap, sync::MutexGuard};

use gpush_api::{Actor, ApiError, LeaseGrant, LeaseId, LeaseKeep};
use gpush_core::lease::{
    machine::EndProcesses,
    over_limit::{OverLimitEnd, OverLimitWarning},
    unused::{UnusedEnd, UnusedWarning},
};
use gpush_locked::Locked;
use gpush_store::StoreError;
use jiff::Timestamp;
use tokio::sync::{OwnedMutexGuard, mpsc, oneshot, watch};

use crate::{
    leases::job_terms::JobTerms,
    operations::scheduler::{LeaseAnswer, LeaseInbox},
    requests::{caller::Caller, idempotency::Key},
};

/// The channel through which a waiting client gets its lease.
pub(in crate::leases) type Reply = oneshot::Sender<Result<LeaseGrant, ApiError>>;

/// A message to the task of a lease: a request, or a fact to which the task must react.
#[derive(Debug)]
pub(in crate::leases) enum LeaseCommand {
    /// Change the lease for a user.
    Change(ChangeRequest),
    /// The client does not wait for the lease any more, and has not got it.
    ClientGone,
    /// A GPU or MIG device of the lease is gone.
    GpuLost,
    /// Something has happened to a GPU or MPS daemon of the lease that does not end it.
    Warn(Warning),
    /// Tell the holder what a policy does with the lease. The reply says whether the notice has reached the holder.
    SendPolicyNotice { news: HolderNews, reply: oneshot::Sender<bool> },
    /// The scheduler has decided about the request.
    Scheduled(LeaseAnswer),
    /// The client of a request of an earlier gpushd is connected again.
    Rejoin(Box<Rejoin>),
}

/// What has happened to a GPU or MPS daemon of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::leases) enum Warning {
    /// A GPU takes no new leases. `by` is the administrator; `None` if a fault has cordoned the GPU.
    Cordoned { gpu: String, reason: String, by: Option<String> },
    /// An MPS daemon has stopped serving.
    MpsFault { target: String, reason: String },
}

/// What a policy tells the holder of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HolderNews {
    /// The lease is unused.
    Unused(UnusedWarning),
    /// The warning of an unused lease does not apply any more.
    UnusedNoMore(UnusedEnd),
    /// The lease uses more memory than its share has.
    OverLimit(OverLimitWarning),
    /// The notice about memory above the limit does not apply any more.
    OverLimitNoMore(OverLimitEnd),
}

/// A change of a lease that a user has requested, or that gpushd makes. gpushd records it before the reply.
#[derive(Debug)]
pub(in crate::leases) struct ChangeRequest {
    pub(in crate::leases) change: RequestedChange,
    /// The user; `None` for gpushd itself.
    pub(in crate::leases) by: Option<Actor>,
    /// The idempotency key that gpushd records with the change of an active lease.
    pub(in crate::leases) key: Option<Key>,
    pub(in crate::leases) reply: oneshot::Sender<Result<(), ChangeError>>,
}

/// The requested change.
#[derive(Debug, Clone)]
pub(in crate::leases) enum RequestedChange {
    /// Release the lease, or cancel the request. `end` says when its processes must end.
    Release { end: Option<EndProcesses> },
    /// Revoke the lease, or cancel the request. `end` says when its processes must end.
    Revoke { reason: String, end: Option<EndProcesses> },
    /// Set the end time.
    Renew { expires_at: Option<Timestamp> },
    /// Keep the lease although it is unused.
    Keep(LeaseKeep),
    /// Revoke the lease because of a policy, if the check permits it. `ends_processes` is whether its processes end too.
    EndByPolicy { reason: String, ends_processes: bool, check: EndCheck },
    /// Change nothing: find out whether a policy may end the lease.
    CheckEnd(EndCheck),
}

/// What must be true of a lease before a policy ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndCheck {
    /// It is active, not kept, and still unused.
    Unused(SeenUnused),
    /// It is active. The policy has checked its reason.
    Active,
}

/// What was seen of an unused lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SeenUnused {
    /// Whether the lease had no process on its targets.
    pub(crate) is_empty: bool,
    /// Time of the last sample, in clock ticks since boot. Processes that started later were not seen.
    pub(crate) sampled_at: u64,
}

/// Why a change was not made.
#[derive(Debug)]
pub(in crate::leases) enum ChangeError {
    /// Only an active lease can be renewed, kept, or ended by a policy.
    Inactive,
    /// The lease is kept, so it does not end because it is unused.
    Kept,
    /// A process of the lease was not seen, so the lease may be used.
    MayBeUsed,
    /// The change could not be recorded.
    Unrecorded(StoreError),
    /// The operation of the lease could not be cancelled.
    OperationRuns(ApiError),
}

/// A client that is connected again, and repeats the request of an earlier gpushd's time.
#[derive(Debug)]
pub(in crate::leases) struct Rejoin {
    pub(in crate::leases) caller: Caller,
    pub(in crate::leases) job: Option<JobTerms>,
    /// The lock of the idempotency key.
    pub(in crate::leases) lock: Option<OwnedMutexGuard<()>>,
    pub(in crate::leases) reply: Reply,
    pub(in crate::leases) joined: oneshot::Sender<Joined>,
}

/// Whether a client has joined its request.
#[derive(Debug)]
pub(in crate::leases) enum Joined {
    /// The client waits, or has its lease already.
    Yes,
    /// The request does not wait for a client. Returns the lock of the key.
    NotAway(Option<OwnedMutexGuard<()>>),
    /// The request cannot be met any more, or gpushd cannot decide about it now.
    Failed(ApiError),
}

/// Sends commands to the task of a lease.
#[derive(Debug, Clone)]
pub(in crate::leases) struct Inbox(mpsc::UnboundedSender<LeaseCommand>);

impl Inbox {
    /// Creates an inbox, and the end from which the task reads it.
    pub(in crate::leases) fn new() -> (Self, mpsc::UnboundedReceiver<LeaseCommand>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), receiver)
    }

    /// Sends a command. Returns it if the lease has ended.
    pub(in crate::leases) fn send(&self, command: LeaseCommand) -> Result<(), Box<LeaseCommand>> {
        self.0.send(command).map_err(|unsent| Box::new(unsent.0))
    }
}

impl LeaseInbox for Inbox {
    fn answer(&self, answer: LeaseAnswer) {
        let _the_lease_may_have_ended = self.send(LeaseCommand::Scheduled(answer));
    }
}

/// The inboxes of all open leases.
#[derive(Debug, Default)]
pub(in crate::leases) struct Inboxes {
    entries: Locked<BTreeMap<LeaseId, Inbox>>,
    changed: watch::Sender<()>,
}

impl Inboxes {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<LeaseId, Inbox>> {
        self.entries.lock()
    }

    /// Returns the inbox of a lease; `None` if the lease has no task.
    pub(in crate::leases) fn get(&self, id: LeaseId) -> Option<Inbox> {
        self.entries().get(&id).cloned()
    }

    /// Sends a command to a lease, if it has a task.
    pub(in crate::leases) fn send(&self, id: LeaseId, command: LeaseCommand) {
        let _the_lease_may_have_ended = self.get(id).map(|inbox| inbox.send(command));
    }

    /// Returns a receiver that is notified when a task begins or ends.
    pub(in crate::leases) fn watch(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn insert(&self, id: LeaseId, inbox: Inbox) {
        self.entries().insert(id, inbox);
        self.changed.send_replace(());
    }

    pub(super) fn remove(&self, id: LeaseId) {
        self.entries().remove(&id);
        self.changed.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_reach_open_leases_only() {
        let inboxes = Inboxes::default();
        let changes = inboxes.watch();
        let (inbox, mut commands) = Inbox::new();
        inboxes.send(LeaseId(1), LeaseCommand::GpuLost);
        inboxes.insert(LeaseId(1), inbox.clone());
        assert!(changes.has_changed().unwrap());
        inboxes.send(LeaseId(1), LeaseCommand::GpuLost);
        assert!(matches!(commands.try_recv(), Ok(LeaseCommand::GpuLost)) && commands.try_recv().is_err());
        inboxes.remove(LeaseId(1));
        assert!(inboxes.get(LeaseId(1)).is_none());
        drop(commands);
        assert!(
            matches!(inbox.send(LeaseCommand::ClientGone), Err(unsent) if matches!(*unsent, LeaseCommand::ClientGone))
        );
    }
}
