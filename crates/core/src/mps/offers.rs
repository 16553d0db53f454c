//! What the GPUs of one snapshot offer to leases.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{GpuUuid, LeaseMember, Placement};

use super::desired_targets::DesiredTargets;
use crate::{
    config::Config,
    lease::placement::{Host, Snapshot},
};

/// What occupies capacity, and the rules.
#[derive(Debug, Clone, Copy)]
pub struct OfferInputs<'a> {
    /// The config.
    pub config: &'a Config,
    /// Members of all leases that hold capacity, each with the uid of the holder.
    pub members: &'a [(u32, &'a LeaseMember)],
    /// UUIDs of the GPUs that an operation has claimed.
    pub claimed: &'a BTreeSet<GpuUuid>,
    /// Instances that gpushd created, by GPU UUID.
    pub created: &'a BTreeMap<GpuUuid, BTreeSet<Placement>>,
}

/// Returns what the GPUs of a snapshot offer, and which capacity leases and operations already occupy.
#[must_use]
pub fn offers(outlook: &DesiredTargets<'_>, inputs: OfferInputs<'_>) -> Host {
    let OfferInputs { config, members, claimed, created } = inputs;
    let supervised = outlook.targets.supervised();
    let mut offered = Host::of(&Snapshot {
        config,
        gpus: &outlook.gpus,
        members,
        claimed,
        daemons: &supervised.targets,
        ended: &supervised.ended,
        users: &supervised.users,
        created,
    });
    let (single_users, serving) = (outlook.targets.single_users(members), outlook.serving());
    for mps in offered.gpus.iter_mut().flat_map(|gpu| &mut gpu.mps) {
        // If the daemon of a target serves one user at a time, use this limit, even if the rule allows several users.
        mps.user = mps.user.or_else(|| single_users.get(&mps.target).copied());
        // `mps set` can have changed what the daemon of a target allows.
        let daemon = outlook.targets.get(&mps.target).and_then(|target| target.report.policy.as_ref());
        if let Some(policy) = daemon {
            mps.ceiling = policy.settings.percentage;
            mps.default = mps.default.min(mps.ceiling);
        }
        // A target without a running daemon has no room now, but still offers its kind of share.
        if !serving.contains(&mps.target) {
            mps.leases = u32::MAX;
        }
    }
    offered
}

#[cfg(test)]
mod tests {
    use gpush_api::{MemberShare, MpsPolicy, MpsUsers};

    use super::*;
    use crate::{
        lease::placement::{Closed, MpsOffer},
        mps::{
            report::DaemonReport,
            scene::{READY, config, gpu_target, gpus, report, targets},
            targets::MpsTargets,
        },
        supervisor::SupervisorState,
    };

    fn offer(targets: &MpsTargets, settings: &str, members: &[(u32, &LeaseMember)]) -> MpsOffer {
        let (config, gpus) = (config(settings), gpus());
        let outlook = DesiredTargets::new(&config, &gpus, targets);
        let (claimed, created) = (BTreeSet::new(), BTreeMap::new());
        let host = offers(&outlook, OfferInputs { config: &config, members, claimed: &claimed, created: &created });
        host.gpus[0].mps[0].clone()
    }

    #[test]
    fn target_without_a_serving_daemon_has_no_room() {
        let serving = targets([gpu_target(0, report(READY))]);
        assert_eq!(offer(&serving, "", &[]).leases, 0);
        let starting = SupervisorState::Starting { until: std::time::Duration::ZERO };
        assert_eq!(offer(&targets([gpu_target(0, report(starting))]), "", &[]).leases, u32::MAX);
    }

    /// A daemon that cannot serve several users keeps its limit although the rule says `users = "many"`.
    #[test]
    fn limit_of_the_daemon_to_one_user_counts_before_the_rule() {
        let many = "users = \"many\"";
        let member = LeaseMember {
            target: "GPU-0".into(),
            gpu_uuid: "GPU-0".into(),
            share: MemberShare::Mps {
                percentage: "10".parse().unwrap(),
                memory_limit_mib: None,
                priority: gpush_api::Priority::Normal,
            },
            memory_mib: 0,
            gpu_memory_mib: 0,
        };
        let members = [(1000, &member)];
        let one = targets([gpu_target(0, report(READY))]);
        assert_eq!(offer(&one, many, &members).user, Some(1000));
        let policy = Some(MpsPolicy { users: MpsUsers::Many, ..MpsPolicy::default() });
        let several = targets([gpu_target(0, DaemonReport { policy, ..report(READY) })]);
        assert_eq!(offer(&several, many, &members).user, None);
    }

    #[test]
    fn claimed_gpu_is_closed() {
        let (config, gpus, all) = (config(""), gpus(), targets([gpu_target(0, report(READY))]));
        let outlook = DesiredTargets::new(&config, &gpus, &all);
        let (claimed, created) = (BTreeSet::from(["GPU-0".into()]), BTreeMap::new());
        let inputs = OfferInputs { config: &config, members: &[], claimed: &claimed, created: &created };
        assert_eq!(offers(&outlook, inputs).gpus[0].closed, Some(Closed::Claimed));
    }
}
