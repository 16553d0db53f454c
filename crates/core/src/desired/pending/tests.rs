//! All ordered pairs of the kind of a lease and a new rule, and what the placement then offers.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{
    ComputeInstance, ComputeMode, GpuInstance, LeaseHolder, LeaseMember, Placement, Priority, TargetUuid,
    TimesliceLevel,
};

use super::*;
use crate::{
    config::Config,
    desired::{self, describe_all},
    lease::placement::{Host, PlacementPolicy, PlacementRequest, RequestedDevice, RequestedShare, Snapshot, place},
    preset,
    sharing::decide,
    timeslice_plan::{TimeslicePlan, timeslice_plans},
};

/// How GPU 0 is shared: a rule, and the shares that it gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Whole,
    Timeslice,
    Mps,
    MigDevice,
    SharedDevice,
}

const KINDS: [Kind; 5] = [Kind::Whole, Kind::Timeslice, Kind::Mps, Kind::MigDevice, Kind::SharedDevice];

impl Kind {
    fn config(self) -> Config {
        let rule = match self {
            Self::Whole => "mode = \"exclusive\"\n",
            Self::Timeslice => "mode = \"timeslice\"\ntimeslice = { replicas = 4 }\n",
            Self::Mps => "mode = \"mps\"\nmps = { users = \"many\" }\n",
            Self::MigDevice => "mode = \"mig\"\nlayout = [\"3g.40gb\"]\n",
            Self::SharedDevice => "mode = \"mig\"\nlayout = [\"3g.40gb:mps\"]\nmps = { users = \"many\" }\n",
        };
        Config::parse(&format!("[[gpu]]\nmatch = [\"0\"]\n{rule}"), "c").unwrap()
    }

    fn is_mig(self) -> bool {
        matches!(self, Self::MigDevice | Self::SharedDevice)
    }

    /// Returns GPU 0 in this mode, with the MIG device `MIG-0` if MIG is on.
    fn gpu(self) -> Gpu {
        let mut gpu = preset::gpus("dgx-a100").unwrap().remove(0);
        let mig = gpu.mig.as_mut().unwrap();
        mig.set_mode(self.is_mig(), self.is_mig());
        let device = ComputeInstance {
            id: 0,
            profile_id: 2,
            profile: "3g.40gb".to_owned(),
            placement: None,
            uuid: Some("MIG-0".into()),
            processes: Vec::new(),
        };
        let instance = GpuInstance {
            id: 2,
            profile_id: 9,
            profile: "3g.40gb".to_owned(),
            placement: Placement { start: 4, size: 4 },
            memory: None,
            compute: vec![device],
            processes: Vec::new(),
        };
        mig.instances = if self.is_mig() { vec![instance] } else { Vec::new() };
        gpu.compute_mode = Some(ComputeMode::Default);
        gpu
    }

    /// Returns the mode of a rule of this kind.
    fn mode(self) -> Mode {
        match self {
            Self::Whole => Mode::Exclusive,
            Self::Timeslice => Mode::Timeslice,
            Self::Mps => Mode::Mps,
            Self::MigDevice | Self::SharedDevice => Mode::Mig,
        }
    }

    fn share(self) -> MemberShare {
        match self {
            Self::Whole => MemberShare::Whole,
            Self::Timeslice => MemberShare::Timeslice {
                replicas: 4,
                level: Some(TimesliceLevel::Default),
                compute_mode: Some(ComputeMode::Default),
            },
            Self::Mps | Self::SharedDevice => MemberShare::Mps {
                percentage: "50".parse().unwrap(),
                memory_limit_mib: None,
                priority: Priority::Normal,
            },
            Self::MigDevice => MemberShare::Mig { profile: "3g.40gb".to_owned() },
        }
    }

    fn lease(self, gpu: &Gpu) -> LeaseUse {
        let target = if self.is_mig() { "MIG-0".to_owned() } else { gpu.uuid.to_string() };
        let (share, holder) = (self.share(), LeaseHolder { uid: 1000, user: None });
        LeaseUse { id: LeaseId(12), target: target.into(), kind: share.kind(), share, holder, until: None }
    }

    fn request(self) -> RequestedShare {
        match self {
            Self::Whole => RequestedShare::Whole,
            Self::Timeslice => RequestedShare::Timeslice,
            Self::Mps | Self::SharedDevice => {
                let percentage = Some("25".parse().unwrap());
                RequestedShare::Mps { percentage, memory_limit: None, priority: None }
            }
            Self::MigDevice => RequestedShare::Mig(RequestedDevice::Profile("3g.40gb".to_owned())),
        }
    }

    /// Returns the targets that have a daemon in this mode.
    fn daemons(self, gpu: &Gpu) -> BTreeSet<TargetUuid> {
        match self {
            Self::Mps => BTreeSet::from([gpu.uuid.clone().into()]),
            Self::SharedDevice => BTreeSet::from(["MIG-0".into()]),
            Self::Whole | Self::Timeslice | Self::MigDevice => BTreeSet::new(),
        }
    }
}

/// GPU 0 with a lease of the kind `from`, after the rule has become `to`. `made` is whether gpushd has already made the
/// change, for example because an administrator forced it.
fn scene(from: Kind, to: Kind, made: bool) -> (Config, Gpu, BTreeSet<TargetUuid>) {
    let config = to.config();
    let stands = if made && from.is_mig() == to.is_mig() { to } else { from };
    let mut gpu = stands.gpu();
    gpu.leases = vec![from.lease(&gpu)];
    describe_all(&config, std::slice::from_mut(&mut gpu));
    let daemons = if made { to.daemons(&gpu) } else { from.daemons(&gpu) };
    (config, gpu, daemons)
}

fn is_granted(config: &Config, gpu: &Gpu, daemons: &BTreeSet<TargetUuid>, share: RequestedShare) -> bool {
    let members: Vec<LeaseMember> = gpu
        .leases
        .iter()
        .map(|lease| {
            let (target, gpu, share) = (lease.target.clone(), gpu.uuid.clone(), lease.share.clone());
            LeaseMember { target, gpu_uuid: gpu, share, memory_mib: 0, gpu_memory_mib: 0 }
        })
        .collect();
    let members: Vec<(u32, &LeaseMember)> = members.iter().map(|member| (1000, member)).collect();
    let host = Host::of(&Snapshot {
        config,
        gpus: std::slice::from_ref(gpu),
        members: &members,
        claimed: &BTreeSet::new(),
        daemons,
        ended: &BTreeSet::new(),
        users: &BTreeMap::new(),
        created: &BTreeMap::new(),
    });
    let wanted = PlacementRequest { share, count: 1, holder: 1001, gpus: None, targets: None };
    place(&host, &wanted, PlacementPolicy::Pack).is_ok()
}

/// Fault: after a reload, a second user could get a replica of a GPU that was leased as a whole. Four other pairs of an old
/// rule and a request had the same fault.
#[test]
fn no_request_is_granted_on_a_leased_gpu_whose_rule_changed() {
    let mut pairs = 0;
    for from in KINDS {
        for to in KINDS {
            for made in [false, true] {
                let (config, gpu, daemons) = scene(from, to, made);
                for asked in KINDS {
                    let granted = is_granted(&config, &gpu, &daemons, asked.request());
                    let shares = from == to && asked.request() == from.request() && from != Kind::Whole;
                    let may = shares && from != Kind::MigDevice;
                    assert_eq!(granted, may, "{from:?} -> {to:?}, made: {made}, asked: {asked:?}");
                    pairs += 1;
                }
            }
        }
    }
    assert_eq!(pairs, 5 * 5 * 2 * 5);
}

#[test]
fn change_of_a_leased_gpu_is_pending_and_names_its_leases() {
    for from in KINDS {
        for to in KINDS {
            let (config, gpu, daemons) = scene(from, to, false);
            let device = || ("MIG-0".to_owned(), "3g.40gb@4".to_owned());
            let aim = match (from, to) {
                _ if from == to => None,
                (Kind::MigDevice, Kind::SharedDevice) => {
                    let (uuid, device) = device();
                    Some(PendingAim::ShareDevice { uuid: uuid.into(), device })
                }
                (Kind::SharedDevice, Kind::MigDevice) => {
                    let (uuid, device) = device();
                    Some(PendingAim::UnshareDevice { uuid: uuid.into(), device })
                }
                _ => Some(PendingAim::Mode { from: from.mode(), mode: config.rules[0].mode }),
            };
            let leases = vec![LeaseId(12)];
            let expected: Vec<_> = aim.into_iter().map(|aim| PendingChange { aim, leases: leases.clone() }).collect();
            assert_eq!(gpu.pending, expected, "{from:?} -> {to:?}");
            // No daemon is started on a target that a lease of another kind holds.
            let sharing = decide(&config, std::slice::from_ref(&gpu), &daemons);
            let starts = sharing.targets.iter().any(|target| !daemons.contains(&target.uuid));
            assert!(!starts, "{from:?} -> {to:?}: {sharing:?}");
        }
    }
}

#[test]
fn level_and_compute_mode_stay_as_the_leases_were_promised() {
    for from in KINDS {
        for to in KINDS {
            let (config, gpu, _) = scene(from, to, false);
            let plan = timeslice_plans(&config, std::slice::from_ref(&gpu)).remove(0);
            let expected = match (from, to) {
                (Kind::Timeslice, _) => "keep",
                _ if from == to || from.is_mig() && to.is_mig() => "restore",
                _ => "wait",
            };
            let found = match plan {
                TimeslicePlan::Keep(_) => "keep",
                TimeslicePlan::Wait => "wait",
                TimeslicePlan::Restore => "restore",
            };
            assert_eq!(found, expected, "{from:?} -> {to:?}");
        }
    }
}

/// Fault: `compute_mode = "prohibited"` was set on a GPU while programs of a lease computed there.
#[test]
fn changed_time_slicing_of_a_leased_gpu_waits() {
    let text = "[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\n\
                timeslice = { replicas = 2, level = \"long\", compute_mode = \"prohibited\" }\n";
    let config = Config::parse(text, "c").unwrap();
    let mut gpu = Kind::Timeslice.gpu();
    gpu.leases = vec![Kind::Timeslice.lease(&gpu)];
    describe_all(&config, std::slice::from_mut(&mut gpu));
    let compute_mode = Some(ComputeMode::Prohibited);
    let aim = PendingAim::Timeslice { level: TimesliceLevel::Long, compute_mode };
    assert_eq!(gpu.pending, [PendingChange { aim: aim.clone(), leases: vec![LeaseId(12)] }]);
    let TimeslicePlan::Keep(policy) = timeslice_plans(&config, std::slice::from_ref(&gpu)).remove(0) else { panic!() };
    assert_eq!((policy.level, policy.compute_mode), (TimesliceLevel::Default, Some(ComputeMode::Default)));

    // After the last lease, the change waits for an apply, unless the rule has changed again.
    gpu.leases.clear();
    let deferred = |config: &Config, gpu: &Gpu| {
        let state = desired::desired_state(config, Some(0), gpu);
        super::deferred(&state, gpu, std::slice::from_ref(&aim), false)
    };
    assert_eq!(deferred(&config, &gpu), [PendingChange { aim: aim.clone(), leases: Vec::new() }]);
    assert!(deferred(&Kind::Timeslice.config(), &gpu).is_empty(), "the rule was changed back");
}

#[test]
fn changed_number_of_replicas_is_not_pending() {
    let text = Kind::Timeslice;
    let config =
        Config::parse("[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 1 }\n", "c").unwrap();
    let mut gpu = text.gpu();
    gpu.leases = vec![text.lease(&gpu)];
    describe_all(&config, std::slice::from_mut(&mut gpu));
    assert!(gpu.pending.is_empty());
    assert!(!is_granted(&config, &gpu, &BTreeSet::new(), RequestedShare::Timeslice), "one replica, one lease");
}

#[test]
fn equal_device_without_a_lease_is_shared_instead() {
    let text = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb:mps\", \"3g.40gb\"]\n";
    let config = Config::parse(text, "c").unwrap();
    let mut gpu = Kind::MigDevice.gpu();
    let mut other = gpu.mig.as_ref().unwrap().instances[0].clone();
    (other.id, other.placement.start, other.compute[0].uuid) = (1, 0, Some("MIG-1".into()));
    gpu.mig.as_mut().unwrap().instances.insert(0, other);
    for (leased, shared) in [("MIG-0", "MIG-1"), ("MIG-1", "MIG-0")] {
        gpu.leases = vec![LeaseUse { target: leased.into(), ..Kind::MigDevice.lease(&gpu) }];
        describe_all(&config, std::slice::from_mut(&mut gpu));
        assert!(gpu.pending.is_empty(), "{:?}", gpu.pending);
        let targets = decide(&config, std::slice::from_ref(&gpu), &BTreeSet::new()).targets;
        assert_eq!(targets.iter().map(|target| target.uuid.as_str()).collect::<Vec<_>>(), [shared]);
    }
}
