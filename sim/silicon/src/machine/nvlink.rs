//! NVLink: the connections between the GPUs of a host, and the GPUs that must be reset together.
//!
//! The rules about resets come from the nvidia-smi manual (`--gpu-reset`). On Ampere and later,
//! each GPU is reset alone, unless it is connected to an NVSwitch and no fabric manager runs.
//! Before Ampere, all connected GPUs are reset together.

use gpush_geometry::{Architecture, Model};
use serde::{Deserialize, Serialize};

use super::{Board, Machine};
use crate::returns::Return;

/// How the GPUs of an entry are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wiring {
    /// The GPUs are not connected.
    None,
    /// Each GPU is connected to the same switches.
    Switch,
    /// The GPUs are connected in pairs, each pair by a bridge.
    Pairs,
    /// Each GPU is directly connected to each other GPU.
    Mesh,
}

impl Wiring {
    /// Returns how the boards of a model are usually connected. Modules of an HGX baseboard are
    /// connected to its switches.
    #[must_use]
    pub fn usual(model: &Model, product: &str) -> Self {
        const MODULES: &[&str] = &[
            "h100-80-sxm",
            "h100-96",
            "h200-141",
            "h20-96",
            "h20-141",
            "b200-180",
            "b300-269",
            "gb200-186",
            "gb300-278",
        ];
        let module = product.contains("-SXM") || MODULES.contains(&model.key.as_str());
        if module { Self::Switch } else { Self::None }
    }
}

/// The NVLink group to which a GPU belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links {
    /// The wiring.
    pub wiring: Wiring,
    /// Index of the first GPU of the connected group.
    pub first: u32,
    /// Number of GPUs in the group, including this one.
    pub count: u32,
}

/// What is at the other end of an NVLink port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// A switch, by its number.
    Switch(u32),
    /// A GPU, by its index.
    Gpu(u32),
}

/// Number of switches on a baseboard.
const SWITCHES: u32 = 6;

impl Machine {
    /// Returns the peer of a GPU's port, or `None` if the port has no peer.
    ///
    /// # Errors
    /// `NotSupported` if the port does not exist, `InvalidArgument` if the GPU does not exist,
    /// `GpuIsLost`.
    pub fn link(&self, gpu: u32, port: u32) -> Result<Option<End>, Return> {
        self.gpu(gpu)?;
        if port >= Board::of(self.model(gpu)?).nvlinks {
            return Err(Return::NotSupported);
        }
        let Links { wiring, first, count } = self.links(gpu)?;
        let own = gpu - first;
        Ok(match wiring {
            Wiring::None => None,
            Wiring::Switch => Some(End::Switch(port % SWITCHES)),
            Wiring::Pairs => ((own ^ 1) < count).then_some(End::Gpu(first + (own ^ 1))),
            Wiring::Mesh => (count > 1).then(|| End::Gpu(first + (own + 1 + port % (count - 1)) % count)),
        })
    }

    /// Returns the other GPUs that must be reset together with a GPU.
    ///
    /// # Errors
    /// `InvalidArgument` if the GPU does not exist.
    pub fn reset_with(&self, gpu: u32) -> Result<Vec<u32>, Return> {
        let Links { wiring, first, count } = self.links(gpu)?;
        let by_itself = match self.model(gpu)?.architecture {
            Architecture::Pascal | Architecture::Volta | Architecture::Turing => wiring == Wiring::None,
            Architecture::Ampere | Architecture::Ada | Architecture::Hopper | Architecture::Blackwell => {
                wiring != Wiring::Switch || self.hardware().fabric_manager
            }
        };
        let others = (first..first + count).filter(|other| *other != gpu);
        Ok(match wiring {
            _ if by_itself => Vec::new(),
            Wiring::None => Vec::new(),
            Wiring::Pairs => others.filter(|other| (other - first) ^ 1 == gpu - first).collect(),
            Wiring::Switch | Wiring::Mesh => others.collect(),
        })
    }

    fn links(&self, gpu: u32) -> Result<Links, Return> {
        self.hardware().slots.get(gpu as usize).map(|slot| slot.nvlink).ok_or(Return::InvalidArgument)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::{Description, GpuDescription};

    fn machine(model: &str, count: u32, nvlink: Option<Wiring>, fabric_manager: bool) -> Machine {
        let gpu = GpuDescription { nvlink, ..GpuDescription::new(model, count) };
        Machine::new(&Description { fabric_manager, ..Description::of(vec![gpu]) }).unwrap()
    }

    fn ends(machine: &Machine, gpu: u32) -> Vec<End> {
        let mut ends: Vec<End> = (0..).map_while(|port| machine.link(gpu, port).ok()).flatten().collect();
        ends.dedup();
        ends
    }

    #[test]
    fn each_wiring_is_symmetric() {
        let bridged = machine("a30-24", 3, Some(Wiring::Pairs), true);
        assert_eq!((ends(&bridged, 0), ends(&bridged, 1)), (vec![End::Gpu(1)], vec![End::Gpu(0)]));
        assert_eq!(ends(&bridged, 2), [], "the odd one out");
        let mesh = machine("a100-40", 4, Some(Wiring::Mesh), true);
        for gpu in 0..4 {
            for other in (0..4).filter(|other| *other != gpu) {
                assert!(ends(&mesh, gpu).contains(&End::Gpu(other)), "{gpu} to {other}");
            }
            assert!(!ends(&mesh, gpu).contains(&End::Gpu(gpu)));
        }
        assert!(ends(&machine("a100-80", 2, None, true), 0).iter().all(|end| matches!(end, End::Switch(_))));
        assert_eq!(ends(&machine("a30-24", 2, None, true), 0), []);
        assert_eq!(machine("t4", 1, None, true).link(0, 0), Err(Return::NotSupported));
    }

    #[test]
    fn switched_gpus_reset_together_without_fabric_manager() {
        assert_eq!(machine("a100-80", 3, None, true).reset_with(1).unwrap(), [0; 0]);
        assert_eq!(machine("a100-80", 3, None, false).reset_with(1).unwrap(), [0, 2]);
        assert_eq!(machine("a100-80", 4, Some(Wiring::Mesh), false).reset_with(1).unwrap(), [0; 0]);
        assert_eq!(machine("a30-24", 4, Some(Wiring::Pairs), false).reset_with(1).unwrap(), [0; 0]);
    }
}
