//! What an entry of the queue needs, and which needs conflict.

use gpush_api::{GpuUuid, TargetUuid};
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use crate::lease::placement::{Assignment, Host, Member};

use super::waiter::Ticket;

/// The targets on one GPU that the last plan of an operation removes or changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimedTargets {
    /// Targets with these UUIDs.
    Targets(BTreeSet<TargetUuid>),
    /// The whole GPU: the plan changes its mode or resets it, or there is no plan yet.
    Gpu,
}

/// What an entry needs on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    /// An operation needs the lane of the GPU, and exclusive use of these targets.
    Lane(ClaimedTargets),
    /// A lease needs parts of these targets, by UUID.
    Parts(BTreeSet<TargetUuid>),
}

/// The needs of an entry, by UUID of the GPU.
pub type Needs = BTreeMap<GpuUuid, Need>;

impl Need {
    /// Returns whether the entry needs a part of this target, or needs it exclusively.
    #[must_use]
    pub fn concerns(&self, target: &TargetUuid) -> bool {
        match self {
            Self::Lane(ClaimedTargets::Gpu) => true,
            Self::Lane(ClaimedTargets::Targets(targets)) | Self::Parts(targets) => targets.contains(target),
        }
    }

    fn conflicts(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Lane(_), Self::Lane(_)) => true,
            (Self::Lane(claimed), Self::Parts(targets)) | (Self::Parts(targets), Self::Lane(claimed)) => {
                match claimed {
                    ClaimedTargets::Gpu => true,
                    ClaimedTargets::Targets(claimed) => !claimed.is_disjoint(targets),
                }
            }
            (Self::Parts(one), Self::Parts(other)) => !one.is_disjoint(other),
        }
    }
}

/// Returns the UUID of a GPU on which two entries conflict.
pub(super) fn conflict<'a>(one: &'a Needs, other: &Needs) -> Option<&'a GpuUuid> {
    let both = |(uuid, need): &(&GpuUuid, &Need)| other.get(*uuid).is_some_and(|other| other.conflicts(need));
    one.iter().find(both).map(|(uuid, _)| uuid)
}

/// Returns the targets of an assignment as the needs of a lease. For an instance that must be created, this is the GPU.
#[must_use]
pub fn reserved_parts(host: &Host, assignment: &Assignment) -> Needs {
    let mut needs = Needs::new();
    for member in &assignment.members {
        let Some(gpu) = host.gpus.iter().find(|gpu| gpu.index == member.gpu()) else { continue };
        let target = match member {
            Member::Device { uuid, .. } => uuid,
            Member::Mps { target, .. } => target,
            Member::Create { .. } | Member::Timeslice { .. } | Member::Whole { .. } => gpu.uuid.as_target(),
        };
        match needs.entry(gpu.uuid.clone()).or_insert_with(|| Need::Parts(BTreeSet::new())) {
            Need::Parts(parts) => drop(parts.insert(target.clone())),
            Need::Lane(_) => {}
        }
    }
    needs
}

/// The entries that are first, among those that were added. Add the entries in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct FirstEntries<'a>(Vec<(Ticket, Cow<'a, Needs>)>);

impl<'a> FirstEntries<'a> {
    /// Returns the earliest first entry that conflicts with these needs, and the UUID of a GPU on which it does.
    pub(super) fn ahead_of(&self, needs: &Needs) -> Option<(Ticket, &GpuUuid)> {
        self.0.iter().find_map(|(ticket, first)| Some((*ticket, conflict(first, needs)?)))
    }

    /// Returns all first entries that conflict with these needs, in order.
    pub(super) fn all_ahead_of(&self, needs: &Needs) -> Vec<Ticket> {
        self.0.iter().filter(|(_, first)| conflict(first, needs).is_some()).map(|(ticket, _)| *ticket).collect()
    }

    /// Adds an entry if it is first.
    pub(super) fn add(&mut self, ticket: Ticket, needs: Cow<'a, Needs>) {
        if !needs.is_empty() && self.ahead_of(&needs).is_none() {
            self.0.push((ticket, needs));
        }
    }
}
