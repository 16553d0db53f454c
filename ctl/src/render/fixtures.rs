//! Sample hosts and operations for snapshot tests, as the API describes them.

use gpush_api::{
    Actor, Architecture, ComputeInstance, Driver, Gpu, GpuHolders, GpuIndex, GpuInstance, GpuPlan, GpuState, Health,
    HealthStatus, Holder, InstanceStep, Memory, Mig, MigDevice, Mode, Operation, OperationState, Placement, Process,
    ProcessKind, Step, StepState, Version,
};
use jiff::Timestamp;

use super::{Appearance, Charset, status::Status};

pub(crate) mod lease;
pub(crate) mod mps;

/// Time of all readings in the samples.
pub(crate) const READ_AT: i64 = 1_790_000_000;

pub(crate) fn look(width: usize, charset: Charset) -> Appearance {
    let now = Timestamp::from_second(READ_AT + 3).unwrap();
    Appearance { width, wraps: true, headings: true, wide: false, exact: false, charset, is_administrator: false, now }
}

/// Removes colors from the text of a snapshot.
pub(crate) fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

pub(crate) fn process(pid: u32, user: &str, command: &str, memory_mib: u64) -> Process {
    Process {
        pid: Some(pid),
        uid: Some(1000),
        user: Some(user.into()),
        command: Some(command.into()),
        kind: ProcessKind::Compute,
        memory_mib: Some(memory_mib),
        unidentified: false,
    }
}

/// A process whose details the viewer may not see.
pub(crate) fn hidden() -> Process {
    Process {
        pid: None,
        uid: None,
        user: None,
        command: None,
        kind: ProcessKind::Compute,
        memory_mib: None,
        unidentified: false,
    }
}

/// A GPU instance with one compute instance that uses all of it.
pub(crate) fn instance(
    id: u32,
    profile: &str,
    start: u8,
    size: u8,
    memory: (u64, u64),
    users: &[Process],
) -> GpuInstance {
    GpuInstance {
        id,
        profile_id: 0,
        profile: profile.into(),
        placement: Placement { start, size },
        memory: Some(Memory { used_mib: memory.0, total_mib: memory.1 }),
        compute: vec![compute(id, 0, profile, users)],
        processes: Vec::new(),
    }
}

pub(crate) fn compute(gi: u32, id: u32, profile: &str, users: &[Process]) -> ComputeInstance {
    ComputeInstance {
        id,
        profile_id: 0,
        profile: profile.into(),
        placement: None,
        uuid: Some(format!("MIG-{gi:04x}{id:04x}-aaaa-5bbb-8ccc-0123456789ab").into()),
        processes: users.to_vec(),
    }
}

pub(crate) fn gpu(index: u32, name: &str, total_mib: u64, mig: Option<Mig>) -> Gpu {
    let used_mib = mig.iter().flat_map(|m| &m.instances).filter_map(|i| i.memory).map(|m| m.used_mib).sum();
    Gpu {
        index: GpuIndex(index),
        uuid: format!("GPU-{index:08x}-1111-2222-3333-444444444444").into(),
        pci: format!("0000:{:02x}:00.0", 7 + index * 8),
        pci_id: None,
        pci_subsystem: None,
        minor: index,
        name: name.into(),
        architecture: Architecture::Ampere,
        passed_through: false,
        memory: Memory { total_mib, used_mib },
        mode: Mode::Mig,
        rule: Some("training".into()),
        access: None,
        layout: None,
        overridden: None,
        drift: Vec::new(),
        pending: Vec::new(),
        mps_daemons: std::collections::BTreeSet::new(),
        state: GpuState::Ready,
        reasons: Vec::new(),
        mig,
        compute_mode: None,
        timeslice: None,
        nvlink: None,
        sensors: gpush_api::Sensors::default(),
        processes: Vec::new(),
        cordons: Vec::new(),
        leases: Vec::new(),
        processes_known: true,
        processes_error: None,
        unleased: Vec::new(),
        blocked_by: Vec::new(),
        observed_at: Timestamp::from_second(READ_AT).unwrap(),
        stale: false,
    }
}

pub(crate) fn mig(slices: u8, instances: Vec<GpuInstance>) -> Mig {
    Mig {
        enabled: true,
        reset_pending: false,
        memory_slices: slices,
        compute_slices: if slices == 8 { 7 } else { slices },
        instances,
        profiles: std::sync::Arc::default(),
    }
}

/// A host with GPUs in every state that `status` can show.
pub(crate) fn mixed() -> Vec<Gpu> {
    let a100 = "NVIDIA A100-SXM4-80GB";
    let train = process(4123, "alice", "python train.py --epochs 90 --data /srv/imagenet", 12_400);
    let jupyter = process(991, "bob", "jupyter-lab", 800);

    let busy = gpu(
        0,
        a100,
        81_920,
        Some(mig(
            8,
            vec![
                instance(2, "3g.40gb", 0, 4, (12_411, 40_448), std::slice::from_ref(&train)),
                instance(3, "2g.20gb", 4, 2, (1, 19_968), &[]),
                instance(11, "1g.10gb", 6, 1, (813, 9_728), &[jupyter.clone(), hidden()]),
            ],
        )),
    );
    let mut split = instance(1, "4g.40gb", 0, 4, (9_000, 40_448), &[]);
    split.compute = vec![
        compute(1, 0, "1c.4g.40gb", &[process(77, "carol", "python serve.py", 4_000)]),
        compute(1, 1, "1c.4g.40gb", &[hidden()]),
        compute(1, 2, "2c.4g.40gb", &[]),
    ];
    let mut bare = instance(5, "2g.20gb", 4, 2, (0, 19_968), &[]);
    bare.compute.clear();
    bare.memory = None;
    let mut drifting = gpu(1, a100, 81_920, Some(mig(8, vec![split, bare])));
    drifting.drift = vec![
        "2g.20gb@4: missing compute instances: 2g.20gb".into(),
        "missing 1g.10gb*2".into(),
        "extra 1g.20gb@6".into(),
    ];

    let small = (0..7)
        .map(|n| instance(7 + u32::from(n), if n == 6 { "1g.10gb+me" } else { "1g.10gb" }, n, 1, (12, 9_728), &[]));
    let mut changing = gpu(2, a100, 81_920, Some(mig(8, small.collect())));
    changing.state = GpuState::Changing;
    changing.reasons = vec!["op-17 (mig.apply by root) is at work on it".into()];

    let empty = gpu(3, a100, 81_920, Some(mig(8, Vec::new())));

    let mut pending = gpu(4, "NVIDIA A30", 24_576, Some(mig(4, Vec::new())));
    if let Some(mig) = &mut pending.mig {
        (mig.enabled, mig.reset_pending) = (false, true);
    }
    pending.memory.used_mib = 5;

    let mut unmanaged = gpu(5, "NVIDIA L4", 23_034, None);
    unmanaged.mode = Mode::NoRule;
    unmanaged.rule = None;
    unmanaged.memory.used_mib = 3_174;
    unmanaged.processes = vec![jupyter, process(31_337, "dave", "./a.out", 2_300)];

    let mut degraded = gpu(
        6,
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        97_887,
        Some(mig(
            12,
            vec![
                instance(3, "1g.24gb", 0, 3, (24_000, 24_192), &[hidden()]),
                instance(1, "2g.48gb", 6, 6, (9, 48_384), &[]),
            ],
        )),
    );
    degraded.state = GpuState::Degraded;
    degraded.reasons = vec![
        "op-12 failed and so did its rollback: the driver would not make 1g.24gb@3 again (insufficient resources)"
            .into(),
    ];

    let mut lost = gpu(7, a100, 81_920, Some(mig(8, Vec::new())));
    lost.state = GpuState::Lost;
    lost.stale = true;
    lost.observed_at = Timestamp::from_second(READ_AT - 300).unwrap();

    vec![busy, drifting, changing, empty, pending, unmanaged, degraded, lost]
}

/// Eight GPUs with seven instances each, for the longest usual output.
pub(crate) fn full() -> Vec<Gpu> {
    (0..8)
        .map(|index| {
            let instances = (0..7).map(|n| {
                let users = if n % 3 == 0 {
                    vec![process(1000 + u32::from(n), "alice", "python serve.py", 4_000)]
                } else {
                    Vec::new()
                };
                instance(7 + u32::from(n), "1g.18gb", n, 1, (if users.is_empty() { 13 } else { 4_013 }, 16_384), &users)
            });
            gpu(index, "NVIDIA H200", 143_771, Some(mig(8, instances.collect())))
        })
        .collect()
}

pub(crate) fn status(gpus: Vec<Gpu>, simulated: bool) -> Status {
    let driver = Driver {
        version: "550.163.01".into(),
        nvml: "12.550.163.01".into(),
        cuda: "12.4".into(),
        library: "libnvidia-ml.so.1".into(),
        simulated,
        memory_limits: false,
    };
    Status {
        version: Version { agent: "0.1.0".into(), api: "v1".into(), driver: Some(driver) },
        health: Health {
            status: HealthStatus::Ok,
            maintenance: None,
            errors: Vec::new(),
            simulated,
            gpu_count: u32::try_from(gpus.len()).unwrap(),
            config_file_changed: false,
            layouts_at_start: None,
            tasks: Vec::new(),
            pid: 812,
        },
        devices: devices(&gpus),
        gpus,
        mps: Vec::new(),
        leases: Vec::new(),
    }
}

/// Lists the MIG devices of GPUs without MPS daemons and leases.
pub(crate) fn devices(gpus: &[Gpu]) -> Vec<MigDevice> {
    gpush_core::devices::list(gpus, &[], &[])
}

fn span(start: u8, size: u8) -> Placement {
    Placement { start, size }
}

/// A plan for the first GPU of [`mixed`]: keeps the busy instances, and replaces a 2g instance by two small ones.
pub(crate) fn plan() -> GpuPlan {
    let gpu = &mixed()[0];
    let create = |start| {
        [
            InstanceStep::CreateGpuInstance { profile: "1g.10gb".into(), profile_id: 19, placement: span(start, 1) },
            InstanceStep::CreateCompute {
                gi_placement: span(start, 1),
                profile: "1g.10gb".into(),
                profile_id: 0,
                placement: None,
            },
        ]
        .map(Step::Instance)
    };
    let mut steps: Vec<Step> = [
        InstanceStep::DestroyCompute { gi: 3, ci: 0, profile: "2g.20gb".into(), uuid: None },
        InstanceStep::DestroyGpuInstance { gi: 3, profile: "2g.20gb".into(), placement: span(4, 2) },
    ]
    .map(Step::Instance)
    .into();
    steps.extend(create(4));
    steps.extend(create(5));
    GpuPlan {
        gpu: GpuIndex(0),
        gpu_uuid: gpu.uuid.clone(),
        name: gpu.name.clone(),
        layout: vec!["3g.40gb".into(), "1g.10gb*3".into()],
        steps,
        keeps: vec![2, 11],
        ..GpuPlan::default()
    }
}

/// A plan without steps for the GPU `index` of [`mixed`].
pub(crate) fn plan_without_steps(index: u32) -> GpuPlan {
    let gpu = &mixed()[index as usize];
    GpuPlan { gpu: GpuIndex(index), gpu_uuid: gpu.uuid.clone(), name: gpu.name.clone(), steps: Vec::new(), ..plan() }
}

/// An operation that executes [`plan`] on GPU 0 and needs no change on GPU 2.
pub(crate) fn operation(state: OperationState) -> Operation {
    let plans = vec![plan(), plan_without_steps(2)];
    let progress = plans.iter().map(|p| StepState {
        gpu: p.gpu,
        done: if state == OperationState::Done { p.steps.len() as u32 } else { 0 },
        total: p.steps.len() as u32,
        doing: None,
        rolling_back: false,
        restored: false,
        error: None,
    });
    Operation {
        begun: true,
        layouts_before: Vec::new(),
        id: "op-17".into(),
        revision: 4,
        kind: "mig.apply".into(),
        state,
        by: Actor { uid: 0, user: Some("root".into()), pid: Some(4242) },
        created_at: Timestamp::from_second(READ_AT).unwrap(),
        ended_at: state.is_final().then(|| Timestamp::from_second(READ_AT + 2).unwrap()),
        reason: None,
        waits_for: Vec::new(),
        notes: Vec::new(),
        progress: progress.collect(),
        plans,
        error: None,
    }
}

/// The GPUs of [`mixed`] after [`plan`] was executed.
pub(crate) fn after() -> Vec<Gpu> {
    let mut gpus = mixed();
    if let Some(mig) = &mut gpus[0].mig {
        mig.instances.retain(|i| i.id != 3);
        mig.instances.push(instance(9, "1g.10gb", 4, 1, (12, 9_728), &[]));
        mig.instances.push(instance(10, "1g.10gb", 5, 1, (12, 9_728), &[]));
        mig.instances.sort_by_key(|i| i.placement);
    }
    gpus
}

/// What has GPU 0 open: a holder of each kind.
pub(crate) fn holders() -> GpuHolders {
    let devices = || vec!["/dev/nvidia0".to_owned()];
    let monitor = Holder {
        pid: Some(812),
        uid: Some(0),
        user: Some("root".to_owned()),
        command: Some("nv-hostengine -n".to_owned()),
        unit: Some("nvidia-dcgm.service".to_owned()),
        devices: devices(),
        ..Holder::default()
    };
    let server = Holder {
        pid: Some(4107),
        uid: Some(1000),
        mps: Some("MPS server of GPU 0".to_owned()),
        unit: Some("gpushd-mps@g0.service".to_owned()),
        devices: devices(),
        ..Holder::default()
    };
    let hidden = Holder { unit: Some("session-3.scope".to_owned()), devices: devices(), ..Holder::default() };
    let module = Holder { module: Some("nvidia_drm".to_owned()), ..Holder::default() };
    GpuHolders { gpu: GpuIndex(0), gpu_uuid: "GPU-0".into(), holders: vec![monitor, server, hidden, module] }
}
