//! The description of a host to simulate: a preset, by name, or a TOML file.
//!
//! ```toml
//! driver = "550.163.01"      # default: new enough for every GPU model
//! owner_is_root = true       # the user who owns the simulated host may change it
//!
//! [[gpu]]
//! model = "a100-80"
//! count = 4
//! chip = "slot3_missing"
//! mig = false
//! ```

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::machine::{Chip, Hardware, Identity, Links, Machine, Part, Slot, Wiring, uuid};
use crate::spelling;

mod driver;
mod read;

pub use driver::DriverVersion;
pub use read::DescriptionError;
pub(crate) use read::{explain, place};

/// Maximum number of GPUs of a host.
pub const MAX_GPUS: u32 = 64;

/// The driver version of a host if its description names no version. If a GPU model needs a newer
/// version, the host has that version.
pub const DEFAULT_DRIVER: DriverVersion = DriverVersion::new(550, 163, 1);

/// A host to simulate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Driver version. `None` means [`DEFAULT_DRIVER`], or a newer version if a GPU model needs
    /// one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<DriverVersion>,
    /// CUDA version, such as `12.4`. `None` means the version that came with the driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
    /// Seed for UUIDs, serial numbers and readings.
    #[serde(default)]
    pub seed: u64,
    /// Whether the owner of the host's directory has root permissions on the host. If not, only the
    /// real root may change the host.
    #[serde(default = "yes")]
    pub owner_is_root: bool,
    /// Whether calls take as long as on hardware.
    #[serde(default)]
    pub latencies: bool,
    /// Whether a fabric manager runs on the host. The fabric manager has an effect only if the GPUs
    /// are connected to an NVSwitch.
    #[serde(default = "yes")]
    pub fabric_manager: bool,
    /// Whether the host is a virtual machine to which the GPUs are passed through. Such a host cannot reset a GPU.
    #[serde(default)]
    pub virtual_machine: bool,
    /// GPUs, in order.
    #[serde(rename = "gpu", default)]
    pub gpus: Vec<GpuDescription>,
}

/// One or more GPUs of the same kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuDescription {
    /// Key of the model in the geometry data, such as `a100-80`.
    pub model: String,
    /// Number of GPUs.
    #[serde(default = "one")]
    pub count: u32,
    /// Chip variant. It determines the GPU instance ids.
    #[serde(default)]
    pub chip: Chip,
    /// Whether MIG mode is on at the start. `None` means that MIG mode is on if the GPU model
    /// supports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<bool>,
    /// Whether the host enables MIG mode at every later boot, as a boot script would.
    #[serde(default)]
    pub mig_at_boot: bool,
    /// Whether the driver resets an idle Ampere GPU when its MIG mode changes.
    #[serde(default)]
    pub resets_itself: bool,
    /// PCI device id of the board, in hex. `None` means the first board of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub board: Option<String>,
    /// How NVLink connects the GPUs of this entry. If the value is `None` and the board is a module
    /// of an HGX baseboard, a switch connects the GPUs. If the value is `None` for another board,
    /// the GPUs are not connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink: Option<Wiring>,
    /// Serial number, only for an entry with a single GPU. `None` means that the serial number is
    /// derived from the seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Minor number of the device file, only for an entry with a single GPU. `None` means the index
    /// of the GPU. On real hosts, the two numbers can differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
}

fn yes() -> bool {
    true
}

fn one() -> u32 {
    1
}

impl GpuDescription {
    /// Creates an entry for GPUs of a model, with default values for the other fields.
    #[must_use]
    pub fn new(model: &str, count: u32) -> Self {
        Self {
            model: model.to_owned(),
            count,
            chip: Chip::default(),
            mig: None,
            mig_at_boot: false,
            resets_itself: false,
            board: None,
            nvlink: None,
            serial: None,
            minor: None,
        }
    }
}

impl Description {
    /// Creates a host with these GPUs, and default values for the other fields.
    #[must_use]
    pub fn of(gpus: Vec<GpuDescription>) -> Self {
        Self {
            driver: None,
            cuda: None,
            seed: 0,
            owner_is_root: true,
            latencies: false,
            fabric_manager: true,
            virtual_machine: false,
            gpus,
        }
    }

    /// Creates a host with one GPU of a model, under a given driver version.
    #[must_use]
    pub fn of_model(key: &str, driver: DriverVersion) -> Self {
        Self { driver: Some(driver), ..Self::of(vec![GpuDescription::new(key, 1)]) }
    }

    /// Returns the preset with this name.
    ///
    /// # Errors
    /// If no preset has this name. The error names the most similar preset.
    pub fn preset(name: &str) -> Result<Self, DescriptionError> {
        let known = gpush_geometry::PRESETS.iter();
        known
            .clone()
            .find(|preset| preset.name == name)
            .map(|preset| Self::of(preset.gpus.iter().map(|&(key, count)| GpuDescription::new(key, count)).collect()))
            .ok_or_else(|| {
                let names = known.map(|preset| preset.name);
                DescriptionError::new(format!("there is no preset `{name}`"), spelling::suggest(name, names))
            })
    }

    /// Returns the driver of the host.
    ///
    /// # Errors
    /// If the described driver is too old for a GPU model.
    pub fn driver(&self) -> Result<DriverVersion, DescriptionError> {
        let mut needed = DEFAULT_DRIVER;
        for gpu in &self.gpus {
            let Some(model) = gpush_geometry::model(&gpu.model) else { continue };
            let Ok(least) = model.min_driver.parse::<DriverVersion>() else { continue };
            if let Some(driver) = self.driver
                && driver < least
            {
                return Err(DescriptionError::new(
                    format!("driver {driver} does not know the {} ({})", model.product, model.key),
                    format!("give `driver = \"{least}\"` or newer, or leave it out"),
                )
                .about(None, "driver"));
            }
            needed = needed.max(least);
        }
        Ok(self.driver.unwrap_or(needed))
    }

    /// Returns the described hardware.
    ///
    /// # Errors
    /// If the description names unknown objects or has an impossible combination.
    pub fn hardware(&self) -> Result<Hardware, DescriptionError> {
        let driver = self.driver()?;
        let cuda = match &self.cuda {
            None => driver.cuda(),
            Some(text) => driver::cuda_number(text).ok_or_else(|| {
                DescriptionError::new(format!("`{text}` is no CUDA version"), "write it as `cuda = \"12.4\"`")
                    .about(None, "cuda")
            })?,
        };
        let mut slots: Vec<Slot> = Vec::new();
        for (entry, gpu) in self.gpus.iter().enumerate() {
            self.add(gpu, entry, &driver, &mut slots)?;
        }
        Ok(Hardware {
            driver,
            cuda,
            owner_is_root: self.owner_is_root,
            latencies: self.latencies,
            virtual_machine: self.virtual_machine,
            fabric_manager: self.fabric_manager && slots.iter().any(|slot| slot.nvlink.wiring == Wiring::Switch),
            slots,
        })
    }

    fn add(
        &self,
        gpu: &GpuDescription,
        entry: usize,
        driver: &DriverVersion,
        slots: &mut Vec<Slot>,
    ) -> Result<(), DescriptionError> {
        let wrong = |key, message: String, hint: String| DescriptionError::new(message, hint).about(Some(entry), key);
        let model = gpush_geometry::model(&gpu.model).ok_or_else(|| {
            wrong(
                "model",
                format!("there is no GPU model `{}`", gpu.model),
                spelling::suggest(&gpu.model, gpush_geometry::KEYS.iter().copied()),
            )
        })?;
        let board = match &gpu.board {
            None => model.boards.first(),
            Some(id) => model.boards.iter().find(|board| board.device_id.eq_ignore_ascii_case(id)),
        };
        let board = board.cloned().ok_or_else(|| {
            let known = model.boards.iter().map(|b| format!("{} ({})", b.device_id, b.name)).collect::<Vec<_>>();
            wrong(
                "board",
                format!("the {} has no board `{}`", model.product, gpu.board.as_deref().unwrap_or("")),
                format!("known: {}", known.join(", ")),
            )
        })?;
        if gpu.count == 0 {
            return Err(wrong(
                "count",
                format!("`count = 0` of {} describes no GPU", gpu.model),
                "give 1 to 64, or leave the entry out".to_owned(),
            ));
        }
        if slots.len() as u64 + u64::from(gpu.count) > u64::from(MAX_GPUS) {
            return Err(wrong(
                "count",
                format!("more than {MAX_GPUS} GPUs are described"),
                format!("lower the counts to {MAX_GPUS} in all"),
            ));
        }
        if gpu.serial.is_some() && gpu.count > 1 {
            return Err(wrong(
                "serial",
                format!("{} GPUs cannot have one serial number", gpu.count),
                "give each GPU with a serial number its own [[gpu]] entry".to_owned(),
            ));
        }
        if !model.has_mig() && (gpu.mig == Some(true) || gpu.mig_at_boot) {
            return Err(wrong(
                "mig",
                format!("the {} has no MIG", model.product),
                "leave `mig` and `mig_at_boot` out, or take another model".to_owned(),
            ));
        }
        let mig_at_start = gpu.mig.unwrap_or(model.has_mig());
        let with_vendor = |id: &str| u32::from_str_radix(id, 16).unwrap_or(0) << 16 | 0x10de;
        let part = Part::new(model, gpu.chip, driver).map(Arc::new).ok_or_else(|| {
            wrong(
                "model",
                format!("the geometry data of {} lacks a GPU instance id", gpu.model),
                "this is a mistake in crates/geometry; take another model".to_owned(),
            )
        })?;
        let name = board.product.clone();
        let wiring = gpu.nvlink.unwrap_or_else(|| Wiring::usual(&part.model, &name));
        let nvlink = Links { wiring, first: slots.len() as u32, count: gpu.count };
        for _ in 0..gpu.count {
            let index = slots.len() as u32;
            let minor = gpu.minor.unwrap_or(index);
            if slots.iter().any(|slot| slot.identity.minor == minor) {
                return Err(wrong(
                    "minor",
                    format!("two GPUs cannot have the minor number {minor}"),
                    "give each GPU its own [[gpu]] entry with another `minor`".to_owned(),
                ));
            }
            let seed = self.seed.wrapping_mul(0x9e37_79b9).wrapping_add(u64::from(index));
            slots.push(Slot {
                identity: Identity {
                    uuid: uuid::of_gpu(self.seed, index, &gpu.model),
                    serial: gpu
                        .serial
                        .clone()
                        .unwrap_or_else(|| format!("16{:011}", seed.wrapping_mul(7_919) % 100_000_000_000)),
                    pci_domain: 0,
                    pci_bus: gpush_geometry::preset_bus(index),
                    pci_device: 0,
                    pci_device_id: with_vendor(&board.device_id),
                    pci_subsystem_id: with_vendor(board.subsystem_id.as_deref().unwrap_or_default()),
                    minor,
                    name: name.clone(),
                    seed,
                    mig_at_start,
                    mig_at_boot: gpu.mig_at_boot,
                    resets_itself: gpu.resets_itself,
                },
                part: Arc::clone(&part),
                nvlink,
            });
        }
        Ok(())
    }
}

impl Machine {
    /// Creates a host as described, at its first boot.
    ///
    /// # Errors
    /// If the description names unknown objects or has an impossible combination.
    pub fn new(description: &Description) -> Result<Self, DescriptionError> {
        Ok(Self::first_boot(Arc::new(description.hardware()?)))
    }

    /// Creates a host with one GPU of a model, for tests of planners. The driver is the newest one
    /// that any GPU model needs. If the model supports MIG, MIG mode is on. Returns `None` if no
    /// model has this key.
    #[must_use]
    pub fn of_model(key: &str) -> Option<Self> {
        let description = Description::of_model(key, DriverVersion::NEWEST);
        Self::new(&description).ok()
    }
}
