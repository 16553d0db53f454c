//! gpushd's side of the driver worker: async access to the hardware.
//!
//! Driver calls run in a child process, so that a crash or a hang of NVIDIA's library does not affect gpushd.
//! [`Hardware`] is a handle to a task that manages the child. The task starts the child with the first call, and sends
//! the child at most one call per GPU at a time. The task enforces each call's deadline, and abandons a child that does
//! not answer. `machine` makes the task's decisions as a pure state machine, and `supervisor` executes them. `keeper`
//! is the thread that owns a worker process.
//!
//! A second child takes samples, so that samples never affect commands: see `sampler`.
//!
//! A mutation may still take effect after its deadline. Its caller gets [`ErrorKind::Deadline`] with `may_land`. Every
//! further call to that GPU gets [`ErrorKind::Unsettled`]. [`Hardware::settle`] returns when the outcome can be read.

mod call_times;
mod confirm;
mod fresh_session;
mod keeper;
mod machine;
mod retry_in_use;
mod sampler;
mod supervisor;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use gpush_api::{ComputeInstance, ComputeMode, Driver, GpuInstance, GpuUuid, Placement};
use gpush_locked::Locked;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::{
    error::{DriverError, ErrorKind},
    proto::{Answer, GpuRef, Request},
    reading::{Event, Listed, ModeChange, Reading},
    sample::{InstanceRef, Sample, Wanted},
    worker::ScriptedDriver,
};

pub use call_times::CallTime;
use call_times::CallTimes;
pub use sampler::SampleError;
use sampler::Sampler;

/// Options of the worker.
#[derive(Debug, Clone)]
pub struct Options {
    /// Absolute path of the worker's program, usually gpushd's own executable. Its standard input will be the socket.
    pub program: PathBuf,
    /// Arguments that start the program as a worker: `["driver-worker"]`.
    pub args: Vec<String>,
    /// Library to load; `None`: the loader searches for `libnvidia-ml.so.1`.
    pub library: Option<PathBuf>,
    /// Whether to register for the driver's events. This keeps the GPUs open.
    pub events: bool,
    /// Time limits.
    pub deadlines: Deadlines,
    /// For tests: answers in this process, in place of a worker process.
    pub scripted: Option<Arc<dyn ScriptedDriver>>,
}

impl Options {
    /// Returns the defaults: the command `program driver-worker`, a library found by the loader, default deadlines, no
    /// events.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: vec!["driver-worker".to_owned()],
            library: None,
            events: false,
            deadlines: Deadlines::default(),
            scripted: None,
        }
    }

    /// Returns options with a scripted driver in place of a worker process.
    #[must_use]
    pub fn scripted(driver: Arc<dyn ScriptedDriver>) -> Self {
        Self { scripted: Some(driver), ..Self::of_this_program() }
    }

    /// Returns options that use the running program as the worker, even if an upgrade has replaced its file.
    #[must_use]
    pub fn of_this_program() -> Self {
        Self::new(THIS_PROGRAM)
    }
}

/// The path of the running program. It stays valid if the program's file was replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Time limits. The time of a call begins when the call is sent to the worker. The wait for earlier
/// calls to the same GPU is not included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// For loading and initialising the library. Without persistence mode, a real driver initialises every GPU here,
    /// which takes seconds for each.
    pub start: Duration,
    /// For listing the GPUs, and for reading one GPU.
    pub read: Duration,
    /// For one mutation.
    pub change: Duration,
    /// For one sample, which is dropped when it is late.
    pub sample: Duration,
    /// For waiting until a sample begins. The start of the worker for samples is included.
    pub sample_wait: Duration,
    /// For waiting in the queue, until the worker has started or earlier calls to the same GPU have finished.
    pub queue: Duration,
    /// Additional time for a late mutation to take effect before its worker is killed. The same
    /// time is allowed for a worker to end on request.
    pub grace: Duration,
    /// How long a failed start is remembered. Calls within this time get the same error. The first
    /// call after this time causes another attempt to start.
    pub retry: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            start: Duration::from_secs(60),
            read: Duration::from_secs(10),
            change: Duration::from_secs(60),
            sample: Duration::from_secs(2),
            sample_wait: Duration::from_secs(5),
            queue: Duration::from_secs(90),
            grace: Duration::from_secs(10),
            retry: Duration::from_millis(500),
        }
    }
}

/// How a call that passed its deadline ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settled {
    /// There was no unsettled call.
    Nothing,
    /// The call returned late with this result. A reading now shows the effect of the call.
    Late(Result<(), DriverError>),
    /// The worker with the call has ended. A reading now shows what the call has changed.
    Gone,
}

/// State of the worker, for health and metrics.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    /// Pid of the serving worker, if any.
    pub worker: Option<u32>,
    /// The driver, as of the worker's last start.
    pub driver: Option<Driver>,
    /// Why there is no worker, if the reason is a failure.
    pub failure: Option<DriverError>,
    /// Number of workers started so far.
    pub started: u64,
    /// Number of workers that crashed.
    pub crashed: u64,
    /// Abandoned workers that have not ended yet.
    pub abandoned: Vec<AbandonedWorker>,
    /// UUIDs of the GPUs with a call whose outcome is unknown.
    pub unsettled: Vec<GpuUuid>,
}

/// A worker that was abandoned because a call in it did not return.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbandonedWorker {
    /// Pid of the worker, if known.
    pub pid: Option<u32>,
    /// The calls that hang, each with its duration.
    pub calls: Vec<String>,
    /// Time when the worker was abandoned.
    pub since: SystemTime,
    /// Whether the worker was killed but has not ended. Such a worker hangs in the kernel, and only
    /// a reboot ends it.
    pub stuck: bool,
}

/// The GPUs of this host. Cloning is cheap; dropping the last clone ends the worker.
#[derive(Debug, Clone)]
pub struct Hardware {
    tx: mpsc::UnboundedSender<Message>,
    status: watch::Receiver<Status>,
    events: broadcast::Sender<Event>,
    /// GPUs whose reading also failed in a fresh session: see `fresh_session`.
    unmended: Arc<Locked<BTreeSet<GpuUuid>>>,
    sampler: Sampler,
    call_times: CallTimes,
}

type Sender<T> = oneshot::Sender<T>;

/// A request from the handle to the task.
#[derive(Debug)]
enum Message {
    Driver(Sender<Result<Driver, DriverError>>),
    Call(Request, Sender<Result<Answer, DriverError>>),
    Settle(GpuUuid, Sender<Settled>),
    Restart(Sender<Result<(), DriverError>>),
    Stop(Sender<Result<(), DriverError>>),
    Resume,
    Pause(Sender<Result<(), DriverError>>),
    Unpause,
}

impl Hardware {
    /// Starts the task. The worker starts with the first call. If there is no driver, this function
    /// does not fail, but each call fails and later calls try again.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "for programs without supervised tasks")]
    pub fn start(options: Options) -> Self {
        let (hardware, task) = Self::with_task(options);
        tokio::spawn(task);
        hardware
    }

    /// Does the same as [`Self::start`], but returns the task, which the caller must run. Without the task, each call
    /// fails.
    pub fn with_task(options: Options) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (tx, rx) = mpsc::unbounded_channel();
        let (status_tx, status) = watch::channel(Status::default());
        let (events, _) = broadcast::channel(256);
        let call_times = CallTimes::default();
        let (sampler, sampling) = Sampler::with_task(options.clone(), call_times.clone());
        let commands = supervisor::run(options, rx, status_tx, events.clone(), call_times.clone());
        let task = async move { _ = tokio::join!(commands, sampling) };
        (Self { tx, status, events, unmended: Arc::default(), sampler, call_times }, task)
    }

    /// Returns the driver's versions and library, and whether the library is simulated.
    ///
    /// # Errors
    /// There is no driver, or its version differs from the library's.
    pub async fn driver(&self) -> Result<Driver, DriverError> {
        self.ask(Message::Driver).await.unwrap_or_else(|| Err(ended("querying the driver")))
    }

    /// Returns all GPUs that the driver lists, including those that cannot be read.
    ///
    /// # Errors
    /// The driver as a whole fails.
    pub async fn list(&self) -> Result<Vec<Listed>, DriverError> {
        let request = Request::List { skip: Vec::new() };
        match self.call(request).await? {
            Answer::Listed(list) => Ok(list),
            other => Err(mixed_up("listing the GPUs", &other)),
        }
    }

    /// Reads everything about one GPU. Replaces an outdated driver session.
    ///
    /// # Errors
    /// The GPU cannot be read at all. Partial failures are in [`Reading::warnings`].
    pub async fn read(&self, uuid: &GpuUuid) -> Result<Reading, DriverError> {
        self.read_with_fresh_session(uuid).await
    }

    /// Samples one GPU. `instances` are its GPU instances with the caller's generations; `None` means that MIG is off.
    /// The first sample of a GPU or an instance begins a window, so it has no activity.
    ///
    /// A second worker process takes the samples. A sample that hangs is dropped after [`Deadlines::sample`]: it delays
    /// no other call, and the GPU does not become unsettled. One window lasts at least 100 ms.
    ///
    /// # Errors
    /// There is no sample. This says nothing about the state of the GPU.
    pub async fn sample(
        &self,
        gpu: GpuRef,
        instances: Option<Vec<InstanceRef>>,
        wanted: Wanted,
    ) -> Result<Sample, SampleError> {
        self.sampler.sample(gpu, instances, wanted).await
    }

    /// Ends the worker for samples, so that it holds no driver handle. The next sample starts a new one, and begins all
    /// windows again.
    ///
    /// # Errors
    /// The worker hangs in the kernel and cannot be ended.
    pub async fn end_sampling(&self) -> Result<(), DriverError> {
        self.sampler.restart().await
    }

    /// Creates a GPU instance at a placement, and reads it back.
    ///
    /// # Errors
    /// Errors of the driver. If the outcome is unknown, [`DriverError::may_land`] returns true.
    pub async fn create_gpu_instance(
        &self,
        uuid: &GpuUuid,
        profile_id: u32,
        placement: Placement,
    ) -> Result<GpuInstance, DriverError> {
        let request = Request::CreateGpuInstance { gpu: GpuRef::new(uuid), profile_id, placement };
        match self.change(request).await {
            Ok(Answer::GpuInstance(instance)) => Ok(instance),
            Ok(other) => Err(mixed_up("creating a GPU instance", &other)),
            Err(error) => {
                self.confirm_in_fresh_session(uuid, error, |mig| confirm::gpu_instance(mig, profile_id, placement))
                    .await
            }
        }
    }

    /// Creates a compute instance in GPU instance `gi`, and reads it back.
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn create_compute_instance(
        &self,
        uuid: &GpuUuid,
        gi: u32,
        profile_id: u32,
        placement: Option<Placement>,
    ) -> Result<ComputeInstance, DriverError> {
        let request = Request::CreateComputeInstance { gpu: GpuRef::new(uuid), gi, profile_id, placement };
        match self.change(request).await {
            Ok(Answer::ComputeInstance(instance)) => Ok(instance),
            Ok(other) => Err(mixed_up("creating a compute instance", &other)),
            Err(error) => {
                self.confirm_in_fresh_session(uuid, error, |mig| {
                    confirm::compute_instance(mig, gi, profile_id, placement)
                })
                .await
            }
        }
    }

    /// Destroys a compute instance.
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn destroy_compute_instance(&self, uuid: &GpuUuid, gi: u32, ci: u32) -> Result<(), DriverError> {
        match self.change(Request::DestroyComputeInstance { gpu: GpuRef::new(uuid), gi, ci }).await {
            Ok(Answer::Destroyed) => Ok(()),
            Ok(other) => Err(mixed_up("destroying a compute instance", &other)),
            Err(error) => {
                self.confirm_in_fresh_session(uuid, error, |mig| confirm::no_compute_instance(mig, gi, ci)).await
            }
        }
    }

    /// Destroys a GPU instance, which must have no compute instances.
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn destroy_gpu_instance(&self, uuid: &GpuUuid, gi: u32) -> Result<(), DriverError> {
        match self.change(Request::DestroyGpuInstance { gpu: GpuRef::new(uuid), gi }).await {
            Ok(Answer::Destroyed) => Ok(()),
            Ok(other) => Err(mixed_up("destroying a GPU instance", &other)),
            Err(error) => self.confirm_in_fresh_session(uuid, error, |mig| confirm::no_gpu_instance(mig, gi)).await,
        }
    }

    /// Changes MIG mode and reads it back. `Ok` does not mean that the change is effective: see [`ModeChange`].
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn set_mig_mode(&self, uuid: &GpuUuid, enabled: bool) -> Result<ModeChange, DriverError> {
        // The driver refuses the change while any other process has a driver session.
        let _held = self.sampler.hold().await;
        match self.call(Request::SetMigMode { gpu: GpuRef::new(uuid), enabled }).await? {
            Answer::Mode(change) => Ok(change),
            other => Err(mixed_up("setting MIG mode", &other)),
        }
    }

    /// Sets the compute mode and reads it back. `Ok` means that the mode is effective for new
    /// contexts. The call also works on a GPU that is in use. A GPU in MIG mode supports only
    /// DEFAULT.
    ///
    /// # Errors
    /// As [`Self::create_gpu_instance`].
    pub async fn set_compute_mode(&self, uuid: &GpuUuid, mode: ComputeMode) -> Result<(), DriverError> {
        match self.call(Request::SetComputeMode { gpu: GpuRef::new(uuid), mode }).await {
            Ok(Answer::ComputeModeSet) => Ok(()),
            Ok(other) => Err(mixed_up("setting the compute mode", &other)),
            Err(error) => {
                self.confirm_reading_in_fresh_session(uuid, error, |reading| confirm::compute_mode(reading, mode)).await
            }
        }
    }

    /// Waits until the GPU has no call with an unknown outcome. If a worker hangs in the kernel,
    /// this function may never return, so use a timeout.
    pub async fn settle(&self, uuid: &GpuUuid) -> Settled {
        self.ask(|tx| Message::Settle(uuid.clone(), tx)).await.unwrap_or(Settled::Gone)
    }

    /// Ends both workers and verifies that they have ended, so that gpush has no open handle. The next call starts a new
    /// worker. Calls in flight finish first; queued calls wait for the new worker.
    ///
    /// # Errors
    /// A worker hangs in the kernel and cannot be ended.
    pub async fn restart(&self) -> Result<(), DriverError> {
        let (commands, samples) = tokio::join!(self.ask(Message::Restart), self.sampler.restart());
        commands.unwrap_or_else(|| Err(ended("restarting gpushd's driver worker"))).and(samples)
    }

    /// Ends the worker like [`Self::restart`]. After that, every call fails with [`ErrorKind::Stopped`] until
    /// [`Self::resume`].
    ///
    /// # Errors
    /// As [`Self::restart`].
    pub async fn stop(&self) -> Result<(), DriverError> {
        let (commands, samples) = tokio::join!(self.ask(Message::Stop), self.sampler.stop());
        commands.unwrap_or(Ok(())).and(samples)
    }

    /// Makes later calls fail, as [`Self::stop`] does, but does not wait for the worker to end.
    pub fn suspend(&self) {
        let (tx, _) = oneshot::channel();
        let _ = self.tx.send(Message::Stop(tx));
        self.sampler.suspend();
    }

    /// Accepts calls again.
    pub fn resume(&self) {
        let _ = self.tx.send(Message::Resume);
        self.sampler.resume();
    }

    /// Ends the worker like [`Self::restart`], but starts no new worker before [`Self::unpause`].
    /// Until then, calls wait without limit. A reset needs such a pause: gpush must not have an
    /// open handle during the reset, and operations on other GPUs must not fail. A pause is
    /// independent of [`Self::stop`].
    ///
    /// # Errors
    /// As [`Self::restart`].
    pub async fn pause(&self) -> Result<(), DriverError> {
        let (commands, samples) = tokio::join!(self.ask(Message::Pause), self.sampler.pause());
        commands.unwrap_or_else(|| Err(ended("pausing gpushd's driver worker"))).and(samples)
    }

    /// Permits workers to start again.
    pub fn unpause(&self) {
        let _ = self.tx.send(Message::Unpause);
        self.sampler.unpause();
    }

    /// Returns the pids of all workers, including abandoned ones and the worker for samples.
    #[must_use]
    pub fn worker_pids(&self) -> Vec<u32> {
        let of = |status: Status| {
            let abandoned: Vec<_> = status.abandoned.iter().map(|worker| worker.pid).collect();
            std::iter::once(status.worker).chain(abandoned).flatten().collect::<Vec<_>>()
        };
        [self.status(), self.sampler.status()].into_iter().flat_map(of).collect()
    }

    /// Returns the state of the worker for samples. Its failures do not concern the GPUs.
    #[must_use]
    pub fn sampling_status(&self) -> Status {
        self.sampler.status()
    }

    /// Returns how long the calls to both workers took, by kind of call.
    #[must_use]
    pub fn call_times(&self) -> BTreeMap<&'static str, CallTime> {
        self.call_times.list()
    }

    /// Returns the state of the worker.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Returns a receiver for the state of the worker and its changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Returns a receiver for the driver's events, which arrive if [`Options::events`] is set.
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
    DriverError::new(ErrorKind::Stopped, what).detail("gpushd is stopping")
}

fn mixed_up(what: &str, answer: &Answer) -> DriverError {
    DriverError::new(ErrorKind::Garbled, what).detail(format!("gpushd's driver worker answered with {answer:?}"))
}
