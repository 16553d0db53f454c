//! Samples, which a second worker process takes.
//!
//! A sample must never delay or fail a command, and never make a GPU `unknown`. A hung driver call cannot be ended
//! without its process, and may hold locks inside NVIDIA's library, so a second thread in the worker for commands is not
//! enough. The second worker has the same supervisor and state machine as the first one, but its own instance: a late
//! sample ends only this worker.
//!
//! ```text
//!   Hardware ──commands──▶ supervisor ──▶ worker            a late change: the GPU is unsettled
//!      └──────samples────▶ supervisor ──▶ worker (samples)  a late sample: dropped, the worker is killed at once
//! ```
//!
//! The worker starts with the first sample. It has no handle during a reset, maintenance or a change of MIG mode:
//! samples are then refused. After that, each window begins again, so the first sample has no activity.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_api::GpuUuid;
use gpush_locked::Locked;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::{Deadlines, Message, Options, Status, call_times::CallTimes, mixed_up, supervisor};
use crate::{
    error::{DriverError, ErrorKind},
    proto::{Answer, GpuRef, Request},
    sample::{InstanceRef, Sample, Wanted},
};

/// First and longest time without samples of a GPU after a late sample. Each late sample ends the worker, and with it
/// the open windows of all GPUs, so a GPU that hangs must not be sampled often.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(600));

/// Additional time for the answer of the supervisor, which itself keeps the deadlines.
const ANSWERING: Duration = Duration::from_secs(1);

/// Why there is no sample. None of the reasons says anything about the state of the GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SampleError {
    /// The driver did not answer in time. The sample was dropped.
    Late,
    /// The last samples of this GPU were late, so it is not sampled for this time.
    Waiting(Duration),
    /// gpushd has no driver handle at present, because of a reset, maintenance or a change of MIG mode.
    Suspended,
    /// The driver or the worker reports an error.
    Driver(DriverError),
}

impl fmt::Display for SampleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Late => f.write_str("the driver did not answer in time"),
            Self::Waiting(time) => write!(f, "earlier samples were late; next sample in {}s", time.as_secs() + 1),
            Self::Suspended => f.write_str("gpushd has no driver handle at present"),
            Self::Driver(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SampleError {}

#[derive(Debug, Clone, Copy)]
struct Late {
    count: u32,
    until: Instant,
}

/// What keeps the worker from running.
#[derive(Debug, Default)]
struct Hold {
    stopped: bool,
    paused: bool,
    changes: u32,
}

impl Hold {
    fn is_held(&self) -> bool {
        self.stopped || self.pauses()
    }

    fn pauses(&self) -> bool {
        self.paused || self.changes > 0
    }
}

/// The handle to the worker for samples.
#[derive(Debug, Clone)]
pub(super) struct Sampler {
    tx: mpsc::UnboundedSender<Message>,
    status: watch::Receiver<Status>,
    late: Arc<Locked<BTreeMap<GpuUuid, Late>>>,
    hold: Arc<Locked<Hold>>,
    limit: Duration,
}

/// Keeps the worker from running until it is dropped.
#[derive(Debug)]
pub(super) struct Held(Sampler);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.release(|hold| hold.changes -= 1);
    }
}

impl Sampler {
    /// Returns the handle, and the task behind it.
    pub(super) fn with_task(options: Options, times: CallTimes) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let given = options.deadlines;
        let deadlines = Deadlines { read: given.sample, queue: given.sample_wait, ..given };
        let (tx, rx) = mpsc::unbounded_channel();
        let (status_tx, status) = watch::channel(Status::default());
        // The other worker listens to events.
        let (events, _) = broadcast::channel(1);
        let task = supervisor::run(Options { events: false, deadlines, ..options }, rx, status_tx, events, times);
        let limit = given.sample + given.sample_wait + ANSWERING;
        (Self { tx, status, late: Arc::default(), hold: Arc::default(), limit }, task)
    }

    pub(super) async fn sample(
        &self,
        gpu: GpuRef,
        instances: Option<Vec<InstanceRef>>,
        wanted: Wanted,
    ) -> Result<Sample, SampleError> {
        if self.hold.lock().is_held() {
            return Err(SampleError::Suspended);
        }
        let uuid = gpu.uuid.clone();
        if let Some(late) = self.late.lock().get(&uuid)
            && let Some(left) = late.until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
        {
            return Err(SampleError::Waiting(left));
        }
        let (tx, rx) = oneshot::channel();
        let call = Message::Call(Request::Sample { gpu, instances, wanted }, tx);
        let answer = match self.tx.send(call) {
            Ok(()) => tokio::time::timeout(self.limit, rx).await,
            Err(_) => return Err(SampleError::Suspended),
        };
        let error = match answer {
            Ok(Ok(Ok(Answer::Sample(sample)))) => {
                self.late.lock().remove(&uuid);
                return Ok(*sample);
            }
            Ok(Ok(Ok(other))) => return Err(SampleError::Driver(mixed_up("sampling the GPU", &other))),
            Ok(Ok(Err(error))) => error,
            // The task has ended.
            Ok(Err(_)) => return Err(SampleError::Suspended),
            // The supervisor does not answer while it is paused.
            Err(_) if self.hold.lock().is_held() => return Err(SampleError::Suspended),
            Err(_) => return Err(self.note_late(uuid)),
        };
        Err(match error.kind {
            ErrorKind::Deadline { .. } | ErrorKind::Unsettled => self.note_late(uuid),
            ErrorKind::Stopped => SampleError::Suspended,
            _ => SampleError::Driver(error),
        })
    }

    fn note_late(&self, uuid: GpuUuid) -> SampleError {
        let mut late = self.late.lock();
        let count = late.get(&uuid).map_or(0, |late| late.count);
        let (first, longest) = BACKOFF;
        let wait = first.saturating_mul(1 << count.min(16)).min(longest);
        tracing::debug!(gpu = uuid.as_str(), ?wait, "a sample was late and is dropped");
        late.insert(uuid, Late { count: count + 1, until: Instant::now() + wait });
        SampleError::Late
    }

    /// Returns the state of the worker.
    pub(super) fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Ends the worker, and keeps it from running until the result is dropped. If the worker cannot be ended in time,
    /// continues without an error: the driver then refuses the change, which is not worse than with any other monitor.
    pub(super) async fn hold(&self) -> Held {
        self.hold.lock().changes += 1;
        let held = Held(self.clone());
        if let Err(error) = tokio::time::timeout(self.limit, self.end(Message::Pause)).await.unwrap_or(Ok(())) {
            tracing::warn!(%error, "gpushd's worker for samples cannot be ended");
        }
        held
    }

    pub(super) async fn restart(&self) -> Result<(), DriverError> {
        self.end(Message::Restart).await
    }

    pub(super) async fn stop(&self) -> Result<(), DriverError> {
        self.hold.lock().stopped = true;
        self.end(Message::Stop).await
    }

    pub(super) fn suspend(&self) {
        self.hold.lock().stopped = true;
        let (tx, _) = oneshot::channel();
        let _ = self.tx.send(Message::Stop(tx));
    }

    pub(super) fn resume(&self) {
        self.hold.lock().stopped = false;
        let _ = self.tx.send(Message::Resume);
    }

    pub(super) async fn pause(&self) -> Result<(), DriverError> {
        self.hold.lock().paused = true;
        self.end(Message::Pause).await
    }

    pub(super) fn unpause(&self) {
        self.release(|hold| hold.paused = false);
    }

    /// Removes a reason for a pause. Ends the pause if no other reason is left.
    fn release(&self, remove: impl FnOnce(&mut Hold)) {
        let mut hold = self.hold.lock();
        remove(&mut hold);
        if !hold.pauses() {
            let _ = self.tx.send(Message::Unpause);
        }
    }

    async fn end(
        &self,
        message: impl FnOnce(oneshot::Sender<Result<(), DriverError>>) -> Message,
    ) -> Result<(), DriverError> {
        let (tx, rx) = oneshot::channel();
        if self.tx.send(message(tx)).is_err() {
            return Ok(());
        }
        // Without an answer, the task has ended, and its worker with it.
        rx.await.unwrap_or(Ok(()))
    }
}
