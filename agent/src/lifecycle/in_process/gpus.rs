//! The GPUs of an in-process test: a scripted driver that keeps instances in memory, refuses what a test tells it to
//! refuse, and lists its calls.
//!
//! It checks only placements and overlaps. The simulator imitates the other rules of a real driver.

use std::sync::{Arc, Condvar, MutexGuard};

use gpush_api::{
    ComputeInstance, ComputeMode, Driver, Gpu, GpuInstance, GpuProfile, Memory, Mig, Placement, Process, ProcessKind,
};
use gpush_locked::Locked;
use gpush_nvml::{
    DriverError, ErrorKind, Identity, Listed, ModeChange, Reading, ScriptedDriver,
    proto::{Answer, GpuRef, Request},
};

/// The scripted GPUs.
#[derive(Debug)]
pub(super) struct ScriptedGpus {
    script: Locked<Script>,
    /// Notified when a call is no longer held.
    released: Condvar,
}

#[derive(Debug)]
struct Script {
    gpus: Vec<Reading>,
    faults: Vec<Fault>,
    /// The changing calls so far, in the form `creating a GPU instance 0`, with the index of the GPU.
    changes: Vec<String>,
    /// Calls that do not return until [`ScriptedGpus::release`]: the name of the call and the index of the GPU.
    held: Vec<(&'static str, u32)>,
}

/// A rule that lets a call fail.
#[derive(Debug)]
struct Fault {
    /// The name of the call: see [`Request::name`].
    call: &'static str,
    /// Index of the GPU.
    gpu: u32,
    /// How many further calls succeed before the fault.
    after: u32,
    /// How many calls fail.
    times: u32,
    kind: ErrorKind,
}

impl ScriptedGpus {
    /// Creates GPUs with MIG mode on, without instances. The UUIDs are those of the preset.
    pub(super) fn new(gpus: &[Gpu]) -> Arc<Self> {
        let gpus = gpus.iter().map(reading).collect();
        let script = Script { gpus, faults: Vec::new(), changes: Vec::new(), held: Vec::new() };
        Arc::new(Self { script: Locked::new(script), released: Condvar::new() })
    }

    /// Lets the next `times` calls of this name on a GPU fail.
    pub(super) fn fail(&self, call: &'static str, gpu: u32, times: u32, kind: ErrorKind) {
        self.fail_after(0, call, gpu, times, kind);
    }

    /// Does the same as [`Self::fail`], but first lets `after` calls succeed.
    pub(super) fn fail_after(&self, after: u32, call: &'static str, gpu: u32, times: u32, kind: ErrorKind) {
        self.lock().faults.push(Fault { call, gpu, after, times, kind });
    }

    /// Lets calls of this name on a GPU wait until [`Self::release`].
    pub(super) fn hold(&self, call: &'static str, gpu: u32) {
        self.lock().held.push((call, gpu));
    }

    /// Lets all held calls go on.
    pub(super) fn release(&self) {
        self.lock().held.clear();
        self.released.notify_all();
    }

    /// Removes all faults.
    pub(super) fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// Returns the changing calls since the last call of [`Self::take_changes`].
    pub(super) fn changes(&self) -> Vec<String> {
        self.lock().changes.clone()
    }

    /// Does the same as [`Self::changes`], and forgets the calls.
    pub(super) fn take_changes(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().changes)
    }

    /// Returns the instances of a GPU, as `profile@start`, in the order of their placements.
    pub(super) fn instances(&self, gpu: usize) -> Vec<String> {
        let script = self.lock();
        let instances = script.gpus[gpu].mig.iter().flat_map(|mig| &mig.instances);
        instances.map(|instance| format!("{}@{}", instance.profile, instance.placement.start)).collect()
    }

    /// Starts a computation of this process on the first MIG device of a GPU, or on a GPU without MIG.
    pub(super) fn use_first_device(&self, gpu: usize, pid: u32) {
        self.use_as(gpu, pid, ProcessKind::Compute);
    }

    /// Starts a use of this kind by this process on the first MIG device of a GPU, or on a GPU without MIG.
    pub(super) fn use_as(&self, gpu: usize, pid: u32, kind: ProcessKind) {
        let process = Process {
            pid: Some(pid),
            uid: None,
            user: None,
            command: None,
            kind,
            memory_mib: Some(64),
            unidentified: false,
        };
        let mut script = self.lock();
        let reading = &mut script.gpus[gpu];
        match reading.mig.as_mut().filter(|mig| mig.enabled).and_then(|mig| mig.instances.first_mut()) {
            Some(instance) => instance.compute[0].processes.push(process),
            None => reading.processes.push(process),
        }
    }

    /// Returns the compute mode of a GPU.
    pub(super) fn compute_mode(&self, gpu: usize) -> Option<ComputeMode> {
        self.lock().gpus[gpu].compute_mode
    }

    /// Changes what the driver reports about a GPU, as another program or the driver itself does.
    pub(super) fn alter(&self, gpu: usize, change: impl FnOnce(&mut Reading)) {
        change(&mut self.lock().gpus[gpu]);
    }

    /// Ends the use of a GPU by a process.
    pub(super) fn end_process(&self, gpu: usize, pid: u32) {
        let mut script = self.lock();
        let reading = &mut script.gpus[gpu];
        reading.processes.retain(|process| process.pid != Some(pid));
        let instances = reading.mig.iter_mut().flat_map(|mig| &mut mig.instances);
        let all = instances.flat_map(|instance| &mut instance.compute);
        all.for_each(|compute| compute.processes.retain(|process| process.pid != Some(pid)));
    }

    /// Ends all computations on a GPU.
    pub(super) fn end_processes(&self, gpu: usize) {
        let mut script = self.lock();
        let reading = &mut script.gpus[gpu];
        reading.processes.clear();
        let instances = reading.mig.iter_mut().flat_map(|mig| &mut mig.instances);
        instances.flat_map(|instance| &mut instance.compute).for_each(|compute| compute.processes.clear());
    }

    fn lock(&self) -> MutexGuard<'_, Script> {
        self.script.lock()
    }
}

impl ScriptedDriver for ScriptedGpus {
    fn info(&self) -> Result<Driver, DriverError> {
        let text = |text: &str| text.to_owned();
        Ok(Driver {
            version: text("570.0"),
            nvml: text("12.570.0"),
            cuda: text("12.8"),
            library: text("scripted"),
            simulated: true,
        })
    }

    fn call(&self, request: &Request) -> Result<Answer, DriverError> {
        let mut script = self.lock();
        let Some(gpu) = request.gpu() else {
            let listed =
                |reading: &Reading| Listed { index: reading.identity.index, identity: Ok(reading.identity.clone()) };
            return Ok(Answer::Listed(script.gpus.iter().map(listed).collect()));
        };
        let at = position(&script.gpus, gpu, request)?;
        let (name, index) = (request.name(), script.gpus[at].identity.index);
        if request.is_mutation() {
            script.changes.push(format!("{name} {index}"));
        }
        while script.held.contains(&(name, index)) {
            script = self.released.wait(script).expect("no test panics while it holds the lock");
        }
        script.fault(name, index).map_or(Ok(()), |kind| Err(DriverError::new(kind, name)))?;
        change(&mut script.gpus[at], request)
    }
}

impl Script {
    /// Returns the error with which a call must fail.
    fn fault(&mut self, call: &str, gpu: u32) -> Option<ErrorKind> {
        let fault = self.faults.iter_mut().find(|fault| fault.call == call && fault.gpu == gpu && fault.times > 0)?;
        if fault.after > 0 {
            fault.after -= 1;
            return None;
        }
        fault.times -= 1;
        Some(fault.kind.clone())
    }
}

fn position(gpus: &[Reading], gpu: &GpuRef, request: &Request) -> Result<usize, DriverError> {
    let found = gpus.iter().position(|reading| reading.identity.uuid == gpu.uuid);
    found.ok_or_else(|| DriverError::new(ErrorKind::NotFound, request.name()).on(&gpu.uuid))
}

/// Executes a call on its GPU.
fn change(reading: &mut Reading, request: &Request) -> Result<Answer, DriverError> {
    let refused = |kind| DriverError::new(kind, request.name());
    let index = reading.identity.index;
    match request {
        Request::List { .. } => Err(refused(ErrorKind::InvalidArgument)),
        Request::Read { .. } => {
            let mut read = reading.clone();
            if let Some(mig) = &mut read.mig {
                mig.profiles = Arc::new(mig.profiles.iter().map(|profile| with_room(profile, mig)).collect());
            }
            Ok(Answer::Reading(Box::new(read)))
        }
        Request::SetComputeMode { mode, .. } => {
            reading.compute_mode = Some(*mode);
            Ok(Answer::ComputeModeSet)
        }
        Request::SetMigMode { enabled, .. } => {
            let mig = reading.mig.as_mut().ok_or_else(|| refused(ErrorKind::NotSupported))?;
            mig.set_mode(*enabled, *enabled);
            Ok(Answer::Mode(ModeChange { enabled: *enabled, pending: *enabled, activation: None }))
        }
        Request::CreateGpuInstance { profile_id, placement, .. } => {
            let mig = reading.mig.as_mut().ok_or_else(|| refused(ErrorKind::NotSupported))?;
            let profile = mig.profiles.iter().find(|profile| profile.id == *profile_id);
            let profile = profile.ok_or_else(|| refused(ErrorKind::InvalidArgument))?;
            if !profile.placements.contains(placement) || !is_free(mig, *placement) {
                return Err(refused(ErrorKind::InsufficientResources));
            }
            let instance = GpuInstance {
                id: free_id(mig.instances.iter().map(|instance| instance.id), 1),
                profile_id: profile.id,
                profile: profile.name.clone(),
                placement: *placement,
                memory: Some(Memory { total_mib: profile.memory_mib, used_mib: 0 }),
                compute: Vec::new(),
                processes: Vec::new(),
            };
            mig.instances.push(instance.clone());
            mig.instances.sort_by_key(|instance| instance.placement.start);
            Ok(Answer::GpuInstance(instance))
        }
        Request::CreateComputeInstance { gi, profile_id, placement, .. } => {
            let mig = reading.mig.as_mut().ok_or_else(|| refused(ErrorKind::NotSupported))?;
            let profiles = Arc::clone(&mig.profiles);
            let instance = mig.instances.iter_mut().find(|instance| instance.id == *gi);
            let instance = instance.ok_or_else(|| refused(ErrorKind::NotFound))?;
            let profile = profiles.iter().find(|profile| profile.id == instance.profile_id);
            let mut profiles = profile.into_iter().flat_map(|profile| &profile.compute);
            let profile = profiles.find(|profile| profile.id == *profile_id);
            let profile = profile.ok_or_else(|| refused(ErrorKind::InvalidArgument))?;
            let id = free_id(instance.compute.iter().map(|compute| compute.id), 0);
            let compute = ComputeInstance {
                id,
                profile_id: profile.id,
                profile: profile.name.clone(),
                placement: placement.or_else(|| profile.placements.first().copied()),
                uuid: Some(format!(
                    "MIG-{index:08x}-{:04x}-{:04x}-0000-{id:012x}",
                    instance.placement.start, instance.profile_id
                )),
                processes: Vec::new(),
            };
            instance.compute.push(compute.clone());
            Ok(Answer::ComputeInstance(compute))
        }
        Request::DestroyComputeInstance { gi, ci, .. } => {
            let mut instances = reading.mig.iter_mut().flat_map(|mig| &mut mig.instances);
            let instance = instances.find(|instance| instance.id == *gi).ok_or_else(|| refused(ErrorKind::NotFound))?;
            let at = instance.compute.iter().position(|compute| compute.id == *ci);
            let at = at.ok_or_else(|| refused(ErrorKind::NotFound))?;
            if !instance.compute[at].processes.is_empty() {
                return Err(refused(ErrorKind::InUse));
            }
            instance.compute.remove(at);
            Ok(Answer::Destroyed)
        }
        Request::DestroyGpuInstance { gi, .. } => {
            let mig = reading.mig.as_mut().ok_or_else(|| refused(ErrorKind::NotSupported))?;
            let at = mig.instances.iter().position(|instance| instance.id == *gi);
            let at = at.ok_or_else(|| refused(ErrorKind::NotFound))?;
            if !mig.instances[at].compute.is_empty() {
                return Err(refused(ErrorKind::InUse));
            }
            mig.instances.remove(at);
            Ok(Answer::Destroyed)
        }
    }
}

/// Returns the smallest unused number, starting with `first`.
fn free_id(used: impl Iterator<Item = u32>, first: u32) -> u32 {
    let used: Vec<u32> = used.collect();
    (first..).find(|id| !used.contains(id)).unwrap_or(first)
}

fn is_free(mig: &Mig, place: Placement) -> bool {
    let overlaps = |other: Placement| place.start < other.start + other.size && other.start < place.start + place.size;
    mig.enabled && !mig.instances.iter().any(|instance| overlaps(instance.placement))
}

/// Returns a profile with the number of instances that still fit.
fn with_room(profile: &GpuProfile, mig: &Mig) -> GpuProfile {
    let free = profile.placements.iter().filter(|place| is_free(mig, **place)).count();
    let remaining = u8::try_from(free).unwrap_or(u8::MAX).min(profile.max);
    GpuProfile { remaining: mig.enabled.then_some(remaining), ..profile.clone() }
}

/// Returns what the driver reports about an idle GPU of a preset.
fn reading(gpu: &Gpu) -> Reading {
    let hexadecimal = |text: &Option<String>| {
        let digits = text.as_deref().and_then(|text| text.strip_prefix("0x"));
        digits.and_then(|digits| u32::from_str_radix(digits, 16).ok())
    };
    Reading {
        identity: Identity {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            pci: gpu.pci.clone(),
            pci_id: hexadecimal(&gpu.pci_id).unwrap_or_default(),
            pci_subsystem: hexadecimal(&gpu.pci_subsystem),
            minor: gpu.minor,
            name: gpu.name.clone(),
            architecture: gpu.architecture,
            passed_through: false,
        },
        memory: gpu.memory,
        mig: gpu.mig.clone(),
        compute_mode: Some(ComputeMode::Default),
        nvlink: None,
        sensors: gpu.sensors,
        processes: Vec::new(),
        processes_known: true,
        rows: None,
        warnings: Vec::new(),
    }
}
