//! Readings of a GPU: utilization, power, temperature, clocks.
//!
//! A reading depends only on the load and the conditions of the board. Between two changes of the load, all values
//! are constant, so that the power is the slope of the energy counter.

use gpush_geometry::{Architecture, Model};

use super::{Machine, WHOLE_PPM};
use crate::returns::Return;

/// PCIe traffic to the host of a GPU that is always busy, in KiB/s.
pub const PCIE_TX_KIB_S: u32 = 450_000;
/// PCIe traffic from the host of a GPU that is always busy, in KiB/s.
pub const PCIE_RX_KIB_S: u32 = 700_000;

/// Sensors and counters of a GPU at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// Percentage of time in which a kernel ran.
    pub gpu_percent: u32,
    /// Percentage of time in which memory was read or written.
    pub memory_percent: u32,
    /// Power draw, mW.
    pub power_mw: u32,
    /// Effective power limit, mW.
    pub power_limit_mw: u32,
    /// Core temperature, °C.
    pub temperature_c: u32,
    /// Clock of the streaming multiprocessors, MHz.
    pub sm_clock_mhz: u32,
    /// Memory clock, MHz.
    pub memory_clock_mhz: u32,
    /// PCIe traffic to the host, KiB/s.
    pub pcie_tx_kib_s: u32,
    /// PCIe traffic from the host, KiB/s.
    pub pcie_rx_kib_s: u32,
    /// Performance state, which is 0 when the GPU is busy and 8 when it is idle.
    pub performance_state: u32,
    /// Why the clocks are below their maximum, as [`reason`] bits.
    pub event_reasons: u64,
}

/// Limits of a board, from public data sheets. If boards of one model differ, a value is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Board {
    /// Power limit, mW.
    pub power_limit_mw: u32,
    /// Maximum clock of the streaming multiprocessors, MHz.
    pub max_sm_clock_mhz: u32,
    /// Maximum memory clock, MHz.
    pub max_memory_clock_mhz: u32,
    /// PCIe generation.
    pub pcie_generation: u32,
    /// Number of PCIe lanes.
    pub pcie_width: u32,
    /// Number of NVLink links.
    pub nvlinks: u32,
    /// CUDA compute capability.
    pub compute_capability: (u32, u32),
}

impl Board {
    /// Returns the limits of a model's board.
    #[must_use]
    pub fn of(model: &Model) -> Self {
        let (watts, sm, memory, width, nvlinks) = match model.key.as_str() {
            "a100-40" => (400, 1410, 1215, 16, 12),
            "a100-80" => (400, 1410, 1593, 16, 12),
            "a30-24" => (165, 1440, 1215, 16, 4),
            "h100-80-pcie" => (350, 1755, 1593, 16, 12),
            "h100-nvl-94" => (400, 1785, 2619, 16, 12),
            "h200-nvl-141" => (600, 1785, 3201, 16, 18),
            "h20-96" | "h20-141" => (500, 1980, 2619, 16, 18),
            "gh200-96" | "gh200-144" => (900, 1980, 2619, 16, 18),
            "h100-80-sxm" | "h100-96" | "h200-141" => (700, 1980, 2619, 16, 18),
            "b200-180" => (1000, 1965, 3996, 16, 18),
            "gb200-186" => (1200, 1965, 3996, 16, 18),
            "b300-269" => (1100, 1920, 3996, 16, 18),
            "gb300-278" => (1400, 1920, 3996, 16, 18),
            "rtxpro6000-96" => (600, 2430, 12481, 16, 0),
            "p100-16" => (250, 1328, 715, 16, 0),
            "v100-32" => (300, 1530, 877, 16, 6),
            "t4" => (70, 1590, 5001, 16, 0),
            "l4" => (72, 2040, 6251, 16, 0),
            "a10" => (150, 1695, 6251, 16, 0),
            "l40s" => (350, 2520, 9001, 16, 0),
            _ => (300, 1500, 2000, 16, 0),
        };
        let (generation, compute_capability) = match model.architecture {
            Architecture::Pascal => (3, (6, 0)),
            Architecture::Volta => (3, (7, 0)),
            Architecture::Turing => (3, (7, 5)),
            Architecture::Ampere if model.has_mig() => (4, (8, 0)),
            Architecture::Ampere => (4, (8, 6)),
            Architecture::Ada => (4, (8, 9)),
            Architecture::Hopper => (5, (9, 0)),
            Architecture::Blackwell if model.memory_slices == 12 => (5, (12, 0)),
            Architecture::Blackwell => (5, (10, 0)),
        };
        Self {
            power_limit_mw: watts * 1000,
            max_sm_clock_mhz: sm,
            max_memory_clock_mhz: memory,
            pcie_generation: generation,
            pcie_width: width,
            nvlinks,
            compute_capability,
        }
    }
}

impl Board {
    /// Returns the core clocks that applications can choose, in MHz, highest first.
    #[must_use]
    pub fn core_clocks_mhz(&self) -> Vec<u32> {
        const LOWEST: u32 = 210;
        const STEP: u32 = 15;
        (0..)
            .map(|n| n * STEP)
            .take_while(|less| self.max_sm_clock_mhz >= LOWEST + less)
            .map(|less| self.max_sm_clock_mhz - less)
            .collect()
    }
}

/// Clock event reasons, with NVML's bits.
pub mod reason {
    /// The GPU is idle.
    pub const IDLE: u64 = 0x1;
    /// The power limit lowers the clocks.
    pub const POWER_CAP: u64 = 0x4;
    /// The temperature lowers the clocks.
    pub const THERMAL: u64 = 0x20;
}

impl Machine {
    /// Returns the energy in mJ that a GPU has used since the driver was loaded or the GPU was reset.
    ///
    /// # Errors
    /// `NotSupported` before Volta, `GpuIsLost`, `InvalidArgument`.
    pub fn energy_mj(&self, gpu: u32, at_ms: u64) -> Result<u64, Return> {
        let energy_uj = self.energy_uj(gpu, at_ms)?;
        match self.model(gpu)?.architecture {
            Architecture::Pascal => Err(Return::NotSupported),
            Architecture::Volta
            | Architecture::Turing
            | Architecture::Ampere
            | Architecture::Ada
            | Architecture::Hopper
            | Architecture::Blackwell => Ok(energy_uj / 1000),
        }
    }

    /// Returns the present sensor values of a GPU.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn reading(&self, gpu: u32) -> Result<Reading, Return> {
        let at = self.gpu(gpu)?;
        let board = Board::of(self.model(gpu)?);
        let now = self.current_use(at);
        let busy = now.whole.busy > 0;
        let of = |rate: u32, whole: u32| (u64::from(rate) * u64::from(whole) / u64::from(WHOLE_PPM)) as u32;
        let percent = |rate: u32| of(rate + 5000, 100);
        // A limited GPU runs at about four fifths of its clock.
        let limited = now.power_limited || now.heat_limited;
        let highest = if limited { board.max_sm_clock_mhz / 5 * 4 } else { board.max_sm_clock_mhz };
        let mut event_reasons = 0;
        for (yes, bit) in
            [(!busy, reason::IDLE), (now.power_limited, reason::POWER_CAP), (now.heat_limited, reason::THERMAL)]
        {
            event_reasons |= if yes { bit } else { 0 };
        }
        Ok(Reading {
            gpu_percent: percent(now.whole.busy),
            memory_percent: percent(now.whole.dram),
            power_mw: u32::try_from(now.power_mw).unwrap_or(u32::MAX),
            power_limit_mw: at.conditions.power_limit_mw.unwrap_or(board.power_limit_mw),
            temperature_c: now.temperature_c,
            sm_clock_mhz: if busy { highest } else { 210 },
            memory_clock_mhz: board.max_memory_clock_mhz,
            pcie_tx_kib_s: of(now.whole.busy, PCIE_TX_KIB_S),
            pcie_rx_kib_s: of(now.whole.busy, PCIE_RX_KIB_S),
            performance_state: if busy { 0 } else { 8 },
            event_reasons,
        })
    }
}
