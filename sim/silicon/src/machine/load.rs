//! The load that a process puts on its GPU or GPU instance.

use serde::{Deserialize, Serialize};

/// A whole in parts per million, the unit of a [`Load`].
pub const WHOLE_PPM: u32 = 1_000_000;

/// The load of a process. Parts are relative to the place of the process: to its GPU instance, or to the GPU without
/// one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Part of the time in which a kernel of the process runs, in ppm.
    pub busy_ppm: u32,
    /// Part of the streaming multiprocessors that are active, over time, in ppm.
    pub sm_ppm: u32,
    /// Part of the tensor cores that are active, over time, in ppm.
    pub tensor_ppm: u32,
    /// Part of the memory bandwidth, in ppm.
    pub dram_ppm: u32,
    /// Power above that of an idle context, in mW. `None` derives the power from the other fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_mw: Option<u32>,
}

impl Load {
    /// A process that has a context and does nothing.
    pub const IDLE: Self = Self { busy_ppm: 0, sm_ppm: 0, tensor_ppm: 0, dram_ppm: 0, power_mw: None };

    /// Creates the load of a process whose kernels always use this part of the streaming multiprocessors.
    #[must_use]
    pub const fn of_sm(sm_ppm: u32) -> Self {
        Self { busy_ppm: sm_ppm, sm_ppm, ..Self::IDLE }
    }

    /// Returns whether no part is larger than the whole.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        [self.busy_ppm, self.sm_ppm, self.tensor_ppm, self.dram_ppm].iter().all(|part| *part <= WHOLE_PPM)
    }

    /// Returns the load of a process whose load was not set. It depends only on the GPU's seed and the process.
    pub(super) fn usual(seed: u64, pid: u32) -> Self {
        let mixed = (seed ^ u64::from(pid).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let busy_ppm = 600_000 + ((mixed >> 40) % 350_000) as u32;
        Self {
            busy_ppm,
            sm_ppm: busy_ppm / 100 * 92,
            tensor_ppm: busy_ppm / 100 * 55,
            dram_ppm: busy_ppm / 100 * 50,
            power_mw: None,
        }
    }

    /// Returns the power above that of an idle context on a place with this part of the board's power, in mW.
    pub(super) fn power_mw(&self, place_mw: u64) -> u64 {
        let parts = u64::from(self.sm_ppm) * 45 + u64::from(self.dram_ppm) * 20 + u64::from(self.tensor_ppm) * 10;
        self.power_mw.map_or(place_mw * parts / (100 * u64::from(WHOLE_PPM)), u64::from)
    }
}
