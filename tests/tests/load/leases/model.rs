//! The reference model: leases, their holders, and the free targets.
//!
//! The model knows only the rules:
//! - A MIG device and a whole GPU have at most one lease. A time-sliced GPU has at most as many
//!   leases as replicas.
//! - A lease with several members gets all of them, or gpushd refuses the request.
//! - A target is free if it has no lease and no process.
//! - A released or revoked lease ends when its last process has ended.
//! - A reboot ends all leases. A restart of gpushd ends none.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{EndReason, LeaseKind, LeaseState};

/// The kind of share that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Share {
    /// MIG devices of a profile.
    Mig(&'static str),
    /// A time-slice replica.
    Timeslice,
    /// Whole GPUs.
    Whole,
}

impl Share {
    pub(super) fn kind(&self) -> LeaseKind {
        match self {
            Self::Mig(_) => LeaseKind::Mig,
            Self::Timeslice => LeaseKind::Timeslice,
            Self::Whole => LeaseKind::Whole,
        }
    }
}

/// A target that can be leased.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    /// Index of the target's GPU.
    pub(super) gpu: usize,
    pub(super) share: Share,
    /// Maximum number of leases on the target.
    pub(super) most: usize,
    /// Arguments of `gpush-sim` that start a process on the target.
    pub(super) place: String,
    /// Pids of the processes on the target.
    pub(super) processes: BTreeSet<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lease {
    pub(super) holder: u32,
    pub(super) kind: LeaseKind,
    pub(super) state: LeaseState,
    pub(super) reason: Option<EndReason>,
    /// UUIDs of the targets of the lease, sorted.
    pub(super) targets: Vec<String>,
}

/// The answer that gpushd must give to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    Granted,
    /// gpushd refuses the request, but may grant the same request later.
    Blocked,
    /// gpushd refuses the request, because it could not grant the request in any state of the host.
    Impossible,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    /// Targets by UUID.
    pub(super) targets: BTreeMap<String, Target>,
    /// Leases that have not ended.
    pub(super) open: BTreeMap<String, Lease>,
    /// Leases that have ended.
    pub(super) ended: BTreeMap<String, Lease>,
    /// GPUs on which gpushd grants no leases.
    pub(super) closed: BTreeSet<usize>,
}

impl Model {
    /// Returns the number of leases on a target.
    pub(super) fn leases_on(&self, uuid: &str) -> usize {
        self.open.values().filter(|lease| lease.targets.iter().any(|target| target == uuid)).count()
    }

    /// Returns how many members with this share gpushd could grant at present, or on an idle host
    /// if `idle` is true.
    fn room(&self, share: &Share, idle: bool) -> usize {
        let of = |(uuid, target): (&String, &Target)| {
            if target.share != *share {
                0
            } else if idle {
                target.most
            } else if self.closed.contains(&target.gpu) {
                0
            } else {
                let is_used = !target.processes.is_empty() && target.share != Share::Timeslice;
                if is_used { 0 } else { target.most - self.leases_on(uuid) }
            }
        };
        self.targets.iter().map(of).sum()
    }

    pub(super) fn expects(&self, share: &Share, count: usize) -> Expected {
        if self.room(share, true) < count {
            Expected::Impossible
        } else if self.room(share, false) < count {
            Expected::Blocked
        } else {
            Expected::Granted
        }
    }

    /// Records a grant.
    ///
    /// # Errors
    /// If the grant breaks a rule.
    pub(super) fn grant(&mut self, id: &str, share: &Share, count: usize, lease: Lease) -> Result<(), String> {
        if self.open.contains_key(id) || self.ended.contains_key(id) {
            return Err(format!("{id} was granted before"));
        }
        if lease.targets.len() != count {
            return Err(format!("{id} has {} members, requested were {count}", lease.targets.len()));
        }
        for uuid in &lease.targets {
            let Some(target) = self.targets.get(uuid) else { return Err(format!("{id}: {uuid} does not exist")) };
            if target.share != *share {
                return Err(format!("{id}: {uuid} is {:?}, requested was {share:?}", target.share));
            }
            if self.closed.contains(&target.gpu) {
                return Err(format!("{id}: GPU {} takes no leases", target.gpu));
            }
            if !target.processes.is_empty() && target.share != Share::Timeslice {
                return Err(format!("{id}: {uuid} has processes"));
            }
        }
        self.open.insert(id.to_owned(), lease);
        match self.targets.iter().find(|(uuid, target)| self.leases_on(uuid) > target.most) {
            Some((uuid, target)) => Err(format!("{uuid} has more than {} leases, one of them {id}", target.most)),
            None => Ok(()),
        }
    }

    /// Returns whether a process prevents the lease from ending. The processes in these tests
    /// belong to root. On a time-sliced GPU, a process belongs to the oldest lease of root on this
    /// GPU.
    pub(super) fn is_used(&self, id: &str) -> bool {
        let Some(lease) = self.open.get(id) else { return false };
        let is_oldest = |uuid: &String| {
            let on_target =
                self.open.iter().filter(|(_, one)| one.holder == lease.holder && one.targets.contains(uuid));
            on_target.map(|(id, _)| number(id)).min() == Some(number(id))
        };
        let used = |uuid: &String| {
            let target = self.targets.get(uuid);
            target.is_some_and(|target| {
                !target.processes.is_empty() && (target.share != Share::Timeslice || is_oldest(uuid))
            })
        };
        lease.holder == 0 && lease.targets.iter().any(used)
    }

    /// Changes a lease from active to releasing.
    pub(super) fn end(&mut self, id: &str, reason: EndReason) {
        if let Some(lease) = self.open.get_mut(id)
            && lease.state == LeaseState::Active
        {
            (lease.state, lease.reason) = (LeaseState::Releasing, Some(reason));
        }
        self.settle();
    }

    /// Ends all leases that are releasing and whose processes have ended.
    pub(super) fn settle(&mut self) {
        loop {
            let idle = |id: &&String| self.open[*id].state == LeaseState::Releasing && !self.is_used(id);
            let Some(id) = self.open.keys().find(idle).cloned() else { return };
            if let Some(lease) = self.open.remove(&id) {
                self.ended.insert(id, Lease { state: LeaseState::Ended, ..lease });
            }
        }
    }

    /// Ends all leases and processes, as a reboot does.
    pub(super) fn reboot(&mut self) {
        for target in self.targets.values_mut() {
            target.processes.clear();
        }
        for (id, lease) in std::mem::take(&mut self.open) {
            let reason = lease.reason.or(Some(EndReason::Rebooted));
            self.ended.insert(id, Lease { state: LeaseState::Ended, reason, ..lease });
        }
    }
}

/// Returns the number in a lease id: 17 for `L17`.
fn number(id: &str) -> u64 {
    id.trim_start_matches('L').parse().expect("a lease id")
}
