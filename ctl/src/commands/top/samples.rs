//! A host for tests, as gpushd describes it: MIG, MPS, whole GPUs, and figures of every kind.

use std::collections::BTreeSet;

use gpush_api::{
    ClockLimit, DeviceActivity, EnergyMethod, Gpu, GpuIndex, GpuProcess, GpuProcesses, GpuState, GpuUsage, HostUsage,
    InstanceUsage, Lease, LeaseBinding, LeaseHolder, LeaseId, LeaseKind, LeaseMember, LeaseUsage, LeaseUsageSummary,
    MemberShare, Mode, Process, SignalSource, TargetUsage, UnknownReason, UnleasedPolicy, UseState,
};
use jiff::Timestamp;

use super::answers::HostAnswers;
use crate::render::fixtures::{self, READ_AT};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(READ_AT + seconds).unwrap()
}

/// GPU 0 has MIG with a split instance, GPU 1 has MPS, GPU 2 is an A100 with MIG, GPU 3 is a whole GPU without a rule, GPU 4 is
/// lost.
fn gpus() -> Vec<Gpu> {
    let h100 = "NVIDIA H100 80GB HBM3";
    let mut split = fixtures::instance(5, "2g.20gb", 4, 2, (5_000, 19_968), &[]);
    split.compute = vec![fixtures::compute(5, 0, "1c.2g.20gb", &[]), fixtures::compute(5, 1, "1c.2g.20gb", &[])];
    let instances = vec![
        fixtures::instance(2, "3g.40gb", 0, 4, (20_200, 40_448), &[]),
        split,
        fixtures::instance(11, "1g.10gb", 6, 1, (13, 9_728), &[]),
    ];
    let mig = fixtures::gpu(0, h100, 81_920, Some(fixtures::mig(8, instances)));
    let mut mps = fixtures::gpu(1, h100, 81_920, None);
    mps.mode = Mode::Mps;
    mps.processes = vec![fixtures::process(900, "root", "nvidia-cuda-mps-server", 40)];
    let instances = vec![fixtures::instance(1, "3g.40gb", 0, 4, (9_000, 40_448), &[])];
    let a100 = fixtures::gpu(2, "NVIDIA A100-SXM4-80GB", 81_920, Some(fixtures::mig(8, instances)));
    let mut whole = fixtures::gpu(3, "NVIDIA L4", 23_034, None);
    (whole.mode, whole.rule) = (Mode::NoRule, None);
    whole.processes = vec![fixtures::process(31_337, "dave", "./a.out", 2_300)];
    let mut lost = fixtures::gpu(4, h100, 81_920, None);
    lost.state = GpuState::Lost;
    vec![mig, mps, a100, whole, lost]
}

fn held(id: u64, kind: LeaseKind, user: &str, member: LeaseMember) -> Lease {
    let holder = LeaseHolder { uid: 1000, user: Some(user.to_owned()) };
    Lease { holder, members: vec![member], ..fixtures::lease::lease(id, kind) }
}

fn leases() -> Vec<Lease> {
    let device = |gi: u32, ci: u32| format!("MIG-{gi:04x}{ci:04x}-aaaa-5bbb-8ccc-0123456789ab");
    let mig = |gpu: u32, gi: u32, ci: u32, profile: &str| {
        let share = MemberShare::Mig { profile: profile.to_owned() };
        fixtures::lease::member(gpu, Some(&device(gi, ci)), share, 19_968)
    };
    let mps = |percentage: &str| {
        let share = MemberShare::Mps {
            percentage: percentage.parse().unwrap(),
            memory_limit_mib: gpush_api::MemoryLimit::of_mib(8192),
            priority: gpush_api::Priority::Normal,
        };
        fixtures::lease::member(1, None, share, 8192)
    };
    let job = LeaseBinding::Job {
        cluster: "ci".to_owned(),
        job: 812,
        node: "n1".to_owned(),
        restart: 0,
        leader: None,
        cgroup: None,
    };
    let mut hidden = held(22, LeaseKind::Mps, "erin", mps("10"));
    hidden.redact();
    vec![
        Lease { binding: job, expires_at: None, ..held(12, LeaseKind::Mig, "alice", mig(0, 2, 0, "3g.40gb")) },
        held(13, LeaseKind::Mig, "bob", mig(0, 5, 0, "1c.2g.20gb")),
        held(14, LeaseKind::Mig, "carol", mig(0, 5, 1, "1c.2g.20gb")),
        held(17, LeaseKind::Mps, "alice", mps("25")),
        held(18, LeaseKind::Mps, "bob", mps("50")),
        hidden,
        held(23, LeaseKind::Mig, "carol", mig(2, 1, 0, "3g.40gb")),
        fixtures::lease::queued(),
    ]
}

fn process(gpu: u32, device: Option<&str>, lease: Option<&str>, one: Process) -> GpuProcess {
    GpuProcess {
        gpu: GpuIndex(gpu),
        gpu_uuid: gpus()[gpu as usize].uuid.clone(),
        device: device.map(str::to_owned),
        process: one,
        account: None,
        cgroup: None,
        unit: None,
        slurm_job: None,
        serves: None,
        lease: lease.map(str::to_owned),
        unattributed: false,
        allowed: false,
        unleased: None,
        unleased_step: None,
        unleased_action: None,
    }
}

fn processes() -> Vec<GpuProcess> {
    let alone = process(3, None, None, fixtures::process(31_337, "dave", "./a.out", 2_300));
    let mut unleased = process(1, None, None, fixtures::process(4_444, "mallory", "./miner --all", 512));
    unleased.unleased = Some("mallory has no lease on GPU 1".to_owned());
    let server = process(1, None, None, fixtures::process(900, "root", "nvidia-cuda-mps-server", 40));
    vec![
        process(
            0,
            Some("3g.40gb@0"),
            Some("L12"),
            fixtures::process(4_123, "alice", "/usr/bin/python simulate.py", 20_150),
        ),
        process(0, Some("1c.2g.20gb@4/0"), Some("L13"), fixtures::process(991, "bob", "jupyter-lab", 4_900)),
        GpuProcess { serves: Some("MPS server of GPU 1".to_owned()), ..server },
        process(1, None, Some("L17"), fixtures::process(5_001, "alice", "python train.py --epochs 90", 7_100)),
        process(1, None, Some("L18"), fixtures::process(5_002, "bob", "python serve.py", 2_000)),
        process(1, None, None, fixtures::hidden()),
        unleased,
        alone,
    ]
}

fn gpu_usage(gpu: &Gpu, source: SignalSource) -> GpuUsage {
    GpuUsage {
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        sampled_at: Some(at(2)),
        failure: None,
        source,
        activity: DeviceActivity::default(),
        memory_used_mib: Some(gpu.memory.used_mib),
        power_w: Some(80.0),
        power_limit_w: Some(700.0),
        energy_j: Some(1_234_567.0),
        unattributed_j: 34_567.0,
        temperature_c: Some(41),
        memory_temperature_c: Some(45),
        sm_clock_mhz: Some(1_980),
        memory_clock_mhz: Some(2_619),
        limited_by: Some(Vec::new()),
        leased: Some(0.0),
        unused: None,
        unusable: Some(0.0),
        instance_usage: Vec::new(),
    }
}

fn sm(ratio: f64) -> DeviceActivity {
    DeviceActivity { sm_activity: Some(ratio), dram_activity: Some(ratio / 2.0), ..DeviceActivity::default() }
}

fn all_gpu_usage() -> Vec<GpuUsage> {
    let gpus = gpus();
    let instance = |gi: u32, profile: &str, ratio: f64, mib: u64| InstanceUsage {
        gi,
        profile: profile.to_owned(),
        activity: sm(ratio),
        memory_used_mib: Some(mib),
        memory_total_mib: None,
    };
    let mig = GpuUsage {
        power_w: Some(412.4),
        leased: Some(0.75),
        unused: Some(0.25),
        instance_usage: vec![
            instance(2, "3g.40gb", 0.874, 20_200),
            instance(5, "2g.20gb", 0.12, 5_000),
            instance(11, "1g.10gb", 0.0, 13),
        ],
        ..gpu_usage(&gpus[0], SignalSource::Gpm)
    };
    let mps = GpuUsage {
        activity: DeviceActivity { busy: Some(0.99), tensor_activity: Some(0.2), ..sm(0.61) },
        memory_used_mib: Some(9_700),
        power_w: Some(689.6),
        limited_by: Some(vec![ClockLimit::Power]),
        leased: Some(0.85),
        ..gpu_usage(&gpus[1], SignalSource::Gpm)
    };
    let a100 = GpuUsage { power_limit_w: Some(400.0), ..gpu_usage(&gpus[2], SignalSource::MemoryOnly) };
    let whole = GpuUsage {
        sampled_at: None,
        failure: Some("the driver worker restarts".to_owned()),
        memory_used_mib: None,
        power_w: None,
        power_limit_w: None,
        source: SignalSource::None,
        ..gpu_usage(&gpus[3], SignalSource::None)
    };
    vec![mig, mps, a100, whole]
}

fn use_of(lease: &Lease, state: UseState, reason: Option<UnknownReason>, ratio: Option<f64>, mib: u64) -> LeaseUsage {
    let is_mps = lease.kind == LeaseKind::Mps;
    let target = TargetUsage {
        target: lease.members[0].target.clone(),
        gpu_uuid: lease.members[0].gpu_uuid.clone(),
        source: if is_mps { SignalSource::Processes } else { SignalSource::Gpm },
        estimate: is_mps,
        weak: false,
        sm_activity: ratio,
        dram_activity: None,
        sm_mean: ratio,
        memory_mib: Some(mib),
        memory_peak_mib: Some(mib + 1_000),
        memory_p98_mib: Some(mib),
    };
    LeaseUsage {
        lease_id: lease.id,
        state,
        reason,
        weak: false,
        since: at(-500),
        unused_since: matches!(state, UseState::Idle | UseState::Empty).then(|| at(-4_000)),
        unused_s: matches!(state, UseState::Idle | UseState::Empty).then_some(4_000),
        busy_s: 5_400,
        idle_s: 600,
        empty_s: 0,
        unknown_s: 60,
        energy_j: 812_000.0,
        energy_method: if is_mps { EnergyMethod::Process } else { EnergyMethod::Gpm },
        energy_mixed: false,
        target_usage: vec![target],
    }
}

fn usage(leases: &[Lease]) -> HostUsage {
    let lease_usage = leases.iter().filter_map(|lease| {
        Some(match lease.id.0 {
            12 => use_of(lease, UseState::Busy, None, Some(0.874), 20_150),
            13 => use_of(lease, UseState::Unknown, Some(UnknownReason::SharedDevice), None, 4_900),
            14 => use_of(lease, UseState::Empty, None, None, 0),
            17 => use_of(lease, UseState::Busy, None, Some(0.52), 7_100),
            // L17 works on the same GPU, so the power does not confirm that L18 is idle.
            18 => LeaseUsage { weak: true, ..use_of(lease, UseState::Idle, None, Some(0.0), 2_000) },
            23 => use_of(lease, UseState::Unknown, Some(UnknownReason::MemoryOnly), None, 8_900),
            _ => return None,
        })
    });
    HostUsage { interval_ms: Some(1000), gpu_usage: all_gpu_usage(), lease_usage: lease_usage.collect() }
}

/// The use of a lease as `GET /v1/leases` reports it.
fn summary(usage: &LeaseUsage) -> LeaseUsageSummary {
    LeaseUsageSummary {
        state: Some(usage.state),
        reason: usage.reason,
        weak: usage.weak,
        unused_since: usage.unused_since,
        unused_s: usage.unused_s,
        busy_s: usage.busy_s,
        idle_s: usage.idle_s,
        empty_s: usage.empty_s,
        unknown_s: usage.unknown_s,
        process_count: Some(1),
        memory_mib: usage.target_usage[0].memory_mib,
        memory_peak_mib: usage.target_usage[0].memory_peak_mib,
        energy_j: Some(usage.energy_j),
        energy_method: usage.energy_method,
        energy_mixed: usage.energy_mixed,
        power_limited: None,
        thermal_limited: None,
    }
}

/// Answers about a host with figures of every kind. The caller holds L12 and L17, and is not an administrator.
pub(crate) fn host() -> HostAnswers {
    let mut status = fixtures::status(gpus(), false);
    status.leases = leases();
    status.devices = gpush_core::devices::list(&status.gpus, &[], &status.leases);
    let usage = usage(&status.leases);
    for lease in &mut status.leases {
        lease.usage = usage.lease_usage.iter().find(|usage| usage.lease_id == lease.id).map(summary);
    }
    let processes = GpuProcesses { policy: UnleasedPolicy::Report, processes: processes(), unknown: Vec::new() };
    let own = BTreeSet::from([LeaseId(12), LeaseId(17)]);
    HostAnswers {
        status,
        usage,
        processes: Some(processes),
        processes_error: None,
        others: BTreeSet::new(),
        own,
        at: at(3),
    }
}
