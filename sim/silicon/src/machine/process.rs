//! Processes of the simulated GPUs, and clients of the simulated driver.
//!
//! They are real processes: monitors look into `/proc`. One is told from a later one with the
//! same pid by its start time, and reaped when it is gone.

use serde::{Deserialize, Serialize};

use super::{Gpu, Machine};
use crate::returns::Return;

/// What a process does with the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessKind {
    /// A CUDA context of its own.
    Compute,
    /// A graphics context.
    Graphics,
    /// A client of an MPS server. The server itself is a compute process.
    Mps,
    /// Only an open handle, such as a monitor leaks it: the driver lists it nowhere, and yet
    /// what it holds is in use.
    Handle,
}

impl ProcessKind {
    /// All kinds.
    pub const ALL: [ProcessKind; 4] =
        [ProcessKind::Compute, ProcessKind::Graphics, ProcessKind::Mps, ProcessKind::Handle];

    /// Name as in descriptions and on the command line.
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

/// A real process, told from others that had or will have its pid.
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
    /// Which process.
    #[serde(flatten)]
    pub pid: Pid,
    /// What it does.
    pub kind: ProcessKind,
    /// Memory in use, MiB.
    pub memory_mib: u64,
    /// GPU instance that it is charged to; `None`: the GPU as a whole.
    pub gpu_instance: Option<u32>,
    /// Compute instance in it.
    pub compute_instance: Option<u32>,
}

/// A process that has the driver open (between `nvmlInit` and `nvmlShutdown`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// Which process.
    #[serde(flatten)]
    pub pid: Pid,
}

impl Gpu {
    /// Processes charged to exactly this GPU instance (and compute instance, when given), of any
    /// kind.
    pub fn processes_in(&self, gpu_instance: u32, compute_instance: Option<u32>) -> impl Iterator<Item = &Process> {
        self.processes.iter().filter(move |p| {
            p.gpu_instance == Some(gpu_instance)
                && (compute_instance.is_none() || p.compute_instance == compute_instance)
        })
    }

    /// Processes that the driver lists for a kind. `Handle` is listed nowhere. An MPS client is
    /// listed twice, as nvidia-smi's type `M+C` has it; its server is a plain compute process, `C`.
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
}

impl Machine {
    /// Puts a process on a GPU, or in an instance of it. The same pid twice at the same place
    /// and of the same kind replaces the first.
    ///
    /// # Errors
    /// `NotFound` when an instance does not exist, `InvalidArgument` when a GPU in MIG mode is
    /// given a compute process without an instance, or `InsufficientResources` when the memory
    /// is not there.
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
        let at = self.gpu_mut(gpu)?;
        at.processes.retain(|p| !same(p));
        at.processes.push(process);
        Ok(())
    }

    /// Takes a process off a GPU (off all, with `None`). Says how many places it held.
    pub fn detach(&mut self, pid: u32, gpu: Option<u32>) -> usize {
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

    /// Takes a client of the driver off the list.
    pub fn close(&mut self, pid: Pid) {
        self.state.clients.retain(|client| client.pid != pid);
        self.put_down_idle();
    }

    /// Clients of the driver, other than `but`.
    pub fn clients(&self, but: Option<u32>) -> impl Iterator<Item = &Client> {
        self.state.clients.iter().filter(move |client| Some(client.pid.pid) != but)
    }

    /// Drops processes and clients that are gone, and what the driver forgets when the last one
    /// leaves. Says whether there were any.
    pub fn reap(&mut self, alive: impl Fn(Pid) -> bool) -> bool {
        let mut reaped = false;
        let mut keep = |pid: Pid| {
            let lives = alive(pid);
            reaped |= !lives;
            lives
        };
        for gpu in &mut self.state.gpus {
            gpu.processes.retain(|p| keep(p.pid));
        }
        self.state.clients.retain(|client| keep(client.pid));
        self.put_down_idle();
        reaped
    }
}
