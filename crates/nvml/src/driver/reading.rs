//! A complete reading of one GPU, combined from the calls of the other files.
//!
//! A problem with one instance does not hide the other instances. For a GPU instance of an unknown
//! profile, the reading contains its id and placement. A value that cannot be read is absent, and a
//! warning names it. The reading fails only if data is missing that a plan needs: memory, MIG mode,
//! profiles, and the list of instances.

use gpush_api::{ComputeInstance, ComputeProfile, GpuInstance, GpuProfile, GpuUuid, Memory, Mig, NvLink, Placement};
use nvml_wrapper_sys::bindings::{self as sys, nvmlDevice_t};

use super::{
    Gpu,
    compute_instance::{OpenComputeInstance, OpenGpuInstance},
    compute_profiles::expected,
    processes::{Entry, merge},
};
use crate::{
    error::{DriverError, ErrorKind},
    reading::{Identity, Reading, ReadingPart, RemappedRows, Unread},
};

/// Data that does not change within a driver session: the profiles of a GPU, and the compute instance profiles that the
/// driver has reported so far.
#[derive(Debug, Default)]
pub struct ProfileCache {
    uuid: GpuUuid,
    profiles: Vec<GpuProfile>,
    reported: Vec<(u32, Vec<ComputeProfile>)>,
    /// Peers of the NVLink ports, by UUID. The wiring does not change.
    links: Option<(GpuUuid, Option<NvLink>)>,
}

impl ProfileCache {
    /// Returns the ids of the GPU instance profiles whose compute instance profiles the driver has
    /// reported. For other GPU instance profiles, a rule computes the compute instance profiles.
    #[must_use]
    pub fn reported_profiles(&self) -> Vec<u32> {
        self.reported.iter().map(|(id, _)| *id).collect()
    }

    fn compute(&self, gpu_profile: u32) -> Option<&Vec<ComputeProfile>> {
        self.reported.iter().find(|(id, _)| *id == gpu_profile).map(|(_, compute)| compute)
    }
}

impl Gpu<'_> {
    /// Reads everything about the GPU.
    ///
    /// # Errors
    /// Errors of the calls whose data a plan needs.
    pub fn read(&self, cache: &mut ProfileCache) -> Result<Reading, DriverError> {
        let identity = self.identity()?;
        let memory = self.memory()?;
        let mut warnings = Vec::new();
        let nvlink = self.cached_links(cache);
        let compute_mode = self.compute_mode().unwrap_or_else(|error| {
            warnings.push(Unread::new(ReadingPart::ComputeMode, &error));
            None
        });
        let Some(mode) = self.mig_mode()? else {
            let (entries, processes_known) = self.read_processes(&[], &mut warnings);
            let processes = merge(&entries).iter().map(Entry::describe).collect();
            let rows = self.remapped_rows(&mut warnings);
            return Ok(Reading {
                identity,
                memory,
                mig: None,
                compute_mode,
                nvlink,
                sensors: self.sensors(),
                processes,
                processes_known,
                rows,
                warnings,
            });
        };
        self.fill(cache, memory)?;
        let open = if mode.enabled {
            self.gpu_instances(&cache.profiles.iter().map(|p| p.id).collect::<Vec<_>>())?
        } else {
            Vec::new()
        };
        let mut devices = Vec::new();
        let mut instances = Vec::new();
        for instance in &open {
            let (instance, compute) = self.read_instance(instance, cache, &mut warnings)?;
            devices.extend(compute.into_iter().map(|ci| (instance.id, ci)));
            instances.push(instance);
        }
        let (entries, processes_known) = self.read_processes(&devices, &mut warnings);
        let processes = assign(&merge(&entries), &mut instances);
        instances.sort_by_key(|instance| (instance.placement.start, instance.id));
        let profiles = self.read_profiles(cache, &identity, mode.enabled, &mut warnings);
        let mig = Mig {
            enabled: mode.enabled,
            reset_pending: mode.enabled != mode.pending,
            memory_slices: profiles
                .iter()
                .flat_map(|p| &p.placements)
                .map(|p| p.start.saturating_add(p.size))
                .max()
                .unwrap_or_default(),
            compute_slices: profiles.iter().map(|p| p.slices).max().unwrap_or_default(),
            instances,
            profiles: profiles.into(),
        };
        let rows = self.remapped_rows(&mut warnings);
        Ok(Reading {
            identity,
            memory,
            mig: Some(mig),
            compute_mode,
            nvlink,
            sensors: self.sensors(),
            processes,
            processes_known,
            rows,
            warnings,
        })
    }

    /// Reads the row remapper counts. GPUs before Ampere have none.
    fn remapped_rows(&self, warnings: &mut Vec<Unread>) -> Option<RemappedRows> {
        let mut rows = RemappedRows::default();
        let (mut pending, mut failed) = (0, 0);
        // SAFETY: the call writes four integers.
        let reported = unsafe {
            nvml!(
                self.driver,
                nvmlDeviceGetRemappedRows(
                    self.device_handle(),
                    &raw mut rows.correctable,
                    &raw mut rows.uncorrectable,
                    &raw mut pending,
                    &raw mut failed
                )
            )
        };
        match reported {
            Ok(()) => Some(RemappedRows { pending: pending != 0, failed: failed != 0, ..rows }),
            Err(error)
                if matches!(
                    error.kind,
                    ErrorKind::NotSupported | ErrorKind::MissingSymbol | ErrorKind::FunctionNotFound
                ) =>
            {
                None
            }
            Err(error) => {
                warnings.push(Unread::new(ReadingPart::Details, &error.on(&self.uuid)));
                None
            }
        }
    }

    /// Returns the peers of the NVLink ports. Queries them at each reading until the driver
    /// answers, then caches them. Only resets need the peers, so a failure adds no warning.
    fn cached_links(&self, cache: &mut ProfileCache) -> Option<NvLink> {
        if let Some((uuid, links)) = &cache.links
            && *uuid == self.uuid
        {
            return links.clone();
        }
        let links = self.nvlink().ok()?;
        cache.links = Some((self.uuid.clone(), links.clone()));
        links
    }

    fn fill(&self, cache: &mut ProfileCache, memory: Memory) -> Result<(), DriverError> {
        if cache.uuid != self.uuid || cache.profiles.is_empty() {
            let profiles = self.gpu_profiles(memory.total_mib)?;
            *cache =
                ProfileCache { uuid: self.uuid.clone(), profiles, reported: Vec::new(), links: cache.links.take() };
        }
        Ok(())
    }

    fn read_profiles(
        &self,
        cache: &ProfileCache,
        identity: &Identity,
        enabled: bool,
        warnings: &mut Vec<Unread>,
    ) -> Vec<GpuProfile> {
        let mut profiles = cache.profiles.clone();
        for profile in &mut profiles {
            profile.compute = match cache.compute(profile.id) {
                Some(reported) => reported.clone(),
                None => expected(profile, &cache.profiles, identity.architecture),
            };
            if enabled {
                match self.remaining(profile.id) {
                    Ok(remaining) => profile.remaining = remaining,
                    Err(error) => warnings.push(Unread::new(ReadingPart::Profiles, &error)),
                }
            }
        }
        profiles
    }

    /// Reads a GPU instance with its compute instances and their handles.
    fn read_instance<'d>(
        &self,
        open: &OpenGpuInstance<'d>,
        cache: &mut ProfileCache,
        warnings: &mut Vec<Unread>,
    ) -> Result<(GpuInstance, Vec<OpenComputeInstance<'d>>), DriverError> {
        self.cache_compute_profiles(open, cache, warnings);
        let compute = open.compute_instances()?;
        let mut memory = None;
        for ci in &compute {
            match ci.memory() {
                Ok(reported) => memory = memory.or(reported),
                Err(error) => warnings.push(Unread::new(ReadingPart::Details, &error)),
            }
        }
        let described = compute.iter().map(|ci| describe(ci, open.profile_id, cache, warnings)).collect();
        let instance = GpuInstance {
            id: open.id,
            profile_id: open.profile_id,
            profile: gpu_profile_name(open.profile_id, cache),
            placement: open.placement,
            memory,
            compute: described,
            processes: Vec::new(),
        };
        Ok((instance, compute))
    }

    /// Queries the compute instance profiles of a GPU instance profile, but only once.
    fn cache_compute_profiles(&self, open: &OpenGpuInstance<'_>, cache: &mut ProfileCache, warnings: &mut Vec<Unread>) {
        if cache.compute(open.profile_id).is_some() {
            return;
        }
        let Some(profile) = cache.profiles.iter().find(|p| p.id == open.profile_id) else { return };
        match open.compute_profiles(profile) {
            Ok(reported) => cache.reported.push((open.profile_id, reported)),
            Err(error) => warnings.push(Unread::new(ReadingPart::Profiles, &error.on(&self.uuid))),
        }
    }

    /// Returns the processes, and whether the lists are complete. If several lists fail, the warning
    /// names the first failed list.
    fn read_processes(
        &self,
        devices: &[(u32, OpenComputeInstance<'_>)],
        warnings: &mut Vec<Unread>,
    ) -> (Vec<Entry>, bool) {
        let mut entries = Vec::new();
        let mut unknown = None;
        let own = self.processes(self.device_handle());
        let whole = own.is_ok();
        match own {
            Ok(own) => entries.extend(own),
            // A caller without permission cannot list all processes of a MIG GPU, but can list the
            // processes of each MIG device.
            Err(error)
                if matches!(error.kind, ErrorKind::NoPermission | ErrorKind::NotSupported)
                    && !devices.is_empty()
                    && devices.iter().all(|(_, ci)| !ci.device.is_null()) => {}
            Err(error) => unknown = Some(error),
        }
        for (gi, ci) in devices {
            if ci.device.is_null() {
                continue;
            }
            match self.processes(ci.device) {
                Ok(own) => entries.extend(own.into_iter().map(|e| Entry { gi: Some(*gi), ci: Some(ci.id), ..e })),
                Err(error) if error.kind == ErrorKind::NotSupported && whole => {}
                Err(error) => {
                    unknown.get_or_insert(error);
                }
            }
        }
        let known = unknown.is_none();
        warnings.extend(unknown.map(|error| Unread::new(ReadingPart::Processes, &error)));
        (entries, known)
    }

    /// Creates a GPU instance and describes it like a reading does.
    ///
    /// # Errors
    /// Errors of [`Gpu::create_gpu_instance`].
    pub fn make_gpu_instance(
        &self,
        profile_id: u32,
        at: Placement,
        cache: &mut ProfileCache,
    ) -> Result<GpuInstance, DriverError> {
        // Read the memory first. If this read failed after the mutation, the new instance would not
        // be reported.
        let memory = self.memory()?;
        self.fill(cache, memory)?;
        let open = self.create_gpu_instance(profile_id, at)?;
        let mut warnings = Vec::new();
        self.cache_compute_profiles(&open, cache, &mut warnings);
        Ok(GpuInstance {
            id: open.id,
            profile_id,
            profile: gpu_profile_name(profile_id, cache),
            placement: open.placement,
            memory: None,
            compute: Vec::new(),
            processes: Vec::new(),
        })
    }

    /// Creates a compute instance and describes it like a reading does.
    ///
    /// # Errors
    /// Errors of [`OpenGpuInstance::create_compute_instance`].
    pub fn make_compute_instance(
        &self,
        gi: u32,
        profile_id: u32,
        at: Option<Placement>,
        cache: &mut ProfileCache,
    ) -> Result<ComputeInstance, DriverError> {
        let memory = self.memory()?;
        self.fill(cache, memory)?;
        let open = self.gpu_instance(gi)?;
        let mut warnings = Vec::new();
        self.cache_compute_profiles(&open, cache, &mut warnings);
        let made = open.create_compute_instance(profile_id, at)?;
        Ok(describe(&made, open.profile_id, cache, &mut warnings))
    }

    /// Reads the memory of the whole GPU.
    ///
    /// # Errors
    /// Errors of the calls.
    pub fn memory(&self) -> Result<Memory, DriverError> {
        self.memory_of(self.device_handle())
    }

    pub(super) fn memory_of(&self, device: nvmlDevice_t) -> Result<Memory, DriverError> {
        let (total, used) = self.memory_bytes_of(device)?;
        Ok(Memory { total_mib: total >> 20, used_mib: used >> 20 })
    }

    /// Reads the memory of the GPU or of one of its MIG devices: total and used bytes. The second version of the call
    /// reports reserved memory separately; the first version includes it in the used memory.
    pub(super) fn memory_bytes_of(&self, device: nvmlDevice_t) -> Result<(u64, u64), DriverError> {
        // SAFETY: a struct of integers, for which all zeroes are a valid value.
        let mut info: sys::nvmlMemory_v2_t = unsafe { std::mem::zeroed() };
        info.version = super::profiles::version::<sys::nvmlMemory_v2_t>(2);
        // SAFETY: the version word tells the driver which struct the pointer refers to.
        match unsafe { nvml!(self.driver, nvmlDeviceGetMemoryInfo_v2(device, &raw mut info)) } {
            Ok(()) => return Ok((info.total, info.used.saturating_add(info.reserved))),
            Err(error) if matches!(error.kind, ErrorKind::MissingSymbol | ErrorKind::ArgumentVersionMismatch) => {}
            Err(error) => return Err(error.on(&self.uuid)),
        }
        let mut info = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
        // SAFETY: this call fills this struct.
        unsafe { nvml!(self.driver, nvmlDeviceGetMemoryInfo(device, &raw mut info)) }.map_err(|e| e.on(&self.uuid))?;
        Ok((info.total, info.used))
    }
}

fn gpu_profile_name(id: u32, cache: &ProfileCache) -> String {
    let known = cache.profiles.iter().find(|p| p.id == id);
    known.map_or_else(|| format!("profile {id}"), |p| p.name.clone())
}

fn describe(
    ci: &OpenComputeInstance<'_>,
    gpu_profile: u32,
    cache: &ProfileCache,
    warnings: &mut Vec<Unread>,
) -> ComputeInstance {
    let uuid = ci.uuid().unwrap_or_else(|error| {
        warnings.push(Unread::new(ReadingPart::Details, &error));
        None
    });
    let known = cache.compute(gpu_profile).and_then(|reported| reported.iter().find(|p| p.id == ci.profile_id));
    ci.describe(known.map_or_else(|| format!("profile {}", ci.profile_id), |p| p.name.clone()), uuid)
}

/// Assigns processes to their instances, and returns the processes of the whole GPU. These include processes of
/// instances that are not in `instances`.
fn assign(entries: &[Entry], instances: &mut [GpuInstance]) -> Vec<gpush_api::Process> {
    let mut whole = Vec::new();
    for entry in entries {
        let instance = instances.iter_mut().find(|instance| Some(instance.id) == entry.gi);
        let Some(instance) = instance else {
            whole.push(entry.describe());
            continue;
        };
        match instance.compute.iter_mut().find(|ci| Some(ci.id) == entry.ci) {
            Some(ci) => ci.processes.push(entry.describe()),
            None => instance.processes.push(entry.describe()),
        }
    }
    whole
}
