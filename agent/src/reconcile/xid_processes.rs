//! The process that caused an Xid error, and its lease.
//!
//! ```text
//! Xid of the driver ──► message in the kernel log ──► pid ──► facts of the process ──► its user and lease
//! ```
//!
//! The driver writes the message before it reports the error. A program that the error ends may be gone when gpushd looks.
//! Then only the pid and the name are known. Without access to the kernel log, the process is not known.

use std::{sync::Arc, time::Duration};

use gpush_api::{Gpu, LeaseId, XidProcess};
use gpush_core::attribution::{Attribution, GpuUse};
use gpush_host::{
    kernel_log::{KernelLog, pci_address},
    proc,
    process_facts::{LeaseNames, ProcessFacts},
    subtask,
};
use gpush_locked::Locked;
use nix::time::{ClockId, clock_gettime};
use tokio::time::timeout;

use crate::state::State;

/// How long to wait for the facts of a process, whose files may not answer. The event waits for that long too.
const PATIENCE: Duration = Duration::from_millis(250);

/// Clock ticks of a second, in which the kernel counts the start of a process.
const TICKS: u64 = 100;

/// Finds the processes that caused Xid errors.
#[derive(Debug)]
pub(crate) struct XidProcesses {
    /// `None` if gpushd cannot read the kernel log.
    log: Option<Locked<KernelLog>>,
    lease_names: Arc<LeaseNames>,
    state: State,
}

impl XidProcesses {
    pub(crate) fn new(log: Option<KernelLog>, lease_names: Arc<LeaseNames>, state: State) -> Self {
        Self { log: log.map(Locked::new), lease_names, state }
    }

    /// Returns the process that caused an Xid error of a GPU, with its user and its lease, if it still exists. `None` if the
    /// kernel log names no process.
    pub(super) async fn process(&self, gpu: &Gpu, xid: u64) -> Option<XidProcess> {
        let since_boot = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).ok()?);
        let message = self.log.as_ref()?.lock().take(pci_address(&gpu.pci)?, xid, since_boot)?;
        let (pid, command, caused_at) = (message.pid?, message.name, message.at);
        let (names, leases, uuid) = (Arc::clone(&self.lease_names), self.state.leases(), gpu.uuid.clone());
        // With MIG, the message does not name the compute instance.
        let is_mig = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
        let examine = move || {
            let gpu_use = if is_mig { GpuUse::Gpu(&uuid) } else { GpuUse::Target(uuid.as_target()) };
            let facts =
                ProcessFacts::examine(&names, pid, |facts| (facts.owner(), certain(&leases.attribute(facts, gpu_use))));
            // A process that has started since then has the pid of the one that is meant.
            let start = proc::try_start(pid).ok().flatten().map(|ticks| Duration::from_secs(ticks / TICKS));
            facts.ok().flatten().filter(|_| start.is_some_and(|start| start <= caused_at))
        };
        let found = timeout(PATIENCE, subtask::blocking(examine)).await.ok().flatten().flatten();
        let (uid, lease_id) = found.map_or((None, None), |(uid, lease)| (Some(uid), lease));
        Some(XidProcess { pid, command, uid, lease_id })
    }
}

/// Returns a process in words, for the log: `, caused by process 4711 (python)`. Empty without a process.
pub(super) fn caused_by(process: Option<&XidProcess>) -> String {
    match process {
        None => String::new(),
        Some(XidProcess { pid, command: None, .. }) => format!(", caused by process {pid}"),
        Some(XidProcess { pid, command: Some(name), .. }) => format!(", caused by process {pid} ({name})"),
    }
}

/// Returns the lease to which a process belongs with certainty.
fn certain(attribution: &Attribution) -> Option<LeaseId> {
    match attribution {
        Attribution::Lease { id, .. } => Some(*id),
        Attribution::Perhaps { .. } | Attribution::Unknown { .. } | Attribution::NoLease => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use gpush_core::preset;

    use super::*;

    async fn found(text: &str) -> Option<XidProcess> {
        found_earlier(text, Duration::ZERO).await
    }

    /// Returns the process of an Xid 31 of the first GPU of a DGX A100, if the kernel log got this text that long ago.
    async fn found_earlier(text: &str, ago: Duration) -> Option<XidProcess> {
        let gpu = preset::gpus("dgx-a100").unwrap().remove(0);
        let address = gpu.pci.rsplit_once('.').unwrap().0.to_owned();
        let at = (Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap()) - ago).as_micros();
        let record = format!("3,1,{at},-;NVRM: Xid (PCI:{address}): {text}\n");
        let names = Arc::new(LeaseNames::new(|_| Ok(false)));
        let log = KernelLog::of(Cursor::new(record));
        XidProcesses::new(Some(log), names, State::empty()).process(&gpu, 31).await
    }

    #[tokio::test]
    async fn living_process_has_its_user() {
        let (own, name) = (std::process::id(), proc::name(std::process::id()));
        let process = found(&format!("31, pid={own}, name={name}, Ch 00000008")).await.unwrap();
        let uid = Some(nix::unistd::geteuid().as_raw());
        assert_eq!(process, XidProcess { pid: own, command: Some(name), uid, lease_id: None });
        assert!(caused_by(Some(&process)).starts_with(&format!(", caused by process {own} (")));
    }

    #[tokio::test]
    async fn ended_process_is_named_without_its_user() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let process = found(&format!("31, pid={}, name=a", child.id())).await.unwrap();
        assert_eq!(process, XidProcess { pid: child.id(), command: Some("a".into()), uid: None, lease_id: None });
    }

    #[tokio::test]
    async fn later_process_with_the_same_pid_is_not_meant() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = found_earlier(&format!("31, pid={}, name=a", child.id()), Duration::from_secs(5)).await;
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(process.unwrap().uid, None);
    }

    #[tokio::test]
    async fn message_without_a_process_or_about_another_xid_names_none() {
        for text in ["31, pid='<unknown>', name=<unknown>, MMU Fault", "79, pid=1, name=a", "other"] {
            assert_eq!(found(text).await, None, "{text}");
        }
        let gpu = preset::gpus("dgx-a100").unwrap().remove(0);
        let without = XidProcesses::new(None, Arc::new(LeaseNames::new(|_| Ok(false))), State::empty());
        assert_eq!(without.process(&gpu, 31).await, None);
        assert_eq!(caused_by(None), "");
    }
}
