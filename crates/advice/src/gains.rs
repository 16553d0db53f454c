//! Measured gains of sharing, as ranges with their sources. The model of `queueing` cannot replace them.

use serde::Serialize;

/// A measured gain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Gain {
    /// What was compared.
    #[serde(rename = "comparison")]
    pub what: &'static str,
    /// The range of the results.
    #[serde(rename = "measured")]
    pub range: &'static str,
    /// Who measured, on which hardware.
    #[serde(rename = "measured_by")]
    pub source: &'static str,
}

/// The gains that gpushctl shows.
pub const GAINS: [Gain; 4] = [
    Gain {
        what: "8 clients with small kernels: throughput of MPS compared with time-slicing",
        range: "12 to 17 times",
        source: "gpush, docs/benchmarks.md, H200",
    },
    Gain {
        what: "2 or 3 processes with MPS on a whole GPU, compared with 1 process (11 models)",
        range: "-17 to +209 %, median +55 % (2) and +78 % (3)",
        source: "ParvaGPU, SC'24, A100 80GB",
    },
    Gain {
        what: "2 or 3 processes with MPS on a 1g instance, compared with 1 process",
        range: "median +11 % (2) and +12 % (3)",
        source: "ParvaGPU, SC'24, A100 80GB",
    },
    Gain {
        what: "replicas of a speech model with 4 billion parameters, compared with 1 replica",
        range: "3.6 times with MPS (5 replicas), 1.5 to 1.7 times without (2 to 4)",
        source: "sgl-project/sglang-omni issue 1066, H200",
    },
];
