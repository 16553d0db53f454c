//! What processes do on a GPU over time: sums for the GPU, each GPU instance and each process, and the energy.
//!
//! Between two changes of the load, all rates are constant. So the state has only the sums at the last change, and a
//! reader adds the time since then. Every function that changes the load first calls `Machine::settle`:
//!
//! ```text
//!   sums ──settle──▶ sums + rates × time ──change of load──▶ other rates from now on
//!    └─ GPU reset, reboot: start again from 0
//! ```
//!
//! The sums of an instance belong to its generation. A new instance in the same slot starts from 0, although it has
//! the same id and UUID.

use serde::{Deserialize, Serialize};

use super::Pid;
use super::load::Load;
use super::sums::{self, Mark, Rates, Sums};

/// The sums of a GPU and of everything on it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Time up to which the sums are complete, in ms.
    pub(super) since_ms: u64,
    /// Sums of the whole GPU.
    pub(super) whole: Sums,
    /// Energy since the driver was loaded or the GPU was reset, in µJ.
    pub(super) energy_uj: u64,
    /// Time under the power limit, in ms.
    pub(super) power_limited_ms: u64,
    /// Time above the slowdown temperature, in ms.
    pub(super) heat_limited_ms: u64,
    /// Sums of GPU instances that had a process.
    pub(super) instances: Vec<InstanceSums>,
    /// Processes with a set load or with sums.
    pub(super) tasks: Vec<ProcessSums>,
    /// The whole GPU at recent changes of the load.
    pub(super) past: Vec<Mark>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InstanceSums {
    pub(super) generation: u64,
    pub(super) sums: Sums,
}

/// A process of a GPU: its load, and what it has done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessSums {
    #[serde(flatten)]
    pub(super) pid: Pid,
    pub(super) gpu_instance: Option<u32>,
    /// `None` is the usual load.
    pub(super) load: Option<Load>,
    pub(super) busy: u64,
    pub(super) dram: u64,
    pub(super) past: Vec<Mark>,
}

impl Usage {
    /// Creates sums that start from 0 at a time.
    pub(super) fn starting(now_ms: u64) -> Self {
        Self { since_ms: now_ms, past: vec![Mark { at_ms: now_ms, ..Mark::default() }], ..Self::default() }
    }

    pub(super) fn task(&mut self, pid: Pid, gpu_instance: Option<u32>) -> &mut ProcessSums {
        let found = self.tasks.iter().position(|task| task.pid == pid && task.gpu_instance == gpu_instance);
        let at = found.unwrap_or_else(|| {
            let past = vec![Mark { at_ms: self.since_ms, ..Mark::default() }];
            self.tasks.push(ProcessSums { pid, gpu_instance, load: None, busy: 0, dram: 0, past });
            self.tasks.len() - 1
        });
        &mut self.tasks[at]
    }

    pub(super) fn load_of(&self, pid: Pid, gpu_instance: Option<u32>) -> Option<Load> {
        self.tasks.iter().find(|task| task.pid == pid && task.gpu_instance == gpu_instance).and_then(|task| task.load)
    }
}

/// What a GPU does between two changes of its load.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CurrentUse {
    pub(super) whole: Rates,
    /// Rates of the GPU instances with processes, relative to the instance, by generation.
    pub(super) instances: Vec<(u64, Rates)>,
    /// Rates of the processes, relative to the place of the process.
    pub(super) tasks: Vec<(Pid, Option<u32>, Rates)>,
    pub(super) power_mw: u64,
    pub(super) power_limited: bool,
    pub(super) heat_limited: bool,
    pub(super) temperature_c: u32,
}

impl Usage {
    pub(super) fn add(&mut self, now: &CurrentUse, ms: u64) {
        self.whole = self.whole.after(now.whole, ms);
        self.energy_uj = self.energy_uj.saturating_add(now.power_mw.saturating_mul(ms));
        self.power_limited_ms += u64::from(now.power_limited) * ms;
        self.heat_limited_ms += u64::from(now.heat_limited) * ms;
        let end = self.since_ms + ms;
        let mark = Mark { at_ms: end, busy: self.whole.busy, dram: self.whole.dram, energy_uj: self.energy_uj };
        sums::push(&mut self.past, mark);
        for (generation, rates) in &now.instances {
            match self.instances.iter_mut().find(|one| one.generation == *generation) {
                Some(one) => one.sums = one.sums.after(*rates, ms),
                None => {
                    let sums = Sums::default().after(*rates, ms);
                    self.instances.push(InstanceSums { generation: *generation, sums });
                }
            }
        }
        for (pid, place, rates) in &now.tasks {
            let task = self.task(*pid, *place);
            let sums = Sums { busy: task.busy, dram: task.dram, ..Sums::default() }.after(*rates, ms);
            (task.busy, task.dram) = (sums.busy, sums.dram);
            sums::push(&mut task.past, Mark { at_ms: end, busy: task.busy, dram: task.dram, energy_uj: 0 });
        }
    }
}
