//! The policies that report leases, warn their holders, and end leases: unused leases, as `[idle]` of the config says, and
//! leases that use more memory than their share has, as `over_limit` of their rule says. [`gpush_usage::idle`] and
//! [`gpush_usage::over_limit`] decide; this module executes the decisions.
//!
//! ```text
//! usage: a sample ─► figures of each active lease ─► IdleMachine and OverLimitMachine of each lease
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
//! | `watch` | the task that asks the policies after each sample |
//! | `unused` | one lease, as the idle policy sees it |
//! | `over_limit` | the memory of one lease, and its limit |
//! | `subject` | the idle policy of a lease, and whether the config exempts it |
//! | `act` | executes the effects of the machines |
//! | `show` | what happens to leases because of the policies, for answers |
//! | `dry_run` | what the idle policy would have done in the past |

mod act;
mod dry_run;
mod over_limit;
mod show;
mod subject;
mod unused;
mod watch;

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::LeaseId;
use gpush_locked::Locked;
use gpush_usage::moment::Moment;
use tokio::task::JoinHandle;

pub(crate) use self::dry_run::IdleQuery;
use self::{over_limit::WatchedMemory, unused::WatchedUse};
use crate::{leases::Leases, state::context::HostContext, system::tasks::TaskName, usage::Usage};

/// The policies of the host. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct LeasePolicies(Arc<PolicyParts>);

#[derive(Debug)]
struct PolicyParts {
    context: Arc<HostContext>,
    usage: Usage,
    leases: Leases,
    watched: Locked<BTreeMap<LeaseId, Watched>>,
}

/// What gpushd knows about an active lease.
#[derive(Debug)]
struct Watched {
    usage: WatchedUse,
    /// `None` if the hardware limits the memory of all shares of the lease.
    memory: Option<WatchedMemory>,
    /// The policy that has begun to end the lease, and when. The machine of the policy does nothing more.
    ending: Option<(PolicyName, Moment)>,
    /// Whether the job of the lease also runs on other nodes. Then gpushd only reports it.
    runs_elsewhere: bool,
}

/// A policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyName {
    Idle,
    OverLimit,
}

impl LeasePolicies {
    /// Creates the handle.
    pub(crate) fn new(context: Arc<HostContext>, usage: Usage, leases: Leases) -> Self {
        Self(Arc::new(PolicyParts { context, usage, leases, watched: Locked::default() }))
    }

    /// Starts the task that watches the leases. It runs until gpushd stops.
    pub(crate) fn spawn(&self) -> JoinHandle<()> {
        let policies = self.clone();
        self.0.context.tasks.spawn(TaskName::LeasePolicies, move || watch::run(policies.clone()))
    }
}
