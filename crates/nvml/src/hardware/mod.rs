//! The parent's side of the driver worker: the hardware as the agent calls it, async.
//!
//! Driver calls live in a child process, because a crash or a hang in the vendor's library must
//! not be ours. [`Hardware`] is a handle to a task that keeps that child: it spawns it on the
//! first call, sends it at most one call a GPU at a time, holds each call to its deadline, and
//! abandons a child that does not answer. What the task decides is in
//! `machine`, pure; `supervisor` carries it out, and `keeper` is the thread that a worker's life
//! hangs on.
//!
//! A mutation whose deadline passed may still land. Its caller gets [`ErrorKind::Deadline`] with
//! `may_land`, every further call to that GPU gets [`ErrorKind::Unsettled`], and
//! [`Hardware::settle`] returns once the outcome can be read.

mod afresh;
mod confirm;
mod held;
mod keeper;
mod machine;
mod supervisor;

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use gpush_api::{ComputeInstance, ComputeMode, Driver, GpuInstance, Placement};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::{
    error::{DriverError, ErrorKind},
    proto::{Answer, GpuRef, Request},
    reading::{Event, Listed, ModeChange, Reading},
};

/// How to run the worker.
#[derive(Debug, Clone)]
pub struct Options {
    /// Program of the worker, absolute; usually the agent's own executable. Its standard input is
    /// the socket.
    pub program: PathBuf,
    /// Arguments that make it the worker: `["driver-worker"]`.
    pub args: Vec<String>,
    /// Library to load; `None` = `libnvidia-ml.so.1` by the loader's search.
    pub library: Option<PathBuf>,
    /// Whether to listen to the driver's events. Registering for them holds the GPUs open.
    pub events: bool,
    /// How long things may take.
    pub deadlines: Deadlines,
}

impl Options {
    /// The usual: `program driver-worker`, library by search, default deadlines, no events.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: vec!["driver-worker".to_owned()],
            library: None,
            events: false,
            deadlines: Deadlines::default(),
        }
    }

    /// This very program as the worker, also after its file was replaced by an upgrade.
    #[must_use]
    pub fn of_this_program() -> Self {
        Self::new(THIS_PROGRAM)
    }
}

/// The running program, whatever has become of its file.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// How long things may take. A call's time counts from when it is sent to the worker, not while
/// it waits for another call to the same GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// Loading and initialising the library. Without persistence mode a real driver brings up
    /// every GPU here, seconds each.
    pub start: Duration,
    /// Listing, and reading one GPU.
    pub read: Duration,
    /// One mutation.
    pub change: Duration,
    /// Waiting in the queue: for the worker to start, or for earlier calls to the same GPU.
    pub queue: Duration,
    /// How much longer a mutation is left to land before the worker that carries it is killed;
    /// also how long a worker may take to end when asked.
    pub grace: Duration,
    /// How long a failed start is remembered: calls within it are answered with the same error,
    /// the next one after it tries again.
    pub retry: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            start: Duration::from_secs(60),
            read: Duration::from_secs(10),
            change: Duration::from_secs(60),
            queue: Duration::from_secs(90),
            grace: Duration::from_secs(10),
            retry: Duration::from_millis(500),
        }
    }
}

/// How a call that passed its deadline ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settled {
    /// Nothing was unsettled.
    Nothing,
    /// The call returned late, with this result. The hardware shows it now.
    Late(Result<(), DriverError>),
    /// The worker that carried the call is gone; the hardware shows what it had done.
    Gone,
}

/// What the worker is doing, for health and metrics.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    /// Worker that serves, if one does.
    pub worker: Option<u32>,
    /// Driver behind it, as of its last start.
    pub driver: Option<Driver>,
    /// Why there is no worker, when that is a failure.
    pub failure: Option<DriverError>,
    /// Workers started so far.
    pub started: u64,
    /// Workers that ended unasked.
    pub crashed: u64,
    /// Abandoned workers that are not gone yet.
    pub abandoned: Vec<AbandonedWorker>,
    /// GPUs with a call whose outcome is not known, by UUID.
    pub unsettled: Vec<String>,
}

/// A worker given up because a call in it did not return.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbandonedWorker {
    /// Its process, when it is known.
    pub pid: Option<u32>,
    /// What it hangs in, and since when.
    pub calls: Vec<String>,
    /// When it was given up.
    pub since: SystemTime,
    /// Killed and still there: it sits in the kernel, only a reboot ends it.
    pub stuck: bool,
}

/// The GPUs of this host. Cheap to clone; dropping the last clone ends the worker.
#[derive(Debug, Clone)]
pub struct Hardware {
    tx: mpsc::UnboundedSender<Message>,
    status: watch::Receiver<Status>,
    events: broadcast::Sender<Event>,
    /// GPUs whose handles a fresh session did not mend: see `afresh`.
    unmended: Arc<Mutex<BTreeSet<String>>>,
}

type Sender<T> = oneshot::Sender<T>;

/// What the handle asks of the task.
#[derive(Debug)]
enum Message {
    Driver(Sender<Result<Driver, DriverError>>),
    Call(Request, Sender<Result<Answer, DriverError>>),
    Settle(String, Sender<Settled>),
    Restart(Sender<Result<(), DriverError>>),
    Stop(Sender<Result<(), DriverError>>),
    Resume,
    Pause(Sender<Result<(), DriverError>>),
    Unpause,
}

impl Hardware {
    /// Starts the task that keeps the worker; the worker itself starts with the first call. Never
    /// fails for lack of a driver: calls do, and each tries again.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn start(options: Options) -> Self {
        let (tx, rx) = mpsc::unbounded_channel();
        let (status_tx, status) = watch::channel(Status::default());
        let (events, _) = broadcast::channel(256);
        tokio::spawn(supervisor::run(options, rx, status_tx, events.clone()));
        Self { tx, status, events, unmended: Arc::default() }
    }

    /// The driver: versions, library, whether it is simulated.
    ///
    /// # Errors
    /// When there is none, or none that works with its library.
    pub async fn driver(&self) -> Result<Driver, DriverError> {
        self.ask(Message::Driver).await.unwrap_or_else(|| Err(ended("asking for the driver")))
    }

    /// The GPUs of the driver's enumeration, those that can't be read included.
    ///
    /// # Errors
    /// When the driver as a whole fails.
    pub async fn list(&self) -> Result<Vec<Listed>, DriverError> {
        let request = Request::List { skip: Vec::new() };
        match self.call(request).await? {
            Answer::Listed(list) => Ok(list),
            other => Err(mixed_up("listing the GPUs", &other)),
        }
    }

    /// Everything about one GPU. A driver session that has lost track of it is begun anew.
    ///
    /// # Errors
    /// When it can't be read at all. What fails in part is in [`Reading::warnings`].
    pub async fn read(&self, uuid: &str) -> Result<Reading, DriverError> {
        self.read_afresh(uuid).await
    }

    /// Creates a GPU instance at a placement, and reads it back.
    ///
    /// # Errors
    /// The driver's; [`DriverError::may_land`] when its outcome is not known.
    pub async fn create_gpu_instance(
        &self,
        uuid: &str,
        profile_id: u32,
        placement: Placement,
    ) -> Result<GpuInstance, DriverError> {
        let request = Request::CreateGpuInstance { gpu: GpuRef::new(uuid), profile_id, placement };
        match self.change(request).await {
            Ok(Answer::GpuInstance(instance)) => Ok(instance),
            Ok(other) => Err(mixed_up("creating a GPU instance", &other)),
            Err(error) => self.look_again(uuid, error, |mig| confirm::gpu_instance(mig, profile_id, placement)).await,
        }
    }

    /// Creates a compute instance in GPU instance `gi`, and reads it back.
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn create_compute_instance(
        &self,
        uuid: &str,
        gi: u32,
        profile_id: u32,
        placement: Option<Placement>,
    ) -> Result<ComputeInstance, DriverError> {
        let request = Request::CreateComputeInstance { gpu: GpuRef::new(uuid), gi, profile_id, placement };
        match self.change(request).await {
            Ok(Answer::ComputeInstance(instance)) => Ok(instance),
            Ok(other) => Err(mixed_up("creating a compute instance", &other)),
            Err(error) => {
                self.look_again(uuid, error, |mig| confirm::compute_instance(mig, gi, profile_id, placement)).await
            }
        }
    }

    /// Destroys a compute instance.
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn destroy_compute_instance(&self, uuid: &str, gi: u32, ci: u32) -> Result<(), DriverError> {
        match self.change(Request::DestroyComputeInstance { gpu: GpuRef::new(uuid), gi, ci }).await {
            Ok(Answer::Destroyed) => Ok(()),
            Ok(other) => Err(mixed_up("destroying a compute instance", &other)),
            Err(error) => self.look_again(uuid, error, |mig| confirm::no_compute_instance(mig, gi, ci)).await,
        }
    }

    /// Destroys a GPU instance, which must have no compute instance any more.
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn destroy_gpu_instance(&self, uuid: &str, gi: u32) -> Result<(), DriverError> {
        match self.change(Request::DestroyGpuInstance { gpu: GpuRef::new(uuid), gi }).await {
            Ok(Answer::Destroyed) => Ok(()),
            Ok(other) => Err(mixed_up("destroying a GPU instance", &other)),
            Err(error) => self.look_again(uuid, error, |mig| confirm::no_gpu_instance(mig, gi)).await,
        }
    }

    /// Switches MIG mode and reads it back. `Ok` does not mean that it is in force: see
    /// [`ModeChange`].
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn set_mig_mode(&self, uuid: &str, enabled: bool) -> Result<ModeChange, DriverError> {
        match self.call(Request::SetMigMode { gpu: GpuRef::new(uuid), enabled }).await? {
            Answer::Mode(change) => Ok(change),
            other => Err(mixed_up("setting MIG mode", &other)),
        }
    }

    /// Sets the compute mode and reads it back: `Ok` means that it is in force, for contexts that are
    /// made from now on. A GPU in use is no obstacle; one in MIG mode has no other than DEFAULT.
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn set_compute_mode(&self, uuid: &str, mode: ComputeMode) -> Result<(), DriverError> {
        match self.call(Request::SetComputeMode { gpu: GpuRef::new(uuid), mode }).await {
            Ok(Answer::ComputeModeSet) => Ok(()),
            Ok(other) => Err(mixed_up("setting the compute mode", &other)),
            Err(error) => self.look_again_at(uuid, error, |reading| confirm::compute_mode(reading, mode)).await,
        }
    }

    /// Waits until no call to the GPU is left whose outcome is not known. With a worker stuck in
    /// the kernel that can be for ever: bound it with a timeout.
    pub async fn settle(&self, uuid: &str) -> Settled {
        self.ask(|tx| Message::Settle(uuid.to_owned(), tx)).await.unwrap_or(Settled::Gone)
    }

    /// Ends the worker and sees it gone, so that no handle of ours is left; the next call starts
    /// another. Calls in flight are answered first, calls in the queue wait for the new one.
    ///
    /// # Errors
    /// When a worker can't be ended because it is stuck in the kernel.
    pub async fn restart(&self) -> Result<(), DriverError> {
        self.ask(Message::Restart).await.unwrap_or_else(|| Err(ended("restarting the driver worker")))
    }

    /// As [`Self::restart`], but every call fails with [`ErrorKind::Stopped`] until
    /// [`Self::resume`].
    ///
    /// # Errors
    /// As [`Self::restart`].
    pub async fn stop(&self) -> Result<(), DriverError> {
        self.ask(Message::Stop).await.unwrap_or(Ok(()))
    }

    /// As [`Self::stop`], without waiting for the worker to end. Calls made after it fail.
    pub fn suspend(&self) {
        let (tx, _) = oneshot::channel();
        let _ = self.tx.send(Message::Stop(tx));
    }

    /// Lets calls through again.
    pub fn resume(&self) {
        let _ = self.tx.send(Message::Resume);
    }

    /// As [`Self::restart`], but the next worker is not started before [`Self::unpause`]: calls wait
    /// until then, however long it takes. For a reset, which nothing of ours may have the GPU open
    /// for, and which is no reason to fail what is done to other GPUs. Independent of
    /// [`Self::stop`].
    ///
    /// # Errors
    /// As [`Self::restart`].
    pub async fn pause(&self) -> Result<(), DriverError> {
        self.ask(Message::Pause).await.unwrap_or_else(|| Err(ended("pausing the driver worker")))
    }

    /// Lets workers be started again.
    pub fn unpause(&self) {
        let _ = self.tx.send(Message::Unpause);
    }

    /// What the worker is doing.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// The same, as it changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// The driver's events, when [`Options::events`] is set.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    async fn call(&self, request: Request) -> Result<Answer, DriverError> {
        let name = request.name();
        self.ask(|tx| Message::Call(request, tx)).await.unwrap_or_else(|| Err(ended(name)))
    }

    async fn ask<T>(&self, message: impl FnOnce(oneshot::Sender<T>) -> Message) -> Option<T> {
        let (tx, rx) = oneshot::channel();
        self.tx.send(message(tx)).ok()?;
        rx.await.ok()
    }
}

fn ended(what: &str) -> DriverError {
    DriverError::new(ErrorKind::Stopped, what).detail("the agent is ending")
}

fn mixed_up(what: &str, answer: &Answer) -> DriverError {
    DriverError::new(ErrorKind::Garbled, what).detail(format!("the worker answered with {answer:?}"))
}
