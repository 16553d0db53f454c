//! Unused leases: gpushd reports them, warns their holders, and ends them, as `[idle]` of the config says.
//! [`gpush_usage::idle`] decides; this module executes the decisions.
//!
//! ```text
//! usage: a sample ─► figures of each active lease ─► one IdleMachine for each lease
//!                                                         │ effects
//!                      ┌──────────────────┬───────────────┴───┬─────────────────────┐
//!                      ▼                  ▼                   ▼                     ▼
//!                 warn, withdraw     report: log       release, end:         Slurm job: `scancel`,
//!                 leases: a notice                     leases: revocation    if the config says so
//!                      └─ recorded or shown ─► machine ◄─ refused ─┘
//! ```
//!
//! The machines are only in memory. After a start of gpushd, each begins again: the unused time is in the sums of `usage`,
//! and the holder is warned again. So no lease ends without its full last warning. Keeps are in the store.
//!
//! | file | subject |
//! |---|---|
//! | `watch` | the task that asks the policy after each sample |
//! | `subject` | the policy of a lease, and whether the config exempts it |
//! | `act` | executes the effects of the machines |
//! | `show` | what happens to unused leases, for answers |
//! | `dry_run` | what the policy would have done in the past |

mod act;
mod dry_run;
mod show;
mod subject;
mod watch;

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{LeaseId, LeaseKeep};
use gpush_locked::Locked;
use gpush_usage::{
    idle::{IdleEvent, IdleMachine, IdlePolicy, Keep, LeaseTerms},
    moment::Moment,
};
use tokio::task::JoinHandle;

pub(crate) use self::dry_run::IdleQuery;
use crate::{leases::Leases, state::context::HostContext, system::tasks::TaskName, usage::Usage};

/// The idle policy of the host. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Idle(Arc<IdleParts>);

#[derive(Debug)]
struct IdleParts {
    context: Arc<HostContext>,
    usage: Usage,
    leases: Leases,
    watched: Locked<BTreeMap<LeaseId, Watched>>,
}

/// What gpushd knows about an active lease.
#[derive(Debug)]
struct Watched {
    machine: IdleMachine,
    policy: IdlePolicy,
    terms: LeaseTerms,
    /// The last observation.
    observed: IdleEvent,
    /// The keep that the machine knows.
    keep: Option<LeaseKeep>,
    /// The last attempt to deliver a notice: its number, and the time.
    attempt: Option<(u32, Moment)>,
    /// Whether the job of the lease also runs on other nodes. Then gpushd only reports it.
    runs_elsewhere: bool,
}

impl Watched {
    /// Applies a keep that the machine does not know yet. Returns whether there was one.
    fn takes_over(&mut self, keep: Option<&LeaseKeep>, now: Moment) -> Option<Keep> {
        if self.keep.as_ref() == keep {
            return None;
        }
        self.keep = keep.cloned();
        let keep = keep?;
        let left = u64::try_from(keep.until.as_millisecond().saturating_sub(now.wall_ms)).unwrap_or(0);
        Some(Keep { until: now.plus_ms(left), reason: keep.reason.clone() })
    }
}

impl Idle {
    /// Creates the handle.
    pub(crate) fn new(context: Arc<HostContext>, usage: Usage, leases: Leases) -> Self {
        Self(Arc::new(IdleParts { context, usage, leases, watched: Locked::default() }))
    }

    /// Starts the task that watches the leases. It runs until gpushd stops.
    pub(crate) fn spawn(&self) -> JoinHandle<()> {
        let idle = self.clone();
        self.0.context.tasks.spawn(TaskName::IdleLeases, move || watch::run(idle.clone()))
    }
}
