//! What the simulated hardware shows: driver calls, compute modes, MIG instances and MPS daemons.
//! The test reads all of it without gpushd.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::ffi::OsStrExt,
    path::Path,
};

use gpush_api::{ComputeMode, LeaseKind};
use gpush_tests::{host::Host, mps};
use serde_json::Value;

use super::model::{Gpu, Model};

/// The state of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    compute_mode: ComputeMode,
    is_mig: bool,
    /// Ids of the GPU instance and the compute instance of each MIG device.
    devices: BTreeSet<(u32, u32)>,
}

/// The hardware, as the test has seen it at its last check.
#[derive(Debug, Default)]
pub(super) struct Hardware {
    /// Length of the trace at the last check.
    traced: usize,
    gpus: Vec<Seen>,
    /// Pid of the MPS daemon of each lease, at the first check after the grant.
    daemons: BTreeMap<String, i32>,
    /// Ids of the leases at the last check.
    leases: BTreeSet<String>,
}

impl Hardware {
    /// Checks that nothing has changed under a lease since the last check, and that the state of all
    /// GPUs is as the rules in force say.
    ///
    /// # Errors
    /// The first difference. The test may repeat the check, because gpushd may still change a GPU that
    /// has no lease.
    pub(super) fn check(&mut self, host: &Host, model: &Model) -> Result<(), String> {
        let (calls, end) = host.trace_after(self.traced);
        let leased_before = |gpu: &Gpu| {
            let on_gpu = |(id, lease): (&String, &super::model::Lease)| {
                self.leases.contains(id) && lease.gpus.contains(&gpu.uuid)
            };
            model.open.iter().any(on_gpu)
        };
        for call in calls.iter().filter(|call| call.rc == 0) {
            let Some((index, gpu)) = call.gpu.and_then(|gpu| Some((gpu, model.gpus.get(gpu as usize)?))) else {
                continue;
            };
            let in_force = match call.function.as_str() {
                "nvmlDeviceSetMigMode" => usize::from(gpu.in_force.layout().is_some()),
                "nvmlDeviceSetComputeMode" => gpu.in_force.compute_mode() as usize,
                _ => continue,
            };
            if call.arguments != format!("value={in_force}") && leased_before(gpu) {
                return Err(format!("{} {} on GPU {index}, which is leased", call.function, call.arguments));
            }
        }
        if self.gpus.is_empty() || !calls.is_empty() {
            self.gpus = read(host);
        }
        for (index, (gpu, seen)) in model.gpus.iter().zip(&self.gpus).enumerate() {
            check_gpu(model, index, gpu, seen)?;
        }
        self.check_daemons(host, model)?;
        (self.traced, self.leases) = (end, model.open.keys().cloned().collect());
        Ok(())
    }

    /// Checks that the daemon of each MPS lease still runs, and that no other leased target has a
    /// daemon. Settled GPUs must have exactly the daemons of their rules.
    fn check_daemons(&mut self, host: &Host, model: &Model) -> Result<(), String> {
        let running = daemons(host);
        for (id, lease) in &model.open {
            for target in &lease.targets {
                match (lease.kind, running.get(target)) {
                    (LeaseKind::Mps, None) => return Err(format!("{target} of {id} has no MPS daemon")),
                    (LeaseKind::Mps, Some(pid)) => {
                        let before = *self.daemons.entry(id.clone()).or_insert(*pid);
                        if before != *pid {
                            return Err(format!("the MPS daemon of {id} was {before}, and is {pid}"));
                        }
                    }
                    (LeaseKind::Mig | LeaseKind::Timeslice | LeaseKind::Whole, Some(pid)) => {
                        return Err(format!("{target} of {id} ({:?}) has the MPS daemon {pid}", lease.kind));
                    }
                    (LeaseKind::Mig | LeaseKind::Timeslice | LeaseKind::Whole, None) => {}
                }
            }
        }
        self.daemons.retain(|id, _| model.open.contains_key(id));
        for (uuid, target) in model.targets.iter().filter(|(_, target)| model.gpus[target.gpu].is_settled()) {
            let is_shared = target.offer.kind() == LeaseKind::Mps;
            if is_shared != running.contains_key(uuid) {
                return Err(format!("{uuid} offers {:?}, but the daemons are {running:?}", target.offer));
            }
        }
        Ok(())
    }
}

/// Checks a settled or leased GPU. A GPU without a lease whose change is pending may have any state.
fn check_gpu(model: &Model, index: usize, gpu: &Gpu, seen: &Seen) -> Result<(), String> {
    if !gpu.is_settled() && !model.is_leased(index) {
        return Ok(());
    }
    let expected = (gpu.in_force.compute_mode(), gpu.in_force.layout().is_some());
    if (seen.compute_mode, seen.is_mig) != expected {
        return Err(format!("GPU {index} has {:?} in force, but its state is {seen:?}", gpu.in_force));
    }
    for (id, lease) in &model.open {
        for uuid in lease.targets.iter().filter(|_| lease.gpus.contains(&gpu.uuid)) {
            let Some(target) = model.targets.get(uuid) else { return Err(format!("{uuid} of {id} does not exist")) };
            if target.gpu == index && target.instance.is_some_and(|instance| !seen.devices.contains(&instance)) {
                return Err(format!("{uuid} of {id} was destroyed: {seen:?}"));
            }
        }
    }
    Ok(())
}

fn read(host: &Host) -> Vec<Seen> {
    let show = host.show();
    let gpus = show["gpus"].as_array().expect("GPUs").iter();
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok()).expect("a number");
    let list = |value: &Value| value.as_array().cloned().expect("a list");
    gpus.map(|gpu| {
        let state = &gpu["state"];
        let instances = list(&state["instances"]).into_iter();
        let devices = instances.flat_map(|gi| {
            let id = number(&gi["id"]);
            list(&gi["instances"]).into_iter().map(move |ci| (id, number(&ci["id"])))
        });
        Seen {
            compute_mode: ComputeMode::ALL[number(&state["compute_mode"]) as usize],
            is_mig: state["mig"] == Value::Bool(true),
            devices: devices.collect(),
        }
    })
    .collect()
}

/// Returns the pids of the running MPS daemons, by the UUID of the GPU or MIG device that each daemon
/// shares.
pub(super) fn daemons(host: &Host) -> BTreeMap<String, i32> {
    let running = mps::controls(&mps::base(host)).into_iter();
    running.filter_map(|pid| Some((visible_device(pid)?, pid))).collect()
}

/// Returns the variable `CUDA_VISIBLE_DEVICES` of a process. `None` if the process has ended.
fn visible_device(pid: i32) -> Option<String> {
    let environment = fs::read(Path::new("/proc").join(pid.to_string()).join("environ")).ok()?;
    let mut words = environment.split(|byte| *byte == 0);
    let value = words.find_map(|word| word.strip_prefix(b"CUDA_VISIBLE_DEVICES="))?;
    Some(std::ffi::OsStr::from_bytes(value).to_string_lossy().into_owned())
}
