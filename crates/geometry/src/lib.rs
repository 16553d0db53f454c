//! MIG geometry as data: the profiles, placements and numbers of each GPU model.
//!
//! The planner (`gpush-core`) and the simulated hardware (`silicon`) both use this data, and each
//! checks the other. So they must share only *data*: this crate contains no rules about which
//! instances fit together.
//!
//! `models/` contains one JSON file for each model, with one row (a profile) on each line. Every
//! row has a confidence. `estimated` names the fields whose values no public transcript shows. On a
//! real host, gpushd does not use this data, because the driver reports the profiles of the GPU.

use serde::Deserialize;

/// How certain the data in a row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Confidence {
    /// The data was seen in a real nvidia-smi or NVML transcript, or in a table by NVIDIA.
    Verified,
    /// The data was computed from verified rows or from the driver's published source.
    Derived,
    /// Names or numbers are not confirmed on hardware, or engines are copied from a similar GPU.
    Uncertain,
}

/// GPU generation, which determines how a change of MIG mode works, and which values the driver can
/// read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// Pascal: no MIG, and MPS cannot limit its clients.
    Pascal,
    /// Volta: no MIG, no time-slice levels.
    Volta,
    /// Turing: no MIG.
    Turing,
    /// Ampere: a change of MIG mode needs a GPU reset. The mode survives a reboot.
    Ampere,
    /// Ada Lovelace: no MIG.
    Ada,
    /// Hopper: a change of MIG mode takes effect without a reset. The mode is lost at a reboot.
    Hopper,
    /// Blackwell: MIG mode works as on Hopper.
    Blackwell,
}

/// Numbers of copy and media engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Engines {
    /// Copy engines.
    pub copy: u8,
    /// Video decoders (NVDEC).
    pub decoder: u8,
    /// Video encoders (NVENC).
    pub encoder: u8,
    /// JPEG decoders (NVJPG).
    pub jpeg: u8,
    /// Optical flow accelerators.
    pub ofa: u8,
}

/// A board that contains the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Board {
    /// PCI device id in hex, without the vendor's 10DE.
    pub device_id: String,
    /// PCI subsystem id in hex, without the vendor's 10DE; `None` if no public source shows it. Boards with equal device
    /// ids and different product names have different subsystem ids. Most ids are from the table "Compatible GPUs" of
    /// NVIDIA's open kernel modules (595.45.04), which also has the product names.
    #[serde(default)]
    pub subsystem_id: Option<String>,
    /// Name of the board.
    pub name: String,
    /// Product name, as the driver reports it. Model selectors of the config match this name.
    pub product: String,
}

/// A compute instance profile within one GPU instance profile.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ComputeProfile {
    /// Name, such as `1c.3g.40gb`. A profile that occupies the whole GPU instance has the name of
    /// the GPU instance profile.
    pub name: String,
    /// Profile id, as the driver reports it.
    pub id: u32,
    /// NVML enum index for queries.
    pub index: u32,
    /// Number of compute slices.
    pub slices: u8,
    /// Maximum number of such instances in one GPU instance.
    pub max: u8,
    /// Number of streaming multiprocessors.
    pub sm: u32,
    /// Possible placements in compute slots, as (start, size).
    pub placements: Vec<(u8, u8)>,
    /// Confidence in the row.
    pub confidence: Confidence,
}

/// A memory size that other driver generations report for a profile. Profiles are therefore
/// identified by name, not by size.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Variant {
    /// Last driver branch that reports this size, such as 470; `None` if the source does not name
    /// the driver.
    #[serde(default)]
    pub until: Option<u32>,
    /// Size of the frame buffer in MiB.
    pub memory_mib: u64,
    /// Source of the size.
    pub source: String,
}

/// A GPU instance profile of one model.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GpuProfile {
    /// Name, such as `3g.40gb` or `1g.10gb+me`.
    pub name: String,
    /// Profile id, as the driver reports it. The id identifies a fraction of the GPU, not a number
    /// of slices: id 14 is `2g.20gb` on an A100, and `1g.6gb` on an A30.
    pub id: u32,
    /// NVML enum index for queries.
    pub index: u32,
    /// Number of compute slices.
    pub slices: u8,
    /// Maximum number of such instances on one GPU.
    pub max: u8,
    /// Size of the frame buffer in MiB.
    pub memory_mib: u64,
    /// Number of streaming multiprocessors.
    pub sm: u32,
    /// Engines that an instance uses.
    pub engines: Engines,
    /// Whether an instance supports graphics.
    pub gfx: bool,
    /// Possible placements in memory slices, as (start, size).
    pub placements: Vec<(u8, u8)>,
    /// Confidence in the row.
    pub confidence: Confidence,
    /// Fields whose values no transcript shows. Such values are estimated by proportion.
    #[serde(default)]
    pub estimated: Vec<String>,
    /// Memory sizes that other driver generations report.
    #[serde(default)]
    pub variants: Vec<Variant>,
    /// Compute instance profiles.
    pub compute: Vec<ComputeProfile>,
}

/// One GPU model.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Model {
    /// Key of the model in this crate and in descriptions of simulated hosts, such as `a100-80`.
    pub key: String,
    /// Common name of the product.
    pub product: String,
    /// GPU generation.
    pub architecture: Architecture,
    /// Confidence in the model as a whole.
    pub confidence: Confidence,
    /// Source of the data.
    pub source: String,
    /// First Linux driver version that supports the GPU.
    pub min_driver: String,
    /// Number of compute slices; 0 for a GPU without MIG.
    pub compute_slices: u8,
    /// Number of memory slices; 0 for a GPU without MIG. The number is not always 8: an RTX PRO
    /// 6000 has 12 memory slices.
    pub memory_slices: u8,
    /// Size of the board's frame buffer in MiB.
    pub board_memory_mib: u64,
    /// Number of streaming multiprocessors.
    pub sm: u32,
    /// Boards that contain the GPU.
    pub boards: Vec<Board>,
    /// Fields whose values no transcript shows.
    #[serde(default)]
    pub estimated: Vec<String>,
    /// GPU instance profiles; empty for a GPU without MIG.
    pub gi_profiles: Vec<GpuProfile>,
}

impl GpuProfile {
    /// Returns the size of the frame buffer, in MiB, that a driver of this branch reports.
    #[must_use]
    pub fn memory_mib_under(&self, branch: u32) -> u64 {
        let reports = |variant: &&Variant| variant.until.is_some_and(|until| branch <= until);
        let oldest = self.variants.iter().filter(reports).min_by_key(|variant| variant.until);
        oldest.map_or(self.memory_mib, |variant| variant.memory_mib)
    }
}

impl Model {
    /// Returns whether the GPU supports MIG.
    #[must_use]
    pub fn has_mig(&self) -> bool {
        !self.gi_profiles.is_empty()
    }
}

macro_rules! models {
    ($($key:literal),* $(,)?) => {
        /// Keys of all models.
        pub const KEYS: &[&str] = &[$($key),*];

        fn text(key: &str) -> Option<&'static str> {
            match key {
                $($key => Some(include_str!(concat!("../models/", $key, ".json"))),)*
                _ => None,
            }
        }
    };
}

models![
    "a100-40",
    "a100-80",
    "h100-80-sxm",
    "h100-80-pcie",
    "h100-nvl-94",
    "h100-96",
    "gh200-96",
    "gh200-144",
    "h200-141",
    "h200-nvl-141",
    "h20-96",
    "h20-141",
    "b200-180",
    "gb200-186",
    "b300-269",
    "gb300-278",
    "a30-24",
    "rtxpro6000-96",
    "p100-16",
    "v100-32",
    "t4",
    "l4",
    "a10",
    "l40s",
];

/// Returns the model with this key. Parses only the file of that model, so that short-lived
/// programs start fast.
#[must_use]
pub fn model(key: &str) -> Option<Model> {
    text(key).and_then(|json| serde_json::from_str(json).ok())
}

/// A named host for simulation and offline planning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// Name, such as `dgx-a100`.
    pub name: &'static str,
    /// Short description.
    pub about: &'static str,
    /// Model key and number of each kind of GPU, in order.
    pub gpus: &'static [(&'static str, u32)],
}

/// Returns the number of the PCI bus for the GPU at this index of a preset. Offline planning and
/// the simulator both use this function, so that they give the same addresses. One PCI domain has
/// room for 64 GPUs.
#[must_use]
pub fn preset_bus(index: u32) -> u32 {
    7 + 3 * index
}

/// All presets.
pub const PRESETS: &[Preset] = &[
    Preset { name: "dgx-a100", about: "8 A100 80GB", gpus: &[("a100-80", 8)] },
    Preset { name: "dgx-h100", about: "8 H100 80GB SXM", gpus: &[("h100-80-sxm", 8)] },
    Preset { name: "dgx-h200", about: "8 H200 141GB", gpus: &[("h200-141", 8)] },
    Preset { name: "dgx-b200", about: "8 B200 180GB", gpus: &[("b200-180", 8)] },
    Preset { name: "a30x4", about: "4 A30 24GB", gpus: &[("a30-24", 4)] },
    Preset { name: "rtx-pro-6000x2", about: "2 RTX PRO 6000 Blackwell", gpus: &[("rtxpro6000-96", 2)] },
    Preset {
        name: "mixed",
        about: "one of each kind: A100, A30, H100, H200, L4, T4",
        gpus: &[("a100-80", 1), ("a30-24", 1), ("h100-80-sxm", 1), ("h200-141", 1), ("l4", 1), ("t4", 1)],
    },
];

/// Start slice of each GPU instance id, by chip variant. The variant names the physical slots that
/// are missing on the die. The text is a JSON object: variant → group (`1g`, `2g`, `1g.rev2`, `3g`,
/// `4g`, `7g`) → id → start.
pub const GI_IDS: &str = include_str!("../gi-ids.json");

/// Transcripts of instance creation that were recorded on hardware: the profiles in order, and the
/// GPU instance ids that the driver chose. The text is a JSON list.
pub const TRANSCRIPTS: &str = include_str!("../transcripts.json");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_parses_and_is_consistent() {
        for key in KEYS {
            let model: Model = serde_json::from_str(text(key).unwrap()).unwrap_or_else(|e| panic!("{key}: {e}"));
            assert_eq!(&model.key, key);
            assert_eq!(model.has_mig(), model.memory_slices > 0, "{key}");
            for profile in &model.gi_profiles {
                for (start, size) in &profile.placements {
                    assert!(start + size <= model.memory_slices, "{key} {}", profile.name);
                }
                let whole = profile.compute.iter().find(|c| c.name == profile.name);
                assert!(whole.is_some_and(|c| c.slices == profile.slices), "{key} {}", profile.name);
                assert!(whole.is_some_and(|c| c.sm == profile.sm), "{key} {}", profile.name);
            }
        }
    }

    #[test]
    fn memory_depends_on_the_driver_branch_where_recorded() {
        let profile = |key: &str, name: &str| {
            model(key).unwrap().gi_profiles.into_iter().find(|profile| profile.name == name).unwrap()
        };
        let three = profile("a100-40", "3g.20gb");
        assert_eq!([450, 470, 525, 595].map(|branch| three.memory_mib_under(branch)), [20096, 20096, 19968, 19968]);
        // The memory size for this profile is from an unknown driver, so it is stored but not used.
        let one = profile("b200-180", "1g.23gb");
        assert_eq!((one.variants.len(), one.memory_mib_under(570)), (1, one.memory_mib));
    }

    #[test]
    fn compute_profile_keys_are_unique_within_a_gpu_profile() {
        for key in KEYS {
            for profile in model(key).unwrap().gi_profiles {
                for (i, a) in profile.compute.iter().enumerate() {
                    for b in &profile.compute[i + 1..] {
                        assert!(a.id != b.id && a.index != b.index && a.name != b.name, "{key} {}", a.name);
                    }
                }
            }
        }
    }

    /// On Hopper and newer GPUs, a `1g` instance with double memory offers two compute profiles:
    /// profile 0 is smaller than the GPU instance, and profile 7 occupies the whole GPU instance.
    #[test]
    fn double_memory_1g_has_two_compute_profiles_since_hopper() {
        let mut models = 0;
        for key in KEYS {
            let model = model(key).unwrap();
            let Some(double) = model.gi_profiles.iter().find(|p| p.index == 9) else { continue };
            let offered: Vec<_> = double.compute.iter().map(|c| (c.id, c.name.clone())).collect();
            let (part, whole) = (format!("1c.{}", double.name), double.name.clone());
            match model.architecture {
                Architecture::Hopper | Architecture::Blackwell => {
                    assert_eq!(offered, [(0, part), (7, whole)], "{key}");
                    // On an H100 PCIe, both profiles have the same number of streaming
                    // multiprocessors.
                    assert!(double.compute[0].sm <= double.compute[1].sm, "{key}");
                    models += 1;
                }
                _ => assert_eq!(offered, [(0, whole)], "{key}"),
            }
        }
        assert_eq!(models, 14);
    }

    #[test]
    fn profile_ids_and_indexes_are_unique_within_a_model() {
        for key in KEYS {
            let model = model(key).unwrap();
            for (i, a) in model.gi_profiles.iter().enumerate() {
                for b in &model.gi_profiles[i + 1..] {
                    assert!(a.id != b.id && a.index != b.index && a.name != b.name, "{key} {}", a.name);
                }
            }
        }
    }
}
