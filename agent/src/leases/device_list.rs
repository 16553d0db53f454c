//! Lists the MIG devices of the host, with their use and with what a new request can get.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{Lease, MigDevice, MpsDaemon, TargetUuid};
use gpush_core::{
    devices::{CallerQuota, Offers},
    schedule::{Need, Needs, Ticket},
};

use super::{Leases, access, holder_facts::HolderFacts};
use crate::{
    operations::scheduler::{HeldLeases, PlacementSnapshot, Scheduler, slurm_gpus},
    requests::caller::{Caller, Viewer},
    state::Observed,
};

/// Lists the MIG devices of the host. For each device, shows its use, as far as the caller may see it, and whether a new
/// request of the caller can get the device.
pub(crate) async fn devices(
    leases: &Leases,
    caller: &Caller,
    seen: &Observed,
    daemons: &[MpsDaemon],
) -> Vec<MigDevice> {
    let viewer = caller.viewer;
    let facts = HolderFacts::of(leases, caller, caller.uid()).await.ok();
    let closed =
        facts.as_ref().map(|facts| access::closed(&seen.host, facts)).unwrap_or_default().into_keys().collect();
    let known = facts.and_then(|facts| Some((facts.account, facts.effective(seen.host.gpus.len()).ok()?)));
    let open: Vec<Lease> =
        leases.handles.context.state.leases().open.values().map(|lease| lease.to_api(viewer)).collect();
    let gpus = seen.gpus(viewer);
    let mut listed = gpush_core::devices::list(&gpus, daemons, &open);
    let scheduler = &leases.handles.scheduler;
    let needed_by = |device: &MigDevice| {
        let needs = Need::Parts(device.uuid.clone().into_iter().collect());
        let ahead = scheduler.would_wait_for(&Needs::from([(device.gpu_uuid.clone(), needs)]));
        ahead.map(|ahead| ahead.waiter.to_string())
    };
    let snapshot = scheduler.snapshot(&seen.host, &seen.gpus(Viewer::Log));
    let takers = takers(scheduler, &snapshot);
    let slurm = if viewer == Viewer::Hook { BTreeSet::new() } else { slurm_gpus(&seen.host) };
    let held = HeldLeases::of(leases.handles.context.users.accounts(), &leases.handles.context.state.leases());
    let known = known.map(|(account, effective)| (effective, held.by(account)));
    let quota = known.as_ref().map(|(effective, held)| CallerQuota { effective, held, gpus: &gpus });
    let offers = Offers { host: &snapshot.host, takers: &takers, slurm: &slurm, closed: &closed, quota };
    gpush_core::devices::apply_queue(&mut listed, needed_by, offers);
    listed
}

/// Returns the free MIG devices that queued requests and operations get first. The map contains the UUID of each such
/// device, and the request or operation that gets it.
fn takers(scheduler: &Scheduler, snapshot: &PlacementSnapshot) -> BTreeMap<TargetUuid, String> {
    // The search runs without the lock of the queue.
    let takers = &snapshot.schedule().takers;
    scheduler.with_queue(|queue| {
        let named =
            |(uuid, ticket): (&TargetUuid, &Ticket)| Some((uuid.clone(), queue.get(*ticket)?.waiter.to_string()));
        takers.iter().filter_map(named).collect()
    })
}
