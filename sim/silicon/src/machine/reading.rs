//! Readings of a GPU: utilization, power, temperature, clocks.
//!
//! A reading depends only on the GPU's seed, the GPU's load and the time. So two clients that read
//! at the same time get the same values, and a test can use any time.

use gpush_geometry::{Architecture, Model};

use super::{Machine, ProcessKind};
use crate::returns::Return;

/// Sensors and counters of a GPU at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// Percentage of time in which a kernel ran.
    pub gpu_percent: u32,
    /// Percentage of time in which memory was read or written.
    pub memory_percent: u32,
    /// Power draw, mW.
    pub power_mw: u32,
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

/// Returns a smooth curve between 0 and 1 with a period of some tens of seconds.
fn wave(seed: u64, at_ms: u64, of: u64) -> f64 {
    let mixed = (seed ^ of.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let phase = (mixed >> 40) as f64 / f64::from(1 << 24) * std::f64::consts::TAU;
    let period = 20_000.0 + (mixed & 0x3fff) as f64;
    let t = (at_ms % 86_400_000) as f64 / period * std::f64::consts::TAU;
    0.5 + 0.35 * (t + phase).sin() + 0.15 * (3.1 * t + 2.0 * phase).sin()
}

impl Machine {
    /// Returns the energy in mJ that a GPU has used since its driver was loaded. The energy depends
    /// only on the time, and is the energy of an idle GPU. If the counter followed the load, every
    /// reading would have to change the state.
    ///
    /// # Errors
    /// `NotSupported` before Volta, `GpuIsLost`, `InvalidArgument`.
    pub fn energy_mj(&self, gpu: u32, at_ms: u64) -> Result<u64, Return> {
        /// 2025-01-01. Every simulated host was created after this time.
        const LOADED_MS: u64 = 1_735_689_600_000;
        self.gpu(gpu)?;
        let model = self.model(gpu)?;
        if model.architecture == Architecture::Pascal {
            return Err(Return::NotSupported);
        }
        let at_rest_mw = u64::from(Board::of(model).power_limit_mw) * 12 / 100;
        Ok(at_ms.saturating_sub(LOADED_MS).saturating_mul(at_rest_mw) / 1000)
    }

    /// Returns the sensor values of a GPU at a time in milliseconds since the epoch. The load is a
    /// sum over the compute processes: each adds the fraction of the GPU that it uses.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn reading(&self, gpu: u32, at_ms: u64) -> Result<Reading, Return> {
        let at = self.gpu(gpu)?;
        let part = self.part(gpu)?;
        let seed = self.identity(gpu)?.seed;
        let board = Board::of(&part.model);
        let mut load = 0.0_f64;
        for process in at.processes.iter().filter(|p| p.kind != ProcessKind::Handle) {
            let share = process
                .gpu_instance
                .and_then(|id| at.instance(id))
                .and_then(|gi| part.profile(gi.profile_id).ok())
                .map_or(1.0, |profile| f64::from(profile.data.slices) / f64::from(part.model.compute_slices.max(1)));
            load += share * (0.55 + 0.45 * wave(seed ^ u64::from(process.pid.pid), at_ms, 1));
        }
        let load = load.min(1.0);
        let busy = load > 0.0;
        let hum = wave(seed, at_ms, 2);
        let watts = board.power_limit_mw as f64;
        Ok(Reading {
            gpu_percent: (load * 100.0).round() as u32,
            memory_percent: (load * (30.0 + 40.0 * wave(seed, at_ms, 3))).round() as u32,
            power_mw: (watts * (0.11 + 0.02 * hum + 0.75 * load)) as u32,
            temperature_c: (29.0 + 5.0 * hum + 38.0 * load).round() as u32,
            sm_clock_mhz: if busy { board.max_sm_clock_mhz - (hum * 60.0) as u32 } else { 210 },
            memory_clock_mhz: board.max_memory_clock_mhz,
            pcie_tx_kib_s: (load * 900_000.0 * hum) as u32,
            pcie_rx_kib_s: (load * 1_400_000.0 * (1.0 - hum)) as u32,
            performance_state: if busy { 0 } else { 8 },
        })
    }
}
