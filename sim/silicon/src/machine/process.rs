//! Processes of the simulated GPUs, and clients of the simulated driver.
//!
//! The processes are real, because monitors read `/proc`. The state identifies a process by its pid
//! and its start time. A process that has ended is removed from the state.

use serde::{Deserialize, Serialize};

use super::Machine;
use crate::returns::Return;

/// How a process uses the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessKind {
    /// A process that has a CUDA context without MPS.
    Compute,
    /// A process with a graphics context.
    Graphics,
    /// A client of an MPS server. The server itself is a compute process.
    Mps,
    /// A process that only has a handle open, such as a monitor that leaks a handle. The driver
    /// does not list the process, but treats the GPU or the instance as in use.
    Handle,
}

impl ProcessKind {
    /// All kinds.
    pub const ALL: [ProcessKind; 4] =
        [ProcessKind::Compute, ProcessKind::Graphics, ProcessKind::Mps, ProcessKind::Handle];

    /// Returns the name that descriptions and the command line use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ProcessKind::Compute => "compute",
            ProcessKind::Graphics => "graphics",
            ProcessKind::Mps => "mps",
            ProcessKind::Handle => "handle",
        }
    }
}

/// A real process. The start time distinguishes it from other processes with the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pid {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot (field 22 of `/proc/<pid>/stat`).
    pub start: u64,
}

/// A process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// The process.
    #[serde(flatten)]
    pub pid: Pid,
    /// How the process uses the GPU.
    pub kind: ProcessKind,
    /// Used memory in MiB.
    pub memory_mib: u64,
    /// Id of the GPU instance that the process uses. `None` means the whole GPU.
    pub gpu_instance: Option<u32>,
    /// Id of the compute instance that the process uses.
    pub compute_instance: Option<u32>,
}

/// A process that has called `nvmlInit` and not yet `nvmlShutdown`, so it has the driver open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// The process.
    #[serde(flatten)]
    pub pid: Pid,
}

impl Machine {
    /// Puts a process on a GPU, or in an instance of the GPU. Replaces an entry with the same pid,
    /// place and kind.
    ///
    /// # Errors
    /// `NotFound` if an instance does not exist, `InvalidArgument` for a compute process without an
    /// instance on a GPU in MIG mode, `InsufficientResources` if the free memory is too small, or
    /// `InUse` if the compute mode does not allow the context (see `Gpu::allows_context`).
    pub fn attach(&mut self, gpu: u32, process: Process) -> Result<(), Return> {
        let part = self.part(gpu)?;
        let at = self.gpu(gpu)?;
        let room = match process.gpu_instance {
            Some(id) => {
                let instance = at.instance(id).ok_or(Return::NotFound)?;
                if let Some(ci) = process.compute_instance {
                    instance.compute(ci).ok_or(Return::NotFound)?;
                }
                part.profile(instance.profile_id)?.data.memory_mib
            }
            None if process.compute_instance.is_some() => return Err(Return::InvalidArgument),
            None if at.mig && process.kind != ProcessKind::Handle && process.kind != ProcessKind::Graphics => {
                return Err(Return::InvalidArgument);
            }
            None => part.model.board_memory_mib,
        };
        if !at.allows_context(&process) {
            return Err(Return::InUse);
        }
        let same = |p: &Process| {
            p.pid == process.pid
                && p.kind == process.kind
                && p.gpu_instance == process.gpu_instance
                && p.compute_instance == process.compute_instance
        };
        let used: u64 = at
            .processes
            .iter()
            .filter(|p| p.gpu_instance == process.gpu_instance && !same(p))
            .map(|p| p.memory_mib)
            .sum();
        if used.saturating_add(process.memory_mib) > room {
            return Err(Return::InsufficientResources);
        }
        self.settle(gpu);
        let at = self.gpu_mut(gpu)?;
        at.processes.retain(|p| !same(p));
        at.processes.push(process);
        Ok(())
    }

    /// Changes the memory of a process in all its places on a GPU.
    ///
    /// # Errors
    /// `NotFound` if the process is not on the GPU, otherwise as [`Machine::attach`].
    pub fn set_memory(&mut self, gpu: u32, pid: u32, memory_mib: u64) -> Result<(), Return> {
        let own: Vec<Process> = self.gpu(gpu)?.processes.iter().filter(|p| p.pid.pid == pid).copied().collect();
        if own.is_empty() {
            return Err(Return::NotFound);
        }
        let mut after = self.clone();
        for process in own {
            after.attach(gpu, Process { memory_mib, ..process })?;
        }
        *self = after;
        Ok(())
    }

    /// Removes a process from a GPU, or from all GPUs if `gpu` is `None`. Returns the number of
    /// removed entries.
    pub fn detach(&mut self, pid: u32, gpu: Option<u32>) -> usize {
        self.settle_some(gpu);
        let mut gone = 0;
        for at in self.state.gpus.iter_mut().filter(|at| gpu.is_none_or(|index| index == at.index)) {
            let before = at.processes.len();
            at.processes.retain(|p| p.pid.pid != pid);
            gone += before - at.processes.len();
        }
        self.put_down_idle();
        gone
    }

    /// Registers a client of the driver.
    pub fn open(&mut self, pid: Pid) {
        if !self.state.clients.iter().any(|client| client.pid == pid) {
            self.state.clients.push(Client { pid });
        }
    }

    /// Removes a client of the driver.
    pub fn close(&mut self, pid: Pid) {
        self.state.clients.retain(|client| client.pid != pid);
        self.put_down_idle();
    }

    /// Returns the clients of the driver, except the process with the pid `but`.
    pub fn clients(&self, but: Option<u32>) -> impl Iterator<Item = &Client> {
        self.state.clients.iter().filter(move |client| Some(client.pid.pid) != but)
    }

    /// Removes processes and clients that have ended. If no client of the driver is left, also
    /// resets the settings of idle GPUs. Returns whether it removed any process or client.
    pub fn reap(&mut self, alive: impl Fn(Pid) -> bool) -> bool {
        let mut reaped = false;
        let mut keep = |pid: Pid| {
            let lives = alive(pid);
            reaped |= !lives;
            lives
        };
        let all = self.state.gpus.iter();
        let ended = all.filter(|gpu| gpu.processes.iter().any(|p| !alive(p.pid)));
        let changed: Vec<u32> = ended.map(|gpu| gpu.index).collect();
        changed.into_iter().for_each(|gpu| self.settle(gpu));
        for gpu in &mut self.state.gpus {
            gpu.processes.retain(|p| keep(p.pid));
        }
        self.state.clients.retain(|client| keep(client.pid));
        self.put_down_idle();
        reaped
    }
}
