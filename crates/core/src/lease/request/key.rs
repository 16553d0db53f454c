//! Keys of a request and their notations.

use std::fmt;

/// A key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Key {
    /// MIG profile.
    Mig,
    /// Memory.
    Memory,
    /// Compute slices.
    Slices,
    /// Active thread percentage.
    Mps,
    /// Priority of kernels.
    Priority,
    /// Time-slice replica.
    Timeslice,
    /// Whole GPU.
    Whole,
    /// GPU selector.
    Gpu,
    /// Number of members.
    Count,
    /// Duration of the lease.
    For,
    /// Maximum time to wait for capacity.
    Wait,
}

/// The notation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Spelling {
    /// Flags of `gpushctl run` and `gpushctl lease request`: `--mps 25`.
    Flags,
    /// A Slurm request: `mps=25`.
    Slurm,
    /// The default request of a quota: `mps=25,for=4h`.
    Quota,
}

/// Whether a key takes a value.
pub(super) enum Arity {
    None,
    Optional,
    Required,
}

impl Key {
    /// All keys, in the order in which [`super::spec`] writes them.
    pub const ALL: [Self; 11] = [
        Self::Mig,
        Self::Mps,
        Self::Timeslice,
        Self::Whole,
        Self::Memory,
        Self::Slices,
        Self::Priority,
        Self::Gpu,
        Self::Count,
        Self::For,
        Self::Wait,
    ];

    /// Returns the name of the key, without dashes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mig => "mig",
            Self::Memory => "memory",
            Self::Slices => "slices",
            Self::Mps => "mps",
            Self::Priority => "priority",
            Self::Timeslice => "timeslice",
            Self::Whole => "whole",
            Self::Gpu => "gpu",
            Self::Count => "count",
            Self::For => "for",
            Self::Wait => "wait",
        }
    }

    /// Returns whether Slurm chooses the value of this key, so that the request of a job cannot
    /// contain it.
    pub(super) fn is_chosen_by_slurm(self) -> bool {
        matches!(self, Self::Gpu | Self::Count | Self::For | Self::Wait)
    }

    /// Returns the keys that a Slurm request can contain.
    pub(super) fn of_slurm() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|key| !key.is_chosen_by_slurm())
    }

    /// Returns whether the key has a value.
    pub(super) fn arity(self) -> Arity {
        match self {
            Self::Timeslice | Self::Whole => Arity::None,
            Self::Mps | Self::Wait => Arity::Optional,
            Self::Mig | Self::Memory | Self::Slices | Self::Priority | Self::Gpu | Self::Count | Self::For => {
                Arity::Required
            }
        }
    }

    /// Returns an example of a value for the key.
    pub(super) fn example(self) -> &'static str {
        match self {
            Self::Mig => "1g.10gb",
            Self::Memory => "10G",
            Self::Slices => "2",
            Self::Mps => "25",
            Self::Priority => "below-normal",
            Self::Timeslice | Self::Whole => "",
            Self::Gpu => "0-3",
            Self::Count => "2",
            Self::For => "2h",
            Self::Wait => "5m",
        }
    }

    /// Returns the key as the notation writes it: `--mps` or `mps`.
    pub(super) fn written(self, spelling: Spelling) -> Written {
        Written { key: self, spelling }
    }
}

/// A key, as a notation writes it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    key: Key,
    spelling: Spelling,
}

impl Written {
    /// Returns the key with a value, as the notation writes them: `--mps 25`, `--wait=5m` or
    /// `mps=25`.
    pub(super) fn with(self, value: &str) -> String {
        let separator = match (self.spelling, self.key) {
            _ if value.is_empty() => "",
            // After `--wait`, the command line would not read a separate word as the value of the
            // flag.
            (Spelling::Slurm | Spelling::Quota, _) | (Spelling::Flags, Key::Wait) => "=",
            (Spelling::Flags, _) => " ",
        };
        format!("{self}{separator}{value}")
    }
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.spelling {
            Spelling::Flags => write!(f, "--{}", self.key.name()),
            Spelling::Slurm | Spelling::Quota => f.write_str(self.key.name()),
        }
    }
}
