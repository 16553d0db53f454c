//! A table of what each mechanism isolates. Each row is an aspect, and each column is a mechanism.
//! Each cell lists its sources.

use std::fmt::Write as _;

use serde::Serialize;

/// A sharing mechanism: a column of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mechanism {
    /// Exclusive use of a whole GPU by one lease.
    Exclusive,
    /// MIG devices.
    Mig,
    /// Clients of one MPS daemon.
    Mps,
    /// Time-slicing.
    Timeslice,
}

/// All mechanisms, in the order of [`Aspect::cells`].
pub const MECHANISMS: [Mechanism; 4] = [Mechanism::Exclusive, Mechanism::Mig, Mechanism::Mps, Mechanism::Timeslice];

impl Mechanism {
    /// Returns the heading of the column, which is the mode in the config.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Mig => "mig",
            Self::Mps => "mps",
            Self::Timeslice => "timeslice",
        }
    }
}

/// A document that is the source of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Source {
    /// Number that identifies the source in cells.
    pub number: u8,
    /// Title of the document, and the sections that are used.
    pub title: &'static str,
    /// Address of the document. The address of gpush's own page is relative to `docs`.
    pub url: &'static str,
}

/// The source documents.
pub const SOURCES: [Source; 4] = [
    Source {
        number: 1,
        title: "NVIDIA Multi-Instance GPU User Guide: Concepts, Device Nodes and Capabilities",
        url: "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/",
    },
    Source {
        number: 2,
        title: "NVIDIA Multi-Process Service: Memory Protection and Error Containment, Resource Provisioning, Limitations",
        url: "https://docs.nvidia.com/deploy/mps/",
    },
    Source {
        number: 3,
        title: "NVIDIA device plugin for Kubernetes: Shared Access to GPUs",
        url: "https://github.com/NVIDIA/k8s-device-plugin#shared-access-to-gpus",
    },
    Source { number: 4, title: "gpush: docs/leases.md", url: "leases.md" },
];

/// How well a mechanism isolates users from each other in one aspect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Cell {
    /// `yes`, `limit`, or `no`.
    pub answer: &'static str,
    /// Explanation of the answer.
    pub text: &'static str,
    /// Numbers of the sources.
    #[serde(rename = "source_numbers")]
    pub sources: &'static [u8],
}

/// An aspect in which users could affect each other: a row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Aspect {
    /// Name.
    pub name: &'static str,
    /// One cell for each mechanism, in the order of [`MECHANISMS`].
    pub cells: [Cell; 4],
}

const fn cell(answer: &'static str, text: &'static str, sources: &'static [u8]) -> Cell {
    Cell { answer, text, sources }
}

/// The table.
pub const TABLE: [Aspect; 5] = [
    Aspect {
        name: "memory",
        cells: [
            cell("yes", "one lease has all memory of the GPU", &[4]),
            cell("yes", "each GPU instance has its own memory; compute instances of one GPU instance share it", &[1]),
            cell(
                "limit",
                "separate address spaces; the limit is for each process, and a program can lift it in its environment; \
                 over_limit = \"end\" in the rule ends a lease that stays above its share",
                &[2, 4],
            ),
            cell(
                "no",
                "separate address spaces; each program can allocate all free memory; over_limit = \"end\" in the rule \
                 ends a lease that stays above its share",
                &[3, 4],
            ),
        ],
    },
    Aspect {
        name: "faults",
        cells: [
            cell("yes", "no other lease is on the GPU", &[4]),
            cell(
                "yes",
                "a fault ends only the programs of its GPU instance; the loss of the GPU ends all programs",
                &[1],
            ),
            cell("no", "a fatal fault of one client ends all clients of the server", &[2]),
            cell("no", "a fatal fault can end the programs of all users", &[3]),
        ],
    },
    Aspect {
        name: "bandwidth",
        cells: [
            cell(
                "yes",
                "one lease has all memory bandwidth of the GPU; PCIe and NVLink are shared with other GPUs",
                &[4],
            ),
            cell("yes", "each GPU instance has its own L2 banks, memory controllers and buses; PCIe is shared", &[1]),
            cell("no", "all clients share memory bandwidth and L2", &[2]),
            cell("no", "the program in the current time slice has all of the bandwidth", &[3]),
        ],
    },
    Aspect {
        name: "compute",
        cells: [
            cell("yes", "one lease has all multiprocessors of the GPU", &[4]),
            cell("yes", "each compute instance has its own multiprocessors", &[1]),
            cell(
                "limit",
                "the percentage is a ceiling for each process, not a reservation; a program can raise it to the \
                percentage of the daemon",
                &[2],
            ),
            cell("no", "programs take turns; each additional program slows the others", &[3]),
        ],
    },
    Aspect {
        name: "device access",
        cells: [
            cell(
                "limit",
                "by default, any program can open the device; after gpushctl enforce on, the kernel denies it to login \
                sessions without a lease, but not to services and containers",
                &[4],
            ),
            cell(
                "limit",
                "as for a whole GPU; a lease also opens only the nodes in /dev/nvidia-caps of its MIG devices",
                &[1, 4],
            ),
            cell(
                "limit",
                "only users with a lease can enter the pipe directory; compute mode EXCLUSIVE_PROCESS keeps other \
                programs off a whole GPU",
                &[2, 4],
            ),
            cell("limit", "as for a whole GPU; leases of one GPU are not kept apart", &[4]),
        ],
    },
];

/// Returns the table and its sources as Markdown, for docs/isolation.md.
#[must_use]
pub fn markdown() -> String {
    let mut out = String::from("| |");
    MECHANISMS.iter().for_each(|mechanism| _ = write!(out, " {} |", mechanism.name()));
    out += "\n|---|---|---|---|---|\n";
    for aspect in TABLE {
        _ = write!(out, "| {} |", aspect.name);
        for cell in aspect.cells {
            let sources: Vec<String> = cell.sources.iter().map(ToString::to_string).collect();
            _ = write!(out, " **{}**: {} [{}] |", cell.answer, cell.text, sources.join(", "));
        }
        out.push('\n');
    }
    out += "\nSources:\n\n";
    for source in SOURCES {
        _ = writeln!(out, "{}. [{}]({})", source.number, source.title, source.url);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_has_an_answer_and_an_existing_source() {
        for aspect in TABLE {
            for cell in aspect.cells {
                assert!(["yes", "limit", "no"].contains(&cell.answer), "{}: {}", aspect.name, cell.answer);
                assert!(!cell.sources.is_empty(), "{}: {}", aspect.name, cell.text);
                assert!(cell.sources.iter().all(|number| SOURCES.iter().any(|source| source.number == *number)));
            }
        }
        let used: Vec<u8> =
            TABLE.iter().flat_map(|aspect| aspect.cells).flat_map(|cell| cell.sources.to_vec()).collect();
        assert!(SOURCES.iter().all(|source| used.contains(&source.number)));
    }

    #[test]
    fn page_of_isolation_has_the_table() {
        let page = include_str!("../../../../docs/isolation.md");
        assert!(page.contains(&markdown()), "docs/isolation.md needs this:\n{}", markdown());
    }
}
