//! Which leases occupy a target: a GPU, or a MIG device.
//!
//! A lease on a whole GPU occupies all MIG devices of the GPU, and a lease on a MIG device occupies a part of the GPU. So
//! two targets overlap if they are the same, or if one of them is the GPU of the other:
//!
//! ```text
//!                   GPU-0   MIG-a on GPU-0   MIG-b on GPU-0   GPU-1
//! GPU-0             yes     yes              yes              no
//! MIG-a on GPU-0    yes     yes              no               no
//! ```
//!
//! Only leases of the kinds `mps` and `timeslice` share a target, and only with leases of the same kind on the same
//! target. Every other lease on an overlapping target excludes a new lease, whatever the mode of the GPU is now: the mode
//! may have changed since the grant.

use gpush_api::{GpuUuid, LeaseKind, LeaseMember, LeaseUse, MemberShare, TargetUuid};

/// What one lease holds on one target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held<'a> {
    /// UUID of the GPU.
    pub gpu: &'a GpuUuid,
    /// UUID of the target; empty while the MIG device is being created.
    pub target: &'a TargetUuid,
    /// The share.
    pub share: &'a MemberShare,
}

/// How a lease is related to a target that a request or a change needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    /// The lease holds a share of the target, and the target has room for other shares of this kind.
    Shares,
    /// The lease holds the target, a part of the target, or the GPU of the target, and does not share it.
    Excludes,
    /// The lease does not concern the target.
    None,
}

impl<'a> Held<'a> {
    /// Returns what a member of a lease holds.
    #[must_use]
    pub fn by_member(member: &'a LeaseMember) -> Self {
        Self { gpu: &member.gpu_uuid, target: &member.target, share: &member.share }
    }

    /// Returns what a lease holds on the GPU with the UUID `gpu`.
    #[must_use]
    pub fn by_use(gpu: &'a GpuUuid, lease: &'a LeaseUse) -> Self {
        Self { gpu, target: &lease.target, share: &lease.share }
    }

    /// Returns the relation to a share of kind `kind` on a target of the GPU `gpu`.
    #[must_use]
    pub fn relation(self, gpu: &GpuUuid, target: &TargetUuid, kind: LeaseKind) -> Relation {
        if self.gpu != gpu {
            return Relation::None;
        }
        let is_same = self.target == target;
        if !is_same && *self.target != *gpu && *target != *gpu {
            return Relation::None;
        }
        match (self.share.kind(), kind) {
            (LeaseKind::Mps, LeaseKind::Mps) | (LeaseKind::Timeslice, LeaseKind::Timeslice) if is_same => {
                Relation::Shares
            }
            (LeaseKind::Mig | LeaseKind::Mps | LeaseKind::Timeslice | LeaseKind::Whole, _) => Relation::Excludes,
        }
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::Priority;

    use super::*;

    fn shares() -> [MemberShare; 4] {
        let percentage = "50".parse().unwrap();
        [
            MemberShare::Mig { profile: "1g.10gb".to_owned() },
            MemberShare::Mps { percentage, memory_limit_mib: None, priority: Priority::Normal },
            MemberShare::Timeslice { replicas: 2, level: None, compute_mode: None },
            MemberShare::Whole,
        ]
    }

    /// All kinds of a lease, all kinds of a request, and all pairs of targets on two GPUs.
    #[test]
    fn only_equal_shareable_kinds_on_one_target_share_it() {
        let targets = [("GPU-0", "GPU-0"), ("GPU-0", "MIG-a"), ("GPU-0", "MIG-b"), ("GPU-1", "GPU-1")]
            .map(|(gpu, target)| (GpuUuid::from(gpu), TargetUuid::from(target)));
        let mut pairs = 0;
        for share in &shares() {
            for (of, held) in &targets {
                for kind in [LeaseKind::Mig, LeaseKind::Mps, LeaseKind::Timeslice, LeaseKind::Whole] {
                    for (gpu, target) in &targets {
                        let relation = Held { gpu: of, target: held, share }.relation(gpu, target, kind);
                        let overlap = of == gpu && (held == target || *held == *of || *target == *gpu);
                        let shareable = matches!(kind, LeaseKind::Mps | LeaseKind::Timeslice);
                        let expected = match (overlap, held == target && share.kind() == kind && shareable) {
                            (false, _) => Relation::None,
                            (true, true) => Relation::Shares,
                            (true, false) => Relation::Excludes,
                        };
                        assert_eq!(relation, expected, "{share:?} on {held}, {kind:?} on {target}");
                        pairs += 1;
                    }
                }
            }
        }
        assert_eq!(pairs, 4 * 4 * 4 * 4);
    }

    #[test]
    fn device_in_creation_excludes_only_its_whole_gpu() {
        let share = &shares()[0];
        let held = Held { gpu: &"GPU-0".into(), target: &"".into(), share };
        assert_eq!(held.relation(&"GPU-0".into(), &"GPU-0".into(), LeaseKind::Whole), Relation::Excludes);
        assert_eq!(held.relation(&"GPU-0".into(), &"MIG-a".into(), LeaseKind::Mig), Relation::None);
    }
}
