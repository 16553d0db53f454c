//! A GPU as recorded from a real driver in `docs/hardware/<model>-<driver>.json`, and the differences between this
//! record and another record.
//!
//! The record contains only values that are the same for every board of the model under this
//! driver: no UUID, no process and no usage. For a GPU instance profile without an instance, the
//! driver does not report compute instance profiles. So the record lacks them.

use gpush_api::{Architecture, GpuProfile};
use gpush_nvml::Reading;
use serde::{Deserialize, Serialize};

/// A recorded GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fixture {
    /// Driver version.
    pub driver: String,
    /// NVML version.
    pub nvml: String,
    /// CUDA version.
    pub cuda: String,
    /// Product name.
    pub name: String,
    /// PCI device id in hex, without the vendor id.
    pub pci_device_id: String,
    /// GPU architecture.
    pub architecture: Architecture,
    /// Memory of the GPU in MiB.
    pub memory_mib: u64,
    /// The MIG data, or `None` for a GPU without MIG.
    pub mig: Option<MigFixture>,
}

/// The MIG data of a recorded GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigFixture {
    /// Number of memory slices.
    pub memory_slices: u8,
    /// Number of compute slices.
    pub compute_slices: u8,
    /// GPU instance profiles. If the driver did not report the compute instance profiles of a
    /// profile, its `compute` is empty.
    pub profiles: Vec<GpuProfile>,
}

impl Fixture {
    /// Creates a fixture from a reading. `reported` has the GPU instance profiles for which the driver
    /// reported compute instance profiles.
    #[must_use]
    pub fn of(driver: &gpush_api::Driver, reading: &Reading, reported: &[u32]) -> Self {
        let mig = reading.mig.as_ref().map(|mig| MigFixture {
            memory_slices: mig.memory_slices,
            compute_slices: mig.compute_slices,
            profiles: mig
                .profiles
                .iter()
                .map(|profile| {
                    let compute = if reported.contains(&profile.id) { profile.compute.clone() } else { Vec::new() };
                    GpuProfile { remaining: None, compute, ..profile.clone() }
                })
                .collect(),
        });
        Self {
            driver: driver.version.clone(),
            nvml: driver.nvml.clone(),
            cuda: driver.cuda.clone(),
            name: reading.identity.name.clone(),
            pci_device_id: format!("{:04X}", reading.identity.pci_device_id()),
            architecture: reading.identity.architecture,
            memory_mib: reading.memory.total_mib,
            mig,
        }
    }

    /// Returns the file name, such as `nvidia-h200-570.86.15.json`.
    #[must_use]
    pub fn file_name(&self) -> String {
        let slug: String =
            self.name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect();
        format!("{slug}-{}.json", self.driver)
    }

    /// Returns the key of the model. Compares PCI device id and memory, because several models have
    /// the same device id.
    #[must_use]
    pub fn model(&self) -> Option<&'static str> {
        let mut models: Vec<_> = gpush_geometry::KEYS
            .iter()
            .filter_map(|key| gpush_geometry::model(key).map(|model| (*key, model)))
            .filter(|(_, model)| model.boards.iter().any(|b| b.device_id.eq_ignore_ascii_case(&self.pci_device_id)))
            .collect();
        models.sort_by_key(|(_, model)| model.board_memory_mib.abs_diff(self.memory_mib));
        models.first().map(|(key, _)| *key)
    }

    /// Returns how this record differs from `other`, in one sentence for each difference. Each
    /// sentence names the recorded value first.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let mut differ = Vec::new();
        let mut compare = |what: &str, ours: String, theirs: String| {
            if ours != theirs {
                differ.push(format!("{what}: recorded {ours}, now {theirs}"));
            }
        };
        compare("architecture", format!("{:?}", self.architecture), format!("{:?}", other.architecture));
        compare("memory in MiB", self.memory_mib.to_string(), other.memory_mib.to_string());
        match (&self.mig, &other.mig) {
            (None, None) => {}
            (Some(ours), Some(theirs)) => {
                compare("memory slices", ours.memory_slices.to_string(), theirs.memory_slices.to_string());
                compare("compute slices", ours.compute_slices.to_string(), theirs.compute_slices.to_string());
                let ids = |mig: &MigFixture| mig.profiles.iter().map(|p| p.id).collect::<Vec<_>>();
                compare("profiles", format!("{:?}", ids(ours)), format!("{:?}", ids(theirs)));
                for recorded in &ours.profiles {
                    let Some(now) = theirs.profiles.iter().find(|p| p.id == recorded.id) else { continue };
                    let bare =
                        |profile: &GpuProfile| format!("{:?}", GpuProfile { compute: Vec::new(), ..profile.clone() });
                    compare(&recorded.name, bare(recorded), bare(now));
                    if !recorded.compute.is_empty() {
                        let compute = |profile: &GpuProfile| format!("{:?}", profile.compute);
                        compare(&format!("{} compute", recorded.name), compute(recorded), compute(now));
                    }
                }
            }
            (ours, theirs) => compare("MIG", ours.is_some().to_string(), theirs.is_some().to_string()),
        }
        differ
    }
}
