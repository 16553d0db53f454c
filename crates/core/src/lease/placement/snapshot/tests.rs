use gpush_api::{ComputeInstance, GpuIndex, GpuUuid, Process, ProcessKind, TargetUuid};

use super::*;
use crate::{
    lease::placement::{
        NoAssignment, Obstacle, PlacementPolicy, PlacementRequest, RequestedDevice, RequestedShare, place,
        scene::timeslice_offer,
    },
    preset,
};

const CONFIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*2\"]\n\
    [[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n[gpu.mps]\ntotal_percentage = 150\n\
    [[gpu]]\nmatch = [\"2\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 3 }\n\
    [[gpu]]\nmatch = [\"3\"]\nmode = \"exclusive\"\n";

fn gpus() -> Vec<Gpu> {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    for mig in gpus[1..].iter_mut().filter_map(|gpu| gpu.mig.as_mut()) {
        mig.set_mode(false, false);
    }
    let instance = |n: u8| GpuInstance {
        id: u32::from(n),
        profile_id: 19,
        profile: "1g.10gb".to_owned(),
        placement: Placement { start: n, size: 1 },
        memory: None,
        compute: vec![ComputeInstance {
            id: 0,
            profile_id: 0,
            profile: "1g.10gb".to_owned(),
            placement: None,
            uuid: Some(format!("MIG-{n}").into()),
            processes: Vec::new(),
        }],
        processes: Vec::new(),
    };
    gpus[0].mig.as_mut().unwrap().instances = (0..2).map(instance).collect();
    gpus
}

struct Scene {
    config: Config,
    gpus: Vec<Gpu>,
    members: Vec<(u32, LeaseMember)>,
    claimed: BTreeSet<GpuUuid>,
    daemons: BTreeSet<TargetUuid>,
    ended: BTreeSet<TargetUuid>,
    created: BTreeMap<GpuUuid, BTreeSet<Placement>>,
}

impl Scene {
    fn new() -> Self {
        let config = Config::parse(CONFIG, "gpushd.toml").unwrap();
        let (claimed, daemons, ended, created) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        Self { config, gpus: gpus(), members: Vec::new(), claimed, daemons, ended, created }
    }

    fn lease(&mut self, holder: u32, target: &str, share: MemberShare) {
        // The MIG devices are on GPU 0.
        let gpu = if target.starts_with("MIG-") { self.uuid(0) } else { target.to_owned() };
        let target = target.to_owned();
        self.members.push((
            holder,
            LeaseMember { target: target.into(), gpu_uuid: gpu.into(), share, memory_mib: 0, gpu_memory_mib: 0 },
        ));
    }

    fn host(&self) -> Host {
        let members: Vec<(u32, &LeaseMember)> = self.members.iter().map(|(uid, member)| (*uid, member)).collect();
        Host::of(&Snapshot {
            config: &self.config,
            gpus: &self.gpus,
            members: &members,
            claimed: &self.claimed,
            daemons: &self.daemons,
            ended: &self.ended,
            users: &BTreeMap::new(),
            created: &self.created,
        })
    }

    fn uuid(&self, gpu: usize) -> String {
        self.gpus[gpu].uuid.to_string()
    }
}

fn process() -> Process {
    let kind = ProcessKind::Compute;
    Process { pid: Some(7), uid: Some(1000), user: None, command: None, kind, memory_mib: None, unidentified: false }
}

#[test]
fn each_mode_offers_its_kind_of_lease() {
    let host = Scene::new().host();
    let kinds = |gpu: usize| host.gpus[gpu].kinds().map(gpush_api::LeaseKind::name).collect::<Vec<_>>();
    assert_eq!([kinds(0), kinds(1), kinds(2), kinds(3)], [["mig"], ["mps"], ["timeslice"], ["whole"]]);
    assert!(kinds(4).is_empty(), "the config does not claim it");
    assert_eq!(host.gpus[1].mps[0].capacity_tenths, 1500);
    let closed: Vec<Option<Closed>> = host.gpus.iter().take(4).map(|gpu| gpu.closed).collect();
    assert_eq!(closed, [None, Some(Closed::NotShared), None, None], "no operation has started the MPS daemon");
}

#[test]
fn gpu_without_an_offer_has_the_reason() {
    let mut scene = Scene::new();
    scene.gpus[1].state = GpuState::Lost;
    scene.gpus[3].mig.as_mut().unwrap().set_mode(true, true);
    let host = scene.host();
    let reasons: Vec<_> = host.gpus.iter().map(|gpu| gpu.unoffered).take(5).collect();
    let other_mode = Some(Unoffered::OtherMode(Mode::Exclusive));
    assert_eq!(reasons, [None, Some(Unoffered::NotReady(Mode::Mps)), None, other_mode, Some(Unoffered::NoRule)]);
}

/// Fault: a request with `--wait` for the next mode of the GPU was refused until the MPS daemon had ended.
#[test]
fn gpu_that_leaves_mps_is_closed_but_offers_its_next_mode() {
    let mut scene = Scene::new();
    scene.daemons = [scene.uuid(2), scene.uuid(3)].map(TargetUuid::from).into();
    let kinds = |host: &Host, gpu: usize| host.gpus[gpu].kinds().collect::<Vec<_>>();
    for closed in [Closed::StillShared, Closed::Pending] {
        let host = scene.host();
        assert_eq!([kinds(&host, 2), kinds(&host, 3)], [[LeaseKind::Timeslice], [LeaseKind::Whole]]);
        assert_eq!([2, 3].map(|gpu| host.gpus[gpu].closed), [Some(closed); 2], "no request is granted");
        for (gpu, mode) in [(2, Mode::Timeslice), (3, Mode::Exclusive)] {
            let aim = gpush_api::PendingAim::Mode { from: Mode::Mps, mode };
            scene.gpus[gpu].pending = vec![gpush_api::PendingChange { aim, leases: vec![gpush_api::LeaseId(3)] }];
        }
    }
}

/// Fault: a request with `--wait` reserved a GPU whose MPS daemon was not started. The operation that starts the daemon
/// waited behind this request, and the request waited for the daemon.
#[test]
fn mps_gpu_without_a_daemon_is_closed_and_not_reserved() {
    let mut scene = Scene::new();
    let share = RequestedShare::Mps { percentage: None, memory_limit: None, priority: None };
    let wanted = PlacementRequest { share, count: 1, holder: 1000, gpus: None, targets: None };
    let obstacles = match place(&scene.host(), &wanted, PlacementPolicy::Pack) {
        Err(NoAssignment::Busy { obstacles, .. }) => obstacles,
        other => panic!("{other:?}"),
    };
    assert_eq!(obstacles, [(GpuIndex(1), Obstacle::Closed(Closed::NotShared))]);
    assert_eq!(scene.host().reservation(&wanted, PlacementPolicy::Pack), None);
    scene.daemons.insert(scene.uuid(1).into());
    assert!(place(&scene.host(), &wanted, PlacementPolicy::Pack).is_ok());
}

/// Fault: between `nvidia-smi -c DEFAULT` and the next correction by gpushd, a lease was granted on such a GPU.
#[test]
fn rule_that_prohibits_programs_closes_the_gpu() {
    let mut scene = Scene::new();
    let prohibited = CONFIG.replace("{ replicas = 3 }", "{ replicas = 3, compute_mode = \"prohibited\" }");
    scene.config = Config::parse(&prohibited, "gpushd.toml").unwrap();
    assert_eq!(scene.host().gpus[2].closed, Some(Closed::Prohibited));
}

/// Fault: a request with `--wait` for a device that loses its MPS daemon was refused without a hint.
#[test]
fn device_is_in_use_until_its_mps_daemon_has_ended() {
    let mut scene = Scene::new();
    scene.daemons = ["MIG-0", "MIG-1"].map(TargetUuid::from).into();
    let share = RequestedShare::Mig(RequestedDevice::Profile("1g.10gb".to_owned()));
    let wanted = PlacementRequest { share, count: 1, holder: 1000, gpus: None, targets: None };
    let busy = place(&scene.host(), &wanted, PlacementPolicy::Pack);
    assert!(
        matches!(&busy, Err(NoAssignment::Busy { obstacles, .. }) if *obstacles == [(GpuIndex(0), Obstacle::InUse)]),
        "{busy:?}"
    );
    // Fault: directly after an apply, a request was refused, because gpushd had not removed the ended daemon yet.
    scene.ended.insert("MIG-0".into());
    assert!(place(&scene.host(), &wanted, PlacementPolicy::Pack).is_ok());
}

/// Fault: the hint proposed an `apply`, which is always refused.
#[test]
fn mps_rule_on_gpu_that_is_too_old_is_not_another_mode() {
    let mut scene = Scene::new();
    scene.gpus[1].architecture = gpush_api::Architecture::Legacy;
    assert_eq!(scene.host().gpus[1].unoffered, Some(Unoffered::NoMps));
}

#[test]
fn target_with_lease_or_process_is_not_free() {
    let mut scene = Scene::new();
    let (mps, timeslice, whole) = (scene.uuid(1), scene.uuid(2), scene.uuid(3));
    scene.lease(1000, "MIG-0", MemberShare::Mig { profile: "1g.10gb".to_owned() });
    let percentage = "12.5".parse().unwrap();
    let share = MemberShare::Mps { percentage, memory_limit_mib: None, priority: gpush_api::Priority::Normal };
    scene.lease(1000, &mps, share);
    scene.lease(1000, &timeslice, MemberShare::Timeslice { replicas: 3, level: None, compute_mode: None });
    scene.lease(1000, &whole, MemberShare::Whole);
    let host = scene.host();
    let free: Vec<bool> = host.gpus[0].mig.as_ref().unwrap().instances.iter().map(|one| one.devices[0].free).collect();
    assert_eq!(free, [false, true]);
    assert_eq!((host.gpus[1].mps[0].taken_tenths, host.gpus[1].mps[0].user), (125, Some(1000)));
    assert_eq!(host.gpus[2].timeslice, Some(TimesliceOffer { taken: 1, ..timeslice_offer(3) }));
    assert_eq!(host.gpus[3].whole, Some(WholeOffer { free: false, leased: true, end: None }));

    let mut scene = Scene::new();
    scene.gpus[3].processes.push(process());
    scene.gpus[0].mig.as_mut().unwrap().instances[1].compute[0].processes.push(process());
    let host = scene.host();
    assert_eq!(host.gpus[3].whole, Some(WholeOffer { free: false, leased: false, end: None }));
    assert!(!host.gpus[0].mig.as_ref().unwrap().instances[1].is_free());
}

#[test]
fn instance_of_another_program_is_foreign_on_a_dynamic_gpu() {
    let mut scene = Scene::new();
    let wanted = |name: &str| PlacementRequest {
        share: RequestedShare::Mig(RequestedDevice::Profile(name.to_owned())),
        count: 1,
        holder: 1000,
        gpus: None,
        targets: None,
    };
    assert!(place(&scene.host(), &wanted("2g.20gb"), PlacementPolicy::Pack).is_err(), "the layout is fixed");
    let dynamic = CONFIG.replace("[\"1g.10gb*2\"]", "\"dynamic\"");
    scene.config = Config::parse(&dynamic, "gpushd.toml").unwrap();
    assert!(place(&scene.host(), &wanted("2g.20gb"), PlacementPolicy::Pack).unwrap().needs_operation());
    let uuid = scene.uuid(0);
    scene.created.insert(uuid.clone().into(), BTreeSet::from([Placement { start: 0, size: 1 }]));
    let assignment = place(&scene.host(), &wanted("7g.80gb"), PlacementPolicy::Pack);
    assert!(assignment.is_err(), "the instance at start 1 is foreign");
    scene.created.insert(uuid.into(), (0..2).map(|start| Placement { start, size: 1 }).collect());
    let assignment = place(&scene.host(), &wanted("7g.80gb"), PlacementPolicy::Pack).unwrap();
    assert_eq!(assignment.destroys, [(GpuIndex(0), 0), (GpuIndex(0), 1)]);
}

#[test]
fn gpu_that_is_not_ready_read_or_free_of_claims_is_closed() {
    let obstacle = |scene: &Scene| {
        let wanted =
            PlacementRequest { share: RequestedShare::Whole, count: 1, holder: 1000, gpus: None, targets: None };
        match place(&scene.host(), &wanted, PlacementPolicy::Pack) {
            Err(NoAssignment::Busy { obstacles, .. }) => Some(obstacles),
            Ok(_) | Err(_) => None,
        }
    };
    assert_eq!(obstacle(&Scene::new()), None);
    for state in [GpuState::Degraded, GpuState::Held, GpuState::Unknown, GpuState::Lost, GpuState::Maintenance] {
        let mut scene = Scene::new();
        scene.gpus[3].state = state;
        assert_eq!(obstacle(&scene), Some(vec![(GpuIndex(3), Obstacle::Closed(Closed::NotReady))]), "{state:?}");
    }
    let mut scene = Scene::new();
    scene.gpus[3].compute_mode = Some(ComputeMode::Prohibited);
    assert_eq!(obstacle(&scene), Some(vec![(GpuIndex(3), Obstacle::Closed(Closed::Prohibited))]));
    let mut scene = Scene::new();
    scene.gpus[3].processes_known = false;
    assert_eq!(obstacle(&scene), Some(vec![(GpuIndex(3), Obstacle::Closed(Closed::NotReady))]));
    let mut scene = Scene::new();
    scene.claimed.insert(scene.uuid(3).into());
    assert_eq!(obstacle(&scene), Some(vec![(GpuIndex(3), Obstacle::Closed(Closed::Claimed))]));
}
