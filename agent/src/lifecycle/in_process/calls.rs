//! What the calls of the scripted driver do to a GPU.

use std::sync::Arc;

use gpush_api::{ComputeInstance, GpuInstance, GpuProfile, Memory, Mig, Placement};
use gpush_nvml::{
    DriverError, ErrorKind, ModeChange, Reading,
    proto::{Answer, Request},
};

/// Executes a call on its GPU.
pub(super) fn change(reading: &mut Reading, request: &Request) -> Result<Answer, DriverError> {
    let refused = |kind| DriverError::new(kind, request.name());
    let index = reading.identity.index;
    match request {
        Request::List { .. } => Err(refused(ErrorKind::InvalidArgument)),
        Request::Sample { .. } => Err(refused(ErrorKind::NotSupported)),
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
            if !enabled && !mig.instances.is_empty() {
                return Err(refused(ErrorKind::InUse));
            }
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
                uuid: Some(
                    format!(
                        "MIG-{:08x}-{:04x}-{:04x}-0000-{id:012x}",
                        index.0, instance.placement.start, instance.profile_id
                    )
                    .into(),
                ),
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
