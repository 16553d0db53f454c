//! Samples of one GPU: what the worker keeps between two samples, and the order of the driver calls.
//!
//! ```text
//!   field values ─▶ process lists ─▶ MIG off: GPM window or utilization, memory, utilization of the processes
//!                                    MIG on:  GPM windows of some instances, memory if wanted
//!                                 ─▶ board if wanted
//! ```
//!
//! A failure of one part leaves its values absent. A failed activity has the doubt [`Doubt::Failed`], because a GPU without
//! activity readings must look different. The sample fails only if the GPU itself is gone. All handles end with the worker,
//! so no handle survives a reset or maintenance.

use gpush_api::SignalSource;
use std::{
    collections::BTreeMap,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use nvml_wrapper_sys::bindings::{self as sys, nvmlDevice_t};

use self::{fields::Fields, gpm::Window, time::DriverTime, utilization::add_utilization};
use super::{Driver, Gpu, processes::Entry};
use crate::{
    error::{DriverError, ErrorKind},
    proto::GpuRef,
    sample::{
        Activity, Doubt, Doubts, InstanceRef, InstanceSample, LimitedTime, MemoryUse, ProcessSample, Sample, Wanted,
    },
};

mod calls;
mod fields;
mod gpm;
mod time;
mod utilization;

/// Room for the processes of a GPU. More processes cost a second call.
const PROCESSES: usize = 64;

/// Time without any entry of the process utilization after which no process did anything. The driver leaves out processes
/// that did nothing, but also has no entries if the last sampling period is not complete.
const QUIET_US: u64 = 2_000_000;

/// How far before this sample the next mean of the process utilization begins, if no process did anything. This is more
/// than the driver's sampling period of at most 1 s, whose end has not been seen yet.
const OVERLAP_US: u64 = 1_250_000;

/// What the worker keeps between two samples of one GPU.
#[derive(Debug, Default)]
pub struct Sampling<'d> {
    gpu: Option<Gpu<'d>>,
    /// Whether the GPU has performance monitoring; `None` until the driver has answered.
    has_gpm: Option<bool>,
    whole: Option<Window<'d>>,
    instances: BTreeMap<u32, Window<'d>>,
    /// Number of the sample.
    round: u64,
    request: gpm::MetricsRequest,
    time: DriverTime,
    /// Handle of a MIG device in each GPU instance, and the instances for which they were looked up.
    devices: (Vec<InstanceRef>, BTreeMap<u32, nvmlDevice_t>),
}

// SAFETY: NVML's handles belong to the session of the process. NVML is thread-safe, and allows any thread to use them.
unsafe impl Send for Sampling<'_> {}

fn wall_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Returns whether an error concerns the whole GPU or session, so that further calls are useless.
fn ends_the_sample(error: &DriverError) -> bool {
    matches!(
        error.kind,
        ErrorKind::GpuIsLost
            | ErrorKind::ResetRequired
            | ErrorKind::Uninitialized
            | ErrorKind::InvalidArgument
            | ErrorKind::DriverNotLoaded
            | ErrorKind::LibRmVersionMismatch
    )
}

impl<'d> Sampling<'d> {
    /// Samples a GPU. `instances` are its GPU instances; `None` means that MIG is off.
    ///
    /// # Errors
    /// The GPU cannot be found or is lost. All handles of the GPU are then dropped.
    pub fn sample(
        &mut self,
        driver: &'d Driver,
        gpu: &GpuRef,
        instances: Option<&[InstanceRef]>,
        wanted: Wanted,
    ) -> Result<Sample, DriverError> {
        let began = Instant::now();
        let sampled = self.sample_parts(driver, gpu, instances, wanted);
        match sampled {
            Ok(sample) => {
                Ok(Sample { took_us: u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX), ..sample })
            }
            Err(error) => {
                *self = Self::default();
                Err(error.on(&gpu.uuid))
            }
        }
    }

    fn sample_parts(
        &mut self,
        driver: &'d Driver,
        gpu: &GpuRef,
        instances: Option<&[InstanceRef]>,
        wanted: Wanted,
    ) -> Result<Sample, DriverError> {
        let found = match self.gpu.take() {
            Some(known) if known.uuid == gpu.uuid => known,
            Some(_) | None => driver.find(gpu)?,
        };
        let gpu = self.gpu.insert(found).clone();
        self.round += 1;
        let mut doubts = Doubts::default();
        let (fields, at_us) = self.fields(&gpu, &mut doubts)?;
        let entries =
            if wanted.processes { optional(gpu.running_processes(instances.is_some(), PROCESSES))? } else { None };
        let mut processes = entries.map(|entries| entries.iter().map(described).collect::<Vec<_>>());
        let mut sample = Sample {
            uuid: gpu.uuid.clone(),
            at_us,
            activity: Activity::default(),
            memory: None,
            instances: Vec::new(),
            processes: None,
            energy_mj: fields.energy_mj,
            power_mw: fields.power_mw,
            power_limit_mw: fields.power_limit_mw,
            temperature_c: None,
            memory_temperature_c: fields.memory_temperature_c,
            sm_clock_mhz: None,
            memory_clock_mhz: None,
            event_reasons: None,
            limited: LimitedTime { power_ns: fields.power_limited_ns, thermal_ns: fields.thermal_limited_ns },
            doubts,
            took_us: 0,
        };
        match instances {
            None => {
                self.instances.clear();
                sample.memory = memory_of(&gpu, gpu.device_handle())?;
                sample.activity = self.whole(&gpu, at_us)?;
                if let Some(processes) = &mut processes
                    && wanted.process_activity
                {
                    let counted = self.process_activity(&gpu, processes, at_us, &mut sample.doubts)?;
                    if sample.activity.source == SignalSource::None && counted {
                        sample.activity.source = SignalSource::Processes;
                    }
                }
                self.time.limit_entries();
            }
            Some(instances) => {
                self.whole = None;
                if wanted.memory {
                    sample.memory = memory_of(&gpu, gpu.device_handle())?;
                }
                sample.instances = self.instances(&gpu, instances, wanted, at_us)?;
            }
        }
        if sample.activity.source == SignalSource::None && processes.is_some() {
            sample.activity.source = SignalSource::MemoryOnly;
        }
        if let Some(doubt) = sample.activity.doubt {
            sample.doubts.count(doubt);
        }
        for one in &mut sample.instances {
            if one.activity.source == SignalSource::None && processes.is_some() {
                one.activity.source = SignalSource::MemoryOnly;
            }
            if let Some(doubt) = one.activity.doubt {
                sample.doubts.count(doubt);
            }
        }
        sample.processes = processes;
        if wanted.board {
            sample.temperature_c = optional(gpu.temperature())?.filter(|celsius| *celsius <= MOST_C);
            sample.sm_clock_mhz = optional(gpu.clock(sys::nvmlClockType_enum_NVML_CLOCK_SM))?;
            sample.memory_clock_mhz = optional(gpu.clock(sys::nvmlClockType_enum_NVML_CLOCK_MEM))?;
            sample.event_reasons = optional(gpu.event_reasons())?;
        }
        Ok(sample)
    }

    /// Reads the field values, and leaves them out if they are not newer than the last ones.
    fn fields(&mut self, gpu: &Gpu<'d>, doubts: &mut Doubts) -> Result<(Fields, u64), DriverError> {
        let fields = optional(gpu.fields())?.unwrap_or_default();
        let wall_us = wall_us();
        let at_us = fields.at_us.unwrap_or(wall_us);
        if self.time.accept(at_us, wall_us) {
            return Ok((fields, at_us));
        }
        doubts.count(Doubt::StaleTime);
        Ok((Fields::default(), at_us))
    }

    /// Reads the activity of a GPU with MIG off.
    fn whole(&mut self, gpu: &Gpu<'d>, now_us: u64) -> Result<Activity, DriverError> {
        match self.gpm(|| gpu.has_gpm())? {
            Some(true) => {}
            Some(false) => {
                let read = gpu.utilization_since(&mut self.time.utilization_us);
                return or_failed(read, SignalSource::Utilization);
            }
            None => return Ok(waiting(Doubt::Failed)),
        }
        let round = self.round;
        let turned = match &mut self.whole {
            Some(window) => window.turn(gpu, None, round, now_us, &mut self.request),
            None => Window::begin(gpu, None, 0, round, now_us).map(|window| {
                self.whole = Some(window);
                waiting(Doubt::FirstSample)
            }),
        };
        let activity = or_failed(turned, SignalSource::Gpm)?;
        if activity.doubt == Some(Doubt::Failed) {
            // The window begins again.
            self.whole = None;
        }
        Ok(activity)
    }

    /// Returns whether the GPU has performance monitoring; `None` if the driver did not answer. Then the next sample asks
    /// again.
    fn gpm(&mut self, ask: impl FnOnce() -> Result<bool, DriverError>) -> Result<Option<bool>, DriverError> {
        if self.has_gpm.is_none() {
            self.has_gpm = optional(ask())?;
        }
        Ok(self.has_gpm)
    }

    /// Reads the activity, and the memory if wanted, of the GPU instances.
    fn instances(
        &mut self,
        gpu: &Gpu<'d>,
        instances: &[InstanceRef],
        wanted: Wanted,
        now_us: u64,
    ) -> Result<Vec<InstanceSample>, DriverError> {
        let known = |gi: &u32, window: &mut Window<'d>| {
            instances.iter().any(|one| one.gi == *gi && one.generation == window.generation)
        };
        self.instances.retain(known);
        let has_gpm = if instances.is_empty() { Some(false) } else { self.gpm(|| gpu.has_gpm())? };
        // A new instance comes first, and then the one whose window is the longest.
        let mut order: Vec<InstanceRef> = instances.to_vec();
        order.sort_by_key(|one| (self.instances.get(&one.gi).map_or(0, |window| window.round), one.gi));
        order.truncate(if has_gpm == Some(true) { wanted.windows.into() } else { 0 });
        let mut sampled = Vec::with_capacity(instances.len());
        for instance in instances {
            let activity = match (has_gpm, order.contains(instance)) {
                (None, _) => waiting(Doubt::Failed),
                (Some(false), _) => Activity::default(),
                (Some(true), false) => self.not_read(instance.gi),
                (Some(true), true) => self.instance(gpu, *instance, now_us)?,
            };
            let memory = if wanted.memory { self.instance_memory(gpu, instances, instance.gi)? } else { None };
            sampled.push(InstanceSample { instance: *instance, activity, memory });
        }
        Ok(sampled)
    }

    /// Returns the activity of a GPU instance that this sample does not read.
    fn not_read(&self, gi: u32) -> Activity {
        waiting(if self.instances.contains_key(&gi) { Doubt::Skipped } else { Doubt::FirstSample })
    }

    fn instance(&mut self, gpu: &Gpu<'d>, instance: InstanceRef, now_us: u64) -> Result<Activity, DriverError> {
        let (round, gi) = (self.round, instance.gi);
        let read = match self.instances.get_mut(&gi) {
            Some(window) => window.turn(gpu, Some(gi), round, now_us, &mut self.request),
            None => Window::begin(gpu, Some(gi), instance.generation, round, now_us).map(|window| {
                self.instances.insert(gi, window);
                waiting(Doubt::FirstSample)
            }),
        };
        match read {
            Ok(activity) => Ok(activity),
            Err(error) if error.kind == ErrorKind::GpuIsLost => Err(error),
            Err(error) => {
                // The window begins again.
                self.instances.remove(&gi);
                Ok(without_window(&error))
            }
        }
    }

    /// Reads the memory of a GPU instance through one of its MIG devices.
    fn instance_memory(
        &mut self,
        gpu: &Gpu<'d>,
        instances: &[InstanceRef],
        gi: u32,
    ) -> Result<Option<MemoryUse>, DriverError> {
        if self.devices.0 != instances {
            self.devices = (instances.to_vec(), optional(gpu.mig_device_of_each_instance())?.unwrap_or_default());
        }
        let Some(device) = self.devices.1.get(&gi) else { return Ok(None) };
        match memory_of(gpu, *device) {
            Err(error) if error.kind != ErrorKind::GpuIsLost => {
                // The MIG device was replaced. The next sample looks the devices up again.
                self.devices.0.clear();
                Ok(None)
            }
            other => other,
        }
    }

    /// Adds the utilization to the processes. Returns whether the driver reports it.
    fn process_activity(
        &mut self,
        gpu: &Gpu<'d>,
        processes: &mut [ProcessSample],
        now_us: u64,
        doubts: &mut Doubts,
    ) -> Result<bool, DriverError> {
        let since = self.time.processes_us;
        let read = gpu.process_utilization(&mut self.time.processes_us, doubts);
        let Some(Some(entries)) = optional(read)? else {
            return Ok(false);
        };
        // If no process did anything for some time, the next mean must not include that time again.
        self.time.processes_us = self.time.processes_us.max(now_us.saturating_sub(OVERLAP_US));
        // A new entry of any process ends a sampling period, so a process without an entry did nothing in that period.
        let is_period_over = entries.iter().any(|entry| entry.busy.is_ok() && entry.at_us > since);
        let quiet = since > 0 && (is_period_over || now_us.saturating_sub(since) >= QUIET_US);
        add_utilization(processes, &entries, quiet, doubts);
        Ok(true)
    }
}

/// Largest plausible temperature in °C.
const MOST_C: u32 = 200;

/// An activity that is not known yet.
fn waiting(doubt: Doubt) -> Activity {
    Activity { source: SignalSource::Gpm, doubt: Some(doubt), ..Activity::default() }
}

/// Converts a failed reading of the activity to one that says so, unless the failure concerns the whole GPU.
fn or_failed(read: Result<Activity, DriverError>, source: SignalSource) -> Result<Activity, DriverError> {
    let failed = Activity { source, doubt: Some(Doubt::Failed), ..Activity::default() };
    Ok(optional(read)?.unwrap_or(failed))
}

/// Returns the activity of a GPU instance whose window could not be read.
fn without_window(error: &DriverError) -> Activity {
    match error.kind {
        // The GPU instance does not exist any more, or has no performance monitoring.
        ErrorKind::NotFound | ErrorKind::InvalidArgument | ErrorKind::NotSupported | ErrorKind::MissingSymbol => {
            Activity::default()
        }
        _ => waiting(Doubt::Failed),
    }
}

/// Converts a failed part of a sample to an absent one, unless the failure concerns the whole GPU.
fn optional<T>(read: Result<T, DriverError>) -> Result<Option<T>, DriverError> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if ends_the_sample(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

fn described(entry: &Entry) -> ProcessSample {
    ProcessSample { pid: entry.pid, gi: entry.gi, ci: entry.ci, memory_bytes: entry.memory, busy: None, dram: None }
}

fn memory_of(gpu: &Gpu<'_>, device: nvmlDevice_t) -> Result<Option<MemoryUse>, DriverError> {
    let read = gpu.memory_bytes_of(device);
    optional(read).map(|memory| memory.map(|(total_bytes, used_bytes)| MemoryUse { total_bytes, used_bytes }))
}

#[cfg(test)]
mod tests;
