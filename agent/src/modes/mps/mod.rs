//! MPS on this host: one supervised control daemon for each target that the config shares through MPS.
//!
//! ```text
//! config, layouts of the GPUs ──────► core::sharing: which targets ──┐
//! store: stopped, settings that override the rule; leases ───────────┼──► reconcile ─► Daemon (a task each)
//! /run/gpush-mps: daemons that a previous gpushd left running ───────┘                  │
//!                                                              nvidia-cuda-mps-control ◄┘ one per target
//! ```
//!
//! This module has only the handles of the daemons. What gpushd knows about targets is in the state of the host
//! ([`gpush_core::mps`]): each supervisor task reports there, and reconcilers, operations and administrators store their
//! decisions there.
//!
//! Daemons continue to run when gpushd ends. The next gpushd finds them by their directories and adopts them before it
//! reads any GPU. Later it decides whether each daemon is still desired.
//!
//! | file | subject |
//! |---|---|
//! | `supervise` | adds targets; the supervisor task of each daemon |
//! | `desired` | the desired state of a daemon |
//! | `outlook` | which targets of a snapshot serve clients |
//! | `reconcile` | reconciles the daemons of each GPU, under its lane |
//! | `wakes` | wakes the reconcilers |
//! | `present` | which daemons exist now, and who uses them |
//! | `plan_steps` | plans which daemons an operation stops and starts |
//! | `operation_steps` | stops and starts daemons for operations |
//! | `records` | what is recorded about daemons |
//! | `multi_user_support` | whether a daemon can serve several users |
//! | `missing` | errors for targets that gpushd does not have, or does not have yet |
//! | `leases` | functions of targets for leases: admission of holders, clients |
//! | `clients` | the clients of a daemon, and their leases |
//! | `control_connection` | names the processes that prevent a daemon from answering |
//! | `act` | actions of administrators on a daemon |
//! | `view` | daemons as the API shows them |

mod act;
mod clients;
mod compute_mode;
mod control_connection;
mod desired;
mod leases;
mod missing;
mod multi_user_support;
mod operation_steps;
mod outlook;
mod plan_steps;
mod present;
mod reconcile;
mod records;
mod supervise;
mod view;
mod wakes;

use gpush_api::{GpuUuid, TargetUuid};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Deref,
    path::PathBuf,
    sync::{Arc, MutexGuard, atomic::AtomicU64},
};

use gpush_core::mps::MpsTarget;
use gpush_host::process_facts::LeaseNames;
use gpush_locked::Locked;
use gpush_mps::daemon::{Daemon, Launcher};
pub(crate) use gpush_mps::daemon::{
    base_lock::{path as base_lock_path, take as lock_base},
    server_processes::{Place, ServedTarget, Server, Servers, SupervisedTarget},
};

pub(crate) use self::{
    act::{MpsAction, act, set},
    clients::{grants_leases, terminate},
    leases::{admit, clients_now, has_target, is_of_another_agent, pipe_directory, prepare},
    missing::gpus_known,
    operation_steps::{start_and_wait, start_device_daemons, stop_for_operation},
    outlook::{find, outlook},
    plan_steps::{claimed_by_plan, plan},
    present::poll,
    reconcile::run,
    records::RecordedSettings,
    supervise::adopt_daemons,
    view::{all, health, logs_of, one},
};
use crate::{
    modes::{shared_gpus::SharedGpus, timeslice::Timeslice},
    state::{HostState, OpenLease, context::HostContext},
    system::{options::MPS_DIRECTORY, tasks::TaskName},
};

use self::wakes::Wakes;

/// Pause before gpushd checks again whether a daemon has exited.
const SOON: std::time::Duration = std::time::Duration::from_millis(100);

/// The MPS daemons of the host, with the handles that supervise them. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Mps(Arc<MpsParts>);

impl Deref for Mps {
    type Target = MpsParts;

    fn deref(&self) -> &MpsParts {
        &self.0
    }
}

pub(crate) struct MpsHandles {
    pub(crate) context: Arc<HostContext>,
    pub(crate) shared_gpus: SharedGpus,
    pub(crate) timeslice: Timeslice,
    /// The leases that processes name in their environments.
    pub(crate) lease_names: Arc<LeaseNames>,
    /// The uid that gpushd runs as.
    pub(crate) own_uid: u32,
}

impl fmt::Debug for MpsHandles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpsHandles").finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct MpsParts {
    handles: MpsHandles,
    /// Directory that contains one subdirectory for each target.
    base: PathBuf,
    launcher: Launcher,
    /// Directory of NVIDIA's MPS programs. Used if the config does not set their paths.
    programs: Option<PathBuf>,
    /// The handles of the daemons, by UUID of the target. A target is in the state of the host exactly if it has a handle.
    /// Both change while this lock is held, so take it before the lock of the state.
    daemons: Locked<BTreeMap<TargetUuid, DaemonHandle>>,
    /// Number of the last supervisor task.
    supervisors: AtomicU64,
    /// What gpushd knows about the MPS control program. Locked while gpushd probes the program.
    control_program: tokio::sync::Mutex<Option<multi_user_support::ProgramSupport>>,
    wakes: Wakes,
}

/// The handle of a target's daemon. Cheap to clone.
#[derive(Debug, Clone)]
struct DaemonHandle {
    daemon: Daemon,
    /// Locked while the target's users or its daemon change.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Mps {
    /// Creates the handle. `base` contains the directories of the daemons. `programs` is the directory of NVIDIA's
    /// programs, used if the config does not set their paths.
    pub(crate) fn new(base: PathBuf, programs: Option<PathBuf>, launcher: Launcher, handles: MpsHandles) -> Self {
        Self(Arc::new(MpsParts {
            handles,
            launcher,
            base,
            programs,
            daemons: Locked::default(),
            supervisors: AtomicU64::default(),
            control_program: tokio::sync::Mutex::default(),
            wakes: Wakes::default(),
        }))
    }

    /// Wakes the reconcilers of all GPUs.
    pub(crate) fn wake_all(&self) {
        self.wakes.wake_all();
    }

    /// Wakes the reconciler of a GPU after a short pause.
    fn wake_soon(&self, gpu: &GpuUuid) {
        let (mps, gpu) = (self.clone(), gpu.clone());
        self.handles.context.tasks.once(TaskName::ReconcilerWakeup, async move {
            tokio::time::sleep(SOON).await;
            mps.wakes.wake(&gpu);
        });
    }

    /// Returns whether this host has MPS targets.
    pub(crate) fn is_used(&self) -> bool {
        !self.handles.context.state.mps().by_uuid.is_empty()
    }

    /// Returns the log directory from the config. If the config has the default, and `base` is not the directory of the
    /// system service, returns a directory below `base`.
    fn log_directory(&self, configured: &str, usual: &str) -> PathBuf {
        if configured == usual && self.base != std::path::Path::new(MPS_DIRECTORY) {
            return self.base.join("logs");
        }
        PathBuf::from(configured)
    }

    /// Returns whether a whole GPU is an MPS target, even if the target is about to be removed.
    pub(crate) fn has(&self, uuid: &TargetUuid) -> bool {
        self.handles.context.state.mps().has(uuid)
    }

    fn daemons(&self) -> MutexGuard<'_, BTreeMap<TargetUuid, DaemonHandle>> {
        self.daemons.lock()
    }

    /// Returns the handle of a target's daemon.
    fn daemon(&self, uuid: &TargetUuid) -> Option<DaemonHandle> {
        self.daemons().get(uuid).cloned()
    }

    /// Returns a target as last reported.
    fn target(&self, uuid: &TargetUuid) -> Option<Arc<MpsTarget>> {
        self.handles.context.state.mps().get(uuid).cloned()
    }

    /// Returns the data by which gpushd recognizes its current MPS servers.
    pub(crate) fn servers(&self) -> Servers {
        let (targets, daemons) = (self.handles.context.state.mps(), self.daemons().clone());
        let supervised = targets.all().filter_map(|target| {
            let names = ServedTarget { label: target.label(), name: target.name() };
            let report = daemons.get(&target.uuid)?.daemon.last_report();
            Some(SupervisedTarget::of(names, &target.short, &target.uuid, &target.gpu_uuid, &report))
        });
        Servers::of(&self.base, supervised.collect(), &self.handles.context.state.config().mps, self.handles.own_uid)
    }

    /// Returns the uids of the users who may use a target.
    fn admitted(&self, uuid: &TargetUuid) -> BTreeSet<u32> {
        self.handles.context.state.leases().admitted(uuid)
    }
}

/// Returns the leases on a target, in order of arrival.
fn leases_on(host: &HostState, uuid: &TargetUuid) -> Vec<OpenLease> {
    host.leases.on_target(uuid).cloned().collect()
}

/// Returns one sentence for each use of a target; empty if it is not in use.
fn uses(host: &HostState, target: &MpsTarget) -> Vec<String> {
    let leases: Vec<String> = host.leases.on_target(&target.uuid).map(OpenLease::describe).collect();
    target.uses(&leases, host.leases.is_occupied(&target.uuid))
}
