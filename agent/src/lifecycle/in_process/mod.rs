//! gpushd inside a unit test: all its handles, its store and its tasks, but no socket, no worker process and no simulator.
//! The driver, the MPS daemons and `nvidia-smi` are scripted. Requests go through the router, as from a client.
//!
//! These tests are for policies: what gpushd refuses, which steps it executes and in which order, what it does when a step
//! fails, and what it records. Tests of programs, permissions and crashes are in `tests/`.
//!
//! | file | subject |
//! |---|---|
//! | `world` | the host, on which one gpushd after another can run |
//! | `gpus` | the scripted driver |
//! | `daemons` | the scripted MPS daemons |
//! | `smi` | the scripted `nvidia-smi compute-policy` |
//! | `programs` | processes of users |
//! | `access` | who may see and do what |
//! | `apply` | layouts: refusals, steps, rollback, queue |
//! | `leases` | grants, the queue, quotas, failed grants |
//! | `mps` | leases of MPS targets, actions on daemons, faults of daemons, changes of mode |
//! | `timeslice` | levels and compute modes of time-sliced GPUs |
//! | `unleased` | processes without a lease |

mod access;
mod apply;
mod daemons;
mod gpus;
mod leases;
mod mps;
mod programs;
mod smi;
mod timeslice;
mod unleased;
mod world;

use std::{os::unix::fs::DirBuilderExt, sync::Arc, task::Poll, time::Duration};

use axum::{Router, body::Body, extract::Request};
use gpush_api::{ApiError, Gpu, Operation};
use gpush_host::{
    helper::Helpers,
    identity::Users,
    peer::Peer,
    users::{Lookups, NameService},
};
use gpush_mps::daemon::Launcher;
use gpush_nvml::Options;
use http_body_util::BodyExt;
use hyper::{Method, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower_service::Service;

use self::{gpus::ScriptedGpus, world::World};
use super::{
    compose::{HostEnvironment, Parts, compose},
    take_over::take_over,
};
use crate::{
    lifecycle::stored_state,
    modes::{mps as mps_daemons, shared_gpus, timeslice as levels},
    processes::Unleased,
    serve::http,
    system::{host_services::HostServices, options::Trust, settings::Settings, tasks::TaskName},
};

/// The boot id of the host.
const BOOT: &str = "in-process";

/// gpushd in a test.
struct InProcess {
    router: Router,
    gpus: Arc<ScriptedGpus>,
    world: Arc<World>,
    unleased: Unleased,
    stopping: CancellationToken,
}

impl InProcess {
    /// Starts gpushd with this config, on a host with the first `count` GPUs of a preset.
    async fn start(preset: &str, count: usize, config: &str) -> Self {
        Self::start_on(World::new(preset, count), BOOT, config).await
    }

    /// Starts gpushd with this config on a host. An earlier gpushd on this host must have ended.
    async fn start_on(world: Arc<World>, boot: &str, config: &str) -> Self {
        let directory = &world.directory;
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("config.toml"), config).expect("the config can be written");
        if !path("state").exists() {
            std::fs::DirBuilder::new().mode(0o700).create(path("state")).expect("a directory");
        }
        let copy = path("config.last-valid.toml");
        let settings = Settings::load_as_service(&path("config.toml"), true, Trust::Logged, &copy, false);
        let name = |uid: &u32| if *uid == 0 { "root".to_owned() } else { format!("user{uid}") };
        let known = Lookups { user: Box::new(move |uid| Some(Some(name(uid)))), ..Lookups::empty() };
        let names = NameService::with(known).expect("the threads of the name service");
        let users = Users::new(names, nix::unistd::geteuid().as_raw(), directory.path());
        let (state, marker) = (path("state"), path("marker"));
        let origin = stored_state::Origin {
            directory: &state,
            boot_id: boot,
            marker: &marker,
            host_root: directory.path(),
            accounts: users.accounts(),
        };
        let remembered = tokio::task::block_in_place(|| stored_state::open(&origin));
        let environment = HostEnvironment {
            boot: Ok(boot.to_owned()),
            host_root: directory.path().to_owned(),
            host_services: Arc::new(HostServices {
                helpers: Helpers::new(&path("state")).with_script(Arc::clone(&world.smi) as Arc<_>),
                proc: "/proc".into(),
                nvidia_smi: Some("/bin/true".into()),
                level_interval: *world.level_interval.lock(),
                driverless: Default::default(),
                services: Default::default(),
                not_started: Default::default(),
            }),
            users,
            mps_dir: path("mps"),
            mps_launcher: Launcher::scripted(Arc::clone(&world.daemons) as Arc<_>),
            mps_programs: Some(path("programs")),
        };
        let options = Options::scripted(Arc::clone(&world.gpus) as Arc<_>);
        let parts = compose(settings, environment, remembered.expect("a store"), options);
        let (router, stopping) = (http::router(parts.handles.clone()), parts.engine.stopping.clone());
        let unleased = parts.handles.unleased.clone();
        serve(parts).await;
        Self { router, gpus: Arc::clone(&world.gpus), world, unleased, stopping }
    }

    /// Writes another config, and reloads it.
    async fn reload(&self, config: &str) {
        std::fs::write(self.world.directory.path().join("config.toml"), config).expect("the config can be written");
        self.post::<Value>("/v1/config/reload", &json!({})).await.expect("the config is reloaded");
    }

    /// Sends a request. Returns the status and the body.
    async fn send(&self, peer: Peer, method: Method, path: &str, body: Option<&Value>) -> (StatusCode, Value) {
        let text = body.map_or_else(String::new, Value::to_string);
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let mut request = request.body(Body::from(text)).expect("a request");
        request.extensions_mut().insert(peer);
        let mut router = self.router.clone();
        std::future::poll_fn(|context| match Service::<Request>::poll_ready(&mut router, context) {
            Poll::Ready(Ok(())) => Poll::Ready(()),
            Poll::Ready(Err(never)) => match never {},
            Poll::Pending => Poll::Pending,
        })
        .await;
        let response = router.call(request).await.unwrap_or_else(|never| match never {});
        let (status, body) = (response.status(), response.into_body().collect().await.expect("a body").to_bytes());
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    /// Reads a document as an administrator.
    async fn get<T: DeserializeOwned>(&self, path: &str) -> T {
        self.get_as(user(0), path).await.expect("an administrator may read everything")
    }

    /// Reads a document.
    async fn get_as<T: DeserializeOwned>(&self, peer: Peer, path: &str) -> Result<T, ApiError> {
        self.answer(self.send(peer, Method::GET, path, None).await)
    }

    /// Sends a changing request as an administrator.
    async fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, ApiError> {
        self.post_as(user(0), path, body).await
    }

    /// Sends a changing request.
    async fn post_as<T: DeserializeOwned>(&self, peer: Peer, path: &str, body: &Value) -> Result<T, ApiError> {
        self.answer(self.send(peer, Method::POST, path, Some(body)).await)
    }

    fn answer<T: DeserializeOwned>(&self, (status, body): (StatusCode, Value)) -> Result<T, ApiError> {
        if status.is_success() {
            return Ok(serde_json::from_value(body).expect("the answer of this path"));
        }
        Err(serde_json::from_value(body).expect("an error"))
    }

    /// Returns the GPUs.
    async fn gpus(&self) -> Vec<Gpu> {
        self.get("/v1/gpus").await
    }

    /// Begins to apply a layout, or returns why gpushd refuses it.
    async fn begin(&self, selectors: &[&str], entries: &[&str], more: &Value) -> Result<Operation, ApiError> {
        let mut body = json!({ "selectors": selectors, "layout_source": { "entries": entries } });
        if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
            body.extend(more.clone());
        }
        self.post("/v1/mig/apply", &body).await
    }

    /// Applies a layout, and waits for the end of the operation.
    async fn apply(&self, selectors: &[&str], entries: &[&str]) -> Operation {
        let begun = self.begin(selectors, entries, &json!({})).await.expect("the operation begins");
        self.ended(&begun).await
    }

    /// Waits for the end of an operation.
    async fn ended(&self, operation: &Operation) -> Operation {
        let mut now = operation.clone();
        while !now.state.is_final() {
            now = self.get(&format!("/v1/operations/{}?after={}&wait_ms=60000", now.id, now.revision)).await;
        }
        now
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
        tokio::time::timeout(Duration::from_secs(120), wait)
            .await
            .unwrap_or_else(|_| panic!("timed out after 120 s: {what}"))
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        // Otherwise a held call would block its thread forever.
        self.gpus.release();
        self.world.smi.release();
        self.stopping.cancel();
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

/// Starts the tasks that requests need, and the reconcilers of MPS daemons and time-slicing. Does not apply layouts.
async fn serve(parts: Parts) {
    let Parts { engine, handles, recovery, unfinished, superseded, boot_id, timeslice, shared_gpus, .. } = parts;
    let (reload, mut inbox) = (parts.reload, parts.inbox);
    take_over(&engine, &handles, &recovery, unfinished, &superseded, &boot_id).await;
    drop((crate::leases::spawn(&handles.leases), engine.scheduler.spawn()));
    let (tasks, stopping) = (&engine.tasks, engine.stopping.clone());
    let (mps, of_levels, of_modes) = (handles.mps.clone(), handles.mps.clone(), handles.mps.clone());
    drop(tasks.spawn(TaskName::MpsReconciler, move || mps_daemons::run(mps.clone())));
    drop(tasks.spawn(TaskName::TimesliceReconciler, move || {
        let mps = of_levels.clone();
        levels::run(timeslice.clone(), move |uuid: &str| mps.has(uuid))
    }));
    drop(tasks.spawn(TaskName::ComputeModes, move || {
        let mps = of_modes.clone();
        shared_gpus::run(shared_gpus.clone(), move |uuid: &str| mps.needs_compute_mode(uuid), stopping.clone())
    }));
    let stopping = engine.stopping.clone();
    tokio::spawn(stopping.run_until_cancelled_owned(async move {
        loop {
            let (command, reply) = inbox.next().await;
            let _caller_left = reply.send(reload.carry_out(command, |_| Ok(())).await);
        }
    }));
}
