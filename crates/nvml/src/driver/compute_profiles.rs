//! Compute instance profiles. NVML reports them only for an existing GPU instance, but a plan needs
//! them earlier. So gpush caches the reported profiles by GPU instance profile. Until the profiles
//! are known, gpush uses [`expected`], a rule that holds for every recorded GPU model.
//!
//! The rule determines only names and counts. The driver determines the placements. gpush queries
//! the placements at creation (see `compute_instance`).

use gpush_api::{Architecture, ComputeProfile, GpuProfile, Placement};
use nvml_wrapper_sys::bindings as sys;

use super::{
    compute_instance::OpenGpuInstance,
    names, narrow,
    profiles::{ask_older, no_such_profile, parse_name, placement, version},
};
use crate::error::DriverError;

/// Enum indexes to query. NVML 13 has 9.
const INDEXES: u32 = 16;

/// Number of compute slices by enum index, for the profiles of known GPU models.
const SLICES: [(u32, u8); 5] = [
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE, 1),
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE, 2),
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE, 3),
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE, 4),
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE, 7),
];

/// Computes the compute instance profiles that `profile` will offer.
///
/// - A placement starts at a multiple of its rounded size, which is its number of slices, rounded up to a power of two.
///   Before Hopper, the placement occupies its number of slices. From Hopper on, it occupies the rounded size.
/// - Profiles with three slices exist only in GPU instances of three and of seven slices.
/// - A compute instance has as many streaming multiprocessors as the GPU instance profile with the same number of
///   slices.
/// - From Hopper on, a double-memory `1g` offers two profiles of one slice. Index 0 has as many
///   multiprocessors as a plain `1g`, and index 7 has all multiprocessors of the GPU instance.
pub(super) fn expected(profile: &GpuProfile, all: &[GpuProfile], architecture: Architecture) -> Vec<ComputeProfile> {
    let aligned = match architecture {
        Architecture::Hopper | Architecture::Blackwell | Architecture::Unknown => true,
        Architecture::Legacy
        | Architecture::Volta
        | Architecture::Turing
        | Architecture::Ampere
        | Architecture::Ada => false,
    };
    let whole = profile.slices;
    let double_memory = aligned && profile.index == sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2;
    let widened = double_memory.then_some((sys::NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1, 1));
    let mut profiles: Vec<ComputeProfile> = SLICES
        .iter()
        .copied()
        .filter(|(_, slices)| *slices == whole || *slices < whole && (*slices != 3 || whole == 7))
        .chain(widened)
        .map(|(index, slices)| {
            let takes_all = slices == whole && (!double_memory || widened == Some((index, slices)));
            let step = slices.next_power_of_two();
            let size = if aligned { step } else { slices };
            let placements: Vec<_> = (0..whole)
                .step_by(usize::from(step))
                .filter(|start| start + slices <= whole)
                .map(|start| Placement { start, size })
                .collect();
            ComputeProfile {
                name: String::new(),
                id: index,
                index,
                slices,
                max: narrow(u32::try_from(placements.len()).unwrap_or(u32::MAX), u8::MAX),
                sm: if takes_all { profile.sm } else { of_slices(all, slices).unwrap_or_default() },
                placements,
            }
        })
        .collect();
    names::compute_profiles(&mut profiles, profile);
    profiles
}

fn of_slices(all: &[GpuProfile], slices: u8) -> Option<u32> {
    all.iter().filter(|p| p.slices == slices).min_by_key(|p| p.index).map(|p| p.sm)
}

impl OpenGpuInstance<'_> {
    /// Reads the profiles that the driver offers in this GPU instance. `gpu_profile` is the instance's profile.
    ///
    /// # Errors
    /// Errors of the calls, except "no such profile".
    pub fn compute_profiles(&self, gpu_profile: &GpuProfile) -> Result<Vec<ComputeProfile>, DriverError> {
        let mut profiles = Vec::new();
        for index in 0..INDEXES {
            match self.compute_figures(index) {
                Ok((mut profile, name)) => {
                    profile.name = name.unwrap_or_default();
                    profile.placements = self.compute_placements(profile.id)?;
                    profiles.push(profile);
                }
                Err(error) if no_such_profile(&error) => {}
                Err(error) => return Err(error.detail(format!("compute instance profile index {index}"))),
            }
        }
        profiles.sort_by_key(|p| (p.slices, p.index));
        names::compute_profiles(&mut profiles, gpu_profile);
        Ok(profiles)
    }

    fn compute_figures(&self, index: u32) -> Result<(ComputeProfile, Option<String>), DriverError> {
        match self.compute_figures_v3(index) {
            Err(error) if ask_older(&error) => match self.compute_figures_v2(index) {
                Err(error) if ask_older(&error) => self.compute_figures_v1(index),
                other => other,
            },
            other => other,
        }
    }

    fn compute_figures_v3(&self, index: u32) -> Result<(ComputeProfile, Option<String>), DriverError> {
        // SAFETY: a struct of integers, for which all zeroes are a valid value.
        let mut info: sys::nvmlComputeInstanceProfileInfo_v3_t = unsafe { std::mem::zeroed() };
        info.version = version::<sys::nvmlComputeInstanceProfileInfo_v3_t>(3);
        let pointer = (&raw mut info).cast::<sys::nvmlComputeInstanceProfileInfo_v2_t>();
        let engines = sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
        // SAFETY: the version word tells the driver which struct the pointer refers to.
        unsafe {
            nvml!(self.gpu.driver, nvmlGpuInstanceGetComputeInstanceProfileInfoV(self.handle, index, engines, pointer))
        }?;
        let figures = (info.id, info.sliceCount, info.instanceCount, info.multiprocessorCount);
        Ok((bare(index, figures), parse_name(&info.name)))
    }

    fn compute_figures_v2(&self, index: u32) -> Result<(ComputeProfile, Option<String>), DriverError> {
        // SAFETY: a struct of integers, for which all zeroes are a valid value.
        let mut info: sys::nvmlComputeInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        info.version = version::<sys::nvmlComputeInstanceProfileInfo_v2_t>(2);
        let engines = sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
        // SAFETY: the version word tells the driver which struct the pointer refers to.
        unsafe {
            nvml!(
                self.gpu.driver,
                nvmlGpuInstanceGetComputeInstanceProfileInfoV(self.handle, index, engines, &raw mut info)
            )
        }?;
        let figures = (info.id, info.sliceCount, info.instanceCount, info.multiprocessorCount);
        Ok((bare(index, figures), parse_name(&info.name)))
    }

    fn compute_figures_v1(&self, index: u32) -> Result<(ComputeProfile, Option<String>), DriverError> {
        // SAFETY: a struct of integers, for which all zeroes are a valid value.
        let mut info: sys::nvmlComputeInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        let engines = sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
        // SAFETY: this call fills this struct.
        unsafe {
            nvml!(
                self.gpu.driver,
                nvmlGpuInstanceGetComputeInstanceProfileInfo(self.handle, index, engines, &raw mut info)
            )
        }?;
        let figures = (info.id, info.sliceCount, info.instanceCount, info.multiprocessorCount);
        Ok((bare(index, figures), None))
    }

    /// Reads the possible placements of a compute instance profile, in compute slots. Returns an empty list if the
    /// library is too old.
    pub(super) fn compute_placements(&self, profile_id: u32) -> Result<Vec<Placement>, DriverError> {
        use super::profiles::fits;
        use crate::error::ErrorKind;
        let mut list = [sys::nvmlComputeInstancePlacement_t { start: 0, size: 0 }; 64];
        let mut count = 0;
        // SAFETY: with a null list, the call only returns the number of entries.
        let how_many = unsafe {
            nvml!(
                self.gpu.driver,
                nvmlGpuInstanceGetComputeInstancePossiblePlacements(
                    self.handle,
                    profile_id,
                    std::ptr::null_mut(),
                    &raw mut count
                )
            )
        };
        match how_many {
            Ok(()) => fits(count, "nvmlGpuInstanceGetComputeInstancePossiblePlacements")?,
            Err(error) if matches!(error.kind, ErrorKind::MissingSymbol | ErrorKind::NotSupported) => {
                return Ok(Vec::new());
            }
            Err(error) => return Err(error),
        }
        let entries = list.as_mut_ptr();
        // SAFETY: the list has room for `count` entries, as checked.
        unsafe {
            nvml!(
                self.gpu.driver,
                nvmlGpuInstanceGetComputeInstancePossiblePlacements(self.handle, profile_id, entries, &raw mut count)
            )
        }?;
        Ok(list.iter().take(count as usize).map(|p| placement(p.start, p.size)).collect())
    }
}

fn bare(index: u32, (id, slices, max, sm): (u32, u32, u32, u32)) -> ComputeProfile {
    ComputeProfile {
        name: String::new(),
        id,
        index,
        slices: narrow(slices, u8::MAX),
        max: narrow(max, u8::MAX),
        sm,
        placements: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpush_api::Engines;

    fn api_profiles(model: &gpush_geometry::Model) -> Vec<GpuProfile> {
        model
            .gi_profiles
            .iter()
            .map(|p| GpuProfile {
                name: p.name.clone(),
                id: p.id,
                index: p.index,
                slices: p.slices,
                max: p.max,
                remaining: None,
                memory_mib: p.memory_mib,
                sm: p.sm,
                engines: Engines::default(),
                gfx: p.gfx,
                placements: Vec::new(),
                compute: Vec::new(),
            })
            .collect()
    }

    /// Old drivers report no names, so the profiles get the names of the rule.
    #[test]
    fn unnamed_or_ambiguous_profiles_get_the_names_of_the_rule() {
        let model = gpush_geometry::model("h100-80-sxm").unwrap();
        let all = api_profiles(&model);
        let double = all.iter().find(|p| p.name == "1g.20gb").unwrap();
        let expected = expected(double, &all, Architecture::Hopper);
        assert_eq!(expected.iter().map(|c| (c.id, c.sm)).collect::<Vec<_>>(), [(0, 16), (7, 26)]);
        for given in [["", ""], ["1g.20gb", "1g.20gb"], ["", "1g.20gb"]] {
            let mut profiles = expected.clone();
            for (profile, name) in profiles.iter_mut().zip(given) {
                profile.name = name.to_owned();
            }
            names::compute_profiles(&mut profiles, double);
            assert_eq!(profiles, expected, "{given:?}");
        }
    }

    #[test]
    fn rule_gives_compute_profiles_of_every_known_part() {
        let (mut tried, mut wrong) = (0, Vec::new());
        for key in gpush_geometry::KEYS {
            let model = gpush_geometry::model(key).unwrap();
            let architecture = match model.architecture {
                gpush_geometry::Architecture::Pascal => Architecture::Legacy,
                gpush_geometry::Architecture::Volta => Architecture::Volta,
                gpush_geometry::Architecture::Turing => Architecture::Turing,
                gpush_geometry::Architecture::Ampere => Architecture::Ampere,
                gpush_geometry::Architecture::Ada => Architecture::Ada,
                gpush_geometry::Architecture::Hopper => Architecture::Hopper,
                gpush_geometry::Architecture::Blackwell => Architecture::Blackwell,
            };
            let all = api_profiles(&model);
            for (known, profile) in model.gi_profiles.iter().zip(&all) {
                let reported: Vec<_> = known
                    .compute
                    .iter()
                    .map(|c| {
                        let spans: Vec<_> =
                            c.placements.iter().map(|(start, size)| Placement { start: *start, size: *size }).collect();
                        (c.name.clone(), c.id, c.index, c.slices, c.max, c.sm, spans)
                    })
                    .collect();
                let ours: Vec<_> = expected(profile, &all, architecture)
                    .into_iter()
                    .map(|c| (c.name, c.id, c.index, c.slices, c.max, c.sm, c.placements))
                    .collect();
                tried += 1;
                if reported != ours {
                    wrong.push(format!("{key} {}:\n  reported {reported:?}\n  rule {ours:?}", profile.name));
                }
            }
        }
        println!("{tried} GPU instance profiles, {} differ", wrong.len());
        assert!(tried > 100);
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
