//! Driver settings of a whole GPU: compute mode and time-slice level.
//!
//! The driver keeps both settings only while the GPU is initialised. A reboot resets them. Without
//! persistence mode, they are also reset when the last program on the GPU ends (NVIDIA, Driver
//! Persistence, "Data Persistence").

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Which processes may create a CUDA context on a GPU (`nvmlComputeMode_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ComputeMode {
    /// Any number of processes.
    #[default]
    Default,
    /// One thread of one process. Only old drivers support this mode; current drivers refuse to set
    /// it.
    ExclusiveThread,
    /// No process.
    Prohibited,
    /// One process. With MPS, this process is the MPS server, so all clients of the server can use
    /// the GPU.
    ExclusiveProcess,
}

impl ComputeMode {
    /// All modes, in the order of NVML's numbers.
    pub const ALL: [Self; 4] = [Self::Default, Self::ExclusiveThread, Self::Prohibited, Self::ExclusiveProcess];

    /// Returns NVIDIA's name, as `nvidia-smi --compute-mode` takes it: `EXCLUSIVE_PROCESS`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "DEFAULT",
            Self::ExclusiveThread => "EXCLUSIVE_THREAD",
            Self::Prohibited => "PROHIBITED",
            Self::ExclusiveProcess => "EXCLUSIVE_PROCESS",
        }
    }
}

impl fmt::Display for ComputeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Length of the time slices on a time-sliced GPU (`nvidia-smi compute-policy`).
///
/// A new level applies only to contexts that are created afterwards. NVIDIA does not document the
/// durations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum TimesliceLevel {
    /// The driver's choice.
    #[default]
    Default,
    /// Short slices: programs wait less, and the GPU switches more often.
    Short,
    /// Slices longer than `Short` and shorter than `Long`.
    Medium,
    /// Long slices.
    Long,
}

impl TimesliceLevel {
    /// All levels, in the order of nvidia-smi's numbers.
    pub const ALL: [Self; 4] = [Self::Default, Self::Short, Self::Medium, Self::Long];

    /// Returns the name, as in configs and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Short => "short",
            Self::Medium => "medium",
            Self::Long => "long",
        }
    }

    /// Returns the number for `nvidia-smi compute-policy --set-timeslice`: 0 to 3.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Default => 0,
            Self::Short => 1,
            Self::Medium => 2,
            Self::Long => 3,
        }
    }
}

impl fmt::Display for TimesliceLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Error: the text is not the name of a compute mode or time-slice level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownName {
    what: &'static str,
    text: String,
    known: String,
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a {}; write one of: {}", self.text.escape_debug(), self.what, self.known)
    }
}

impl std::error::Error for UnknownName {}

fn find<T: Copy + fmt::Display>(text: &str, what: &'static str, all: &[T]) -> Result<T, UnknownName> {
    let wanted = text.replace('-', "_");
    all.iter().copied().find(|known| known.to_string().eq_ignore_ascii_case(&wanted)).ok_or_else(|| UnknownName {
        what,
        text: text.to_owned(),
        known: all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    })
}

impl FromStr for ComputeMode {
    type Err = UnknownName;

    /// Reads the name of a compute mode in upper or lower case, with `-` or `_`: `EXCLUSIVE_PROCESS`,
    /// `exclusive-process`.
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        find(text, "compute mode", &Self::ALL)
    }
}

impl FromStr for TimesliceLevel {
    type Err = UnknownName;

    /// Reads the name of a time-slice level in upper or lower case.
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        find(text, "time-slice level", &Self::ALL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_modes_read_back_in_every_spelling() {
        for mode in ComputeMode::ALL {
            let json = serde_json::to_string(&mode).unwrap();
            assert_eq!(serde_json::from_str::<ComputeMode>(&json).unwrap(), mode);
            let snake = json.trim_matches('"');
            for text in [mode.to_string(), snake.to_owned(), snake.replace('_', "-")] {
                assert_eq!(text.parse(), Ok(mode), "{text}");
            }
        }
        assert_eq!(ComputeMode::ExclusiveProcess.to_string(), "EXCLUSIVE_PROCESS");
        let error = "shared".parse::<ComputeMode>().unwrap_err().to_string();
        assert_eq!(
            error,
            "`shared` is not a compute mode; write one of: DEFAULT, EXCLUSIVE_THREAD, PROHIBITED, EXCLUSIVE_PROCESS"
        );
    }

    #[test]
    fn levels_read_back_and_count_from_zero() {
        for (number, level) in (0..).zip(TimesliceLevel::ALL) {
            assert_eq!(level.number(), number);
            assert_eq!(level.to_string().parse(), Ok(level));
            assert_eq!(level.to_string().to_uppercase().parse(), Ok(level));
            assert_eq!(serde_json::to_string(&level).unwrap(), format!("\"{level}\""));
        }
        assert!("1".parse::<TimesliceLevel>().is_err() && "".parse::<TimesliceLevel>().is_err());
    }
}
