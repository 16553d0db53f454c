//! gpushd inside a unit test: all its handles, its store and its tasks, but no socket, no worker process and no simulator.
//! The driver, the MPS daemons and the helper programs are scripted. Requests go through the router, as from a client.
//!
//! These tests are for policies: what gpushd refuses, which steps it executes and in which order, what it does when a step
//! fails, and what it records. Tests of programs, permissions and crashes are in `tests/`.
//!
//! A [`ScriptedHost`] survives its gpushd. So a test can end a gpushd, also in a driver call, and start another one on the
//! same state directory and the same GPUs.
//!
//! | file | subject |
//! |---|---|
//! | `host` | the host: its files, its boot, its GPUs |
//! | `requests` | requests and answers |
//! | `listener` | event streams |
//! | `gpus` | the scripted driver |
//! | `calls` | what calls of the driver do to a GPU |
//! | `call_rules` | which calls of the driver fail, wait, or end a program |
//! | `access` | who may see and do what |
//! | `refusals` | requests that gpushd refuses |
//! | `plans` | plans, and the layouts that they lead to |
//! | `apply` | layouts: steps, and which change begins |
//! | `queue` | operations that wait |
//! | `rollback`, `partly_back` | failed calls |
//! | `crashes`, `recovery` | a gpushd that ends during an operation, and the next gpushd |
//! | `startup` | layouts that gpushd applies at its start |
//! | `overrides`, `override_ends` | overrides |
//! | `idempotency` | repeated requests |
//! | `http` | invalid requests, long polls, lists, shared readings |
//! | `events` | event streams and their filters |
//! | `conditions` | cordons, replaced memory rows, a lost database |
//! | `bills` | closed months, late use, own bills |
//! | `leases`, `lease_requests` | grants, quotas, failed grants |
//! | `lease_queue` | requests that wait for a lease |
//! | `lease_reservations` | capacity that the queue keeps for waiting requests |
//! | `dynamic` | devices that are created for leases |
//! | `daemons` | the scripted MPS daemons |
//! | `slurm` | leases of Slurm jobs |
//! | `smi` | the scripted `nvidia-smi compute-policy` |
//! | `scripted_services` | the scripted `systemctl` and hooks |
//! | `programs` | processes of users |
//! | `mps` | leases of MPS targets, actions on daemons, faults of daemons, changes of mode |
//! | `services` | services and hooks around an operation |
//! | `timeslice` | levels and compute modes of time-sliced GPUs |
//! | `idle` | unused leases |
//! | `over_limit` | leases above the memory of their share |
//! | `unleased` | processes without a lease |
//! | `enforcement` | rules that enforce leases |
//! | `device_access` | `enforce on` and `off`, with a systemd in a script |

mod access;
mod apply;
mod bills;
mod call_rules;
mod calls;
mod conditions;
mod crashes;
mod daemons;
mod device_access;
mod dynamic;
mod enforcement;
mod events;
mod gpus;
mod host;
mod http;
mod idempotency;
mod idle;
mod lease_queue;
mod lease_requests;
mod lease_reservations;
mod leases;
mod listener;
mod mps;
mod notices;
mod over_limit;
mod override_ends;
mod overrides;
mod partly_back;
mod plans;
mod programs;
mod queue;
mod quotas;
mod recovery;
mod refusals;
mod requests;
mod rollback;
mod scripted_services;
mod services;
mod slurm;
mod smi;
mod startup;
mod timeslice;
mod unleased;
mod usage;
mod usage_history;
mod usage_records;

use std::{sync::Arc, time::Duration};

use axum::Router;
use gpush_api::{Gpu, Operation};
use gpush_host::peer::Peer;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use self::{gpus::ScriptedGpus, host::ScriptedHost};
use crate::{operations::apply::Engine, processes::Unleased, system::tasks::Tasks};

/// Time limit for every wait in a test. It is long, because the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// gpushd in a test. It has its own threads, so that a test can end it at any moment.
struct InProcess {
    /// `None` if gpushd has ended.
    runtime: Option<Runtime>,
    router: Router,
    /// `None` if gpushd has ended.
    engine: Option<Engine>,
    gpus: Arc<ScriptedGpus>,
    unleased: Unleased,
    stopping: CancellationToken,
    tasks: Tasks,
    host: Arc<ScriptedHost>,
}

impl InProcess {
    /// Starts gpushd with this config, on a host with the first `count` GPUs of a preset. It does not apply layouts by
    /// itself.
    async fn start(preset: &str, count: usize, config: &str) -> Self {
        ScriptedHost::new(preset, count).start(config).await
    }

    /// Ends gpushd at once, as SIGKILL does. Calls that wait do not take effect.
    fn kill(mut self) {
        self.end();
    }

    /// Waits until a driver call ends gpushd: see [`call_rules::CallEffect::EndGpushd`].
    async fn died(self) {
        self.until("the call that ends gpushd", async || self.gpus.is_ending().then_some(())).await;
        self.kill();
    }

    /// Stops gpushd, as SIGTERM does.
    async fn stop(mut self) {
        self.stopping.cancel();
        let tasks = self.tasks.clone();
        let finished = self.runtime.as_ref().expect("gpushd runs").spawn(async move { tasks.finish().await });
        tokio::time::timeout(PATIENCE, finished).await.expect("gpushd stops").expect("its tasks end");
        self.end();
    }

    fn end(&mut self) {
        (self.router, self.engine) = (Router::new(), None);
        if let Some(runtime) = self.runtime.take() {
            tokio::task::block_in_place(|| runtime.shutdown_timeout(PATIENCE));
        }
        self.gpus.end_calls();
    }

    /// Returns the GPUs.
    async fn gpus(&self) -> Vec<Gpu> {
        self.get("/v1/gpus").await
    }

    /// Returns a GPU, by index.
    async fn gpu(&self, index: u32) -> Gpu {
        self.get(&format!("/v1/gpus/{index}")).await
    }

    /// Waits for the end of an operation.
    async fn ended(&self, operation: &Operation) -> Operation {
        self.ended_or(operation, |_| false).await
    }

    /// Waits for the end of an operation, or until `is` returns true.
    async fn ended_or(&self, operation: &Operation, is: impl Fn(&Operation) -> bool) -> Operation {
        let mut now = operation.clone();
        while !now.state.is_final() && !is(&now) {
            now = self.get(&format!("/v1/operations/{}?after={}&wait_ms=60000", now.id, now.revision)).await;
        }
        now
    }

    /// Waits until a driver call waits: see [`ScriptedGpus::hold`].
    async fn until_held(&self) {
        self.until("a call that waits", async || self.gpus.is_held().then_some(())).await;
    }

    /// Waits until `is` returns a value. Polls, because not every fact has an event.
    async fn until<T>(&self, what: &str, is: impl AsyncFn() -> Option<T>) -> T {
        let wait = async {
            loop {
                if let Some(found) = is().await {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("timed out: {what}"))
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.stopping.cancel();
        // Otherwise a held call would block its thread forever.
        self.gpus.end_calls();
        self.host.smi.release();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Returns a process of this user on the host.
fn user(uid: u32) -> Peer {
    Peer { uid, pid: Some(std::process::id()), start: None, groups: Vec::new(), is_on_this_host: true }
}

/// Returns a process of this user in a container.
fn in_container(uid: u32) -> Peer {
    Peer { is_on_this_host: false, pid: None, ..user(uid) }
}
