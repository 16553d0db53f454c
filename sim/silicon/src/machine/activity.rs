//! Changes of the load of processes, and what a GPU does at present and has done up to a time. `usage` has the sums.

use super::load::Load;
use super::sums::{Rates, Sums};
use super::usage::{CurrentUse, ProcessSums};
use super::{Board, Gpu, Machine, Pid, Process, ProcessKind};
use crate::returns::Return;

/// Sums at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activity {
    /// The time, in ms.
    pub at_ms: u64,
    /// Sums since the driver was loaded, the GPU was reset or the GPU instance was created.
    pub sums: Sums,
    /// Whether there is data: a GPU instance without compute instance has none.
    pub has_data: bool,
}

/// Core temperature in °C from which the GPU lowers its clocks.
pub const SLOWDOWN_C: u32 = 87;

impl Machine {
    /// Sets the time of the following changes, in milliseconds of the host's clock.
    pub fn set_time(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
    }

    /// Returns what a GPU does at present, even if the GPU is lost.
    pub(super) fn current_use(&self, at: &Gpu) -> CurrentUse {
        let slot = &self.hardware().slots[at.index as usize];
        let (part, seed) = (&slot.part, slot.identity.seed);
        let board = Board::of(&part.model);
        let limit = at.conditions.power_limit_mw.unwrap_or(board.power_limit_mw);
        let contexts: Vec<&Process> = at.processes.iter().filter(|p| p.kind != ProcessKind::Handle).collect();
        let mut now = CurrentUse::default();
        // Without load, a board needs 12 % of its power, and the first context 5 % more.
        let board_mw = u64::from(board.power_limit_mw);
        let mut demand = board_mw * 12 / 100 + if contexts.is_empty() { 0 } else { board_mw * 5 / 100 };
        let mut places: Vec<Option<u32>> = contexts.iter().map(|process| process.gpu_instance).collect();
        places.sort_unstable();
        places.dedup();
        for place in places {
            let mut here: Vec<(Pid, Load)> = Vec::new();
            for process in contexts.iter().filter(|process| process.gpu_instance == place) {
                // A process that is in two lists, or in two compute instances, has one load.
                if here.iter().all(|(pid, _)| *pid != process.pid) {
                    let set = at.usage.load_of(process.pid, place);
                    here.push((process.pid, set.unwrap_or_else(|| Load::usual(seed, process.pid.pid))));
                }
            }
            let wanted = here.iter().map(|(_, load)| Rates::of(load)).fold(Rates::default(), Rates::plus);
            let rates = wanted.limited();
            let instance = place.and_then(|id| at.instance(id));
            let profile = instance.and_then(|gi| part.profile(gi.profile_id).ok().map(|profile| (gi, profile)));
            // The part of the GPU that the place has: of its compute slices, and of its memory slices.
            let (slices, memory) = match profile {
                Some((gi, profile)) => (
                    (u32::from(profile.data.slices), u32::from(part.model.compute_slices.max(1))),
                    (u32::from(gi.placement.size), u32::from(part.model.memory_slices.max(1))),
                ),
                None => ((1, 1), (1, 1)),
            };
            let of = |rate: u32, (own, all): (u32, u32)| (u64::from(rate) * u64::from(own) / u64::from(all)) as u32;
            now.whole = now.whole.plus(Rates {
                busy: of(rates.busy, slices),
                sm: of(rates.sm, slices),
                tensor: of(rates.tensor, slices),
                dram: of(rates.dram, memory),
            });
            let place_mw = board_mw * u64::from(slices.0) / u64::from(slices.1);
            demand += here
                .iter()
                .map(|(_, load)| {
                    let own = Rates::of(load).granted(wanted);
                    let granted = Load { sm_ppm: own.sm, tensor_ppm: own.tensor, dram_ppm: own.dram, ..*load };
                    granted.power_mw(place_mw)
                })
                .sum::<u64>();
            now.instances.extend(instance.map(|gi| (gi.generation, rates)));
            now.tasks.extend(here.iter().map(|(pid, load)| (*pid, place, Rates::of(load).granted(wanted))));
        }
        now.whole = now.whole.limited();
        now.power_mw = demand.min(u64::from(limit));
        now.power_limited = demand > u64::from(limit);
        // The cast is exact: the power is at most the limit of the board.
        now.temperature_c = 28 + (now.power_mw * 45 / board_mw.max(1)) as u32 + at.conditions.heat_c;
        now.heat_limited = now.temperature_c >= SLOWDOWN_C;
        now
    }

    /// Completes the sums of a GPU up to the present time. Functions call this before they change the load.
    pub(super) fn settle(&mut self, gpu: u32) {
        let now_ms = self.now_ms;
        let Some(at) = self.state.gpus.get(gpu as usize) else { return };
        // If the clock was set back, the sums wait until it has caught up.
        let ms = now_ms.saturating_sub(at.usage.since_ms);
        let now = (ms > 0 && !at.lost).then(|| self.current_use(at));
        let Some(at) = self.state.gpus.get_mut(gpu as usize) else { return };
        let generations: Vec<u64> = at.instances.iter().map(|gi| gi.generation).collect();
        let usage = &mut at.usage;
        if let Some(now) = now {
            usage.add(&now, ms);
        }
        usage.since_ms = usage.since_ms.max(now_ms);
        usage.instances.retain(|one| generations.contains(&one.generation));
        let present = |task: &ProcessSums| {
            at.processes.iter().any(|process| process.pid == task.pid && process.gpu_instance == task.gpu_instance)
        };
        usage.tasks.retain(present);
    }

    /// Completes the sums of all GPUs.
    pub(crate) fn settle_all(&mut self) {
        (0..self.state.gpus.len() as u32).for_each(|gpu| self.settle(gpu));
    }

    /// Completes the sums of some GPUs, of all GPUs for `None`.
    pub(super) fn settle_some(&mut self, gpu: Option<u32>) {
        match gpu {
            Some(gpu) => self.settle(gpu),
            None => self.settle_all(),
        }
    }

    /// Sets the load of a process in all its places on a GPU. `None` sets the usual load.
    ///
    /// # Errors
    /// `NotFound` if the process has no context on the GPU, `InvalidArgument` if a part is larger than the whole,
    /// `GpuIsLost`.
    pub fn set_load(&mut self, gpu: u32, pid: u32, load: Option<Load>) -> Result<(), Return> {
        if load.is_some_and(|load| !load.is_possible()) {
            return Err(Return::InvalidArgument);
        }
        let at = self.gpu(gpu)?;
        let own = |process: &&Process| process.pid.pid == pid && process.kind != ProcessKind::Handle;
        let places: Vec<_> = at.processes.iter().filter(own).map(|p| (p.pid, p.gpu_instance)).collect();
        if places.is_empty() {
            return Err(Return::NotFound);
        }
        self.settle(gpu);
        let usage = &mut self.gpu_mut(gpu)?.usage;
        for (pid, gpu_instance) in places {
            usage.task(pid, gpu_instance).load = load;
        }
        Ok(())
    }

    /// Returns the load of a process on a GPU, as set or as usual.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn load(&self, gpu: u32, process: &Process) -> Result<Load, Return> {
        let set = self.gpu(gpu)?.usage.load_of(process.pid, process.gpu_instance);
        Ok(set.unwrap_or(Load::usual(self.identity(gpu)?.seed, process.pid.pid)))
    }

    /// Returns the sums of a GPU, or of one of its GPU instances, at a time.
    ///
    /// # Errors
    /// `NotFound` if the instance does not exist, `NotSupported` for an instance with MIG off, `GpuIsLost`,
    /// `InvalidArgument`.
    pub fn activity(&self, gpu: u32, gpu_instance: Option<u32>, at_ms: u64) -> Result<Activity, Return> {
        let at = self.gpu(gpu)?;
        let now = self.current_use(at);
        let ms = at_ms.saturating_sub(at.usage.since_ms);
        let Some(id) = gpu_instance else {
            return Ok(Activity { at_ms, sums: at.usage.whole.after(now.whole, ms), has_data: true });
        };
        let instance = self.gpu_instance(gpu, id)?;
        let rates = now.instances.iter().find(|(generation, _)| *generation == instance.generation);
        let before = at.usage.instances.iter().find(|one| one.generation == instance.generation);
        let sums = before.map_or(Sums::default(), |one| one.sums);
        let rates = rates.map_or(Rates::default(), |(_, rates)| *rates);
        Ok(Activity { at_ms, sums: sums.after(rates, ms), has_data: !instance.instances.is_empty() })
    }

    /// Returns the energy in µJ that a GPU has used since the driver was loaded or the GPU was reset.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn energy_uj(&self, gpu: u32, at_ms: u64) -> Result<u64, Return> {
        let at = self.gpu(gpu)?;
        let ms = at_ms.saturating_sub(at.usage.since_ms);
        Ok(at.usage.energy_uj.saturating_add(self.current_use(at).power_mw.saturating_mul(ms)))
    }

    /// Returns how long a GPU was under its power limit, and how long above its slowdown temperature, in ms.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn limited_ms(&self, gpu: u32, at_ms: u64) -> Result<(u64, u64), Return> {
        let at = self.gpu(gpu)?;
        let ms = at_ms.saturating_sub(at.usage.since_ms);
        let now = self.current_use(at);
        Ok((
            at.usage.power_limited_ms + u64::from(now.power_limited) * ms,
            at.usage.heat_limited_ms + u64::from(now.heat_limited) * ms,
        ))
    }
}
