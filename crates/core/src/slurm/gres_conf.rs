//! gres.conf, which maps the index of a GRES device to its device files.
//!
//! `SLURM_JOB_GPUS` in a hook contains indexes of this file. An index is neither the minor number
//! of a device file nor an index of NVML: with `File=/dev/nvidia[2-3]`, index 0 is `/dev/nvidia2`.
//! Slurm numbers the devices in the order of the file. If slurm.conf gives the node GPUs with
//! types, the order of the types in slurm.conf has priority: [`GresConf::ordered_by`].
//!
//! All rules of this module were compared with slurmd 22.05 (`slurmd -G`).

mod read;
#[cfg(test)]
mod tests;

use std::fmt;

use super::{HostListError, LineError, NodeGres, node_gres};
use crate::quote::Quoted;

/// What gres.conf says about one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GresConf {
    /// Records that concern the node, in the order of the file.
    pub records: Vec<GresRecord>,
    /// Whether and how Slurm detects devices itself. When Slurm detects devices, Slurm numbers GPUs
    /// in the order of the library (NVML) and uses the records only as a check. In that case,
    /// [`GresConf::gpu`] does not return Slurm's order.
    pub auto_detect: Option<AutoDetect>,
    /// Keys that this parser does not know. slurmd may know these keys, or may refuse the file.
    pub unknown_keys: Vec<UnknownKey>,
    /// GPUs, in the order of their indexes.
    gpus: Vec<GresDevice>,
}

/// The value of `AutoDetect=`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AutoDetect {
    /// Slurm finds NVIDIA GPUs through NVML.
    Nvml,
    /// Slurm finds NVIDIA GPUs without NVML (24.11 and later).
    Nvidia,
    /// Slurm uses only the lines of gres.conf.
    Off,
    /// Slurm uses a library for devices of another vendor, or slurmd ignores the value.
    Other(String),
}

/// A line of gres.conf with a `Name=`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GresRecord {
    /// Name, as written: `gpu`, `mps` or `shard`. slurmd ignores case in gres.conf, but refuses
    /// `GPU` in slurm.conf.
    pub name: String,
    /// Type, such as `h200`, as written. slurmd ignores case.
    pub gres_type: Option<String>,
    /// Device files, in order.
    pub files: Vec<String>,
    /// Whether the files belong to one device (`MultipleFiles=`).
    pub multiple_files: bool,
    /// Value of `Count=`; if absent, the number of devices.
    pub count: u64,
    /// Value of `Cores=`, as written.
    pub cores: Option<String>,
    /// Values of `Flags=`, as written.
    pub flags: Vec<String>,
    /// Value of `UniqueId=`: the UUID of a MIG device (24.05 and later).
    pub unique_id: Option<String>,
    /// Position of the line.
    pub place: Position,
}

/// A device of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GresDevice {
    /// Name, as written: `gpu`. slurmd ignores case.
    pub name: String,
    /// Type, such as `h200`, as written. slurmd ignores case.
    pub gres_type: Option<String>,
    /// Device file. For a MIG device: the device file of its GPU.
    pub file: String,
    /// All device files, including the capability files of a MIG device.
    pub files: Vec<String>,
    /// Value of `UniqueId=`: the UUID of a MIG device.
    pub unique_id: Option<String>,
    /// Position of the device's record.
    pub place: Position,
}

/// Position of a line in gres.conf, or in a file that gres.conf includes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// The included file as written after `Include`; `None` for gres.conf itself.
    pub included: Option<String>,
    /// Line number; the first line is 1.
    pub line: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.included.as_deref().unwrap_or("gres.conf"), self.line)
    }
}

/// A key that this parser does not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownKey {
    /// The key.
    pub key: String,
    /// Position of the key.
    pub place: Position,
}

/// Error in a gres.conf. slurmd also refuses such a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct GresConfError {
    /// Position of the problem.
    pub place: Position,
    /// What is wrong.
    pub problem: GresProblem,
}

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GresProblem {
    /// A part of the line is not a `Key=Value` pair.
    #[error(transparent)]
    NotKeyValue(#[from] LineError),
    /// The line begins with a key that Slurm does not allow at the beginning of a line.
    #[error("the line begins with {}, not with Name, NodeName or AutoDetect", Quoted(.0))]
    FirstKey(String),
    /// A line with device files has no `Name=`.
    #[error("the line has no Name")]
    NoName,
    /// The list of nodes or files is invalid.
    #[error("{key}: {error}")]
    List {
        /// Key of the list: `File`, `MultipleFiles` or `NodeName`.
        key: &'static str,
        /// What is wrong with the list.
        error: HostListError,
    },
    /// A line has both `File` and `MultipleFiles`.
    #[error("File and MultipleFiles exclude each other")]
    FileAndMultipleFiles,
    /// `Count` is not a number.
    #[error("{} is not a count such as `4` or `10G`", Quoted(.0))]
    Count(String),
    /// `Count` differs from the number of files.
    #[error("Count is {count}, but the line has {files} device files")]
    CountDiffers {
        /// Value of `Count=`.
        count: u64,
        /// Number of device files.
        files: usize,
    },
    /// Two records have the same device file.
    #[error("the device file {} belongs to the GPU of {first} as well", Quoted(.file))]
    Duplicate {
        /// The device file.
        file: String,
        /// Position of the first record with this file.
        first: Position,
    },
    /// An included file cannot be read.
    #[error("cannot read the included file {}", Quoted(.0))]
    Include(String),
    /// Files include each other in a cycle, or too many files are included.
    #[error("{} cannot be included: files include each other, or too many files are included", Quoted(.0))]
    TooManyIncludes(String),
}

impl GresConf {
    /// Parses the text of gres.conf for the node with this `NodeName`. `read_include` returns the
    /// text of an included file. A relative path starts in the directory of slurm.conf.
    ///
    /// # Errors
    /// slurmd would refuse the file.
    pub fn parse(text: &str, node: &str, read_include: impl Fn(&str) -> Option<String>) -> Result<Self, GresConfError> {
        read::read(text, node, &read_include)
    }

    /// Returns the GPU that has this index in `SLURM_JOB_GPUS`.
    #[must_use]
    pub fn gpu(&self, index: u32) -> Option<&GresDevice> {
        self.gpus.get(usize::try_from(index).ok()?)
    }

    /// Returns all GPUs, in the order of their indexes.
    #[must_use]
    pub fn gpus(&self) -> &[GresDevice] {
        &self.gpus
    }

    /// Orders the GPUs by the `Gres=` of the node in slurm.conf, such as `gpu:a:2,gpu:b:2`. Slurm
    /// takes the types in this order. If a type has more GPUs than its count, Slurm ignores the
    /// excess GPUs. Case does not matter in types. A text without GPUs changes nothing.
    #[must_use]
    pub fn ordered_by(mut self, gres: &str) -> Self {
        let wanted: Vec<_> = node_gres(gres).filter(|gres| gres.name == "gpu").collect();
        if wanted.is_empty() {
            return self;
        }
        let mut left = std::mem::take(&mut self.gpus);
        for NodeGres { gres_type, count, .. } in wanted {
            let mut remaining = count;
            let (taken, rest) = left.into_iter().partition(|gpu| {
                let is_of_type =
                    |wanted: &str| gpu.gres_type.as_ref().is_some_and(|own| own.eq_ignore_ascii_case(wanted));
                let suits = remaining > 0 && gres_type.is_none_or(is_of_type);
                remaining -= u64::from(suits);
                suits
            });
            self.gpus.extend::<Vec<_>>(taken);
            left = rest;
        }
        self
    }

    fn of(
        records: Vec<GresRecord>,
        auto_detect: Option<AutoDetect>,
        unknown_keys: Vec<UnknownKey>,
    ) -> Result<Self, GresConfError> {
        let mut gpus: Vec<GresDevice> = Vec::new();
        for record in records.iter().filter(|record| record.name.eq_ignore_ascii_case("gpu")) {
            for device in record.devices() {
                let same = |gpu: &&GresDevice| gpu.files == device.files;
                if let Some(first) = gpus.iter().find(same) {
                    let problem = GresProblem::Duplicate { file: device.file, first: first.place.clone() };
                    return Err(GresConfError { place: record.place.clone(), problem });
                }
                gpus.push(device);
            }
        }
        Ok(Self { records, auto_detect, unknown_keys, gpus })
    }
}

impl GresRecord {
    /// Returns the devices of the record; empty for a record without files.
    #[must_use]
    pub fn devices(&self) -> Vec<GresDevice> {
        let device = |files: &[String]| {
            Some(GresDevice {
                name: self.name.clone(),
                gres_type: self.gres_type.clone(),
                file: files.first()?.clone(),
                files: files.to_vec(),
                unique_id: self.unique_id.clone(),
                place: self.place.clone(),
            })
        };
        if self.multiple_files {
            device(&self.files).into_iter().collect()
        } else {
            self.files.chunks(1).filter_map(device).collect()
        }
    }
}

impl GresDevice {
    /// Returns the minor number in the name of the device file: 2 for `/dev/nvidia2`. Returns
    /// `None` if the name has no number.
    #[must_use]
    pub fn minor(&self) -> Option<u32> {
        let digits = self.file.len() - self.file.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        self.file[self.file.len() - digits..].parse().ok()
    }
}
