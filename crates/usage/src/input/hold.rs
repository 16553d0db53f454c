//! Holds: the shares of leases on targets.

use gpush_api::{GpuUuid, LeaseKind, LeaseMember, TargetUuid};
use serde::{Deserialize, Serialize};

use crate::share::{Share, TargetSize};

/// The hold of a lease on one target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// UUID of the GPU.
    pub gpu: GpuUuid,
    /// UUID of the target: the GPU, or the MIG device.
    pub target: TargetUuid,
    /// Kind of the lease.
    pub kind: LeaseKind,
    /// Share of the GPU.
    pub share: Share,
    /// GPU instance of the target; `None` if the target is the whole GPU.
    pub instance: Option<u32>,
    /// Memory of the share, in MiB. It is the scale of the memory histogram.
    pub memory_mib: u64,
}

impl Hold {
    /// Returns the hold of a member of a lease. `target` is the size of the member's target, and `instance` its GPU
    /// instance.
    #[must_use]
    pub fn of_member(member: &LeaseMember, target: TargetSize, instance: Option<u32>) -> Self {
        Self {
            gpu: member.gpu_uuid.clone(),
            target: member.target.clone(),
            kind: member.share.kind(),
            share: Share::of_member(member, target),
            instance,
            memory_mib: if member.memory_mib == 0 { member.gpu_memory_mib } else { member.memory_mib },
        }
    }

    /// Returns whether the lease uses its device alone.
    #[must_use]
    pub fn is_exclusive(&self) -> bool {
        match self.kind {
            LeaseKind::Mig | LeaseKind::Whole => true,
            LeaseKind::Mps | LeaseKind::Timeslice => false,
        }
    }
}

/// Returns the holds with one hold for each target. A lease can have a target several times, such as two replicas of
/// one GPU. Then the shares are added.
#[must_use]
pub fn unique_holds(holds: Vec<Hold>) -> Vec<Hold> {
    let mut unique: Vec<Hold> = Vec::new();
    for hold in holds {
        match unique.iter_mut().find(|other| other.gpu == hold.gpu && other.target == hold.target) {
            Some(same) => {
                same.share.units = same.share.units.saturating_add(hold.share.units);
                same.share.charged = same.share.charged.saturating_add(hold.share.charged);
                same.memory_mib = same.memory_mib.saturating_add(hold.memory_mib);
            }
            None => unique.push(hold),
        }
    }
    unique
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_replicas_of_a_gpu_are_one_hold() {
        let hold = |target: &str, units| Hold {
            gpu: "GPU-1".into(),
            target: target.into(),
            kind: LeaseKind::Timeslice,
            share: Share { units, charged: units },
            instance: None,
            memory_mib: u64::from(units),
        };
        let unique = unique_holds(vec![hold("GPU-1", 5), hold("MIG-1", 1), hold("GPU-1", 7)]);
        assert_eq!(unique, [hold("GPU-1", 12), hold("MIG-1", 1)]);
    }
}
