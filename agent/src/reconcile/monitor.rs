//! Detects changes that no request caused: errors that the driver reports, and a driver that appears, disappears or is
//! replaced.
//!
//! ```text
//! driver's events ──► Xid: published, logged, and a cordon if the config lists it
//! worker's status ──► driver event published; unsettled calls recorded; earlier readings outdated after a restart
//! timer, no worker, maintenance left ──► all GPUs are read
//! ```
//!
//! The worker receives the driver's events. While no worker runs, gpushd misses events. So the monitor then reads the
//! GPUs, which starts another worker. The monitor also reads the GPUs at the configured interval.

use std::{sync::Arc, time::Duration};

use gpush_api::{DriverChange, EventPayload, Xid};
use gpush_host::subtask;
use gpush_nvml::{Event, EventKind, Hardware, Status};
use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::xid_processes::{XidProcesses, caused_by};
use crate::{
    state::{State, readings::Readings, words},
    system::backoff::nth_pause,
};

/// First and longest interval of readings while no worker runs. The interval doubles after each reading.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The handles of the monitor.
#[derive(Debug, Clone)]
pub(crate) struct Monitor {
    /// Receives the detected changes.
    pub(crate) state: State,
    pub(crate) readings: Readings,
    /// Provides the driver's events.
    pub(crate) hardware: Hardware,
    /// Finds the processes that caused Xid errors.
    pub(crate) xid_processes: Arc<XidProcesses>,
}

impl Monitor {
    /// Runs until gpushd stops. The caller must subscribe `events` before the worker starts.
    pub(crate) async fn run(self, mut events: Receiver<Event>, stopping: CancellationToken) {
        let mut status = self.hardware.watch();
        let mut snapshots = self.state.watch();
        let mut in_maintenance = self.state.maintenance().is_some();
        let mut seen = DriverSeen::default();
        let mut started = 0;
        let mut misses = 0;
        let mut again = self.next(misses);
        let mut reading = JoinSet::new();
        loop {
            let wait = async {
                match again {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stopping.cancelled() => return,
                event = events.recv() => match event {
                    Ok(event) => self.report(&event).await,
                    Err(RecvError::Lagged(missed)) => {
                        tracing::warn!("{missed} events of the driver were lost, because they came too fast");
                    }
                    // The driver supervisor has failed. This failure ends gpushd.
                    Err(RecvError::Closed) => return stopping.cancelled().await,
                },
                changed = status.changed() => {
                    if changed.is_err() {
                        return stopping.cancelled().await;
                    }
                    let now = status.borrow_and_update().clone();
                    self.state.set_unsettled(&now.unsettled);
                    if started > 0 && now.started > started {
                        // Readings of the previous worker may be from before a reset.
                        self.readings.invalidate_all();
                    }
                    started = now.started;
                    if now.worker.is_some() && misses > 0 {
                        // A worker runs again, because another caller's read of a GPU has started it.
                        misses = 0;
                        again = self.next(misses);
                    } else if now.worker.is_none() && misses == 0 {
                        misses = 1;
                        again = self.next(misses);
                    }
                    let was_absent = seen.serves == Some(false);
                    if let Some(change) = seen.difference(&now) {
                        log(&change, was_absent);
                        self.state.events().publish(EventPayload::Driver(change));
                    }
                }
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let was = std::mem::replace(&mut in_maintenance, snapshots.borrow_and_update().maintenance.is_some());
                    if was && !in_maintenance {
                        self.read(&mut reading);
                    }
                }
                () = wait, if reading.is_empty() => self.read(&mut reading),
                Some(()) = subtask::next(&mut reading) => {
                    misses = if self.hardware.status().worker.is_some() { 0 } else { misses + 1 };
                    again = self.next(misses);
                }
            }
        }
    }

    /// Returns when to read the GPUs next, after `misses` readings without a worker.
    fn next(&self, misses: u32) -> Option<Instant> {
        let poll = Some(self.state.config().health.poll).filter(|poll| !poll.is_zero());
        let soon = misses.checked_sub(1).map(|index| nth_pause(PAUSE, index));
        [poll, soon].into_iter().flatten().min().map(|pause| Instant::now() + pause)
    }

    /// Starts to read the GPUs. The monitor handles events of the driver during the reading.
    fn read(&self, reading: &mut JoinSet<()>) {
        let (state, readings) = (self.state.clone(), self.readings.clone());
        reading.spawn(async move {
            if state.maintenance().is_none() {
                let _ = readings.host().await;
            }
        });
    }

    /// Publishes an event of the driver. If the event is an Xid, may also cordon its GPU. Waits a short time for the facts of the
    /// process that caused the error, if the kernel log names one.
    async fn report(&self, event: &Event) {
        let EventKind::Xid(xid) = event.kind else { return };
        let at = match (event.gi, event.ci) {
            (Some(gi), Some(ci)) => format!(", in GPU instance {gi}, compute instance {ci}"),
            (Some(gi), None) => format!(", in GPU instance {gi}"),
            (None, _) => String::new(),
        };
        let known = words::xid(xid).map_or_else(String::new, |words| format!(" ({words})"));
        let on = if event.uuid.is_empty() { String::new() } else { format!(" on GPU {}", event.uuid) };
        let (gi, ci, uuid) = (event.gi, event.ci, event.uuid.clone());
        let gpu = self.state.index_of(&uuid);
        self.state.count_xid(&uuid, xid);
        let of_host = self.state.now();
        let gpu_of_event = of_host.gpus.iter().map(|one| &one.gpu).find(|one| one.uuid == uuid);
        let process = match gpu_of_event {
            Some(gpu) => self.xid_processes.process(gpu, xid).await,
            None => None,
        };
        let by = caused_by(process.as_ref());
        self.state.events().publish(EventPayload::Xid(Xid { gpu, gpu_uuid: uuid, xid, gi, ci, process }));
        let listed = |wanted: &u32| u64::from(*wanted) == xid;
        let cordons = !event.uuid.is_empty() && self.state.config().health.cordon_xids.iter().any(listed);
        let reason = format!("the driver reported Xid {xid}{known}{at}");
        // The log entry of a new cordon contains the Xid, but not the process, because every user may read the cause of a
        // cordon.
        let is_logged = cordons && self.state.cordon_for_fault(&event.uuid, &format!("xid-{xid}"), reason);
        if !is_logged || !by.is_empty() {
            tracing::warn!(gpu = event.uuid.as_str(), "the driver reports Xid {xid}{known}{on}{at}{by}");
        }
    }
}

/// Logs a change of the driver. `was_absent` is true if gpushd has already logged that the driver does not answer.
fn log(change: &DriverChange, was_absent: bool) {
    match (&change.before, &change.driver) {
        (Some(before), Some(now)) if *before != now.version => tracing::warn!(
            "the driver version is now {}, and was {before} before: gpushd matches the GPUs by UUID again",
            now.version
        ),
        (_, Some(now)) if was_absent => tracing::info!("driver {} answers now", now.version),
        (_, Some(_) | None) => {}
    }
}

/// The last published state of the driver.
#[derive(Debug, Default)]
struct DriverSeen {
    /// Version of the last working driver.
    version: Option<String>,
    /// Whether the driver works; `None` before the first report.
    serves: Option<bool>,
}

impl DriverSeen {
    fn difference(&mut self, status: &Status) -> Option<DriverChange> {
        let failure = status.failure.as_ref().filter(|error| error.is_driver_unavailable());
        if let Some(error) = failure {
            let vanished = self.serves.replace(false) != Some(false);
            let before = self.version.clone();
            return vanished.then(|| DriverChange { driver: None, before, error: Some(error.to_api()) });
        }
        // A worker that is still starting does not know the driver yet.
        let driver = status.driver.as_ref().filter(|_| status.worker.is_some() && status.failure.is_none())?;
        let before = self.version.replace(driver.version.clone());
        let is_new = self.serves.replace(true) != Some(true) || before.as_ref() != Some(&driver.version);
        is_new.then(|| DriverChange { driver: Some(driver.clone()), before, error: None })
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::Driver;
    use gpush_nvml::{DriverError, ErrorKind};

    use super::*;

    fn serving(version: &str) -> Status {
        let driver = Driver {
            version: version.to_owned(),
            nvml: String::new(),
            cuda: String::new(),
            library: String::new(),
            simulated: true,
            memory_limits: false,
        };
        Status { worker: Some(1), driver: Some(driver), ..Status::default() }
    }

    #[test]
    fn driver_change_is_published_once() {
        let mut seen = DriverSeen::default();
        let gone =
            Status { worker: None, failure: Some(DriverError::new(ErrorKind::LibraryNotFound, "x")), ..serving("1") };
        let mut reported = Vec::new();
        for status in [
            Status::default(),
            serving("1"),
            serving("1"),
            // In this case, the worker has ended and is being started again.
            Status { worker: None, ..serving("1") },
            serving("1"),
            gone.clone(),
            gone,
            serving("1"),
            serving("2"),
        ] {
            reported.push(seen.difference(&status).map_or_else(String::new, |change| {
                format!("{:?} > {:?}", change.before, change.driver.map(|driver| driver.version))
            }));
        }
        assert_eq!(
            reported,
            [
                "",
                "None > Some(\"1\")",
                "",
                "",
                "",
                "Some(\"1\") > None",
                "",
                "Some(\"1\") > Some(\"1\")",
                "Some(\"1\") > Some(\"2\")"
            ]
        );
    }
}
