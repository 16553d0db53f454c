//! The lease of each process in a sample, by the rules of [`gpush_core::attribution`].

use gpush_api::{Gpu, ProcessKind, TargetUuid};
use gpush_core::attribution::GpuUse;
use gpush_host::{
    proc,
    process_facts::{LeaseNames, ProcessFacts},
};
use gpush_nvml::sample::ProcessSample;
use gpush_usage::input::{GpuProcess, ProcessOwner, Ratio, Reading};

use crate::{
    modes::mps::{Place, Servers},
    state::LeaseTable,
};

/// The data by which processes are attributed to leases.
pub(super) struct Owners<'a> {
    pub(super) names: &'a LeaseNames,
    pub(super) leases: &'a LeaseTable,
    pub(super) servers: &'a Servers,
}

impl Owners<'_> {
    /// Returns the processes of a sample with their leases, without the servers of MPS. If one process cannot be read, all
    /// are unknown, because it may belong to any lease. Reads files of processes, so call this on a blocking thread.
    pub(super) fn of(&self, gpu: &Gpu, processes: &[ProcessSample]) -> Reading<Vec<GpuProcess>> {
        let mut found = Vec::with_capacity(processes.len());
        for process in processes {
            match self.of_process(gpu, process) {
                Ok(Some(one)) => found.push(one),
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(pid = process.pid, "cannot attribute a process to a lease: {error}");
                    return Reading::Failed;
                }
            }
        }
        Reading::Value(found)
    }

    /// Returns one process; `None` if it has ended, or is a server of MPS.
    fn of_process(&self, gpu: &Gpu, process: &ProcessSample) -> std::io::Result<Option<GpuProcess>> {
        let device = device(gpu, process);
        let place = Place::Device { gpu: &gpu.uuid, device };
        if self.servers.of_process(process.pid, ProcessKind::Compute, place).is_some() {
            return Ok(None);
        }
        let is_mig = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
        let gpu_use = match device {
            Some(device) => GpuUse::Target(device),
            None if is_mig => GpuUse::Gpu(&gpu.uuid),
            None => GpuUse::Target(gpu.uuid.as_target()),
        };
        let Some(start) = proc::try_start(process.pid)? else { return Ok(None) };
        let attribution =
            ProcessFacts::examine(self.names, process.pid, |facts| self.leases.attribute(facts, gpu_use))?;
        Ok(attribution.map(|attribution| GpuProcess {
            pid: process.pid,
            start,
            owner: ProcessOwner::from(&attribution),
            instance: process.gi,
            target: device.cloned(),
            memory_mib: process.memory_bytes.map_or(Reading::Failed, |bytes| Reading::Value(bytes >> 20)),
            sm: match process.busy {
                Some(busy) => Reading::Value(Ratio::from_millionths(busy.ppm())),
                // With MIG, the driver reports no activity of processes.
                None if is_mig => Reading::Unsupported,
                None => Reading::Failed,
            },
        }))
    }
}

/// Returns the MIG device of a process, if the driver reports it.
fn device<'g>(gpu: &'g Gpu, process: &ProcessSample) -> Option<&'g TargetUuid> {
    let (gi, ci) = (process.gi?, process.ci?);
    let instance = gpu.mig.as_ref()?.instances.iter().find(|instance| instance.id == gi)?;
    instance.compute.iter().find(|device| device.id == ci)?.uuid.as_ref()
}
