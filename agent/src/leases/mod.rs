//! Leases: shares of GPUs for users. [`gpush_core::lease`] makes the decisions; this module executes them.
//!
//! ```text
//! request ─► resolved ─► placed and reserved ─► committed ─► admitted, answered      released, revoked, expired,
//!    │                    │ see `scheduler`        └ failed: capacity is free again    binding ended, GPU lost
//!    │                    ▼                                                                │
//!    │                   no room ─► refused, or recorded as queued ─► granted later        ▼
//!    └─ denied by a quota                            └ cancelled, timed out        admission closed, recorded
//!                                                                                          │
//!                                          end recorded, capacity free ◄── no process left ┘
//! ```
//!
//! [`crate::state`] holds the open leases. [`crate::operations::scheduler`] places requests, and reserves the capacity of a grant in
//! this state. Then gpushd commits the grant. If the commit fails, gpushd frees the capacity. If it is
//! unknown whether the commit succeeded, the capacity stays reserved until gpushd restarts. gpushd frees the capacity
//! of a lease only after the end of the lease is on disk. Once a lease is recorded, its task owns it (`actor`), and
//! publishes it in the table of the state.
//!
//! | file | subject |
//! |---|---|
//! | `request` | what a request means on this host: holder, GPUs, binding |
//! | `share` | the share that a request means, and the target that it names |
//! | `alternatives` | what the holder of a refused request may lease instead, for hints |
//! | `selection` | the GPUs that a request selects and that its caller may lease |
//! | `bind` | the binding of a lease: a scope, a cgroup, a process |
//! | `unit_owner` | whose processes a service runs |
//! | `user_limits` | the limits of a user's slice, for the slice of the user's leases |
//! | `calling_process` | the process that sent a request |
//! | `scope_unit` | the units of the scopes of leases |
//! | `scope` | scopes of leases, which systemd creates and kills |
//! | `scope_devices` | the devices that the scope of each lease may open |
//! | `enter` | processes that enter an existing lease |
//! | `administrator_scope` | moves an administrator out of the login session |
//! | `device_list` | the MIG devices, and what a new request can get |
//! | `grant` | requests: resolving, reserving, waiting |
//! | `holder_facts` | what determines the quota of a user, and the GPUs that the user may lease |
//! | `quotas` | the accounts of users, and their quotas |
//! | `access` | the GPUs that a user may not lease |
//! | `pending` | a client that waits for its lease |
//! | `change` | requests for release, renewal, revocation |
//! | `renewal` | whether a lease can be renewed although a request waits for its capacity |
//! | `keep` | requests to keep an unused lease |
//! | `unused` | what the idle policy does with a lease |
//! | `rule_policies` | the policies of a lease, by the rules of its GPUs |
//! | `notices_and_keeps` | the last notices and keeps in the store |
//! | `job_terms` | what Slurm's hooks say about a job |
//! | `job` | leases of Slurm jobs |
//! | `actor` | the task of one lease |
//! | `lost` | leases whose device is gone |
//! | `processes` | which processes of a lease are left |
//! | `filter` | which leases a list has |
//! | `show` | leases as the API shows them |
//! | `log` | log entries about the devices of a lease |

mod about_to_end;
mod access;
mod actor;
mod administrator_scope;
mod alternatives;
mod bind;
mod calling_process;
mod change;
mod device_list;
mod enter;
mod filter;
mod grant;
mod holder_facts;
mod job;
mod job_terms;
mod keep;
mod log;
mod lost;
mod notices_and_keeps;
mod pending;
mod policy_end;
mod processes;
mod quotas;
mod renewal;
mod request;
mod rule_policies;
mod scope;
mod scope_devices;
mod scope_unit;
mod selection;
mod share;
mod show;
mod unit_owner;
mod user_limits;
mod warned;

use std::{
    collections::BTreeMap,
    ops::Deref,
    sync::{Arc, Weak},
};

use gpush_host::process_facts::LeaseNames;
use gpush_locked::Locked;
use tokio::task::JoinHandle;

use crate::{
    enforcement::Enforcement,
    modes::mps::Mps,
    notices::Notices,
    operations::{apply::Engine, scheduler::Scheduler},
    requests::idempotency::Idempotency,
    state::context::HostContext,
    system::{coalesced::Coalesced, tasks::TaskName},
};

pub(crate) use self::{
    actor::{EndCheck, HolderNews, SeenUnused, overtaken_before, restore_places, take_over},
    administrator_scope::leave_session,
    change::{release, renew, revoke},
    device_list::devices,
    enter::enter,
    filter::{LeaseFilter, Whose},
    grant::{Delivery, Outcome, request_lease},
    job::{end_job, environment_of_job, of_job, request_for_job},
    job_terms::{JobKey, JobTerms},
    keep::keep,
    notices_and_keeps::{StoredNotices, restore as restore_notices},
    policy_end::{end_by_policy, may_end, tell_holder},
    quotas::{quota_subject, quota_view, users_with_quotas},
    rule_policies::{idle_policy, is_judged_by_memory, is_of_job, over_limit_policy, rule_names},
    scope::{Scopes, health},
    show::{MOST_ENDED, all, ended_before, environment, id, one},
};

/// The parts of gpushd that leases use.
#[derive(Debug)]
pub(crate) struct LeaseHandles {
    pub(crate) context: Arc<HostContext>,
    /// Places requests, and queues those that wait.
    pub(crate) scheduler: Scheduler,
    /// Executes the operations that create MIG devices.
    pub(crate) engine: Engine,
    /// Admits holders to MPS targets, and lists the clients of MPS daemons.
    pub(crate) mps: Mps,
    pub(crate) scopes: Scopes,
    /// Whether the kernel denies the GPUs to login sessions.
    pub(crate) enforcement: Enforcement,
    /// The leases that processes name in their environments.
    pub(crate) lease_names: Arc<LeaseNames>,
    /// Tells holders what happens to their leases.
    pub(crate) notices: Notices,
    /// Idempotency keys and their answers.
    pub(crate) idempotency: Idempotency,
    /// Whether gpushd could read all open leases when it started.
    pub(crate) are_leases_known: bool,
}

/// The leases of this host. A handle; clones are cheap and share the state.
#[derive(Debug, Clone)]
pub(crate) struct Leases(Arc<LeaseParts>);

/// The state behind [`Leases`].
#[derive(Debug)]
pub(crate) struct LeaseParts {
    handles: LeaseHandles,
    /// For each user, a scan for processes that belong to leases. Concurrent releases share one scan.
    bound: Locked<BTreeMap<u32, Weak<Coalesced<processes::BoundProcessScan>>>>,
    /// The inboxes of the tasks of all open leases.
    actors: actor::Inboxes,
    /// The devices that scopes may open, as gpushd last set them.
    devices: scope_devices::ScopeDevices,
}

impl Deref for Leases {
    type Target = LeaseParts;

    fn deref(&self) -> &LeaseParts {
        &self.0
    }
}

impl Leases {
    /// Creates the handle. `handles.context.state` must already have the open leases.
    pub(crate) fn new(handles: LeaseHandles) -> Self {
        Self(Arc::new(LeaseParts {
            handles,
            bound: Locked::default(),
            actors: actor::Inboxes::default(),
            devices: scope_devices::ScopeDevices::default(),
        }))
    }

    /// Returns the scan for processes of a user that belong to leases. Concurrent callers share the scan.
    fn bound_by(&self, uid: u32) -> Arc<Coalesced<processes::BoundProcessScan>> {
        let mut bound = self.bound.lock();
        bound.retain(|_, shared| shared.strong_count() > 0);
        bound.get(&uid).and_then(Weak::upgrade).unwrap_or_else(|| {
            let shared = Arc::default();
            bound.insert(uid, Arc::downgrade(&shared));
            shared
        })
    }
}

/// Starts the tasks that end leases whose device is gone, that warn holders, that run the hook for notices, and that keep
/// the devices of scopes up to date. They run until gpushd stops.
pub(crate) fn spawn(leases: &Leases) -> [JoinHandle<()>; 4] {
    let (lost, warned, devices) = (leases.clone(), leases.clone(), leases.clone());
    let tasks = &leases.handles.context.tasks;
    [
        tasks.spawn(TaskName::LostLeases, move || lost::end_lost(lost.clone())),
        leases.handles.notices.spawn(&leases.handles.context),
        tasks.spawn(TaskName::LeaseWarnings, move || warned::warn(warned.clone())),
        tasks.spawn(TaskName::LeaseDevices, move || scope_devices::run(devices.clone())),
    ]
}
