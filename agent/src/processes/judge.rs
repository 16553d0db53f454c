//! Who is a stray, and who of them is not ended whatever the config says.
//!
//! ```text
//! its GPU is not seen as it is now, or is being changed ─► nobody is
//! the database was lost, or the daemon is not wanted ────► nobody is: who has a share is not known, or nobody can
//! its rule does not share it (any more) ─────────────────► nobody is: a daemon that is left has no claim to it
//! an MPS server of gpushd's ──────────────────────────────► no
//! a client with a share of its own user's ───────────────► no
//! any other ─────────────────────────────────────────────► a stray
//!     another's MPS server ────────────────────────────────► which is not ended
//!     of a user who has a share, with another or none ──────► which is not ended
//!     from before a lost database was given up ───────────────► which is not ended
//! ```

use gpush_api::{Gpu, GpuProcess, GpuState, Mode, Process, ProcessKind};
use gpush_host::proc;

use super::{
    Strays,
    lease::{Told, ancestors},
};
use crate::mps::{self, Server, Servers, SharedTarget};

/// Why a stray is not ended whose user was given something: it may be a job of the share before, or one whose
/// environment was cleaned on the way. It is for people to say what it is.
const HOLDER: &str = "its user holds a lease";

/// Why one is not whose share may have been forgotten.
const FORGOTTEN: &str = "it comes from before the database was lost, and may have had a lease";

/// A process, and why it is not ended although it is a stray.
#[derive(Debug, Clone)]
pub(super) struct Judged {
    pub(super) process: GpuProcess,
    pub(super) spared: Option<&'static str>,
}

/// What is found of a process.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// What it serves, where it is an MPS server.
    pub(super) serves: Option<String>,
    pub(super) lease: Option<String>,
    pub(super) stray: Option<String>,
    pub(super) spared: Option<&'static str>,
}

/// Who judges.
#[derive(Debug)]
pub(super) struct Judge<'a> {
    strays: &'a Strays,
    pub(super) servers: Servers,
    lost: bool,
}

impl<'a> Judge<'a> {
    /// By what is known now.
    pub(super) fn of(strays: &'a Strays) -> Self {
        Self {
            strays,
            servers: strays.mps.servers(),
            lost: strays.state.now().lost.as_ref().is_some_and(|lost| lost.holds),
        }
    }

    /// What is to be said of a process on a GPU or MIG device.
    pub(super) fn of_process(&self, gpu: &Gpu, target: &str, process: &Process) -> Found {
        let (Some(shared), Some(pid), Some(uid)) = (mps::sharing(&self.strays.mps, target), process.pid, process.uid)
        else {
            return Found::default();
        };
        let server = self.servers.of_process(pid, process.kind);
        let serves = server.map(Server::words);
        if let Some(Server::Of(_)) = server {
            return Found { serves, ..Found::default() };
        }
        let told = self.strays.leases.lease_of(pid, |name| shared.is_lease_of(name, uid));
        let lease = match (&told, process.kind) {
            (Told::Lease(name), ProcessKind::MpsClient) => Some(name.clone()),
            _ => None,
        };
        if lease.is_some() || self.lost || !shared.is_given || !shares(gpu, target) || !is_seen(gpu) {
            return Found { serves, lease, ..Found::default() };
        }
        let stray = why(&shared, process.kind, uid, &told);
        let spared =
            if shared.is_held_by(uid) { Some(HOLDER) } else { self.may_be_forgotten(pid, uid).then_some(FORGOTTEN) };
        Found { serves, lease: None, stray: Some(stray), spared }
    }
}

impl Judge<'_> {
    /// Whether a process had a share for all that is known: itself, or one of its user's that it comes from.
    fn may_be_forgotten(&self, pid: u32, uid: u32) -> bool {
        let its = |pid: &u32| proc::owner(*pid) == Some(uid);
        let from = std::iter::once(pid).chain(ancestors(pid).take_while(its));
        from.filter_map(proc::start).any(|start| self.strays.state.may_have_forgotten(start))
    }
}

/// Whether its rule has a GPU shared, or its MIG devices: a daemon that stands on one that is to be something else
/// has whoever it has, and nobody who comes past it is out of place.
fn shares(gpu: &Gpu, target: &str) -> bool {
    match gpu.mode {
        Mode::Mps => true,
        Mode::Mig => target != gpu.uuid,
        Mode::Unmanaged | Mode::Exclusive | Mode::Timeslice => false,
    }
}

/// Whether a GPU was seen as it is now, and nobody is changing it.
fn is_seen(gpu: &Gpu) -> bool {
    let workable = match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => true,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    workable && !gpu.stale && gpu.processes_known
}

/// Why a process on a target that is shared through MPS has no place there.
fn why(shared: &SharedTarget, kind: ProcessKind, uid: u32, told: &Told) -> String {
    match (kind, told) {
        (ProcessKind::Compute, _) => "it computes past MPS".to_owned(),
        (ProcessKind::Graphics, _) => "it draws, and has no lease".to_owned(),
        (ProcessKind::MpsClient, _) if !shared.is_held_by(uid) => "its user holds no lease".to_owned(),
        (ProcessKind::MpsClient, Told::Another(name)) => format!("it names lease {name}, which its user does not hold"),
        (ProcessKind::MpsClient, Told::Nothing) => "it names none of its user's leases".to_owned(),
        (ProcessKind::MpsClient, Told::Unsure | Told::Lease(_)) => {
            "its lease is not known: its environment is overwritten, or can't be read".to_owned()
        }
    }
}
