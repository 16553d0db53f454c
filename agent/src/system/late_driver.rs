//! Restarts gpushd if the driver was loaded after gpushd started.
//!
//! systemd allows gpushd only the devices that exist when gpushd starts ([`driver_devices`]). So after a driver was
//! loaded, gpushd stops, and systemd starts gpushd again.
//!
//! ```text
//! the worker changes, or no worker runs for a while
//!   └─► did the driver get new major numbers, or did a worker find the driver's devices denied?
//!         └─ yes ─► did gpushd already restart for these major numbers? ─ no ─► record them, stop
//! ```
//!
//! This module reads `/proc/devices`, and opens no device. Only driver workers open devices, and no worker runs during
//! maintenance.
//!
//! gpushd records the driver's major numbers in `/run`, so that it restarts only once for each load of the driver.
//! gpushd removes the record when the recorded driver is no longer loaded, or when a worker serves. A host without a
//! driver has no major numbers, so gpushd does not restart on such a host.

use std::{collections::BTreeSet, fs, io, path::PathBuf, time::Duration};

use gpush_host::{driver_devices, notify};
use gpush_nvml::{ErrorKind, Status};
use tokio::{sync::watch, time::sleep};

/// Interval of the checks while no driver worker runs.
const INTERVAL: Duration = Duration::from_secs(2);

/// What gpushd knew about the driver's devices when it started.
#[derive(Debug)]
pub(crate) struct LateDriver {
    proc: PathBuf,
    /// File with the major numbers for which gpushd has already restarted.
    record: PathBuf,
    at_start: BTreeSet<u32>,
    /// Whether gpushd is a systemd service, so that systemd starts gpushd again after gpushd stops.
    is_service: bool,
}

/// What the driver worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Worker {
    Serves,
    /// The worker could not open the driver's devices, because systemd does not allow them.
    Denied,
    /// No worker runs, or the driver has another problem.
    Absent,
}

impl Worker {
    fn of(status: &Status) -> Self {
        let denied = status.failure.as_ref().is_some_and(|failure| failure.kind == ErrorKind::DeviceDenied);
        // A worker that is still starting has a pid, but no driver.
        match (status.worker, &status.driver) {
            (Some(_), Some(_)) => Self::Serves,
            _ if denied => Self::Denied,
            _ => Self::Absent,
        }
    }
}

impl LateDriver {
    pub(crate) fn new(proc: PathBuf, record: PathBuf) -> Self {
        let (at_start, is_service) = (driver_devices::majors(&proc), notify::is_service());
        Self { proc, record, at_start, is_service }
    }

    /// Waits until gpushd must stop. systemd then starts it again, with access to the driver's devices.
    pub(crate) async fn needs_restart(self, mut status: watch::Receiver<Status>) {
        if !self.is_service {
            return std::future::pending().await;
        }
        let mut is_logged = false;
        loop {
            let worker = Worker::of(&status.borrow_and_update());
            match self.check(worker) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    if !is_logged {
                        tracing::warn!(
                            "gpushd needs a restart for the devices of the driver, but cannot write {}: {error}; run \
                             `systemctl restart gpushd`",
                            self.record.display()
                        );
                    }
                    is_logged = true;
                }
            }
            tokio::select! {
                changed = status.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = sleep(INTERVAL), if worker != Worker::Serves => {}
            }
        }
    }

    /// Returns whether gpushd must restart now: systemd denies gpushd the driver's devices, and gpushd has not
    /// restarted for this load of the driver. Records the restart.
    ///
    /// # Errors
    /// If the restart cannot be recorded. Without the record, gpushd could restart again and again.
    fn check(&self, worker: Worker) -> io::Result<bool> {
        let majors = driver_devices::majors(&self.proc);
        let is_new = !majors.is_subset(&self.at_start);
        let recorded = fs::read_to_string(&self.record).ok();
        let is_unloaded = |recorded: &String| !numbers(recorded).is_subset(&majors);
        let recorded = match recorded {
            // Remove the record: the restart has succeeded, or the recorded driver is not loaded any more.
            Some(text) if worker == Worker::Serves && !is_new || is_unloaded(&text) => {
                fs::remove_file(&self.record)?;
                None
            }
            recorded => recorded,
        };
        let is_outdated = is_new || (!majors.is_empty() && worker == Worker::Denied);
        if !is_outdated || recorded.is_some_and(|recorded| numbers(&recorded) == majors) {
            return Ok(false);
        }
        fs::write(&self.record, text(&majors))?;
        Ok(true)
    }
}

fn text(majors: &BTreeSet<u32>) -> String {
    majors.iter().map(|major| format!("{major}\n")).collect()
}

fn numbers(text: &str) -> BTreeSet<u32> {
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use gpush_nvml::DriverError;

    use super::*;

    /// A simulated `/proc/devices`, and the record.
    struct Host(tempfile::TempDir);

    impl Host {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn devices(&self, text: &str) {
            fs::write(self.0.path().join("devices"), text).unwrap();
        }

        fn start_gpushd(&self) -> LateDriver {
            LateDriver::new(self.0.path().to_owned(), self.0.path().join("record"))
        }
    }

    #[test]
    fn new_major_numbers_need_one_restart() {
        let host = Host::new();
        let before = host.start_gpushd();
        assert!(!before.check(Worker::Absent).unwrap(), "a host without a driver");
        host.devices("195 nvidia\n240 nvidia-caps\n");
        assert!(before.check(Worker::Absent).unwrap());
        assert!(!before.check(Worker::Absent).unwrap(), "gpushd restarts once");
        assert!(!host.start_gpushd().check(Worker::Absent).unwrap(), "the next gpushd knows the numbers");
        // Simulates another driver version, whose `nvidia-caps` has another major number.
        host.devices("195 nvidia\n241 nvidia-caps\n");
        assert!(before.check(Worker::Serves).unwrap());
    }

    #[test]
    fn each_load_with_the_same_major_numbers_needs_one_restart() {
        let host = Host::new();
        for unloaded_first in [false, true, true] {
            if unloaded_first {
                host.devices("");
            }
            let before = host.start_gpushd();
            assert!(!before.check(Worker::Absent).unwrap(), "a host without a driver");
            host.devices("195 nvidia\n");
            assert!(before.check(Worker::Absent).unwrap());
            assert!(!host.start_gpushd().check(Worker::Absent).unwrap(), "once");
        }
        // The driver is removed and loaded again while gpushd runs.
        let running = host.start_gpushd();
        host.devices("");
        assert!(!running.check(Worker::Absent).unwrap());
        host.devices("195 nvidia\n");
        assert!(running.check(Worker::Denied).unwrap());
    }

    #[test]
    fn denied_devices_need_one_restart_until_a_worker_serves() {
        let host = Host::new();
        assert!(!host.start_gpushd().check(Worker::Denied).unwrap(), "a device file without a driver");
        host.devices("195 nvidia\n");
        let first = host.start_gpushd();
        assert!(!first.check(Worker::Absent).unwrap());
        assert!(first.check(Worker::Denied).unwrap());
        let second = host.start_gpushd();
        assert!(!second.check(Worker::Denied).unwrap(), "a restart does not help, so gpushd does not repeat it");
        assert!(!second.check(Worker::Serves).unwrap());
        assert!(second.check(Worker::Denied).unwrap(), "the driver served meanwhile");
    }

    #[test]
    fn unwritable_record_prevents_the_restart() {
        let host = Host::new();
        let late = LateDriver::new(host.0.path().to_owned(), host.0.path().join("absent/record"));
        host.devices("195 nvidia\n");
        assert!(late.check(Worker::Absent).is_err());
    }

    #[test]
    fn worker_state_comes_from_its_failure() {
        let failed = |kind| Some(DriverError::new(kind, "nvmlInit_v2"));
        let mut status = Status::default();
        assert_eq!(Worker::of(&status), Worker::Absent);
        status.failure = failed(ErrorKind::DriverNotLoaded);
        assert_eq!(Worker::of(&status), Worker::Absent);
        status.failure = failed(ErrorKind::DeviceDenied);
        assert_eq!(Worker::of(&status), Worker::Denied);
        (status.failure, status.worker) = (None, Some(7));
        assert_eq!(Worker::of(&status), Worker::Absent, "the worker is still starting");
        let text = String::new;
        let (version, nvml, cuda, library) = (text(), text(), text(), text());
        status.driver = Some(gpush_api::Driver { version, nvml, cuda, library, simulated: true, memory_limits: false });
        assert_eq!(Worker::of(&status), Worker::Serves);
    }
}
