//! Profile names for drivers too old to tell them (before `nvmlDeviceGetGpuInstanceProfileInfoV`).
//!
//! The rule is NVIDIA's own (go-nvlib): memory is the profile's share of the board, rounded up to
//! eighths, of the board's whole GiB. Attributes come from the profile's index.

use nvml_wrapper_sys::bindings as sys;

/// Index of the 3-slice graphics profile, which nvml-wrapper-sys does not name yet.
const GPU_INSTANCE_PROFILE_3_SLICE_GFX: u32 = 17;

/// `3g.40gb` from slices, memory of the profile and of the board (MiB), and profile index.
pub(super) fn gpu_profile(slices: u8, memory_mib: u64, board_mib: u64, index: u32) -> String {
    let eighths = (memory_mib * 8).div_ceil(board_mib.max(1));
    let board_gib = board_mib.div_ceil(1024);
    let gib = (eighths * board_gib + 4) / 8;
    format!("{slices}g.{gib}gb{}", attribute(index))
}

/// `1c.3g.40gb`, or the GPU instance profile's own name when all of it is taken.
pub(super) fn compute_profile(slices: u8, of: u8, gpu_profile: &str) -> String {
    if slices == of { gpu_profile.to_owned() } else { format!("{slices}c.{gpu_profile}") }
}

/// The driver's name without its `MIG ` prefix.
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
    fn the_rule_gives_every_known_name() {
        let mut tried = 0;
        let mut wrong = Vec::new();
        for key in gpush_geometry::KEYS {
            let model = gpush_geometry::model(key).unwrap();
            for profile in &model.gi_profiles {
                let name = gpu_profile(profile.slices, profile.memory_mib, model.board_memory_mib, profile.index);
                if name != profile.name {
                    wrong.push(format!("{key}: {name} for {}", profile.name));
                }
                for compute in &profile.compute {
                    assert_eq!(compute_profile(compute.slices, profile.slices, &profile.name), compute.name, "{key}");
                }
                tried += 1;
            }
        }
        println!("{tried} names by rule, {} not: {wrong:?}", wrong.len());
        assert!(tried > 100);
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn the_prefix_goes() {
        assert_eq!(plain("MIG 1g.10gb+me"), "1g.10gb+me");
        assert_eq!(plain("1g.10gb"), "1g.10gb");
    }
}
