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
    kernel_log::{KernelLog, XidMessage, pci_address},
    process_facts::{LeaseNames, ProcessFacts},
    subtask,
};
use gpush_locked::Locked;
use tokio::time::timeout;

use crate::state::State;

/// How long to wait for the facts of a process, whose files may not answer.
const PATIENCE: Duration = Duration::from_secs(2);

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

    /// Returns the message about an Xid error of a GPU; `None` if the kernel log has none, or if it names no process.
    pub(super) fn message(&self, gpu: &Gpu, xid: u64) -> Option<XidMessage> {
        let address = pci_address(&gpu.pci)?;
        let message = self.log.as_ref()?.lock().take(address, xid)?;
        message.pid.is_some().then_some(message)
    }

    /// Returns the process that a message names, with its user and its lease, if it still exists.
    pub(super) async fn process(&self, message: XidMessage, gpu: &Gpu) -> Option<XidProcess> {
        let pid = message.pid?;
        let (names, leases, uuid) = (Arc::clone(&self.lease_names), self.state.leases(), gpu.uuid.clone());
        // With MIG, the message does not name the compute instance.
        let is_mig = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
        let examine = move || {
            let gpu_use = if is_mig { GpuUse::Gpu(&uuid) } else { GpuUse::Target(uuid.as_target()) };
            ProcessFacts::examine(&names, pid, |facts| (facts.owner(), certain(&leases.attribute(facts, gpu_use))))
        };
        let found =
            timeout(PATIENCE, subtask::blocking(examine)).await.ok().flatten().and_then(|facts| facts.ok().flatten());
        let (uid, lease_id) = found.map_or((None, None), |(uid, lease)| (Some(uid), lease));
        Some(XidProcess { pid, command: message.name, uid, lease_id })
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
    use std::io::{Cursor, Read};

    use gpush_core::preset;

    use super::*;

    /// Returns the processes that this text of the kernel log names, for an Xid 31 of the first GPU of a DGX A100.
    fn found(text: &str) -> (XidProcesses, Gpu, Option<XidMessage>) {
        let gpu = preset::gpus("dgx-a100").unwrap().remove(0);
        let address = gpu.pci.rsplit_once('.').unwrap().0.to_owned();
        let record = format!("3,1,2,-;NVRM: Xid (PCI:{address}): {text}\n");
        let names = Arc::new(LeaseNames::new(|_| Ok(false)));
        let log = KernelLog::of(Cursor::new(record).take(8192));
        let processes = XidProcesses::new(Some(log), names, State::empty());
        let message = processes.message(&gpu, 31);
        (processes, gpu, message)
    }

    #[tokio::test]
    async fn living_process_has_its_user() {
        let own = std::process::id();
        let (processes, gpu, message) = found(&format!("31, pid={own}, name=python, Ch 00000008"));
        let process = processes.process(message.unwrap(), &gpu).await.unwrap();
        let uid = Some(nix::unistd::geteuid().as_raw());
        assert_eq!(process, XidProcess { pid: own, command: Some("python".into()), uid, lease_id: None });
    }

    #[tokio::test]
    async fn ended_process_is_named_without_its_user() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (processes, gpu, message) = found(&format!("31, pid={}, name=a", child.id()));
        let process = processes.process(message.unwrap(), &gpu).await.unwrap();
        assert_eq!(process, XidProcess { pid: child.id(), command: Some("a".into()), uid: None, lease_id: None });
    }

    #[test]
    fn message_without_a_process_or_about_another_xid_names_none() {
        for text in ["31, pid='<unknown>', name=<unknown>, MMU Fault", "79, pid=1, name=a", "other"] {
            assert_eq!(found(text).2, None, "{text}");
        }
        let gpu = preset::gpus("dgx-a100").unwrap().remove(0);
        let without = XidProcesses::new(None, Arc::new(LeaseNames::new(|_| Ok(false))), State::empty());
        assert_eq!(without.message(&gpu, 31), None);
    }
}
