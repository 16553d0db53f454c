//! The GPUs and MIG devices that Slurm allocated to a job, and whether they can be leased.

use std::collections::BTreeSet;

use gpush_api::{
    ApiError, Code, Gpu, GpuState, GpuUuid, LeaseOwner, LeaseRequest, LeaseShare, Mode, SlurmDevice, SlurmGpu,
    TargetUuid,
};
use gpush_core::{config::Rule, quote::Quoted, slurm::numbering};
use gpush_store::LeaseRecord;

use crate::state::HostState;

/// One device of a job.
#[derive(Debug, Clone)]
struct Allocated {
    gpu: Gpu,
    /// UUID of the MIG device; `None` for the whole GPU.
    mig: Option<TargetUuid>,
    /// Whether only Slurm's jobs may lease the GPU: its rule has `owner = "slurm"`.
    owned: bool,
    /// Whether the layout of the GPU is `dynamic`.
    dynamic: bool,
    /// The share that the rule of the GPU gives to a job without a request.
    job_default: Option<LeaseShare>,
}

impl Allocated {
    /// Returns the profiles of the GPU instance and of the compute instance of the MIG device; `None` for a whole GPU.
    fn profiles(&self) -> Option<[&str; 2]> {
        let target = self.mig.as_ref()?;
        let mut instances = self.gpu.mig.iter().flat_map(|mig| &mig.instances);
        instances.find_map(|instance| {
            let device = instance.compute.iter().find(|device| device.uuid.as_ref() == Some(target))?;
            Some([instance.profile.as_str(), device.profile.as_str()])
        })
    }
}

/// The devices that Slurm allocated to a job.
#[derive(Debug, Clone, Default)]
pub(super) struct Allocation {
    devices: Vec<Allocated>,
    /// Devices that Slurm allocated, but that this host does not have.
    unknown: Vec<SlurmDevice>,
}

/// The lease request of a job. `targets` are the MIG devices on which the lease may be granted.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Wanted {
    pub(super) request: LeaseRequest,
    pub(super) targets: Option<BTreeSet<TargetUuid>>,
}

impl Wanted {
    /// Returns whether a lease was granted for this request, on devices that Slurm allocated.
    pub(super) fn is_met_by(&self, lease: &LeaseRecord) -> bool {
        let is_allocated = |target: &TargetUuid| self.targets.as_ref().is_none_or(|targets| targets.contains(target));
        lease.request == self.request && lease.members.iter().all(|member| is_allocated(&member.target))
    }
}

/// Returns the GPUs that only Slurm's jobs can lease.
pub(super) fn owned(host: &HostState, gpus: &[Gpu]) -> Vec<SlurmGpu> {
    let owned = gpus.iter().filter(|gpu| is_owned(host, gpu));
    owned.map(|gpu| SlurmGpu { uuid: gpu.uuid.clone(), minor: gpu.minor, mig_uuids: mig_uuids(gpu) }).collect()
}

fn is_owned(host: &HostState, gpu: &Gpu) -> bool {
    let rule = host.gpu(&gpu.uuid).and_then(|snapshot| host.config.rules.get(snapshot.rule?));
    rule.and_then(|rule| rule.lease).is_some_and(|terms| terms.owner == LeaseOwner::Slurm)
}

fn mig_uuids(gpu: &Gpu) -> Vec<TargetUuid> {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    instances.flat_map(|instance| &instance.compute).filter_map(|device| device.uuid.clone()).collect()
}

impl Allocation {
    /// Finds the devices that Slurm allocated to a job.
    pub(super) fn of(host: &HostState, gpus: &[Gpu], devices: &[SlurmDevice]) -> Self {
        let mut allocation = Self::default();
        for device in devices {
            let found = gpus.iter().find_map(|gpu| match device {
                SlurmDevice::Minor(minor) => (gpu.minor == *minor).then_some((gpu, None)),
                SlurmDevice::Mig { minor, gpu_instance, compute_instance } => {
                    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
                    let mut here = instances.filter(|one| gpu.minor == *minor && one.id == *gpu_instance);
                    let device = here.find_map(|one| one.compute.iter().find(|one| one.id == *compute_instance));
                    device.and_then(|device| device.uuid.clone()).map(|uuid| (gpu, Some(uuid)))
                }
                SlurmDevice::Detected { index, devices, minors } => {
                    let found = numbering::whole_gpu(gpus, *index, *devices, minors);
                    found.is_some_and(|found| found.uuid == gpu.uuid).then_some((gpu, None))
                }
                SlurmDevice::Uuid(uuid) if gpu.uuid.as_str().eq_ignore_ascii_case(uuid) => Some((gpu, None)),
                SlurmDevice::Uuid(uuid) => {
                    let mig = mig_uuids(gpu).into_iter().find(|one| one.as_str().eq_ignore_ascii_case(uuid));
                    mig.map(|mig| (gpu, Some(mig)))
                }
            });
            match found {
                Some((gpu, mig)) => {
                    let rule = host.gpu(&gpu.uuid).and_then(|snapshot| host.config.rules.get(snapshot.rule?));
                    // If an override is active, the layout is not dynamic.
                    let dynamic = rule.is_some_and(Rule::is_dynamic) && gpu.overridden.is_none();
                    let job_default = rule.and_then(|rule| rule.job_default.clone());
                    let (gpu, owned) = (gpu.clone(), is_owned(host, gpu));
                    allocation.devices.push(Allocated { gpu, mig, owned, dynamic, job_default });
                }
                None => allocation.unknown.push(device.clone()),
            }
        }
        allocation
    }

    /// Returns whether the rule of a GPU of the job has `owner = "slurm"`.
    pub(super) fn is_owned(&self) -> bool {
        self.devices.iter().any(|device| device.owned)
    }

    /// Returns the UUIDs of the GPUs.
    pub(super) fn gpus(&self) -> Vec<GpuUuid> {
        self.devices.iter().map(|device| device.gpu.uuid.clone()).collect()
    }

    /// Returns whether this host does not have one of the devices.
    pub(super) fn has_unknown(&self) -> bool {
        !self.unknown.is_empty()
    }

    /// Checks that gpushd can grant a lease on the job's devices now.
    ///
    /// # Errors
    /// If gpushd cannot grant a lease there. The error says why.
    pub(super) fn check_node(&self) -> Result<(), ApiError> {
        if let Some(device) = self.unknown.first() {
            if let SlurmDevice::Detected { index, devices, minors: _ } = device {
                // Use an error code that does not drain the node, because the node can still serve
                // other jobs.
                return Err(ApiError::new(
                    Code::Unsupported,
                    format!("cannot tell which GPU has Slurm's index {index}"),
                )
                .cause(format!(
                    "slurm.conf gives the node {devices} GPUs and MIG devices, but with AutoDetect=nvml in gres.conf, the \
                         devices that the driver lists do not match"
                ))
                .hint("ask the administrator of the node to run `gpushctl doctor --only slurm`"));
            }
            let name = match device {
                SlurmDevice::Uuid(uuid) => Quoted(uuid).to_string(),
                SlurmDevice::Minor(minor) => format!("/dev/nvidia{minor}"),
                SlurmDevice::Detected { index, .. } => format!("the GPU with index {index}"),
                SlurmDevice::Mig { minor, gpu_instance, compute_instance } => {
                    format!("compute instance {compute_instance} of GPU instance {gpu_instance} of /dev/nvidia{minor}")
                }
            };
            let message = format!("Slurm allocated {name}, which is not a device of this host");
            return Err(ApiError::new(Code::ConfigInvalid, message)
                .hint("compare gres.conf with the devices: `gpushctl doctor --only slurm`"));
        }
        for device in &self.devices {
            let gpu = &device.gpu;
            let (state, passes) = match gpu.state {
                // The GPU is free, but its reading is old. gpushd may grant a lease after the next
                // reading.
                GpuState::Ready if gpu.stale || !gpu.processes_known => {
                    ("slow to answer: gpushd has not been able to read its state lately", true)
                }
                GpuState::Ready => continue,
                GpuState::Changing => ("being changed", true),
                GpuState::Cordoned => ("cordoned", false),
                GpuState::Degraded => ("degraded", false),
                GpuState::Held => ("held", false),
                GpuState::Unknown => ("in an unknown state", false),
                GpuState::Lost => ("lost", false),
                GpuState::Maintenance => ("in maintenance", false),
            };
            let mut error = ApiError::new(Code::Unavailable, format!("GPU {} is {state}", gpu.index));
            error.causes.clone_from(&gpu.reasons);
            error = error.hint(format!("see `gpushctl gpu show {}`", gpu.index));
            return Err(if passes { error.retryable() } else { error });
        }
        Ok(())
    }

    /// Returns the lease request for a job, limited to the devices that Slurm allocated. `explicit`
    /// is the request in the job itself, if any.
    ///
    /// # Errors
    /// If the job cannot have a lease on these devices. The error is for the user of the job.
    pub(super) fn request(&self, explicit: Option<&LeaseRequest>, uid: u32) -> Result<Wanted, ApiError> {
        let refused = |message: String| ApiError::new(Code::Unsupported, message);
        // A job without a request gets a lease only on devices that are reserved for Slurm.
        let devices: Vec<&Allocated> =
            self.devices.iter().filter(|device| explicit.is_some() || device.owned).collect();
        if let Some(device) = devices.iter().find(|device| device.dynamic) {
            return Err(refused(format!("GPU {} has a dynamic layout", device.gpu.index))
                .cause("Slurm knows MIG devices only from gres.conf, so gpushd does not create any for a job")
                .hint("ask the administrator to give the GPUs of Slurm a static layout"));
        }
        let mig: BTreeSet<TargetUuid> = devices.iter().filter_map(|device| device.mig.clone()).collect();
        let whole: BTreeSet<&GpuUuid> =
            devices.iter().filter(|device| device.mig.is_none()).map(|device| &device.gpu.uuid).collect();
        if !mig.is_empty() && !whole.is_empty() {
            return Err(refused("the job has whole GPUs and MIG devices".to_owned())
                .cause("a lease is either for whole GPUs or for MIG devices")
                .hint("submit the job with one kind of GPU: --gres=gpu:TYPE:COUNT"));
        }
        let gpus: BTreeSet<GpuUuid> = devices.iter().map(|device| device.gpu.uuid.clone()).collect();
        let members = u32::try_from(if mig.is_empty() { whole.len() } else { mig.len() }).unwrap_or(u32::MAX);
        let targets = (!mig.is_empty()).then_some(mig);
        let share = match explicit {
            Some(request) => request.share.clone(),
            None => allocated_share(&devices, targets.is_some())?,
        };
        let count = match &share {
            // The job requests a MIG profile or size, and Slurm allocated whole GPUs: give the job
            // one MIG device on these GPUs.
            LeaseShare::MigProfile { .. } | LeaseShare::MigSize { .. } if targets.is_none() => 1,
            LeaseShare::MigProfile { profile } if other_profile(&devices, profile).is_some() => {
                let given = other_profile(&devices, profile).unwrap_or_default();
                return Err(refused(format!("Slurm gave this job a {given}, but the job requests {profile}"))
                    .cause("gpushd gives a job only the MIG devices that Slurm allocated to it")
                    .hint(format!(
                        "submit the job without the request for {profile}, and name the type of the MIG device in --gres: \
                         `sinfo -N -o '%N %G'` lists the types"
                    )));
            }
            LeaseShare::MigProfile { .. } | LeaseShare::MigSize { .. } | LeaseShare::Whole {} => members.max(1),
            LeaseShare::Mps { .. } | LeaseShare::Timeslice {} | LeaseShare::Default {} if members > 1 => {
                return Err(refused(format!("the job requests one share, but Slurm allocated {members} devices"))
                    .cause("a share is a part of one GPU or of one MIG device")
                    .hint(one_device(&devices)));
            }
            LeaseShare::Mps { .. } | LeaseShare::Timeslice {} | LeaseShare::Default {} => 1,
        };
        // Sort the GPUs, so that requests of the same job can be compared.
        let request = LeaseRequest {
            share,
            gpus: gpus.iter().map(GpuUuid::to_string).collect(),
            count,
            holder: Some(uid),
            ..LeaseRequest::default()
        };
        Ok(Wanted { request, targets })
    }
}

/// Returns the profile of a MIG device that has another profile than the job requests.
fn other_profile<'a>(devices: &[&'a Allocated], requested: &str) -> Option<&'a str> {
    let is_other = |profiles: &[&str; 2]| !profiles.iter().any(|profile| profile.eq_ignore_ascii_case(requested));
    devices.iter().filter_map(|device| device.profiles()).find(is_other).map(|[instance, _]| instance)
}

/// Returns what the user of a job with several devices can do who requested one share. Without a request, gpushd would
/// refuse the job too if one of its GPUs is shared.
fn one_device(devices: &[&Allocated]) -> &'static str {
    let is_shared = |device: &&&Allocated| {
        device.mig.is_none() && matches!(device.gpu.mode, Mode::Mps | Mode::Timeslice | Mode::Mig)
    };
    match devices.iter().any(|device| is_shared(&device)) {
        true => "submit the job with one device: --gres=gpu:1",
        false => "submit the job with one device: --gres=gpu:1, or without a request for a share",
    }
}

/// Returns the share for a job that requests no share: all whole GPUs or MIG devices that Slurm allocated to the job, or
/// the default share of the rule of its only GPU.
fn allocated_share(devices: &[&Allocated], is_mig: bool) -> Result<LeaseShare, ApiError> {
    if is_mig {
        return Ok(LeaseShare::MigSize { memory_mib: None, slices: None });
    }
    if let [Allocated { job_default: Some(share), .. }] = devices {
        return Ok(share.clone());
    }
    for device in devices {
        let index = device.gpu.index;
        let (is, what) = match device.gpu.mode {
            Mode::Exclusive | Mode::NoRule | Mode::Unmanaged => continue,
            Mode::Mps => ("shared through MPS", "--comment=gpush:mps=25"),
            Mode::Timeslice => ("time-sliced", "--comment=gpush:timeslice"),
            Mode::Mig => ("partitioned with MIG", "--comment=gpush:mig=PROFILE"),
        };
        let error =
            ApiError::new(Code::Unsupported, format!("GPU {index} is {is}, but the job requests no share of it"));
        return Err(match devices {
            // With a request for a share, gpushd would refuse the job too: a share is on one device.
            [_, _, ..] => error
                .cause(format!("Slurm allocated {} GPUs, and a job can have a share of only one", devices.len()))
                .hint(format!("submit the job with one GPU and a request for a share, such as --gres=gpu:1 {what}")),
            [_] | [] => error
                .cause("in Prolog, gpushd cannot distinguish gres/shard from gres/gpu")
                .hint(format!("submit the job with a request for a share, such as {what}")),
        });
    }
    Ok(LeaseShare::Whole {})
}

#[cfg(test)]
mod tests;
