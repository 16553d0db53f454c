//! Warns the holders of leases about changes that do not end a lease: a GPU is cordoned, or an MPS daemon stops serving.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{Cordon, GpuUuid, LeaseMember, MpsState, TargetUuid};

use super::{
    Leases,
    actor::{LeaseCommand, Warning},
};
use crate::state::{HostState, OpenLease};

/// The cordons and the serving MPS daemons that the holders know of.
#[derive(Debug, Default)]
struct Known {
    /// The last known cordons of each GPU.
    cordons: BTreeMap<GpuUuid, Vec<Cordon>>,
    /// The MPS targets whose daemons serve.
    serving: BTreeSet<TargetUuid>,
}

/// Sends warnings to the tasks of leases, until gpushd stops.
pub(super) async fn warn(leases: Leases) {
    let mut snapshots = leases.handles.context.state.watch();
    let mut known = Known::default();
    loop {
        let host = Arc::clone(&snapshots.borrow_and_update());
        for (lease, warning) in known.news(&host) {
            leases.actors.send(lease.id(), LeaseCommand::Warn(warning));
        }
        tokio::select! {
            () = leases.handles.context.stopping.cancelled() => return,
            changed = snapshots.changed() => if changed.is_err() { return },
        }
    }
}

impl Known {
    /// Returns the warnings for the leases of a snapshot, and notes that the holders know them.
    fn news<'a>(&mut self, host: &'a HostState) -> Vec<(&'a OpenLease, Warning)> {
        let mut news = Vec::new();
        for snapshot in &host.gpus {
            let gpu = &snapshot.gpu;
            let before = self.cordons.insert(gpu.uuid.clone(), gpu.cordons.clone());
            // Holders know the cordons from before this gpushd began.
            let Some(before) = before.filter(|before| *before != gpu.cordons) else { continue };
            let is_new =
                |cordon: &&Cordon| !before.iter().any(|one| one.cause == cordon.cause && one.since == cordon.since);
            for cordon in gpu.cordons.iter().filter(is_new) {
                let by = cordon.by.as_ref().map(|by| by.user.clone().unwrap_or_else(|| format!("uid {}", by.uid)));
                let (name, reason) = (format!("GPU {}", gpu.index), cordon.reason.clone());
                let warning = Warning::Cordoned { gpu: name, reason, by };
                news.extend(holding(host, |member| member.gpu_uuid == gpu.uuid).map(|lease| (lease, warning.clone())));
            }
        }
        for target in host.mps.all() {
            let is_fault = match target.report.shown_state() {
                MpsState::Ready => {
                    self.serving.insert(target.uuid.clone());
                    continue;
                }
                MpsState::Fault | MpsState::Hung | MpsState::BackingOff | MpsState::GivenUp => true,
                // An administrator or an operation stops the daemon, or it has not started yet.
                MpsState::Stopped | MpsState::Starting | MpsState::Draining | MpsState::Stopping => false,
            };
            if self.serving.remove(&target.uuid) && is_fault {
                let reason = target.reasons().into_iter().next().unwrap_or_default();
                let warning = Warning::MpsFault { target: target.label(), reason };
                news.extend(holding(host, |member| member.target == target.uuid).map(|lease| (lease, warning.clone())));
            }
        }
        self.serving.retain(|uuid| host.mps.get(uuid).is_some());
        news
    }
}

/// Returns the leases with a member for which `is_its` is true.
fn holding(host: &HostState, is_its: impl Fn(&LeaseMember) -> bool) -> impl Iterator<Item = &OpenLease> {
    host.leases.holding().filter(move |lease| lease.record.members.iter().any(&is_its))
}
