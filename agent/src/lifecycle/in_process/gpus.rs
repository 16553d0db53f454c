//! The GPUs of an in-process test: a scripted driver that keeps instances in memory, refuses what a test tells it to
//! refuse, and lists its calls.
//!
//! It checks only placements and overlaps. The simulator imitates the other rules of a real driver.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Condvar, MutexGuard},
};

use gpush_api::{ComputeInstance, ComputeMode, Driver, Gpu, GpuInstance, GpuUuid, Process, ProcessKind, SignalSource};
use gpush_locked::Locked;
use gpush_nvml::{
    DriverError, ErrorKind, Identity, Listed, ModeChange, Reading, ReadingPart, ScriptedDriver, Unread,
    proto::{Answer, GpuRef, Request},
    sample::{Activity, Doubts, LimitedTime, MemoryUse, Ratio, Sample},
};

use super::{
    call_rules::{self, CallEffect, CallRule, EndMoment},
    calls::change,
};

/// The scripted GPUs. They survive a gpushd, like hardware.
#[derive(Debug)]
pub(super) struct ScriptedGpus {
    script: Locked<Script>,
    /// Notified when a call waits, and when calls no longer wait.
    changed: Condvar,
}

#[derive(Debug)]
struct Script {
    gpus: Vec<Reading>,
    rules: Vec<CallRule>,
    /// Indexes of the GPUs that have fallen off the bus.
    lost: BTreeSet<u32>,
    /// Indexes of the GPUs whose UUID the driver does not report.
    without_uuid: BTreeSet<u32>,
    /// Why the driver cannot be loaded.
    unloaded: Option<ErrorKind>,
    /// The changing calls so far, in the form `creating a GPU instance 0`, with the index of the GPU.
    changes: Vec<String>,
    /// The samples of GPUs, by index. A GPU without one has no samples.
    samples: BTreeMap<u32, Sample>,
    /// Number of calls, readings included.
    calls: u64,
    /// Number of samples.
    sampled: u64,
    /// Number of calls that wait for [`ScriptedGpus::release`].
    waiting: usize,
    releases: u64,
    /// Number of gpushd that have ended. A call of such a gpushd no longer takes effect.
    ended: u64,
    /// Whether a call has ended gpushd: see [`CallEffect::EndGpushd`].
    is_ending: bool,
}

impl ScriptedGpus {
    /// Creates GPUs with MIG mode on, without instances. The UUIDs are those of the preset.
    pub(super) fn new(gpus: &[Gpu]) -> Arc<Self> {
        let script = Script {
            gpus: gpus.iter().map(reading).collect(),
            rules: Vec::new(),
            lost: BTreeSet::new(),
            without_uuid: BTreeSet::new(),
            unloaded: None,
            changes: Vec::new(),
            samples: BTreeMap::new(),
            calls: 0,
            sampled: 0,
            waiting: 0,
            releases: 0,
            ended: 0,
            is_ending: false,
        };
        Arc::new(Self { script: Locked::new(script), changed: Condvar::new() })
    }

    /// Adds a rule for calls.
    pub(super) fn rule(&self, rule: CallRule) {
        self.lock().rules.push(rule);
    }

    /// Lets the next `times` calls of this name on a GPU fail.
    pub(super) fn fail(&self, call: &'static str, gpu: u32, times: u32, kind: ErrorKind) {
        self.fail_after(0, call, gpu, times, kind);
    }

    /// Does the same as [`Self::fail`], but first lets `after` calls succeed.
    pub(super) fn fail_after(&self, after: u32, call: &'static str, gpu: u32, times: u32, kind: ErrorKind) {
        self.rule(CallRule::on(call, gpu).after(after).times(times).fails(kind));
    }

    /// Lets calls of this name on a GPU wait until [`Self::release`].
    pub(super) fn hold(&self, call: &'static str, gpu: u32) {
        self.rule(CallRule::on(call, gpu).held());
    }

    /// Lets all held calls go on.
    pub(super) fn release(&self) {
        let mut script = self.lock();
        script.rules.retain(|rule| !rule.held);
        script.releases += 1;
        self.changed.notify_all();
    }

    /// Returns whether a call waits.
    pub(super) fn is_held(&self) -> bool {
        self.lock().waiting > 0
    }

    /// Returns whether a call has ended gpushd.
    pub(super) fn is_ending(&self) -> bool {
        self.lock().is_ending
    }

    /// Ends the calls of a gpushd that has ended. Calls that still wait do not take effect.
    pub(super) fn end_calls(&self) {
        let mut script = self.lock();
        script.ended += 1;
        script.releases += 1;
        script.is_ending = false;
        self.changed.notify_all();
    }

    /// Removes all faults.
    pub(super) fn clear_faults(&self) {
        self.lock().rules.clear();
    }

    /// Returns the changing calls since the last call of [`Self::take_changes`].
    pub(super) fn changes(&self) -> Vec<String> {
        self.lock().changes.clone()
    }

    /// Does the same as [`Self::changes`], and forgets the calls.
    pub(super) fn take_changes(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().changes)
    }

    /// Returns the number of calls so far, readings included.
    pub(super) fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Returns the instances of a GPU, as `profile@start`, in the order of their placements.
    pub(super) fn instances(&self, gpu: usize) -> Vec<String> {
        let script = self.lock();
        let instances = script.gpus[gpu].mig.iter().flat_map(|mig| &mig.instances);
        instances.map(|instance| format!("{}@{}", instance.profile, instance.placement.start)).collect()
    }

    /// Returns the instances of a GPU with their compute instances, as `3g.40gb@4[3g.40gb@0]`, or `MIG off`.
    pub(super) fn layout(&self, gpu: usize) -> Vec<String> {
        let script = self.lock();
        let Some(mig) = script.gpus[gpu].mig.as_ref().filter(|mig| mig.enabled) else {
            return vec!["MIG off".to_owned()];
        };
        let text = |instance: &GpuInstance| {
            let start = |compute: &ComputeInstance| compute.placement.map_or(0, |placement| placement.start);
            let compute = instance.compute.iter().map(|compute| format!("{}@{}", compute.profile, start(compute)));
            let compute: Vec<String> = compute.collect();
            format!("{}@{}[{}]", instance.profile, instance.placement.start, compute.join(" "))
        };
        mig.instances.iter().map(text).collect()
    }

    /// Returns the id of the GPU instance that starts at a memory slice.
    pub(super) fn instance_at(&self, gpu: usize, start: u8) -> u32 {
        self.alter(gpu, |reading| instance_at(reading, start).id)
    }

    /// Changes a GPU without gpushd, as another program or an administrator does.
    pub(super) fn alter<T>(&self, gpu: usize, change: impl FnOnce(&mut Reading) -> T) -> T {
        change(&mut self.lock().gpus[gpu])
    }

    /// Turns MIG off on all GPUs.
    pub(super) fn without_mig(&self) {
        self.lock().gpus.iter_mut().flat_map(|gpu| &mut gpu.mig).for_each(|mig| mig.set_mode(false, false));
    }

    /// Creates a MIG device without gpushd.
    pub(super) fn create_by_hand(&self, gpu: usize, profile: &str, start: u8) {
        self.alter(gpu, |reading| {
            let uuid = GpuRef::new(&reading.identity.uuid.clone());
            let mig = reading.mig.as_ref().expect("a GPU with MIG");
            let profile = mig.profiles.iter().find(|known| known.name == profile).expect("a profile").clone();
            let placement = profile.placements.iter().find(|place| place.start == start).expect("a placement");
            let create =
                Request::CreateGpuInstance { gpu: uuid.clone(), profile_id: profile.id, placement: *placement };
            let Ok(Answer::GpuInstance(created)) = change(reading, &create) else { panic!("no room at {start}") };
            let whole = profile.compute.iter().find(|compute| compute.name == profile.name).expect("a profile");
            let create =
                Request::CreateComputeInstance { gpu: uuid, gi: created.id, profile_id: whole.id, placement: None };
            change(reading, &create).expect("a compute instance");
        });
    }

    /// Destroys all instances of a GPU without gpushd.
    pub(super) fn clear(&self, gpu: usize) {
        self.alter(gpu, |reading| reading.mig.iter_mut().for_each(|mig| mig.instances.clear()));
    }

    /// Destroys all instances, ends all processes and finds lost GPUs again, as a reboot does.
    pub(super) fn reboot(&self) {
        let mut script = self.lock();
        script.lost.clear();
        for reading in &mut script.gpus {
            reading.processes.clear();
            reading.mig.iter_mut().for_each(|mig| mig.instances.clear());
        }
    }

    /// Sets what the driver reports in the samples of a GPU from now on.
    pub(super) fn set_sample(&self, gpu: u32, change: impl FnOnce(&mut Sample)) {
        let mut script = self.lock();
        let uuid = script.gpus[gpu as usize].identity.uuid.clone();
        change(script.samples.entry(gpu).or_insert_with(|| idle_sample(uuid)));
    }

    /// Returns the number of samples that gpushd has taken.
    pub(super) fn sampled(&self) -> u64 {
        self.lock().sampled
    }

    /// Starts a computation of this process on the first MIG device of a GPU, or on a GPU without MIG.
    pub(super) fn use_first_device(&self, gpu: usize, pid: u32) {
        self.use_as(gpu, pid, ProcessKind::Compute);
    }

    /// Starts a use of this kind by this process on the first MIG device of a GPU, or on a GPU without MIG.
    pub(super) fn use_as(&self, gpu: usize, pid: u32, kind: ProcessKind) {
        let process = Process { kind, ..computation(pid) };
        self.alter(gpu, |reading| {
            match reading.mig.as_mut().filter(|mig| mig.enabled).and_then(|mig| mig.instances.first_mut()) {
                Some(instance) => instance.compute[0].processes.push(process),
                None => reading.processes.push(process),
            }
        });
    }

    /// Starts a computation of this process on the MIG device that starts at a memory slice.
    pub(super) fn use_device_at(&self, gpu: usize, start: u8, pid: u32) {
        self.alter(gpu, |reading| instance_at(reading, start).compute[0].processes.push(computation(pid)));
    }

    /// Returns the compute mode of a GPU.
    pub(super) fn compute_mode(&self, gpu: usize) -> Option<ComputeMode> {
        self.lock().gpus[gpu].compute_mode
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
        self.alter(gpu, end_processes);
    }

    /// Lets the driver report no UUID of a GPU, or report it again.
    pub(super) fn hide_uuid(&self, gpu: u32, hidden: bool) {
        let mut script = self.lock();
        script.without_uuid.remove(&gpu);
        script.without_uuid.extend(hidden.then_some(gpu));
    }

    /// Takes a GPU off the bus.
    pub(super) fn lose(&self, gpu: u32) {
        self.lock().lost.insert(gpu);
    }

    /// Unloads the driver for workers that start from now on, or loads it again.
    pub(super) fn unload(&self, error: Option<ErrorKind>) {
        self.lock().unloaded = error;
    }

    fn lock(&self) -> MutexGuard<'_, Script> {
        self.script.lock()
    }

    /// Waits while `waits` is true.
    fn wait<'s>(
        &'s self,
        mut script: MutexGuard<'s, Script>,
        waits: impl Fn(&Script) -> bool,
    ) -> MutexGuard<'s, Script> {
        script.waiting += 1;
        while waits(&script) {
            script = self.changed.wait(script).expect("no test panics while it holds the lock");
        }
        script.waiting -= 1;
        script
    }
}

impl ScriptedDriver for ScriptedGpus {
    fn info(&self) -> Result<Driver, DriverError> {
        if let Some(kind) = self.lock().unloaded.clone() {
            return Err(DriverError::new(kind, "nvmlInit_v2"));
        }
        let text = |text: &str| text.to_owned();
        Ok(Driver {
            version: text("570.0"),
            nvml: text("12.570.0"),
            cuda: text("12.8"),
            library: text("scripted"),
            simulated: true,
            memory_limits: false,
        })
    }

    fn call(&self, request: &Request) -> Result<Answer, DriverError> {
        let mut script = self.lock();
        script.calls += 1;
        let Some(gpu) = request.gpu() else { return Ok(Answer::Listed(script.listed())) };
        let at = position(&script.gpus, gpu, request)?;
        let (name, index) = (request.name(), script.gpus[at].identity.index);
        script.sampled += u64::from(matches!(request, Request::Sample { .. }));
        if request.is_mutation() {
            script.changes.push(format!("{name} {index}"));
        }
        let rule = call_rules::applicable(&mut script.rules, request, index.0);
        let (ended, releases) = (script.ended, script.releases);
        if rule.as_ref().is_some_and(|rule| rule.held) {
            script = self.wait(script, |now| now.releases == releases);
        }
        let refused = |kind| Err(DriverError::new(kind, name).on(&gpu.uuid));
        if script.ended != ended {
            return refused(ErrorKind::Stopped);
        }
        let effect = rule.map_or(CallEffect::Succeed, |rule| rule.effect);
        if matches!(effect, CallEffect::LoseGpu) {
            script.lost.insert(index.0);
        }
        if script.lost.contains(&index.0) {
            return refused(ErrorKind::GpuIsLost);
        }
        match effect {
            CallEffect::Succeed | CallEffect::LoseGpu => {}
            CallEffect::HideProcesses(error) => {
                let mut answer = change(&mut script.gpus[at], request)?;
                if let Answer::Reading(reading) = &mut answer {
                    end_processes(reading);
                    reading.processes_known = false;
                    reading.warnings.push(Unread { part: ReadingPart::Processes, error: error.to_owned() });
                }
                return Ok(answer);
            }
            CallEffect::Fail(kind) => return refused(kind),
            CallEffect::KeepMode(kind) => {
                let activation = Some(DriverError::new(kind, name));
                let enabled = script.gpus[at].mig.as_ref().is_some_and(|mig| mig.enabled);
                return Ok(Answer::Mode(ModeChange { enabled, pending: enabled, activation }));
            }
            CallEffect::EndWorker(moment) | CallEffect::EndGpushd(moment) => {
                if moment == EndMoment::After {
                    let _ = change(&mut script.gpus[at], request);
                }
                if let CallEffect::EndGpushd(_) = effect {
                    script.is_ending = true;
                    drop(self.wait(script, |now| now.ended == ended));
                }
                // The scripted worker ends after such an error.
                return refused(ErrorKind::WorkerDied { may_have_landed: moment == EndMoment::After });
            }
        }
        if let (Request::Sample { .. }, Some(sample)) = (request, script.samples.get(&index.0)) {
            return Ok(Answer::Sample(Box::new(sample.clone())));
        }
        change(&mut script.gpus[at], request)
    }
}

impl Script {
    fn listed(&self) -> Vec<Listed> {
        let listed = |reading: &Reading| {
            let index = reading.identity.index;
            let failed = |kind| Err(DriverError::new(kind, "nvmlDeviceGetUUID"));
            let identity = if self.lost.contains(&index.0) {
                failed(ErrorKind::GpuIsLost)
            } else if self.without_uuid.contains(&index.0) {
                failed(ErrorKind::Unknown)
            } else {
                Ok(reading.identity.clone())
            };
            Listed { index, identity }
        };
        self.gpus.iter().map(listed).collect()
    }
}

/// Returns a sample of a GPU that does nothing.
fn idle_sample(uuid: GpuUuid) -> Sample {
    let activity = Activity { source: SignalSource::Utilization, busy: Some(Ratio::ZERO), ..Activity::default() };
    Sample {
        uuid,
        at_us: 0,
        activity,
        memory: Some(MemoryUse { total_bytes: 80 << 30, used_bytes: 1 << 30 }),
        instances: Vec::new(),
        processes: Some(Vec::new()),
        energy_mj: Some(1_000_000),
        power_mw: Some(70_000),
        power_limit_mw: Some(700_000),
        temperature_c: Some(31),
        memory_temperature_c: None,
        sm_clock_mhz: Some(1980),
        memory_clock_mhz: Some(2619),
        event_reasons: Some(0x01),
        limited: LimitedTime { power_ns: Some(0), thermal_ns: Some(0) },
        doubts: Doubts::default(),
        took_us: 0,
    }
}

fn computation(pid: u32) -> Process {
    Process {
        pid: Some(pid),
        uid: None,
        user: None,
        command: None,
        kind: ProcessKind::Compute,
        memory_mib: Some(64),
        unidentified: false,
    }
}

fn end_processes(reading: &mut Reading) {
    reading.processes.clear();
    let instances = reading.mig.iter_mut().flat_map(|mig| &mut mig.instances);
    instances.flat_map(|instance| &mut instance.compute).for_each(|compute| compute.processes.clear());
}

fn instance_at(reading: &mut Reading, start: u8) -> &mut GpuInstance {
    let mut instances = reading.mig.iter_mut().flat_map(|mig| &mut mig.instances);
    instances.find(|instance| instance.placement.start == start).expect("an instance")
}

fn position(gpus: &[Reading], gpu: &GpuRef, request: &Request) -> Result<usize, DriverError> {
    let found = gpus.iter().position(|reading| reading.identity.uuid == gpu.uuid);
    found.ok_or_else(|| DriverError::new(ErrorKind::NotFound, request.name()).on(&gpu.uuid))
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
