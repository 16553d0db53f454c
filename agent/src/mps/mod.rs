//! MPS on this host: one supervised control daemon for each target that the config shares through MPS.
//!
//! ```text
//! config, layouts of the GPUs ──────► core::sharing: which targets ──┐
//! store: stopped, settings that override the rule; leases ───────────┼──► reconcile ─► Daemon (a task each)
//! /run/gpush-mps: daemons that a previous gpushd left running ───────┘                  │
//!                                                              nvidia-cuda-mps-control ◄┘ one per target
//! ```
//!
//! Daemons continue to run when gpushd ends. The next gpushd finds them by their directories and adopts them before it
//! reads any GPU. Later it decides whether each daemon is still desired.
//!
//! | file | subject |
//! |---|---|
//! | `targets` | which daemons each GPU should have |
//! | `reconcile` | reconciles the daemons of each GPU, under its lane |
//! | `wakes` | wakes the reconcilers |
//! | `present` | which daemons exist now, and who uses them |
//! | `plan_steps` | plans which daemons an operation stops and starts |
//! | `operation_steps` | stops and starts daemons for operations |
//! | `operation_daemons` | the daemons that running operations start or keep stopped |
//! | `records` | what is recorded about daemons |
//! | `multi_user_support` | whether a daemon can serve several users |
//! | `missing` | errors for targets that gpushd does not have, or does not have yet |
//! | `leases` | functions of targets for leases: offers, admission of holders, clients |
//! | `clients` | the clients of a daemon, and their leases |
//! | `control_connection` | names the processes that prevent a daemon from answering |
//! | `daemon_state` | the state of a daemon, its reasons, and the errors that follow from the state |
//! | `act` | actions of administrators on a daemon |
//! | `view` | daemons as the API shows them |

mod act;
mod clients;
mod compute_mode;
mod control_connection;
mod daemon_state;
mod leases;
mod missing;
mod multi_user_support;
mod operation_daemons;
mod operation_steps;
mod plan_steps;
mod present;
mod reconcile;
mod records;
mod targets;
mod view;
mod wakes;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Deref,
    path::PathBuf,
    sync::{Arc, MutexGuard},
};

use gpush_core::sharing::{Finding, SharingTarget};
use gpush_host::{identity::Users, process_facts::LeaseNames};
use gpush_locked::Locked;
use gpush_mps::daemon::{Daemon, Launcher};
pub(crate) use gpush_mps::daemon::{
    base_lock::{path as base_lock_path, take as lock_base},
    server_processes::{Place, ServedTarget, Server, Servers, SupervisedTarget},
};
use gpush_nvml::Hardware;
use gpush_store::{MpsTarget, Store};
use tokio_util::sync::CancellationToken;

pub(crate) use self::{
    act::{MpsAction, act, set},
    clients::{is_shared, terminate},
    leases::{
        admit, client_settings, clients_now, daemons, has_target, is_of_another_agent, is_starting, not_serving,
        pipe_directory, prepare, serves, serving, single_users, target,
    },
    missing::gpus_known,
    operation_steps::{start_and_wait, start_device_daemons, stop_for_operation},
    plan_steps::{claimed_by_plan, plan},
    present::{add_daemons_to, daemons_on, poll},
    reconcile::run,
    records::RecordedSettings,
    targets::adopt_daemons,
    view::{all, health, logs_of, one},
};
use crate::{
    lanes::Lanes,
    options::MPS_DIRECTORY,
    shared_gpus::SharedGpus,
    state::{OpenLease, State, readings::Readings},
    tasks::{TaskName, Tasks},
    timeslice::Timeslice,
};

use self::{operation_daemons::OperationDaemons, wakes::Wakes};

/// Pause before gpushd checks again whether a daemon has exited.
const SOON: std::time::Duration = std::time::Duration::from_millis(100);

/// The MPS daemons of the host, with the handles that supervise them. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Mps(Arc<Inner>);

impl Deref for Mps {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

pub(crate) struct Handles {
    pub(crate) state: State,
    pub(crate) readings: Readings,
    pub(crate) lanes: Lanes,
    pub(crate) hardware: Hardware,
    pub(crate) store: Store,
    pub(crate) users: Users,
    pub(crate) shared_gpus: SharedGpus,
    pub(crate) timeslice: Timeslice,
    /// The leases that processes name in their environments.
    pub(crate) lease_names: Arc<LeaseNames>,
    pub(crate) tasks: Tasks,
    pub(crate) stopping: CancellationToken,
    /// The uid that gpushd runs as.
    pub(crate) own_uid: u32,
}

impl fmt::Debug for Handles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handles").finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct Inner {
    handles: Handles,
    /// Directory that contains one subdirectory for each target.
    base: PathBuf,
    launcher: Launcher,
    /// Directory of NVIDIA's MPS programs. Used if the config does not set their paths.
    programs: Option<PathBuf>,
    /// Targets by UUID.
    entries: Locked<BTreeMap<String, Entry>>,
    /// Records of targets, by UUID.
    records: Locked<BTreeMap<String, MpsTarget>>,
    /// For each GPU, by UUID, why its desired targets cannot exist.
    findings: Locked<BTreeMap<String, Vec<Finding>>>,
    /// For each GPU, by UUID, why gpushd could not set the compute mode that prevents programs from bypassing MPS.
    open: Locked<BTreeMap<String, String>>,
    /// For each running operation, by id, which daemons it keeps stopped and which it starts.
    moves: Locked<BTreeMap<String, OperationDaemons>>,
    /// Whether the MPS control program supports several users. gpushd finds this out when a rule requests several
    /// users.
    many: Locked<Option<multi_user_support::ProgramSupport>>,
    /// Locked while gpushd runs the MPS control program to determine `many`.
    asking_many: tokio::sync::Mutex<()>,
    wakes: Wakes,
}

/// A target and its daemon's supervisor task.
#[derive(Debug, Clone)]
struct Entry {
    /// Short name.
    short: String,
    /// UUID of the target's GPU. The target is the whole GPU or a MIG device on the GPU.
    gpu_uuid: String,
    /// The target according to the config; `None` if the config no longer has the target, but its daemon still exists.
    target: Option<SharingTarget>,
    daemon: Daemon,
    /// Locked while the target's users or its daemon change.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Mps {
    /// Creates the handle. `base` contains the directories of the daemons. `programs` is the directory of NVIDIA's
    /// programs, used if the config does not set their paths.
    pub(crate) fn new(base: PathBuf, programs: Option<PathBuf>, records: Vec<MpsTarget>, handles: Handles) -> Self {
        let records = records.into_iter().map(|record| (record.target.clone(), record)).collect();
        Self(Arc::new(Inner {
            handles,
            launcher: Launcher::of(&base),
            base,
            programs,
            entries: Locked::default(),
            records: Locked::new(records),
            findings: Locked::default(),
            open: Locked::default(),
            moves: Locked::default(),
            many: Locked::default(),
            asking_many: tokio::sync::Mutex::default(),
            wakes: Wakes::default(),
        }))
    }

    /// Wakes the reconcilers of all GPUs.
    pub(crate) fn wake_all(&self) {
        self.wakes.wake_all();
    }

    /// Wakes the reconciler of a GPU after a short pause.
    fn wake_soon(&self, gpu: &str) {
        let (mps, gpu) = (self.clone(), gpu.to_owned());
        self.handles.tasks.once(TaskName::ReconcilerWakeup, async move {
            tokio::time::sleep(SOON).await;
            mps.wakes.wake(&gpu);
        });
    }

    /// Returns whether this host has MPS targets.
    pub(crate) fn is_used(&self) -> bool {
        !self.entries().is_empty()
    }

    /// Returns the log directory from the config. If the config has the default, and `base` is not the directory of the
    /// system service, returns a directory below `base`.
    fn log_directory(&self, configured: &str, usual: &str) -> PathBuf {
        if configured == usual && self.base != std::path::Path::new(MPS_DIRECTORY) {
            return self.base.join("logs");
        }
        PathBuf::from(configured)
    }

    /// Returns one sentence for each reason why a desired target cannot exist.
    pub(crate) fn findings(&self) -> Vec<String> {
        let findings = self.findings.lock();
        let mut of_gpus: Vec<(&String, &Vec<Finding>)> = findings.iter().collect();
        of_gpus.sort_by_key(|(uuid, _)| self.handles.state.index_of(uuid));
        of_gpus.into_iter().flat_map(|(_, findings)| findings).map(Finding::to_string).collect()
    }

    /// Returns one sentence for each reason why this target cannot exist as desired.
    fn findings_of(&self, gpu: &str, target: &str) -> Vec<String> {
        let findings = self.findings.lock();
        let its = findings.get(gpu).into_iter().flatten().filter(|finding| finding.target.as_deref() == Some(target));
        its.map(Finding::to_string).collect()
    }

    fn multi_user(&self) -> MutexGuard<'_, Option<multi_user_support::ProgramSupport>> {
        self.many.lock()
    }

    fn set_findings(&self, gpu: &str, findings: Vec<Finding>) {
        let mut found = self.findings.lock();
        let before = found.remove(gpu).unwrap_or_default();
        for finding in findings.iter().filter(|finding| !before.contains(finding)) {
            tracing::warn!("not shared through MPS: {finding}");
        }
        if !findings.is_empty() {
            found.insert(gpu.to_owned(), findings);
        }
    }

    /// Returns whether a whole GPU is an MPS target, even if the target is about to be removed.
    pub(crate) fn has(&self, uuid: &str) -> bool {
        self.is_active(uuid) || self.entries().contains_key(uuid)
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock()
    }

    fn operation_daemons(&self) -> MutexGuard<'_, BTreeMap<String, OperationDaemons>> {
        self.moves.lock()
    }

    fn records(&self) -> MutexGuard<'_, BTreeMap<String, MpsTarget>> {
        self.records.lock()
    }

    /// Returns the data by which gpushd recognizes its current MPS servers.
    pub(crate) fn servers(&self) -> Servers {
        let entries = self.entries().clone();
        let supervised = entries.iter().map(|(uuid, entry)| {
            let names = ServedTarget { label: daemon_state::label(entry, uuid), name: daemon_state::name(entry) };
            SupervisedTarget::of(names, &entry.short, uuid, &entry.gpu_uuid, &entry.daemon.last_report())
        });
        Servers::of(&self.base, supervised.collect(), &self.handles.state.config().mps, self.handles.own_uid)
    }

    /// Returns the uids of the users who may use a target.
    fn admitted(&self, uuid: &str) -> BTreeSet<u32> {
        self.handles.state.leases().admitted(uuid)
    }

    /// Returns the leases on a target, in order of arrival.
    fn leases_on(&self, uuid: &str) -> Vec<OpenLease> {
        self.handles.state.leases().on_target(uuid).cloned().collect()
    }

    /// Returns whether a target has a lease, or a grant that is being recorded.
    fn is_leased(&self, uuid: &str) -> bool {
        self.handles.state.leases().is_occupied(uuid)
    }
}
