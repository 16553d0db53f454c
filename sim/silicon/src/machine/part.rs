//! One GPU model under one driver: its profiles, its capacities and its GPU instance ids.
//!
//! The data of a [`Part`] never changes. GPUs of the same model on one host share one [`Part`].

use std::collections::BTreeMap;

use gpush_geometry::{Architecture, ComputeProfile, Engines, GI_IDS, GpuProfile, Model};
use serde::{Deserialize, Serialize};

use super::Placement;
use crate::description::DriverVersion;
use crate::returns::Return;

/// A chip variant: which physical slot is missing on a chip with seven slices. It determines the
/// GPU instance ids.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Chip {
    /// Slot 7 is missing. The GPU instance ids increase with the placement. Most boards have this
    /// variant.
    #[default]
    Slot7Missing,
    /// Slot 3 is missing. The ids of the two halves of the GPU are swapped.
    Slot3Missing,
}

/// Profile ids that exist on at least one GPU model. An id means the same fraction of a GPU on all
/// models.
const KNOWN_PROFILE_IDS: &[u32] = &[0, 5, 6, 9, 14, 15, 19, 20, 21, 32, 35, 47, 64, 65, 66, 67];

/// A GPU instance profile with its placements.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Geometry data of this profile.
    pub data: GpuProfile,
    /// GPU instance id for each placement, in the order of `data.placements`.
    pub ids: Vec<u32>,
}

impl Profile {
    /// Returns the possible placements in memory slices, each with the id of an instance there.
    pub fn placements(&self) -> impl Iterator<Item = (Placement, u32)> + '_ {
        self.data.placements.iter().zip(&self.ids).map(|(&(start, size), &id)| (Placement { start, size }, id))
    }

    /// Returns the compute instance profile with this id.
    #[must_use]
    pub fn compute(&self, id: u32) -> Option<&ComputeProfile> {
        self.data.compute.iter().find(|profile| profile.id == id)
    }

    /// Returns the compute instance profile with this NVML enum index.
    #[must_use]
    pub fn compute_by_index(&self, index: u32) -> Option<&ComputeProfile> {
        self.data.compute.iter().find(|profile| profile.index == index)
    }
}

/// One GPU model under one driver.
#[derive(Debug, Clone)]
pub struct Part {
    /// Geometry data of the model. Its `gi_profiles` has all profiles; [`Part::profiles`] has only
    /// the profiles of this driver.
    pub model: Model,
    /// Chip variant.
    pub chip: Chip,
    /// GPU instance profiles that the driver knows, in the order of the data.
    pub profiles: Vec<Profile>,
    /// Engines of the whole GPU in MIG mode.
    pub engines: Engines,
    /// Number of GPU instance profile indexes in this driver's header.
    pub profile_indexes: u32,
    /// Number of compute instance profile indexes in this driver's header.
    pub compute_profile_indexes: u32,
}

/// Returns the geometry data's group of ids for the profile with this NVML enum index.
fn id_group(index: u32) -> Option<&'static str> {
    match index {
        0 | 7 | 10 | 13 | 15 => Some("1g"),
        9 => Some("1g.rev2"),
        1 | 8 | 11 | 14 | 16 => Some("2g"),
        2 | 17 => Some("3g"),
        3 | 12 => Some("4g"),
        4 => Some("7g"),
        _ => None,
    }
}

/// Returns the first driver branch whose header has the profile index. Source: NVIDIA's headers and
/// release notes.
fn since(index: u32) -> u32 {
    match index {
        0..=6 => 450,
        7 | 8 => 470,
        9 => 525,
        10..=16 => 575,
        _ => 580,
    }
}

type IdMap = BTreeMap<String, BTreeMap<String, u8>>;

impl Part {
    /// Creates the model as it appears under this driver. Returns `None` if the geometry data is
    /// wrong: it has no id for a placement.
    #[must_use]
    pub fn new(model: Model, chip: Chip, driver: &DriverVersion) -> Option<Self> {
        let map: serde_json::Map<String, serde_json::Value> = serde_json::from_str(GI_IDS).ok()?;
        let variant = match (model.compute_slices, model.memory_slices, chip) {
            (4, 4, _) => "a30",
            (4, 12, _) => "rtxpro6000",
            (_, _, Chip::Slot7Missing) => "slot7_missing",
            (_, _, Chip::Slot3Missing) => "slot3_missing",
        };
        let ids: IdMap = serde_json::from_value(map.get(variant)?.clone()).ok()?;
        let mut profiles = Vec::new();
        for data in model.gi_profiles.iter().filter(|profile| driver.branch() >= since(profile.index)) {
            let group = ids.get(id_group(data.index)?)?;
            let id_at = |start: u8| group.iter().find(|(_, at)| **at == start).and_then(|(id, _)| id.parse().ok());
            let ids = data.placements.iter().map(|&(start, _)| id_at(start)).collect::<Option<Vec<u32>>>()?;
            let memory_mib = data.memory_mib_under(driver.branch());
            profiles.push(Profile { data: GpuProfile { memory_mib, ..data.clone() }, ids });
        }
        let most = |of: fn(&Engines) -> u8| model.gi_profiles.iter().map(|p| of(&p.engines)).max().unwrap_or(0);
        let engines = Engines {
            copy: most(|e| e.copy),
            decoder: most(|e| e.decoder),
            encoder: most(|e| e.encoder),
            jpeg: most(|e| e.jpeg),
            ofa: most(|e| e.ofa),
        };
        Some(Self {
            model,
            chip,
            profiles,
            engines,
            profile_indexes: (0..18).filter(|&index| driver.branch() >= since(index)).count() as u32,
            compute_profile_indexes: if driver.branch() >= 595 { 9 } else { 8 },
        })
    }

    /// Returns whether the GPU supports MIG.
    #[must_use]
    pub fn has_mig(&self) -> bool {
        self.model.has_mig()
    }

    /// Returns whether MIG mode behaves as on Ampere: a change needs a reset and survives a reboot.
    /// On Hopper and later, a change takes effect at once, and a reboot reverts it.
    #[must_use]
    pub fn mode_needs_reset(&self) -> bool {
        match self.model.architecture {
            Architecture::Pascal
            | Architecture::Volta
            | Architecture::Turing
            | Architecture::Ampere
            | Architecture::Ada => true,
            Architecture::Hopper | Architecture::Blackwell => false,
        }
    }

    /// Returns whether spare rows can replace faulty rows of memory (Ampere and later).
    #[must_use]
    pub fn remaps_rows(&self) -> bool {
        match self.model.architecture {
            Architecture::Pascal | Architecture::Volta | Architecture::Turing => false,
            Architecture::Ampere | Architecture::Ada | Architecture::Hopper | Architecture::Blackwell => true,
        }
    }

    /// Returns whether `nvidia-smi compute-policy` can set time-slice levels (Turing and later).
    #[must_use]
    pub fn has_timeslice(&self) -> bool {
        match self.model.architecture {
            Architecture::Pascal | Architecture::Volta => false,
            Architecture::Turing
            | Architecture::Ampere
            | Architecture::Ada
            | Architecture::Hopper
            | Architecture::Blackwell => true,
        }
    }

    /// Returns the GPU instance profile with this id.
    ///
    /// # Errors
    /// `NotSupported` for an id that only other GPU models have, `InvalidArgument` for any other
    /// id.
    pub fn profile(&self, id: u32) -> Result<&Profile, Return> {
        self.profiles.iter().find(|profile| profile.data.id == id).ok_or(if KNOWN_PROFILE_IDS.contains(&id) {
            Return::NotSupported
        } else {
            Return::InvalidArgument
        })
    }

    /// Returns the GPU instance profile with this NVML enum index.
    ///
    /// # Errors
    /// `InvalidArgument` for an index beyond the last index of this driver, `NotSupported` if the
    /// GPU does not have the profile.
    pub fn profile_by_index(&self, index: u32) -> Result<&Profile, Return> {
        if index >= self.profile_indexes {
            return Err(Return::InvalidArgument);
        }
        self.profiles.iter().find(|profile| profile.data.index == index).ok_or(Return::NotSupported)
    }

    /// Returns the compute instance profile with this NVML enum index in a GPU instance profile.
    ///
    /// # Errors
    /// `InvalidArgument` for an index beyond the last index of this driver, `NotSupported` if the
    /// GPU instance profile does not have the compute instance profile.
    pub fn compute_profile_by_index<'p>(&self, profile: &'p Profile, index: u32) -> Result<&'p ComputeProfile, Return> {
        if index >= self.compute_profile_indexes {
            return Err(Return::InvalidArgument);
        }
        profile.compute_by_index(index).ok_or(Return::NotSupported)
    }
}
