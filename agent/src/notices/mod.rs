//! Tells the holder of a lease what happens to it. The task of the lease decides the text, and sends it before gpushd
//! signals a process.
//!
//! ```text
//! leases/actor ─► limit ─┬─► terminals of the lease's processes (gpush_host::terminal)
//!                        ├─► the signal of the request (`--notice-signal`)
//!                        ├─► the file of the lease, GPUSH_NOTICE, one JSON object a line
//!                        ├─► the store, for `lease show`
//!                        ├─► event `notice`
//!                        └─► the hook `notify.command`, and the comment of a Slurm job
//! ```
//!
//! A terminal or a file that cannot be written delays nothing, and never prevents the end of a lease. The notice is in the
//! log, in the events and in `gpushctl lease show` anyway. Only the end of an unused lease needs a notice that a terminal
//! shows, or that is in the store: see [`DeliveredNotice::has_reached`].
//!
//! | file | subject |
//! |---|---|
//! | `files` | the files of leases |
//! | `hook` | the program in `notify.command` |
//! | `job_comment` | the comment of the Slurm job of a lease |
//! | `limit` | the limit for the notices of a lease |
//! | `signal` | the signal of the request |

mod files;
mod hook;
mod job_comment;
mod limit;
mod queue;
mod signal;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_api::{EventPayload, LeaseId, LeaseNotice, NoticeChange};
use gpush_core::lease::notice::NoticeCause;
use gpush_host::{proc, subtask, terminal::Terminal};
use gpush_locked::Locked;
use gpush_store::{LeaseRecord, Store};
use jiff::Timestamp;
use tokio::task::JoinHandle;

use self::{files::NoticeFiles, hook::NoticeHook, limit::Limit};
use crate::{
    state::{State, context::HostContext},
    system::tasks::TaskName,
};

/// Maximum time to find the terminals of a lease, and to show a notice on them.
const DELIVERY: Duration = Duration::from_secs(1);

/// Maximum number of terminals that show a notice.
const MOST_TERMINALS: usize = 64;

/// Delivers notices. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Notices(Arc<NoticeParts>);

#[derive(Debug)]
struct NoticeParts {
    state: State,
    store: Store,
    files: NoticeFiles,
    hook: NoticeHook,
    limits: Locked<BTreeMap<LeaseId, Limit>>,
}

/// The processes that a notice concerns.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NoticeReceivers {
    /// Processes that belong to the lease. They get the signal of the request.
    pub(crate) own: BTreeSet<u32>,
    /// Other processes whose terminals show the notice, such as the one that the lease is bound to.
    pub(crate) others: BTreeSet<u32>,
}

/// A notice to a holder, and the outcome of its delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeliveredNotice {
    pub(crate) notice: LeaseNotice,
    /// Whether the notice is in the store, so that the holder sees it in `lease show`.
    is_recorded: bool,
}

impl DeliveredNotice {
    /// Returns whether a terminal of the holder shows the notice, or it is recorded where the holder sees it.
    pub(crate) fn has_reached(&self) -> bool {
        self.is_recorded || self.notice.terminals.is_some_and(|terminals| terminals > 0)
    }
}

impl Notices {
    /// Creates the handle. `directory` contains the files of the leases; gpushd creates it.
    pub(crate) fn new(state: State, store: Store, directory: PathBuf) -> Self {
        let files = NoticeFiles::new(directory);
        let is_open = |id| state.leases().get(id).is_some();
        files.remove_others(is_open);
        Self(Arc::new(NoticeParts { state, store, files, hook: NoticeHook::default(), limits: Locked::default() }))
    }

    /// Starts the task that runs the hook. It runs until gpushd stops.
    pub(crate) fn spawn(&self, context: &HostContext) -> JoinHandle<()> {
        let (hook, services, tasks) = (self.0.hook.clone(), Arc::clone(&context.host_services), context.tasks.clone());
        let stopping = context.stopping.clone();
        context.tasks.spawn(TaskName::NoticeHook, move || {
            hook.clone().serve(Arc::clone(&services), tasks.clone(), stopping.clone())
        })
    }

    /// Creates the file of a lease, so that its holder can watch it.
    pub(crate) fn open(&self, record: &LeaseRecord) {
        self.0.files.create(record.id, record.holder.uid);
    }

    /// Returns the path of the file of a lease; `None` if there is no file.
    pub(crate) fn path(&self, id: LeaseId) -> Option<String> {
        self.0.files.path(id)
    }

    /// Returns the last notice to the holder of a lease of an earlier gpushd.
    pub(crate) fn last(&self, id: LeaseId) -> Option<LeaseNotice> {
        self.0.files.last(id)
    }

    /// Removes the file of a lease that has ended. If it has notices, they stay for a while.
    pub(crate) fn close(&self, id: LeaseId) {
        self.0.limits.lock().remove(&id);
        self.0.files.close(id);
    }

    /// Delivers a notice to the holder of a lease. `processes` finds the processes of the lease. Returns the notice;
    /// `None` if the lease has had too many notices.
    pub(crate) async fn deliver(
        &self,
        record: &LeaseRecord,
        cause: &NoticeCause<'_>,
        processes: impl Future<Output = NoticeReceivers>,
    ) -> Option<DeliveredNotice> {
        let id = record.id;
        if !self.0.limits.lock().entry(id).or_default().permits(cause.kind(), Instant::now()) {
            tracing::debug!(lease = %id, "lease {id}: too many notices, so one of kind {} is left out", cause.kind().name());
            return None;
        }
        let at = Timestamp::now();
        let text = cause.text(id, at);
        let mut notice = LeaseNotice { at, kind: cause.kind(), text, ends_at: cause.ends_at(), terminals: None };
        // Write the file first: the search for terminals may take long.
        let (parts, owner, written) = (Arc::clone(&self.0), record.holder.uid, notice.clone());
        let _gpushd_may_be_stopping = subtask::blocking(move || parts.files.append(id, &written)).await;
        let (shown, signal) = (notice.text.clone(), record.request.notice_signal);
        let delivered = async {
            let read_at = proc::now();
            let NoticeReceivers { own, others } = processes.await;
            subtask::blocking(move || {
                if let Some(signal) = signal {
                    signal::send(id, owner, &own, signal, read_at);
                }
                show(id, owner, &own.union(&others).copied().collect(), &shown)
            })
            .await
        };
        match tokio::time::timeout(DELIVERY, delivered).await {
            Ok(terminals) => notice.terminals = terminals,
            Err(_) => {
                tracing::warn!(
                    lease = %id,
                    "lease {id}: its terminals were not found in time, so they do not show a notice"
                );
            }
        }
        tracing::info!(lease = %id, uid = owner, "notice to the holder: {}", notice.text);
        let is_recorded = self.record(id, &notice).await;
        let gpu_uuids: BTreeSet<_> = record.members.iter().map(|member| member.gpu_uuid.clone()).collect();
        let change = NoticeChange {
            lease_id: id,
            holder: record.holder.clone(),
            gpu_uuids: gpu_uuids.into_iter().collect(),
            notice: notice.clone(),
        };
        self.0.hook.run(&self.0.state.config().notify, &change, job_comment::job_of(record));
        self.0.state.events().publish(EventPayload::Notice(Box::new(change)));
        Some(DeliveredNotice { notice, is_recorded })
    }

    /// Records the last notice of a lease. Returns whether it is recorded.
    async fn record(&self, id: LeaseId, notice: &LeaseNotice) -> bool {
        let stored = notice.clone();
        let writing = self.0.store.write(move |tx| tx.record_notice(id, stored.clone()));
        match tokio::time::timeout(DELIVERY, writing).await {
            Ok(Ok(())) => true,
            // The store reports once that the disk is full.
            Ok(Err(_)) if self.0.store.refusal().is_some() => false,
            Ok(Err(error)) => {
                tracing::warn!(lease = %id, "lease {id}: cannot record a notice: {error}");
                false
            }
            Err(_) => {
                tracing::warn!(lease = %id, "lease {id}: a notice was not recorded in time");
                false
            }
        }
    }
}

/// Shows a text on the terminals of processes, as far as the terminals belong to the user `owner`. Returns the number of
/// terminals that show it.
fn show(id: LeaseId, owner: u32, pids: &BTreeSet<u32>, text: &str) -> u32 {
    let terminals: BTreeSet<Terminal> = pids.iter().filter_map(|pid| Terminal::of(*pid)).collect();
    let mut shown = 0;
    for terminal in terminals.into_iter().take(MOST_TERMINALS) {
        match terminal.show(owner, &format!("gpush: {text}")) {
            Ok(()) => shown += 1,
            Err(why) => tracing::debug!(lease = %id, "lease {id}: {terminal} does not show the notice: {why}"),
        }
    }
    shown
}
