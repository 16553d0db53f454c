//! Profile names, for drivers too old to report them (before `nvmlDeviceGetGpuInstanceProfileInfoV`).
//!
//! The names follow NVIDIA's rule (go-nvlib). The memory in a name is the product of two numbers:
//! the profile's share of the board's memory, in eighths, rounded up; and the board's memory in
//! whole GiB. The profile's index determines the attributes in the name.

use std::cmp::Reverse;

use gpush_api::{ComputeProfile, GpuProfile};
use nvml_wrapper_sys::bindings as sys;

/// Index of the 3-slice graphics profile. nvml-wrapper-sys does not define it yet.
const GPU_INSTANCE_PROFILE_3_SLICE_GFX: u32 = 17;

/// Computes a name such as `3g.40gb` from the slices, the memory of profile and board in MiB, and the profile index.
pub(super) fn gpu_profile(slices: u8, memory_mib: u64, board_mib: u64, index: u32) -> String {
    let eighths = (memory_mib * 8).div_ceil(board_mib.max(1));
    let board_gib = board_mib.div_ceil(1024);
    let gib = (eighths * board_gib + 4) / 8;
    format!("{slices}g.{gib}gb{}", attribute(index))
}

/// Sets the names of those compute instance profiles in `profiles` that have no name, or the same name as another
/// profile. `gpu_profile` is the GPU instance profile.
///
/// The profile that occupies the whole GPU instance has the name of the GPU instance. Every other
/// profile has a name `Nc.NAME`. Sometimes two profiles have as many slices as the GPU instance:
/// for a double-memory `1g` from Hopper on, the profiles with the indexes 0 and 7. In that case,
/// the profile with more streaming multiprocessors occupies the whole GPU instance. If both
/// profiles have the same number of multiprocessors, index 7 occupies the whole GPU instance.
pub(super) fn compute_profiles(profiles: &mut [ComputeProfile], gpu_profile: &GpuProfile) {
    let all = profiles.iter().enumerate().filter(|(_, profile)| profile.slices == gpu_profile.slices);
    let whole = all
        .max_by_key(|(_, profile)| {
            let revised = profile.index == sys::NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1;
            (profile.sm, revised, Reverse(profile.index))
        })
        .map(|(at, _)| at);
    let given: Vec<String> = profiles.iter().map(|profile| profile.name.clone()).collect();
    for (at, profile) in profiles.iter_mut().enumerate() {
        let shared = given.iter().filter(|name| **name == given[at]).count() > 1;
        if given[at].is_empty() || shared {
            profile.name = match whole {
                Some(whole) if whole == at => gpu_profile.name.clone(),
                Some(_) | None => format!("{}c.{}", profile.slices, gpu_profile.name),
            };
        }
    }
}

/// Returns the driver's name without its `MIG ` prefix.
pub(super) fn plain(name: &str) -> String {
    name.strip_prefix("MIG ").unwrap_or(name).trim().to_owned()
}

fn attribute(index: u32) -> &'static str {
    match index {
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1 | sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1 => "+me",
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX
        | sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_GFX
        | GPU_INSTANCE_PROFILE_3_SLICE_GFX
        | sys::NVML_GPU_INSTANCE_PROFILE_4_SLICE_GFX => "+gfx",
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_NO_ME | sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_NO_ME => "-me",
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME | sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME => "+me.all",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_gives_every_known_name() {
        let mut tried = 0;
        let mut wrong = Vec::new();
        for key in gpush_geometry::KEYS {
            let model = gpush_geometry::model(key).unwrap();
            for profile in &model.gi_profiles {
                let name = gpu_profile(profile.slices, profile.memory_mib, model.board_memory_mib, profile.index);
                if name != profile.name {
                    wrong.push(format!("{key}: {name} for {}", profile.name));
                }
                // The memory size that another driver generation reports must give the same profile name.
                for variant in &profile.variants {
                    let name = gpu_profile(profile.slices, variant.memory_mib, model.board_memory_mib, profile.index);
                    assert_eq!(name, profile.name, "{key}: {}", variant.source);
                }
                tried += 1;
            }
        }
        println!("{tried} names by rule, {} not: {wrong:?}", wrong.len());
        assert!(tried > 100);
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn name_prefix_is_removed() {
        assert_eq!(plain("MIG 1g.10gb+me"), "1g.10gb+me");
        assert_eq!(plain("1g.10gb"), "1g.10gb");
    }
}
