//! GPUs, readings, plans and MPS targets for tests.

use std::{collections::BTreeSet, slice};

use gpush_api::{
    ComputeMode, Gpu, GpuIndex, GpuLayout, GpuPlan, LayoutSource, LeaseMember, MemberShare, Mig, MpsPolicy,
    PlanRequest, Process, ProcessKind,
};
use gpush_core::{
    config::Config,
    desired::plan_host,
    mps::{DaemonReport, MpsTarget},
    plan, preset,
    sharing::SharingTarget,
    supervisor::SupervisorState,
};
use gpush_nvml::{Identity, Reading};
use jiff::Timestamp;

/// Returns GPU 0, an A100 with the UUID `GPU-0`. MIG mode is off.
pub(crate) fn whole_gpu() -> Gpu {
    let mut gpu = preset::gpus("dgx-a100").unwrap().remove(0);
    gpu.uuid = "GPU-0".into();
    gpu.mig.as_mut().unwrap().set_mode(false, false);
    gpu
}

/// Returns GPU 0 in MIG mode with these instances. In the order of the placements, their ids are 0, 1 …, and their devices
/// are `MIG-0`, `MIG-1` ….
pub(crate) fn mig_gpu(layout: &[&str]) -> Gpu {
    let mut gpu = whole_gpu();
    gpu.mig.as_mut().unwrap().set_mode(true, true);
    let plan = plan_layout(&gpu, layout);
    let mig = gpu.mig.as_mut().unwrap();
    mig.instances = plan::outcome(&[], plan.instance_steps());
    mig.instances.sort_by_key(|instance| instance.placement);
    let mut devices = 0_u32..;
    for (id, instance) in (0..).zip(&mut mig.instances) {
        instance.id = id;
        for (id, compute) in (0..).zip(&mut instance.compute) {
            compute.id = id;
            compute.uuid = devices.next().map(|number| format!("MIG-{number}").into());
        }
    }
    gpu
}

/// Returns the MIG state of GPU 0 with these instances.
pub(crate) fn mig(layout: &[&str]) -> Mig {
    mig_gpu(layout).mig.unwrap()
}

/// Plans a request of one GPU. The GPU has no rule.
fn plan_request(gpu: &Gpu, gpus: Vec<String>, layout: LayoutSource) -> GpuPlan {
    let plans = plan_host(&Config::default(), slice::from_ref(gpu), &PlanRequest { gpus, layout });
    plans.unwrap().plans.remove(0)
}

/// Plans a layout on GPU 0.
pub(crate) fn plan_layout(gpu: &Gpu, layout: &[&str]) -> GpuPlan {
    let entries = if layout.is_empty() { &["none"] } else { layout };
    let entries = entries.iter().map(|entry| (*entry).to_owned()).collect();
    plan_request(gpu, vec!["0".to_owned()], LayoutSource::Entries(entries))
}

/// Plans to disable MIG mode on GPU 0.
pub(crate) fn plan_mig_off(gpu: &Gpu) -> GpuPlan {
    let off = GpuLayout { gpu: gpu.uuid.to_string(), mig: false, layout: Vec::new() };
    plan_request(gpu, Vec::new(), LayoutSource::PerGpu(vec![off]))
}

/// Returns a reading that shows the GPU.
pub(crate) fn reading(gpu: &Gpu) -> Reading {
    Reading {
        identity: Identity {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            pci: gpu.pci.clone(),
            pci_id: 0,
            pci_subsystem: None,
            minor: gpu.minor,
            name: gpu.name.clone(),
            architecture: gpu.architecture,
            passed_through: gpu.passed_through,
        },
        memory: gpu.memory,
        mig: gpu.mig.clone(),
        compute_mode: Some(ComputeMode::Default),
        nvlink: None,
        sensors: gpu.sensors,
        processes: gpu.processes.clone(),
        processes_known: gpu.processes_known,
        rows: None,
        warnings: Vec::new(),
    }
}

/// Returns a process of user 1000.
pub(crate) fn process(pid: u32) -> Process {
    Process {
        pid: Some(pid),
        uid: Some(1000),
        user: Some("alice".to_owned()),
        command: Some("train".to_owned()),
        kind: ProcessKind::Compute,
        memory_mib: None,
        unidentified: false,
    }
}

/// Returns the member of a lease of a MIG device. `target` is empty if the device does not exist yet.
pub(crate) fn mig_member(gpu: &str, target: &str, profile: &str) -> LeaseMember {
    let share = MemberShare::Mig { profile: profile.to_owned() };
    LeaseMember { target: target.into(), gpu_uuid: gpu.into(), share, memory_mib: 1, gpu_memory_mib: 4 }
}

/// The state of an MPS daemon that serves clients.
pub(crate) const READY: SupervisorState = SupervisorState::Ready { pid: 1, silences: 0 };

/// Returns a report about a desired MPS daemon without clients.
pub(crate) fn daemon_report(state: SupervisorState) -> DaemonReport {
    DaemonReport {
        state,
        since: Timestamp::UNIX_EPOCH,
        wanted: true,
        multi_user: false,
        policy: Some(MpsPolicy::default()),
        pid: Some(1),
        in_force: None,
        servers: Vec::new(),
        clients: Vec::new(),
        clients_known: true,
        waiting: Vec::new(),
        serves_leases: false,
        behind: false,
        until: None,
        failures: 0,
        next_start: None,
        trouble: Vec::new(),
        ear: BTreeSet::new(),
        protocol: None,
        findings: Vec::new(),
        pipe: None,
        logs: None,
        user: None,
    }
}

/// Returns an MPS target on GPU 0: the GPU itself, or a MIG device.
pub(crate) fn mps_target(uuid: &str, report: DaemonReport) -> MpsTarget {
    let full_gpu = uuid == "GPU-0";
    let desired = SharingTarget {
        uuid: uuid.into(),
        gpu: GpuIndex(0),
        gpu_uuid: "GPU-0".into(),
        device: (!full_gpu).then(|| "3g.40gb@4".to_owned()),
        memory_mib: Some(40_960),
        policy: MpsPolicy::default(),
        full_gpu,
    };
    MpsTarget {
        uuid: uuid.into(),
        short: "g1".to_owned(),
        gpu_uuid: "GPU-0".into(),
        desired: Some(desired),
        supervisor: 0,
        report,
    }
}
