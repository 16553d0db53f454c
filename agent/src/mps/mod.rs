//! MPS on this host: one supervised control daemon for each target that the config shares so, and the
//! shares that people took of them.
//!
//! ```text
//! config, what stands on the GPUs ──► core::sharing: which targets ──┐
//! store: stopped by hand, set above the rule, shares ────────────────┼──► reconcile ─► Daemon (a task each)
//! /run/gpush-mps: daemons that an agent before left running ─────────┘                  │
//!                                                              nvidia-cuda-mps-control ◄┘ one a target
//! ```
//!
//! Daemons outlive the agent. One that starts finds them by their directories, before it has seen a GPU,
//! and goes on with them; whether they are still wanted it asks once it can.
//!
//! | file | subject |
//! |---|---|
//! | `targets` | which daemons each GPU should have |
//! | `reconcile` | reconciles the daemons of each GPU, under its lane |
//! | `wakes` | waking the reconcilers |
//! | `moves` | what operations do with daemons |
//! | `records` | what of them outlasts gpushd |
//! | `many` | whether clients of several users can be had |
//! | `missing` | errors for targets that gpushd does not have, or not yet |
//! | `shares`, `share_end` | granting parts of a target, and their end |
//! | `clients` | who computes there, and with which share |
//! | `control_connection` | names the processes that keep a daemon from answering |
//! | `act` | what people may do with a daemon |
//! | `view` | as the API shows it |

mod act;
mod clients;
mod compute_mode;
mod control_connection;
mod many;
mod missing;
mod moves;
mod reconcile;
mod records;
mod share_end;
mod shares;
mod targets;
mod view;
mod wakes;

use std::{
    collections::BTreeMap,
    fmt,
    ops::Deref,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gpush_core::sharing::Target;
use gpush_host::identity::Users;
use gpush_mps::daemon::{Daemon, Launcher as Hands};
pub(crate) use gpush_mps::daemon::{
    base_lock::take as lock_base,
    server_processes::{Server, Servers},
};
use gpush_nvml::Hardware;
use gpush_store::{MpsShare, MpsTarget, Store};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(crate) use self::{
    act::{Act, act, set},
    clients::{SharedTarget, sharing, terminate},
    moves::{aside, bring_up, devices_serve, idle, plan, taken_away},
    reconcile::run,
    records::Lasting,
    share_end::end as end_share,
    shares::take as take_share,
    targets::find,
    view::{SHARE_VARIABLE, all, health, logs_of, one},
};
use crate::{
    idempotency::Idempotency,
    lanes::Lanes,
    options::MPS_DIRECTORY,
    shared_gpus::SharedGpus,
    state::{State, readings::Readings},
    timeslice::Timeslice,
};

use self::{moves::Moves, wakes::Wakes};

/// Until what is about to end is checked again.
const SOON: std::time::Duration = std::time::Duration::from_millis(100);

/// What gpushd knows of MPS, and what it uses to keep the daemons. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Mps(Arc<Inner>);

impl Deref for Mps {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// What the daemons are kept with.
pub(crate) struct Handles {
    pub(crate) state: State,
    pub(crate) readings: Readings,
    pub(crate) lanes: Lanes,
    pub(crate) hardware: Hardware,
    pub(crate) store: Store,
    pub(crate) users: Users,
    pub(crate) shared_gpus: SharedGpus,
    pub(crate) timeslice: Timeslice,
    pub(crate) idempotency: Idempotency,
    /// Tells which share a process names in its environment.
    pub(crate) named_share: NamedShare,
    pub(crate) stopping: CancellationToken,
    /// The uid that gpushd runs as.
    pub(crate) own_uid: u32,
}

/// Which share a process names in its environment, by pid.
pub(crate) type NamedShare = Arc<dyn Fn(u32) -> Option<String> + Send + Sync>;

impl fmt::Debug for Handles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handles").finish_non_exhaustive()
    }
}

/// The state behind an [`Mps`].
#[derive(Debug)]
pub(crate) struct Inner {
    handles: Handles,
    /// Directory below which each target has its own.
    base: PathBuf,
    hands: Hands,
    /// NVIDIA's programs, where the config has its default.
    programs: Option<PathBuf>,
    /// By UUID of the target.
    entries: Mutex<BTreeMap<String, Entry>>,
    shares: Mutex<Vec<MpsShare>>,
    /// What is on record of targets, by UUID.
    records: Mutex<BTreeMap<String, MpsTarget>>,
    /// Why targets that the config wants cannot be, one sentence each, by UUID of the GPU.
    findings: Mutex<BTreeMap<String, Vec<String>>>,
    /// Why GPUs have not the compute mode that keeps everybody from getting past MPS, by UUID.
    open: Mutex<BTreeMap<String, String>>,
    /// What operations that go on have done with daemons.
    moves: Mutex<BTreeMap<String, Moves>>,
    /// What the control daemon says of several users, once a rule wants them.
    many: Mutex<Option<many::Asked>>,
    /// Held while the control daemon is asked about several users.
    asking_many: tokio::sync::Mutex<()>,
    /// Whether the ends of shares can be recorded.
    expiry: share_end::Expiry,
    wakes: Wakes,
    /// Counts shares that end by themselves and were granted.
    expiring: watch::Sender<u64>,
}

/// A target, and who lives for its daemon.
#[derive(Debug, Clone)]
struct Entry {
    /// Short name.
    short: String,
    /// The GPU that it is, or is of.
    gpu_uuid: String,
    /// As the config wants it; `None` for one that only a daemon is left of.
    target: Option<Target>,
    daemon: Daemon,
    /// Of those who change its shares, one at a time.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Mps {
    /// With daemons below `base`; `programs` is where NVIDIA's are looked for in place of the config's
    /// default.
    pub(crate) fn new(
        base: PathBuf,
        programs: Option<PathBuf>,
        shares: Vec<MpsShare>,
        records: Vec<MpsTarget>,
        handles: Handles,
    ) -> Self {
        let records = records.into_iter().map(|record| (record.target.clone(), record)).collect();
        Self(Arc::new(Inner {
            handles,
            hands: Hands::of(&base),
            base,
            programs,
            entries: Mutex::default(),
            shares: Mutex::new(shares),
            records: Mutex::new(records),
            findings: Mutex::default(),
            open: Mutex::default(),
            moves: Mutex::default(),
            many: Mutex::default(),
            expiry: Default::default(),
            asking_many: tokio::sync::Mutex::default(),
            wakes: Wakes::default(),
            expiring: watch::Sender::new(0),
        }))
    }

    /// Has the daemons of all GPUs reconciled.
    pub(crate) fn settle(&self) {
        self.wakes.wake_all();
    }

    /// Has the daemons of a GPU reconciled in a moment.
    fn settle_soon(&self, gpu: &str) {
        let (mps, gpu) = (self.clone(), gpu.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(SOON).await;
            mps.wakes.wake(&gpu);
        });
    }

    /// Whether there is anything of MPS on this host.
    pub(crate) fn is_used(&self) -> bool {
        !self.entries().is_empty()
    }

    /// Where logs go: where the config says, and beside the daemons of a host that is not the system's.
    fn log_directory(&self, configured: &str, usual: &str) -> PathBuf {
        if configured == usual && self.base != std::path::Path::new(MPS_DIRECTORY) {
            return self.base.join("logs");
        }
        PathBuf::from(configured)
    }

    /// Why targets that the config wants can't be, one sentence each.
    pub(crate) fn findings(&self) -> Vec<String> {
        let findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        let mut of_gpus: Vec<(&String, &Vec<String>)> = findings.iter().collect();
        of_gpus.sort_by_key(|(uuid, _)| self.handles.state.index_of(uuid));
        of_gpus.into_iter().flat_map(|(_, findings)| findings).cloned().collect()
    }

    fn many(&self) -> MutexGuard<'_, Option<many::Asked>> {
        self.many.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, gpu: &str, findings: Vec<String>) {
        let mut found = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        let before = found.remove(gpu).unwrap_or_default();
        for finding in findings.iter().filter(|finding| !before.contains(finding)) {
            tracing::warn!("not shared through MPS: {finding}");
        }
        if !findings.is_empty() {
            found.insert(gpu.to_owned(), findings);
        }
    }

    /// Whether a full GPU is a target still, be it one that is about to go.
    pub(crate) fn has(&self, uuid: &str) -> bool {
        self.is_in_force(uuid) || self.entries().contains_key(uuid)
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn moves(&self) -> MutexGuard<'_, BTreeMap<String, Moves>> {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shares(&self) -> MutexGuard<'_, Vec<MpsShare>> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn records(&self) -> MutexGuard<'_, BTreeMap<String, MpsTarget>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Collects what identifies MPS servers now.
    pub(crate) fn servers(&self) -> Servers {
        let entries = self.entries().clone();
        let label = |target: &str| {
            let entry = entries.iter().find(|(_, entry)| entry.short == target);
            entry.map_or_else(|| target.to_owned(), |(uuid, entry)| view::label(entry, uuid))
        };
        Servers::of(&self.base, label, &self.handles.state.config().mps, self.handles.own_uid)
    }

    fn shares_of(&self, uuid: &str) -> Vec<MpsShare> {
        self.shares().iter().filter(|share| share.target == uuid).cloned().collect()
    }
}
