//! Mistakes in how GPUs are shared that a valid config can contain. Each has a number, such as `G001`.
//!
//! `desired::lints` finds them in a config, and gpushctl's doctor finds them on a host. `gpushctl explain G001` prints
//! [`Lint::explanation`]. A number never gets another meaning.

use std::fmt;

use serde::{Serialize, Serializer};

/// A mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lint {
    /// Time-slicing where users must be isolated.
    TimesliceIsolation,
    /// MPS between users who must not share faults.
    SharedFaults,
    /// Another program manages the driver or the layouts.
    OtherManager,
    /// Limits that programs can lift, used as if they were hard.
    SoftLimits,
    /// Several leases on a GPU without a limit of memory.
    UnboundedMemory,
    /// More or fewer leases on a GPU than its workload usually allows.
    UnusualRatio,
    /// Isolation for users with a lease only.
    OpenDevices,
    /// Memory limits whose sum exceeds the memory of the GPU.
    OvercommittedMemory,
}

impl Lint {
    /// All lints, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::TimesliceIsolation,
        Self::SharedFaults,
        Self::OtherManager,
        Self::SoftLimits,
        Self::UnboundedMemory,
        Self::UnusualRatio,
        Self::OpenDevices,
        Self::OvercommittedMemory,
    ];

    /// Returns the number, such as `G001`.
    #[must_use]
    pub fn number(self) -> &'static str {
        match self {
            Self::TimesliceIsolation => "G001",
            Self::SharedFaults => "G002",
            Self::OtherManager => "G003",
            Self::SoftLimits => "G004",
            Self::UnboundedMemory => "G005",
            Self::UnusualRatio => "G006",
            Self::OpenDevices => "G007",
            Self::OvercommittedMemory => "G008",
        }
    }

    /// Returns the lint with this number. Upper and lower case are equal.
    #[must_use]
    pub fn numbered(number: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|lint| lint.number().eq_ignore_ascii_case(number))
    }

    /// Returns the mistake as a noun phrase.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::TimesliceIsolation => "time-slicing where users must be isolated",
            Self::SharedFaults => "MPS between users who must not share faults",
            Self::OtherManager => "another program manages the driver or the MIG layouts",
            Self::SoftLimits => "soft limits used as hard limits",
            Self::UnboundedMemory => "several leases on a GPU without a memory limit",
            Self::UnusualRatio => "an unusual number of leases on a GPU",
            Self::OpenDevices => "hard isolation without required leases",
            Self::OvercommittedMemory => "memory limits that exceed the memory of the GPU",
        }
    }

    /// Returns why it is a mistake and what to do, as paragraphs separated by empty lines.
    #[must_use]
    pub fn explanation(self) -> &'static str {
        match self {
            Self::TimesliceIsolation => {
                "Time-slicing seems to multiply the GPUs, but it isolates nothing except address spaces. Each program \
                 can allocate all free memory, a fatal fault can end the programs of all users, and each neighbour \
                 makes every program slower.\n\n\
                 If the users must be isolated, use mode `mig`, or mode `exclusive` on a model without MIG. If they \
                 trust each other, write `isolation = \"shared\"` in the rule."
            }
            Self::SharedFaults => {
                "All clients of an MPS server share its faults: a fatal fault of one client ends all of them, also \
                 those of other users if the rule has `users = \"many\"`. A client that hangs can block the others.\n\n\
                 If a fault of one user must not end the programs of another, use MIG devices: mode `mig`, with MPS \
                 only inside the device of one user (`\"2g.20gb:mps\"`, `users = \"one\"`). If the users accept it, \
                 write `isolation = \"shared\"` in the rule."
            }
            Self::OtherManager => {
                "Two programs that manage one driver undo each other's changes. The GPU Operator of Kubernetes can \
                 install another driver, and its MIG manager destroys the instances of gpushd. On a host whose driver a \
                 cloud provider manages, an operator that replaces the driver can leave the host without one.\n\n\
                 Let one program manage each driver and each layout: disable the driver container and the MIG manager \
                 of the operator on this node, or give its GPUs `mode = \"unmanaged\"` in gpush's config."
            }
            Self::SoftLimits => {
                "The active thread percentage and the memory limit of MPS are ceilings, and so are the limits of HAMi. \
                 A program can raise or lift them in its environment, they reserve nothing, and the memory limit \
                 counts for each process, not for each user. Processes without a lease have no limit at all.\n\n\
                 Use these limits only between programs that cooperate. A hard limit needs MIG: mode `mig`, without \
                 `:mps`. `gpushctl explain isolation` compares the mechanisms."
            }
            Self::UnboundedMemory => {
                "Several leases share a GPU, but nothing divides its memory: the first program can allocate all of it, \
                 as many frameworks do when they start. The next program then fails with an out-of-memory error.\n\n\
                 With MPS, set `memory` in the rule, for example to the memory of the GPU divided by the number of \
                 leases. Time-slicing has no memory limit: use MPS or MIG, or write `isolation = \"shared\"` if the \
                 programs limit their memory themselves."
            }
            Self::UnusualRatio => {
                "Usual numbers of leases on one GPU are 4 to 8 for inference, 2 to 4 for notebooks, and 1 for training, \
                 which uses the whole GPU. With more leases, memory runs out or latency grows with each neighbour. \
                 With fewer, the GPU is often idle.\n\n\
                 Change `timeslice.replicas`, or `mps.percentage` and `mps.total_percentage`. If your programs differ \
                 from these workloads, leave `workload` out. `gpushctl advise queue` estimates the latency."
            }
            Self::OpenDevices => {
                "The rule asks for hard isolation, but permits processes without a lease. Such a process can open any \
                 device that its user may open, so two users can be on one MIG device or GPU.\n\n\
                 Write `lease = \"required\"` in the rule, and `unleased = \"end\"` under [processes]: gpushd then ends \
                 processes without a lease."
            }
            Self::OvercommittedMemory => {
                "The rule admits so many leases that their memory limits together exceed the memory of the GPU. Each \
                 program stays below its limit, and the last ones still fail with an out-of-memory error.\n\n\
                 Set a lower `mps.memory`, or admit fewer leases: a higher `mps.percentage`, or a lower \
                 `mps.total_percentage` or `mps.max_clients`."
            }
        }
    }
}

impl fmt::Display for Lint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.number())
    }
}

impl Serialize for Lint {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lints_are_numbered_in_order_and_found_by_number() {
        for (position, lint) in Lint::ALL.into_iter().enumerate() {
            assert_eq!(lint.number(), format!("G{:03}", position + 1));
            assert_eq!(Lint::numbered(&lint.number().to_lowercase()), Some(lint));
            assert!(lint.explanation().contains("\n\n"), "{lint}: why, then what to do");
        }
        assert_eq!(Lint::numbered("G000"), None);
    }

    #[test]
    fn reference_of_the_config_lists_each_lint() {
        let page = include_str!("../../../docs/config.md");
        for lint in Lint::ALL {
            let row = format!("| {lint} | {} |", lint.title());
            assert!(page.contains(&row), "docs/config.md lacks {row}");
        }
    }
}
