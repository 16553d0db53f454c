//! A GPU: MIG mode, reset, reboot, loss, memory.
//!
//! MIG mode depends on the architecture of the GPU:
//!
//! ```text
//!  Ampere    off ──SetMigMode on──▶ off, pending on ──reset or reboot──▶ on      (survives reboots)
//!  Hopper +  off ──SetMigMode on──▶ on ──reboot──▶ off       (busy check: at the first instance)
//! ```
//!
//! A change of MIG mode that cannot take effect at once still succeeds. Its activation status is
//! `IN_USE` if a process has the GPU open, and `RESET_REQUIRED` otherwise.

use serde::{Deserialize, Serialize};

use super::{GpuInstance, Machine, Process, ProcessKind, Timeslice, Usage};
use crate::returns::Return;

/// The variable state of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Index.
    pub index: u32,
    /// Whether MIG mode is on.
    pub mig: bool,
    /// MIG mode after the next reset.
    pub mig_pending: bool,
    /// Whether the GPU has fallen off the bus. It then stays lost until the next boot.
    pub lost: bool,
    /// GPU instances, by id.
    pub instances: Vec<GpuInstance>,
    /// Processes on the GPU and in its instances.
    pub processes: Vec<Process>,
    /// Compute mode, as NVML's number; 0 is DEFAULT.
    pub compute_mode: u32,
    /// Time-slice level.
    #[serde(default)]
    pub timeslice: Timeslice,
    /// Persistence mode.
    pub persistence: bool,
    /// Whether accounting mode is on. Enabling MIG disables it.
    pub accounting: bool,
    /// Counts of the row remapper. They survive resets and boots, as on a real GPU.
    #[serde(default)]
    pub rows: RemappedRows,
    /// What processes have done on the GPU.
    #[serde(default)]
    pub usage: Usage,
    /// Conditions that limit the clocks. They last until they are changed.
    #[serde(default)]
    pub conditions: Conditions,
}

/// Conditions of a board, which a test can set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conditions {
    /// Power limit in mW. `None` is the limit of the model.
    pub power_limit_mw: Option<u32>,
    /// Additional temperature in °C, as with a blocked air flow.
    pub heat_c: u32,
}

/// Rows of memory that were replaced by spare rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemappedRows {
    /// Number of rows that were replaced because of correctable errors.
    pub correctable: u32,
    /// Number of rows that were replaced because of uncorrectable errors.
    pub uncorrectable: u32,
    /// Whether replacements are pending until the next reset.
    pub pending: bool,
    /// Whether a replacement has failed because no spare row was left.
    pub failed: bool,
}

/// Memory in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Capacity.
    pub total_mib: u64,
    /// Memory that driver and firmware reserve.
    pub reserved_mib: u64,
    /// Memory that processes use.
    pub used_mib: u64,
}

impl Gpu {
    /// Creates a GPU whose driver was loaded at this time.
    pub(super) fn new(index: u32, mig: bool, now_ms: u64) -> Self {
        Self {
            index,
            mig,
            mig_pending: mig,
            lost: false,
            instances: Vec::new(),
            processes: Vec::new(),
            compute_mode: 0,
            timeslice: Timeslice::Default,
            persistence: true,
            accounting: false,
            rows: RemappedRows::default(),
            usage: Usage::starting(now_ms),
            conditions: Conditions::default(),
        }
    }

    /// Returns the GPU instance with this id.
    #[must_use]
    pub fn instance(&self, id: u32) -> Option<&GpuInstance> {
        self.instances.iter().find(|instance| instance.id == id)
    }

    /// Returns the processes of any kind in this GPU instance. If `compute_instance` is given,
    /// returns only the processes in that compute instance.
    pub fn processes_in(&self, gpu_instance: u32, compute_instance: Option<u32>) -> impl Iterator<Item = &Process> {
        self.processes.iter().filter(move |p| {
            p.gpu_instance == Some(gpu_instance)
                && (compute_instance.is_none() || p.compute_instance == compute_instance)
        })
    }

    /// Returns the processes that the driver lists for a kind. The driver never lists `Handle`. It
    /// lists an MPS client twice: as `Compute` and as `Mps` (`M+C` in nvidia-smi). It lists an MPS
    /// server as an ordinary compute process (`C`).
    pub fn listed(&self, kind: ProcessKind) -> impl Iterator<Item = &Process> {
        self.processes.iter().filter(move |p| match (kind, p.kind) {
            (ProcessKind::Compute, ProcessKind::Compute | ProcessKind::Mps)
            | (ProcessKind::Graphics, ProcessKind::Graphics)
            | (ProcessKind::Mps, ProcessKind::Mps) => true,
            (ProcessKind::Compute, ProcessKind::Graphics | ProcessKind::Handle)
            | (ProcessKind::Graphics, ProcessKind::Compute | ProcessKind::Mps | ProcessKind::Handle)
            | (ProcessKind::Mps, ProcessKind::Compute | ProcessKind::Graphics | ProcessKind::Handle)
            | (ProcessKind::Handle, _) => false,
        })
    }

    fn forget_instances(&mut self) {
        self.instances.clear();
        self.processes.clear();
    }
}

impl Machine {
    /// Enables or disables MIG mode. Returns the activation status: `Success` if the mode is in
    /// effect, `InUse` or `ResetRequired` if the mode is pending.
    ///
    /// # Errors
    /// `NotSupported` on a GPU without MIG, `InUse` if MIG is disabled while instances exist,
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn set_mig_mode(&mut self, gpu: u32, enable: bool, caller: u32) -> Result<Return, Return> {
        let part = self.part(gpu)?;
        let others = self.clients(Some(caller)).next().is_some();
        let resets_itself = self.identity(gpu)?.resets_itself;
        let at = self.gpu_mut(gpu)?;
        if !part.has_mig() {
            return Err(Return::NotSupported);
        }
        if !enable && !at.instances.is_empty() {
            return Err(Return::InUse);
        }
        if at.mig == enable && at.mig_pending == enable {
            return Ok(Return::Success);
        }
        at.mig_pending = enable;
        let busy = others || !at.processes.is_empty();
        let activation = if at.mig == enable || !part.mode_needs_reset() || (resets_itself && !busy) {
            Return::Success
        } else if busy {
            Return::InUse
        } else {
            Return::ResetRequired
        };
        if activation == Return::Success && at.mig != enable {
            self.activate(gpu)?;
            if part.mode_needs_reset() {
                self.restart_usage(gpu)?;
            }
        }
        Ok(activation)
    }

    /// Makes a change of MIG mode pending although it could take effect. A fault rule with an
    /// activation status uses this.
    ///
    /// # Errors
    /// As [`Machine::set_mig_mode`].
    pub fn set_mig_mode_pending(&mut self, gpu: u32, enable: bool) -> Result<(), Return> {
        if !self.part(gpu)?.has_mig() {
            return Err(Return::NotSupported);
        }
        self.gpu_mut(gpu)?.mig_pending = enable;
        Ok(())
    }

    /// Adds a memory error for the row remapper. The next reset replaces the row, unless no spare
    /// row is left.
    ///
    /// # Errors
    /// `InvalidArgument` if the GPU does not exist, `NotSupported` on a GPU without a row remapper,
    /// `GpuIsLost`.
    pub fn remap_row(&mut self, gpu: u32, uncorrectable: bool, spare: bool) -> Result<(), Return> {
        if !self.part(gpu)?.remaps_rows() {
            return Err(Return::NotSupported);
        }
        let rows = &mut self.gpu_mut(gpu)?.rows;
        match (spare, uncorrectable) {
            (false, _) => rows.failed = true,
            (true, false) => rows.correctable += 1,
            (true, true) => rows.uncorrectable += 1,
        }
        rows.pending |= spare;
        Ok(())
    }

    /// Sets all counters of activity and energy to 0, as a reset does.
    fn restart_usage(&mut self, gpu: u32) -> Result<(), Return> {
        let now_ms = self.now_ms;
        self.gpu_mut(gpu)?.usage = Usage::starting(now_ms);
        Ok(())
    }

    /// Sets the conditions of a board.
    ///
    /// # Errors
    /// `InvalidArgument` for a power limit of 0 or above the limit of the model, `GpuIsLost`.
    pub fn set_conditions(&mut self, gpu: u32, conditions: Conditions) -> Result<(), Return> {
        self.gpu(gpu)?;
        let most = super::Board::of(self.model(gpu)?).power_limit_mw;
        if conditions.power_limit_mw.is_some_and(|limit| limit == 0 || limit > most) {
            return Err(Return::InvalidArgument);
        }
        self.settle(gpu);
        self.gpu_mut(gpu)?.conditions = conditions;
        Ok(())
    }

    /// Activates the pending mode.
    fn activate(&mut self, gpu: u32) -> Result<(), Return> {
        let at = self.gpu_mut(gpu)?;
        at.mig = at.mig_pending;
        if at.mig {
            at.accounting = false;
            at.forget_settings();
        }
        self.mig_changed(gpu, None, None);
        Ok(())
    }

    /// Resets a GPU: destroys its instances, and activates a pending mode.
    ///
    /// # Errors
    /// `InUse` while a process uses the GPU or a client other than `caller` has the driver open,
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn reset(&mut self, gpu: u32, caller: Option<u32>) -> Result<(), Return> {
        if self.clients(caller).next().is_some() || !self.gpu(gpu)?.processes.is_empty() {
            return Err(Return::InUse);
        }
        let at = self.gpu_mut(gpu)?;
        let changed = at.mig != at.mig_pending || !at.instances.is_empty();
        at.forget_instances();
        at.forget_settings();
        at.rows.pending = false;
        self.restart_usage(gpu)?;
        if changed {
            self.activate(gpu)?;
        }
        Ok(())
    }

    /// Starts the counters of all GPUs, as loading the driver does.
    pub fn load_driver(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        self.state.gpus.iter_mut().for_each(|at| at.usage = Usage::starting(now_ms));
    }

    /// Boots the host again. Removes instances, processes and clients, and restores lost GPUs. The
    /// architecture of a GPU determines whether it keeps its MIG mode.
    pub fn reboot(&mut self, boot_id: String) {
        let hardware = std::sync::Arc::clone(self.hardware());
        self.state.boot += 1;
        self.state.boot_id = boot_id;
        self.state.clients.clear();
        self.state.events = super::Events::default();
        for (at, slot) in self.state.gpus.iter_mut().zip(&hardware.slots) {
            let kept = slot.part.mode_needs_reset() && at.mig_pending;
            let mig = slot.part.has_mig() && (kept || slot.identity.mig_at_boot);
            let rows = RemappedRows { pending: false, ..at.rows };
            let (persistence, conditions) = (at.persistence, at.conditions);
            *at = Gpu { persistence, rows, conditions, ..Gpu::new(at.index, mig, self.now_ms) };
        }
    }

    /// Makes the GPU fall off the bus until the next boot. On hardware, its processes also end.
    ///
    /// # Errors
    /// `InvalidArgument` if the GPU does not exist.
    pub fn lose(&mut self, gpu: u32) -> Result<(), Return> {
        self.settle(gpu);
        let at = self.state.gpus.get_mut(gpu as usize).ok_or(Return::InvalidArgument)?;
        at.lost = true;
        Ok(())
    }

    /// Sets persistence mode.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn set_persistence(&mut self, gpu: u32, on: bool) -> Result<(), Return> {
        self.gpu_mut(gpu)?.persistence = on;
        Ok(())
    }

    /// Sets accounting mode.
    ///
    /// # Errors
    /// `NotSupported` with MIG on, `GpuIsLost`, `InvalidArgument`.
    pub fn set_accounting(&mut self, gpu: u32, on: bool) -> Result<(), Return> {
        let at = self.gpu_mut(gpu)?;
        if at.mig {
            return Err(Return::NotSupported);
        }
        at.accounting = on;
        Ok(())
    }

    /// Returns the memory of a whole GPU.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn memory(&self, gpu: u32) -> Result<Memory, Return> {
        let at = self.gpu(gpu)?;
        let total = self.model(gpu)?.board_memory_mib;
        // A driver reserves approximately this amount of memory on a data-centre board.
        let reserved = total / 128;
        let used: u64 = at.processes.iter().map(|p| p.memory_mib).sum();
        Ok(Memory { total_mib: total, reserved_mib: reserved, used_mib: used.min(total - reserved) })
    }
}
