//! Attributes the energy of one window of a GPU.

use serde::{Deserialize, Serialize};

use super::{EnergyMethod, split};
use crate::share::GPU_UNITS;

/// A whole in millionths, the unit of [`HeldInWindow::process_use`].
const MILLIONTHS: u128 = 1_000_000;

/// The hold of a lease on the GPU in the window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldInWindow {
    /// Units times milliseconds.
    pub(crate) unit_ms: u64,
    /// Milliseconds. Less than the window if the lease began later.
    pub(crate) held_ms: u64,
    /// GPU instance; `None` for the whole GPU.
    pub(crate) instance: Option<u32>,
    /// Whether the lease has the whole GPU for itself.
    pub(crate) is_whole: bool,
    /// Whether the lease has a process on the GPU.
    pub(crate) has_process: bool,
    /// Sum of the SM use of its processes, in millionths; `None` if it is not known for one of them.
    pub(crate) process_use: Option<u64>,
}

/// The holds on one GPU instance, or on the GPU, of leases that ended in the window and may have worked until then. The
/// totals of these leases are final, so their energy is unattributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EndedInWindow {
    pub(crate) instance: Option<u32>,
    /// Units times milliseconds.
    pub(crate) unit_ms: u64,
    /// Sum of their times in ms.
    pub(crate) held_ms: u64,
}

/// Other processes on a GPU instance, or on the GPU: those without a lease, and those whose lease is not certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OtherProcesses {
    pub(crate) instance: Option<u32>,
    /// Sum of their SM use, in millionths; `None` if it is not known for one of them.
    pub(crate) process_use: Option<u64>,
}

/// The activity of a GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InstanceActivity {
    pub(crate) instance: u32,
    pub(crate) units: u32,
    /// Activity in millionths.
    pub(crate) activity: u32,
}

/// One window of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EnergyWindow {
    /// Difference of the counter, in mJ.
    pub(crate) energy_mj: u64,
    /// Length in ms.
    pub(crate) length_ms: u64,
    /// Least power that the GPU ever needed, in mW.
    pub(crate) least_mw: u64,
    /// The leases at the end of the window.
    pub(crate) holds: Vec<HeldInWindow>,
    pub(crate) ended: Vec<EndedInWindow>,
    pub(crate) others: Vec<OtherProcesses>,
    /// Activities of all GPU instances; `None` without MIG, or if one of them is not known.
    pub(crate) instances: Option<Vec<InstanceActivity>>,
}

/// The energy of each hold, in the order of the window's holds, and the rest. The method is the one of the active energy:
/// `None` if the hold has got only idle energy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttributedEnergy {
    pub(crate) holds: Vec<(u64, EnergyMethod)>,
    pub(crate) unattributed_mj: u64,
}

/// Attributes the energy of a window. The parts add up to its energy.
pub(crate) fn attribute(window: &EnergyWindow) -> AttributedEnergy {
    let all = u64::from(GPU_UNITS).saturating_mul(window.length_ms);
    let mut result = Shares { energy: vec![(0, EnergyMethod::None); window.holds.len()] };
    if let [only] = &*window.holds
        && only.is_whole
    {
        let free = all.saturating_sub(only.unit_ms);
        result.distribute(window.energy_mj, &[(0, only.unit_ms.into())], free.into(), EnergyMethod::Board);
        return result.finish(window);
    }
    let idle_mj = u128::from(window.least_mw) * u128::from(window.length_ms) / 1000;
    let idle_mj = u64::try_from(idle_mj).unwrap_or(u64::MAX).min(window.energy_mj);
    let leased: Vec<(usize, u128)> =
        window.holds.iter().enumerate().map(|(index, hold)| (index, u128::from(hold.unit_ms))).collect();
    let held: u64 = window.holds.iter().map(|hold| hold.unit_ms).fold(0, u64::saturating_add);
    result.distribute(idle_mj, &leased, all.saturating_sub(held).into(), EnergyMethod::None);
    let active_mj = window.energy_mj - idle_mj;
    match &window.instances {
        Some(instances) if instances.iter().any(|one| one.activity > 0 && one.units > 0) => {
            let weights: Vec<u128> =
                instances.iter().map(|one| u128::from(one.activity) * u128::from(one.units)).collect();
            for (one, part) in instances.iter().zip(split(active_mj, &weights)) {
                result.within(window, Some(one), part);
            }
        }
        Some(_) | None => result.within(window, None, active_mj),
    }
    result.finish(window)
}

/// The energy of each hold while it is distributed. The rest is unattributed.
struct Shares {
    energy: Vec<(u64, EnergyMethod)>,
}

impl Shares {
    /// Distributes energy among holds, by weight. `rest` is the weight of the unattributed part.
    fn distribute(&mut self, mj: u64, weights: &[(usize, u128)], rest: u128, method: EnergyMethod) {
        let all: Vec<u128> = weights.iter().map(|(_, weight)| *weight).chain([rest]).collect();
        for ((index, _), part) in weights.iter().zip(split(mj, &all)) {
            if let Some(hold) = self.energy.get_mut(*index).filter(|_| part > 0) {
                hold.0 += part;
                hold.1 = hold.1.max(method);
            }
        }
    }

    /// Distributes the active energy of a GPU instance, or of the GPU, among its holds.
    fn within(&mut self, window: &EnergyWindow, instance: Option<&InstanceActivity>, mj: u64) {
        let is_inside = |other: Option<u32>| instance.is_none_or(|one| other.is_none_or(|id| id == one.instance));
        let holds: Vec<(usize, &HeldInWindow)> =
            window.holds.iter().enumerate().filter(|(_, hold)| is_inside(hold.instance)).collect();
        let others: Vec<&OtherProcesses> = window.others.iter().filter(|other| is_inside(other.instance)).collect();
        let ended: Vec<&EndedInWindow> = window.ended.iter().filter(|ended| is_inside(ended.instance)).collect();
        if let ([(index, only)], Some(_), true) = (&*holds, instance, others.is_empty()) {
            let free = window.length_ms.saturating_sub(only.held_ms);
            let ended_ms = ended.iter().map(|ended| ended.held_ms).fold(0, u64::saturating_add);
            // Otherwise, an ended lease shared the GPU instance with this one.
            if ended_ms <= free {
                return self.distribute(mj, &[(*index, only.held_ms.into())], free.into(), EnergyMethod::Gpm);
            }
        }
        let length = u128::from(window.length_ms);
        let ended_unit_ms: u128 = ended.iter().map(|ended| u128::from(ended.unit_ms)).sum();
        let by_use = |(index, hold): &(usize, &HeldInWindow)| {
            let used = if hold.has_process { hold.process_use? } else { 0 };
            Some((*index, u128::from(used) * u128::from(hold.held_ms)))
        };
        let uses: Option<Vec<(usize, u128)>> = holds.iter().map(by_use).collect();
        let foreign: Option<u128> = others.iter().map(|other| other.process_use.map(u128::from)).sum();
        if let (Some(uses), Some(foreign)) = (uses, foreign)
            && uses.iter().map(|(_, weight)| weight).sum::<u128>() + foreign > 0
        {
            // The use of an ended lease is not known any more. It was at most its share.
            let ended_use = ended_unit_ms * MILLIONTHS / u128::from(GPU_UNITS);
            let rest = foreign * length + ended_use.max(before_holds(window, &uses));
            return self.distribute(mj, &uses, rest, EnergyMethod::Process);
        }
        let by_share = |(index, hold): &(usize, &HeldInWindow)| (*index, u128::from(hold.unit_ms));
        let shares: Vec<(usize, u128)> = holds.iter().filter(|(_, hold)| hold.has_process).map(by_share).collect();
        let units = instance.map_or(GPU_UNITS, |one| one.units);
        let held: u128 = holds.iter().map(|(_, hold)| u128::from(hold.unit_ms)).sum();
        let is_rest_used = !others.is_empty() || shares.is_empty();
        let free = if is_rest_used { (u128::from(units) * length).saturating_sub(held).max(1) } else { 0 };
        let rest = free.max(ended_unit_ms).max(before_holds(window, &shares));
        self.distribute(mj, &shares, rest, EnergyMethod::Slices);
    }

    fn finish(self, window: &EnergyWindow) -> AttributedEnergy {
        let given: u64 = self.energy.iter().map(|(mj, _)| mj).sum();
        AttributedEnergy { unattributed_mj: window.energy_mj - given, holds: self.energy }
    }
}

/// Returns the weight of the time before the first of these holds began. In that time, the holds count with their mean
/// weight, as if the active power was the same all the time.
fn before_holds(window: &EnergyWindow, weights: &[(usize, u128)]) -> u128 {
    let working = weights.iter().filter(|(_, weight)| *weight > 0);
    let held = working.filter_map(|(index, _)| window.holds.get(*index)).map(|hold| hold.held_ms);
    let longest = u128::from(held.max().unwrap_or(0));
    let all: u128 = weights.iter().map(|(_, weight)| weight).sum();
    let before = u128::from(window.length_ms).saturating_sub(longest);
    (all * before).checked_div(longest).unwrap_or(0)
}
