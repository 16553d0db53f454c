//! Settings with which a whole GPU is shared: compute mode and time-slice level.
//!
//! ```text
//!              set                                             reset, reboot, MIG mode on,
//!  DEFAULT ──────────▶ as set, for contexts that are made later ──────────────────────────▶ DEFAULT
//!                                                              no client, persistence off
//! ```
//!
//! The sources do not agree about how long these settings last:
//! - NVIDIA's "Driver Persistence, Data Persistence": compute mode lasts while a GPU is
//!   initialised, so it ends with the GPU's last client.
//! - The nvidia-smi manual: compute mode does not survive a reboot.
//! - The open kernel modules store the compute mode in the driver's registry "so that it persists
//!   even after the last client disconnects" (`subdeviceCtrlCmdGpuSetComputeModeRules`). They store
//!   the time-slice level in a database by UUID (`gpudbSetGpuComputePolicyConfig`). Both settings
//!   last until the module is unloaded.
//!
//! These lifetimes were not verified on hardware. The simulator uses the shortest of them: a program that works with
//! the shortest lifetime also works with the longer lifetimes.

use super::{Gpu, Machine, Process, ProcessKind, Timeslice};
use crate::returns::Return;

/// Names of the compute modes, in the order of NVML's numbers (`nvmlComputeMode_t`).
pub const COMPUTE_MODES: [&str; 4] = ["DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"];

/// NVML's numbers of the compute modes that limit contexts.
const PROHIBITED: u32 = 2;
const EXCLUSIVE_PROCESS: u32 = 3;

impl Gpu {
    /// Returns whether the compute mode allows the context of a new process. Contexts that exist stay.
    /// - PROHIBITED: no process can create a CUDA context.
    /// - EXCLUSIVE_PROCESS: only one process has contexts. Clients of an MPS server compute in the context of the
    ///   server, so they are not counted.
    ///
    /// A program whose context is refused gets CUDA error 46 (`cudaErrorDevicesUnavailable`).
    #[must_use]
    pub fn allows_context(&self, process: &Process) -> bool {
        let computes = |process: &Process| match process.kind {
            ProcessKind::Compute => true,
            ProcessKind::Graphics | ProcessKind::Mps | ProcessKind::Handle => false,
        };
        match (self.compute_mode, process.kind) {
            (_, ProcessKind::Graphics | ProcessKind::Handle) => true,
            (PROHIBITED, ProcessKind::Compute | ProcessKind::Mps) => false,
            (EXCLUSIVE_PROCESS, ProcessKind::Compute) => {
                self.processes.iter().all(|other| other.pid == process.pid || !computes(other))
            }
            (_, ProcessKind::Compute | ProcessKind::Mps) => true,
        }
    }

    /// Sets compute mode and time-slice level to the values of a newly initialised GPU.
    pub(super) fn forget_settings(&mut self) {
        self.compute_mode = 0;
        self.timeslice = Timeslice::Default;
    }
}

impl Machine {
    /// Sets the compute mode by NVML's number. If the GPU is in use, the call succeeds and the
    /// contexts stay, because the driver checks the compute mode only when a context is created.
    ///
    /// # Errors
    /// - `NotSupported` with MIG on, for every mode. Source:
    ///   `subdeviceCtrlCmdGpuSetComputeModeRules` of the open kernel modules. nvidia-smi prints
    ///   "Setting compute mode to EXCLUSIVE_PROCESS is not supported on a MIG-enabled device."
    ///   (NVIDIA/DCGM issue 82).
    /// - `InvalidArgument` for an unknown mode and for EXCLUSIVE_THREAD, which nvidia-smi no longer
    ///   supports.
    /// - `GpuIsLost`.
    pub fn set_compute_mode(&mut self, gpu: u32, mode: u32) -> Result<(), Return> {
        let at = self.gpu_mut(gpu)?;
        match (at.mig, mode) {
            (true, _) => Err(Return::NotSupported),
            (false, 0 | 2 | 3) => {
                at.compute_mode = mode;
                Ok(())
            }
            (false, _) => Err(Return::InvalidArgument),
        }
    }

    /// Returns the time-slice level.
    ///
    /// # Errors
    /// `NotSupported` before Turing (`bComputePolicyTimesliceSupported` of the open kernel modules)
    /// and with MIG on, `GpuIsLost`, `InvalidArgument`.
    pub fn timeslice(&self, gpu: u32) -> Result<Timeslice, Return> {
        let at = self.gpu(gpu)?;
        if self.part(gpu)?.has_timeslice() && !at.mig { Ok(at.timeslice) } else { Err(Return::NotSupported) }
    }

    /// Sets the time-slice level.
    ///
    /// # Errors
    /// As [`Machine::timeslice`].
    pub fn set_timeslice(&mut self, gpu: u32, level: Timeslice) -> Result<(), Return> {
        self.timeslice(gpu)?;
        self.gpu_mut(gpu)?.timeslice = level;
        Ok(())
    }

    /// If the driver has no client, resets the settings of all GPUs without persistence mode.
    pub(super) fn put_down_idle(&mut self) {
        if self.state.clients.is_empty() {
            let idle = |at: &&mut Gpu| !at.persistence && at.processes.is_empty();
            self.state.gpus.iter_mut().filter(idle).for_each(Gpu::forget_settings);
        }
    }
}
