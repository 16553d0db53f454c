//! The answers of the tree: six ways to share a GPU, with the trade-offs of each and the faults of the alternatives.

use gpush_api::Mode;
use serde::Serialize;

/// An answer of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Leaf {
    /// One tenant uses the whole GPU.
    NoSharing,
    /// MIG instances.
    Mig,
    /// Clients of one MPS daemon.
    Mps,
    /// Software limits in the programs of the tenants.
    Hami,
    /// Time-slicing.
    Timeslice,
    /// Time-slicing on a host whose driver another party manages.
    ManagedTimeslice,
}

/// Another mechanism, and why it is worse here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Neighbour {
    /// Name of the mechanism.
    #[serde(rename = "mechanism")]
    pub name: &'static str,
    /// The reason, as a clause.
    #[serde(rename = "remark")]
    pub why: &'static str,
}

const fn neighbour(leaf: Leaf, why: &'static str) -> Neighbour {
    Neighbour { name: leaf.name(), why }
}

impl Leaf {
    /// All answers.
    pub const ALL: [Self; 6] =
        [Self::NoSharing, Self::Mig, Self::Mps, Self::Hami, Self::Timeslice, Self::ManagedTimeslice];

    /// Returns the name for texts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoSharing => "no sharing",
            Self::Mig => "MIG",
            Self::Mps => "MPS",
            Self::Hami => "HAMi",
            Self::Timeslice => "time-slicing",
            Self::ManagedTimeslice => "time-slicing without a driver manager",
        }
    }

    /// Returns the mode of the config that realises the answer. gpush has no mode for HAMi: its tenants share a
    /// time-sliced GPU.
    #[must_use]
    pub fn mode(self) -> Mode {
        match self {
            Self::NoSharing => Mode::Exclusive,
            Self::Mig => Mode::Mig,
            Self::Mps => Mode::Mps,
            Self::Hami | Self::Timeslice | Self::ManagedTimeslice => Mode::Timeslice,
        }
    }

    /// Returns what the tenants accept with this answer, as sentences without a final stop.
    #[must_use]
    pub fn trade_off(self) -> &'static str {
        match self {
            Self::NoSharing => "the capacity that the tenant does not use is reserved and idle",
            Self::Mig => {
                "profiles have fixed sizes, and an idle instance cannot lend its compute; a new layout needs free \
                 instances, but gpush keeps those in use; power and clocks are shared"
            }
            Self::Mps => {
                "a fatal fault of one client can end all clients; percentage and memory are ceilings that a program can \
                 lift, and reserve nothing"
            }
            Self::Hami => {
                "memory is bounded by a library in each program: a static binary or a program that replaces the library \
                 escapes; compute is only limited in rate"
            }
            Self::Timeslice => {
                "nothing is isolated: each program can allocate all free memory, and latency grows with each neighbour"
            }
            Self::ManagedTimeslice => {
                "nothing is isolated: each program can allocate all free memory, and latency grows with each neighbour; \
                 an update by the other party can end programs, and metrics need a deployment of their own"
            }
        }
    }

    /// Returns when the answer applies and what it cannot do, if the answer needs more than gpush.
    #[must_use]
    pub fn limits(self) -> Option<&'static str> {
        match self {
            Self::Hami => Some(
                "HAMi applies if every program loads its library (LD_PRELOAD), on a whole GPU, and finds GPUs by index. \
                 It does not work on MIG devices, does not isolate faults, is not a security boundary, and does not keep \
                 its compute limit exactly. gpush neither installs nor checks it: set the variables below in the \
                 environment of each program",
            ),
            Self::ManagedTimeslice => Some(
                "do not install the GPU Operator's driver container or another driver manager: `gpushctl explain G003`",
            ),
            Self::NoSharing | Self::Mig | Self::Mps | Self::Timeslice => None,
        }
    }

    /// Returns the mechanisms that users would choose instead, and what goes wrong with them here.
    #[must_use]
    pub fn neighbours(self) -> &'static [Neighbour] {
        match self {
            Self::NoSharing => {
                const {
                    &[
                        neighbour(
                            Leaf::Timeslice,
                            "seems to multiply the GPUs, but isolates neither memory nor faults",
                        ),
                        neighbour(
                            Leaf::Mps,
                            "its limits are ceilings that a program can lift, and clients share faults",
                        ),
                    ]
                }
            }
            Self::Mig => {
                const {
                    &[
                        neighbour(Leaf::Mps, "clients share faults and bandwidth, and a program can lift its limits"),
                        neighbour(Leaf::Timeslice, "each program can allocate all memory, and slows down the others"),
                        neighbour(Leaf::NoSharing, "each tenant needs a whole GPU, which is mostly idle"),
                    ]
                }
            }
            Self::Mps => {
                const {
                    &[
                        neighbour(
                            Leaf::Timeslice,
                            "one program computes at a time, so small kernels leave the GPU idle",
                        ),
                        neighbour(Leaf::Mig, "an instance cannot use the idle compute of its neighbours"),
                        neighbour(Leaf::Hami, "limits memory, but programs still take turns"),
                    ]
                }
            }
            Self::Hami => {
                const {
                    &[
                        neighbour(Leaf::Mps, "its memory limit counts for each process, not for each tenant"),
                        neighbour(Leaf::Timeslice, "nothing bounds the memory of a tenant"),
                        neighbour(Leaf::Mig, "bounds memory in hardware, but only in the sizes of the profiles"),
                    ]
                }
            }
            Self::Timeslice => {
                const {
                    &[
                        neighbour(
                            Leaf::Mps,
                            "a fatal fault of one program ends the others, and a busy GPU gains little",
                        ),
                        neighbour(Leaf::Mig, "divides the GPU also while only one tenant is active"),
                        neighbour(Leaf::NoSharing, "the GPU is idle while its tenant is"),
                    ]
                }
            }
            Self::ManagedTimeslice => {
                const {
                    &[
                        neighbour(
                            Leaf::Mps,
                            "its daemon must match the driver, which another party can update at any time",
                        ),
                        neighbour(Leaf::Mig, "the other party can reset MIG mode and instances with the driver"),
                    ]
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_leaf_has_a_trade_off_and_names_other_leaves_as_neighbours() {
        for leaf in Leaf::ALL {
            assert!(!leaf.trade_off().is_empty());
            assert!(leaf.neighbours().len() >= 2, "{leaf:?}");
            for neighbour in leaf.neighbours() {
                assert_ne!(neighbour.name, leaf.name());
                assert!(Leaf::ALL.iter().any(|one| one.name() == neighbour.name), "{}", neighbour.name);
            }
        }
    }

    #[test]
    fn hami_leaf_says_when_it_applies_and_what_it_cannot_do() {
        let limits = Leaf::Hami.limits().unwrap();
        for fact in ["LD_PRELOAD", "MIG", "faults", "security"] {
            assert!(limits.contains(fact), "{fact}");
        }
    }
}
