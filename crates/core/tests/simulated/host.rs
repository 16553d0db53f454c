//! One simulated GPU. The tests read this GPU as gpushd does, execute steps, and run processes.

use gpush_api::{ComputeInstance, GpuInstance, InstanceStep, Placement};
use silicon::machine::{Machine, Pid, Process, ProcessKind};

const GPU: u32 = 0;

#[derive(Clone)]
pub(crate) struct Host {
    machine: Machine,
    next_pid: u32,
}

/// The placements and profiles of the instances, without ids, because the driver chooses the ids.
type Shape = Vec<(Placement, u32, Vec<(Option<Placement>, u32)>)>;

pub(crate) fn shape(instances: &[GpuInstance]) -> Shape {
    let mut shape: Shape = instances
        .iter()
        .map(|i| {
            let mut compute: Vec<_> = i.compute.iter().map(|c| (c.placement, c.profile_id)).collect();
            compute.sort_unstable();
            (i.placement, i.profile_id, compute)
        })
        .collect();
    shape.sort_unstable();
    shape
}

fn ours(placement: silicon::machine::Placement) -> Placement {
    Placement { start: placement.start, size: placement.size }
}

fn theirs(placement: Placement) -> silicon::machine::Placement {
    silicon::machine::Placement { start: placement.start, size: placement.size }
}

impl Host {
    pub(crate) fn of_model(key: &str) -> Self {
        let machine = Machine::of_model(key).unwrap();
        assert!(machine.gpu(GPU).unwrap().mig, "{key}");
        Self { machine, next_pid: 1 }
    }

    /// Returns the GPU instances as the driver reports them.
    pub(crate) fn read(&self) -> Vec<GpuInstance> {
        let gpu = self.machine.gpu(GPU).unwrap();
        let model = self.machine.model(GPU).unwrap();
        gpu.instances
            .iter()
            .map(|i| {
                let profile = model.gi_profiles.iter().find(|p| p.id == i.profile_id).unwrap();
                let processes = |ci: Option<u32>| {
                    let inside = gpu.processes.iter().filter(|p| p.gpu_instance == Some(i.id));
                    inside.filter(|p| p.compute_instance == ci).map(process).collect()
                };
                let compute = i.instances.iter().map(|c| ComputeInstance {
                    id: c.id,
                    profile_id: c.profile_id,
                    profile: profile.compute.iter().find(|p| p.id == c.profile_id).unwrap().name.clone(),
                    placement: Some(ours(c.placement)),
                    uuid: None,
                    processes: processes(Some(c.id)),
                });
                GpuInstance {
                    id: i.id,
                    profile_id: i.profile_id,
                    profile: profile.name.clone(),
                    placement: ours(i.placement),
                    memory: None,
                    compute: compute.collect(),
                    processes: processes(None),
                }
            })
            .collect()
    }

    /// Executes steps. The driver must accept each step, and no step may replace an instance in
    /// use.
    pub(crate) fn execute(&mut self, steps: &[InstanceStep]) {
        let used = self.in_use();
        for step in steps {
            let before = self.read();
            if let Err(refused) = self.execute_step(step) {
                panic!("{step:?} refused with {refused:?} on {before:?}");
            }
        }
        assert_eq!(self.in_use(), used);
    }

    fn execute_step(&mut self, step: &InstanceStep) -> Result<(), silicon::Return> {
        let machine = &mut self.machine;
        match step {
            InstanceStep::DestroyCompute { gi, ci, .. } => {
                let gi = machine.gpu_instance_handle(GPU, *gi)?;
                machine.destroy_compute_instance(machine.compute_instance_handle(gi, *ci)?)
            }
            InstanceStep::DestroyGpuInstance { gi, .. } => {
                machine.destroy_gpu_instance(machine.gpu_instance_handle(GPU, *gi)?)
            }
            InstanceStep::CreateGpuInstance { profile_id, placement, .. } => {
                machine.create_gpu_instance(GPU, *profile_id, Some(theirs(*placement))).map(|_| ())
            }
            InstanceStep::CreateCompute { gi_placement, profile_id, placement, .. } => {
                let there = machine.gpu(GPU)?.instances.iter().find(|i| ours(i.placement) == *gi_placement);
                let gi = machine.gpu_instance_handle(GPU, there.unwrap().id)?;
                machine.create_compute_instance(gi, *profile_id, placement.map(theirs)).map(|_| ())
            }
        }
    }

    /// Returns the generations of the instances that have processes. A replaced instance has
    /// another generation.
    fn in_use(&self) -> Vec<(u32, u64, Option<u64>)> {
        let gpu = self.machine.gpu(GPU).unwrap();
        let place = |p: &Process| {
            let gi = gpu.instance(p.gpu_instance.unwrap()).unwrap();
            (p.pid.pid, gi.generation, p.compute_instance.map(|ci| gi.compute(ci).unwrap().generation))
        };
        gpu.processes.iter().map(place).collect()
    }

    /// Starts some processes. Most of them are in a compute instance, and a few are only in a GPU
    /// instance.
    pub(crate) fn start_some(&mut self, rng: &mut fastrand::Rng) {
        for instance in self.read() {
            for compute in &instance.compute {
                if rng.usize(..6) == 0 {
                    self.start(instance.id, Some(compute.id));
                }
            }
            if rng.usize(..25) == 0 {
                self.start(instance.id, None);
            }
        }
    }

    fn start(&mut self, gi: u32, ci: Option<u32>) {
        let pid = Pid { pid: self.next_pid, start: 1 };
        self.next_pid += 1;
        let process =
            Process { pid, kind: ProcessKind::Compute, memory_mib: 1, gpu_instance: Some(gi), compute_instance: ci };
        self.machine.attach(GPU, process).unwrap();
    }

    /// Ends a process.
    pub(crate) fn stop(&mut self, pid: u32) {
        self.machine.detach(pid, Some(GPU));
    }

    /// Ends about a third of the processes.
    pub(crate) fn stop_some(&mut self, rng: &mut fastrand::Rng) {
        let pids: Vec<u32> = self.machine.gpu(GPU).unwrap().processes.iter().map(|p| p.pid.pid).collect();
        for pid in pids {
            if rng.usize(..3) == 0 {
                self.stop(pid);
            }
        }
    }
}

fn process(p: &Process) -> gpush_api::Process {
    gpush_api::Process {
        pid: Some(p.pid.pid),
        uid: None,
        user: None,
        command: None,
        kind: gpush_api::ProcessKind::Compute,
        memory_mib: Some(p.memory_mib),
        unidentified: false,
    }
}
