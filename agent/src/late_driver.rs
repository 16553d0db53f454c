//! Restarts gpushd if the driver was loaded after gpushd started.
//!
//! When systemd starts gpushd, it allows only the devices that exist at that time ([`driver_devices`]). So gpushd
//! stops, and systemd starts it again.
//!
//! ```text
//! the worker changes, or no worker runs for a while
//!   └─► did the driver get new major numbers, or is /dev/nvidiactl denied?
//!         └─ yes ─► did gpushd already restart for these major numbers? ─ no ─► record them, stop
//! ```
//!
//! The record in `/run` limits the restarts to one for each set of major numbers. A host without a driver has no major
//! numbers, so gpushd does not restart there.

use std::{collections::BTreeSet, fs, path::PathBuf, time::Duration};

use gpush_host::{driver_devices, notify};
use gpush_nvml::Status;
use tokio::{sync::watch, time::sleep};

/// Interval of the checks while no driver worker runs.
const INTERVAL: Duration = Duration::from_secs(2);

/// What gpushd knew about the driver's devices when it started.
#[derive(Debug)]
pub(crate) struct LateDriver {
    proc: PathBuf,
    host_root: PathBuf,
    /// File with the major numbers for which gpushd has already restarted.
    record: PathBuf,
    at_start: BTreeSet<u32>,
    /// Whether gpushd is a systemd service, so that systemd starts it again after it stops.
    is_service: bool,
}

impl LateDriver {
    pub(crate) fn new(proc: PathBuf, host_root: PathBuf, record: PathBuf) -> Self {
        let (at_start, is_service) = (driver_devices::majors(&proc), notify::is_service());
        Self { proc, host_root, record, at_start, is_service }
    }

    /// Waits until gpushd must stop. systemd then starts it again, with access to the driver's devices.
    pub(crate) async fn needs_restart(self, mut status: watch::Receiver<Status>) {
        if !self.is_service {
            return std::future::pending().await;
        }
        loop {
            let has_worker = status.borrow_and_update().worker.is_some();
            if let Some(majors) = self.outdated(has_worker) {
                // Restart only if the record was written. Without it, gpushd could restart again and again.
                match fs::write(&self.record, text(&majors)) {
                    Ok(()) => return,
                    Err(error) => tracing::warn!("cannot write {}: {error}", self.record.display()),
                }
            }
            tokio::select! {
                changed = status.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = sleep(INTERVAL), if !has_worker => {}
            }
        }
    }

    /// Returns the driver's major numbers if this gpushd may not open these devices, and if gpushd has not yet
    /// restarted for these numbers.
    fn outdated(&self, has_worker: bool) -> Option<BTreeSet<u32>> {
        let majors = driver_devices::majors(&self.proc);
        let is_outdated = !majors.is_subset(&self.at_start)
            || (!majors.is_empty() && !has_worker && driver_devices::is_denied(&self.host_root));
        let restarted = || fs::read_to_string(&self.record).is_ok_and(|recorded| recorded == text(&majors));
        (is_outdated && !restarted()).then_some(majors)
    }
}

fn text(majors: &BTreeSet<u32>) -> String {
    majors.iter().map(|major| format!("{major}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_major_numbers_need_one_restart() {
        let scratch = tempfile::tempdir().unwrap();
        let (proc, record) = (scratch.path().to_owned(), scratch.path().join("record"));
        let late = || LateDriver::new(proc.clone(), proc.clone(), record.clone());
        let before = late();
        assert_eq!(before.outdated(false), None, "a host without a driver");
        fs::write(proc.join("devices"), "195 nvidia\n240 nvidia-caps\n").unwrap();
        let majors = before.outdated(false).unwrap();
        assert_eq!(majors, BTreeSet::from([195, 240]));
        assert_eq!(late().outdated(false), None, "the next gpushd knows the numbers");

        fs::write(&record, text(&majors)).unwrap();
        assert_eq!(before.outdated(false), None, "gpushd restarts once");
        // Simulates another driver version, whose `nvidia-caps` has another major number.
        fs::write(proc.join("devices"), "195 nvidia\n241 nvidia-caps\n").unwrap();
        assert_eq!(before.outdated(true), Some(BTreeSet::from([195, 241])));
    }
}
