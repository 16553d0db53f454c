//! The reference model: GPUs with their rules, leases, their holders, and the free targets.
//!
//! The model knows only the documented rules:
//! - A MIG device and a whole GPU have at most one lease. A time-sliced GPU has at most as many
//!   leases as replicas. The leases on an MPS target have at most 100 % together.
//! - A target that is leased in one way is not leased in another way, and nothing that overlaps it
//!   is leased. A whole GPU overlaps its MIG devices.
//! - A lease with several members gets all of them, or gpushd refuses the request.
//! - A target is free if it has no lease and no process.
//! - A released or revoked lease ends when its last process has ended.
//! - A reboot ends all leases. A restart of gpushd ends none.
//! - A changed rule does not change a leased GPU: the old rule stays *in force*, and the change is
//!   *pending*. Until the change, gpushd grants nothing more on the GPU. If the old and the new rule
//!   have mode `mig`, this applies to each MIG device alone.
//!
//! ```text
//!              another rule, an override               no lease, no process, and: an apply,
//!              or the end of an override               a new boot or auto_reconcile
//! settled ────────────────────────────────► pending ─────────────────────────────────────► settled
//!                                              │                                              ▲
//!                                              └────── the rule in force is desired again ────┘
//! ```

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{EndReason, LeaseKind, LeaseState};

use super::rules::{Layout, Offer, Rule};

/// Percentage that all leases on an MPS target may have together.
const ALL_PERCENT: u32 = 100;

/// The share that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Share {
    /// MIG devices of a profile.
    Mig(&'static str),
    /// This percentage of an MPS target.
    Mps(u32),
    /// A time-slice replica.
    Timeslice,
    /// Whole GPUs.
    Whole,
}

impl Share {
    pub(super) fn kind(self) -> LeaseKind {
        match self {
            Self::Mig(_) => LeaseKind::Mig,
            Self::Mps(_) => LeaseKind::Mps,
            Self::Timeslice => LeaseKind::Timeslice,
            Self::Whole => LeaseKind::Whole,
        }
    }
}

impl Offer {
    pub(super) fn kind(self) -> LeaseKind {
        match self {
            Self::Mig(_) => LeaseKind::Mig,
            Self::Mps => LeaseKind::Mps,
            Self::Timeslice(_) => LeaseKind::Timeslice,
            Self::Whole => LeaseKind::Whole,
        }
    }

    /// Returns whether a target with this offer can give the share, if it is free.
    pub(super) fn gives(self, share: Share) -> bool {
        match (self, share) {
            (Self::Mig(profile), Share::Mig(requested)) => profile == requested,
            _ => self.kind() == share.kind(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Gpu {
    pub(super) uuid: String,
    pub(super) has_mig: bool,
    /// The rule of the config.
    pub(super) rule: Rule,
    /// The layout of the override.
    pub(super) overridden: Option<Layout>,
    /// The rule in force.
    pub(super) in_force: Rule,
    /// Whether gpushd grants no leases on the GPU, because of a cordon.
    pub(super) is_closed: bool,
}

impl Gpu {
    /// Returns the desired rule. An override applies only to a rule of mode `mig`.
    pub(super) fn desired(&self) -> Rule {
        match (self.rule, self.overridden) {
            (Rule::Mig(_), Some(layout)) => Rule::Mig(layout),
            (rule, _) => rule,
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        self.in_force == self.desired()
    }
}

/// A target that can be leased.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    /// Index of the target's GPU.
    pub(super) gpu: usize,
    pub(super) offer: Offer,
    /// Ids of the GPU instance and the compute instance.
    pub(super) instance: Option<(u32, u32)>,
    /// Pids of the processes on the target, except MPS clients.
    pub(super) processes: BTreeSet<u32>,
}

impl Target {
    /// Returns the arguments of `gpush-sim` that start a process on the target.
    pub(super) fn place(&self) -> String {
        let instance = self.instance.map(|(gi, ci)| format!(" --gi {gi} --ci {ci}"));
        format!("--gpu {}{}", self.gpu, instance.unwrap_or_default())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lease {
    pub(super) holder: u32,
    pub(super) kind: LeaseKind,
    pub(super) state: LeaseState,
    pub(super) reason: Option<EndReason>,
    /// UUIDs of the targets of the lease, sorted.
    pub(super) targets: Vec<String>,
    /// UUIDs of the GPUs of the targets.
    pub(super) gpus: BTreeSet<String>,
    /// Percentage of an MPS target.
    pub(super) percent: u32,
}

/// The answer that gpushd must give to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    Granted,
    /// gpushd may grant or refuse the request: a GPU without leases gets another rule at present.
    GrantedOrRefused,
    /// gpushd refuses the request, because a change of a GPU is pending.
    Refused,
    /// gpushd refuses the request, but may grant the same request later.
    Blocked,
    /// gpushd refuses the request, because it could not grant the request in any state of the host.
    Impossible,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) gpus: Vec<Gpu>,
    /// Targets by UUID.
    pub(super) targets: BTreeMap<String, Target>,
    /// Leases that have not ended.
    pub(super) open: BTreeMap<String, Lease>,
    /// Leases that have ended.
    pub(super) ended: BTreeMap<String, Lease>,
    /// Number of MPS clients of each lease.
    pub(super) clients: BTreeMap<String, usize>,
}

impl Model {
    fn leases_on<'a>(&'a self, uuid: &'a str) -> impl Iterator<Item = &'a Lease> {
        self.open.values().filter(move |lease| lease.targets.iter().any(|target| target == uuid))
    }

    /// Returns whether a lease is on the GPU or on one of its devices.
    pub(super) fn is_leased(&self, gpu: usize) -> bool {
        let uuid = &self.gpus[gpu].uuid;
        self.open.values().any(|lease| lease.gpus.contains(uuid))
    }

    /// Returns whether a lease or a process is on the GPU or on one of its devices.
    pub(super) fn is_occupied(&self, gpu: usize) -> bool {
        let has_process = |target: &Target| target.gpu == gpu && !target.processes.is_empty();
        self.is_leased(gpu) || self.targets.values().any(has_process)
    }

    /// Returns how many members with this share a settled target can give now, or in an idle host.
    fn room(&self, uuid: &str, target: &Target, share: Share, is_idle: bool) -> usize {
        if !target.offer.gives(share) {
            return 0;
        }
        let leases = if is_idle { 0 } else { self.leases_on(uuid).count() };
        match (target.offer, share) {
            (Offer::Mig(_) | Offer::Whole, _) if !is_idle && !target.processes.is_empty() => 0,
            (Offer::Mig(_) | Offer::Whole, _) => 1 - leases.min(1),
            (Offer::Timeslice(replicas), _) => replicas - leases.min(replicas),
            (Offer::Mps, Share::Mps(percent)) => {
                let granted: u32 = if is_idle { 0 } else { self.leases_on(uuid).map(|lease| lease.percent).sum() };
                usize::from(granted + percent <= ALL_PERCENT)
            }
            (Offer::Mps, _) => 0,
        }
    }

    /// Returns whether gpushd may grant a share on a GPU whose change is pending.
    fn may_be_granted_while_pending(&self, gpu: usize, share: Share) -> bool {
        let (from, to) = (self.gpus[gpu].in_force, self.gpus[gpu].desired());
        if from.changes_devices_only(to) {
            return matches!(share, Share::Mig(_) | Share::Mps(_));
        }
        let is_offered = match to.offer() {
            Some(offer) => offer.gives(share),
            None => matches!(share, Share::Mig(_) | Share::Mps(_)),
        };
        is_offered && !self.is_occupied(gpu)
    }

    /// Returns the answer that gpushd must give to a request for any GPU, or for one GPU.
    pub(super) fn expects(&self, share: Share, count: usize, only: Option<usize>) -> Expected {
        let selected = |gpu: usize| only.is_none_or(|only| only == gpu);
        let pending: Vec<usize> =
            (0..self.gpus.len()).filter(|gpu| selected(*gpu) && !self.gpus[*gpu].is_settled()).collect();
        let settled = || self.targets.iter().filter(|(_, one)| selected(one.gpu) && !pending.contains(&one.gpu));
        let open = settled().filter(|(_, one)| !self.gpus[one.gpu].is_closed);
        let now: usize = open.map(|(uuid, target)| self.room(uuid, target, share, false)).sum();
        let most: usize = settled().map(|(uuid, target)| self.room(uuid, target, share, true)).sum();
        if now >= count {
            Expected::Granted
        } else if pending.iter().any(|gpu| self.may_be_granted_while_pending(*gpu, share)) {
            Expected::GrantedOrRefused
        } else if !pending.is_empty() {
            Expected::Refused
        } else if most >= count {
            Expected::Blocked
        } else {
            Expected::Impossible
        }
    }

    /// Records a grant.
    ///
    /// # Errors
    /// If the grant breaks a rule.
    pub(super) fn grant(&mut self, id: &str, share: Share, count: usize, lease: Lease) -> Result<(), String> {
        if self.open.contains_key(id) || self.ended.contains_key(id) {
            return Err(format!("{id} was granted before"));
        }
        if lease.targets.len() != count {
            return Err(format!("{id} has {} members, requested were {count}", lease.targets.len()));
        }
        if lease.kind != share.kind() {
            return Err(format!("{id} is a lease of kind {:?}, requested was {share:?}", lease.kind));
        }
        for uuid in &lease.targets {
            self.check_target(id, uuid, share)?;
        }
        self.open.insert(id.to_owned(), lease);
        if let Some(why) = overlap(&self.open) {
            return Err(format!("{id} was granted: {why}"));
        }
        let exceeded = |(uuid, target): &(&String, &Target)| {
            let percent: u32 = self.leases_on(uuid).map(|lease| lease.percent).sum();
            let most = match (self.leases_on(uuid).next().map(|lease| lease.kind), target.offer) {
                (Some(LeaseKind::Timeslice), Offer::Timeslice(replicas)) => replicas,
                (Some(LeaseKind::Mps) | None, _) => usize::MAX,
                (Some(LeaseKind::Mig | LeaseKind::Whole | LeaseKind::Timeslice), _) => 1,
            };
            self.leases_on(uuid).count() > most || percent > ALL_PERCENT
        };
        match self.targets.iter().find(exceeded) {
            Some((uuid, target)) => Err(format!("{uuid} has more leases than {:?} allows, one is {id}", target.offer)),
            None => Ok(()),
        }
    }

    fn check_target(&self, id: &str, uuid: &str, share: Share) -> Result<(), String> {
        let Some(target) = self.targets.get(uuid) else { return Err(format!("{id}: {uuid} does not exist")) };
        let gpu = &self.gpus[target.gpu];
        if gpu.is_closed {
            return Err(format!("{id}: GPU {} takes no leases", target.gpu));
        }
        if !target.processes.is_empty() && matches!(target.offer, Offer::Mig(_) | Offer::Whole) {
            return Err(format!("{id}: {uuid} has processes"));
        }
        if gpu.is_settled() && !target.offer.gives(share) {
            return Err(format!("{id}: {uuid} offers {:?}, requested was {share:?}", target.offer));
        }
        if !gpu.is_settled() && !self.may_be_granted_while_pending(target.gpu, share) {
            let what = format!("{:?} of GPU {} changes to {:?}", gpu.in_force, target.gpu, gpu.desired());
            return Err(format!("{id}: {share:?} was granted while {what}"));
        }
        Ok(())
    }

    /// Returns whether a process prevents the lease from ending. The processes in these tests
    /// belong to root. On a time-sliced GPU, a process belongs to the oldest lease of root on this
    /// GPU. The environment of an MPS client names its lease.
    pub(super) fn is_used(&self, id: &str) -> bool {
        let Some(lease) = self.open.get(id) else { return false };
        if self.clients.get(id).is_some_and(|clients| *clients > 0) {
            return true;
        }
        let is_oldest = |uuid: &String| {
            let on_target =
                self.open.iter().filter(|(_, one)| one.holder == lease.holder && one.targets.contains(uuid));
            on_target.map(|(id, _)| number(id)).min() == Some(number(id))
        };
        let used = |uuid: &String| {
            let target = self.targets.get(uuid);
            target.is_some_and(|target| {
                !target.processes.is_empty() && (lease.kind != LeaseKind::Timeslice || is_oldest(uuid))
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

    /// Returns the ended lease with the highest number. gpushd keeps a limited number of ended leases, so an earlier one
    /// may be gone.
    pub(super) fn last_ended(&self) -> Option<(&String, &Lease)> {
        let number = |id: &str| id.trim_start_matches('L').parse::<u64>().unwrap_or_default();
        self.ended.iter().max_by_key(|(id, _)| number(id))
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

    /// Ends all leases and processes, as a reboot does. gpushd then applies the desired state.
    pub(super) fn reboot(&mut self) {
        self.clients.clear();
        for target in self.targets.values_mut() {
            target.processes.clear();
        }
        for gpu in &mut self.gpus {
            gpu.in_force = gpu.desired();
        }
        for (id, lease) in std::mem::take(&mut self.open) {
            let reason = lease.reason.or(Some(EndReason::Rebooted));
            self.ended.insert(id, Lease { state: LeaseState::Ended, reason, ..lease });
        }
    }
}

/// Returns two leases that overlap although one of them has its target alone, as a text.
pub(super) fn overlap(open: &BTreeMap<String, Lease>) -> Option<String> {
    for (at, (id, lease)) in open.iter().enumerate() {
        for (other_id, other) in open.iter().skip(at + 1) {
            let shares = lease.kind == other.kind && matches!(lease.kind, LeaseKind::Mps | LeaseKind::Timeslice);
            let overlaps = |uuid: &String| {
                let is_same = other.targets.contains(uuid) && !shares;
                is_same || other.gpus.contains(uuid) && !other.targets.contains(uuid)
            };
            let contains = other.targets.iter().any(|uuid| lease.gpus.contains(uuid) && !lease.targets.contains(uuid));
            if let Some(uuid) = lease.targets.iter().find(|uuid| overlaps(uuid)) {
                return Some(format!("{id} ({:?}) and {other_id} ({:?}) overlap on {uuid}", lease.kind, other.kind));
            }
            if contains {
                return Some(format!("{id} ({:?}) is on a device of {other_id} ({:?})", lease.kind, other.kind));
            }
        }
    }
    None
}

/// Returns the number in a lease id: 17 for `L17`.
fn number(id: &str) -> u64 {
    id.trim_start_matches('L').parse().expect("a lease id")
}
