//! Lists the MIG devices of the host, with their use and with what a new request can get.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{Lease, MigDevice, MpsDaemon};
use gpush_core::devices::{CallerQuota, Offers};

use super::{Leases, held::HeldLeases, offers::slurm_gpus, placement_snapshot::PlacementSnapshot, quotas, waiting};
use crate::{
    caller::{Caller, Viewer},
    lanes::{Need, Needs},
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
    let known = quotas::quota(leases, caller, caller.uid(), seen.host.gpus.len()).await.ok();
    let open: Vec<Lease> = leases.handles.state.leases().open.values().map(|lease| lease.to_api(viewer)).collect();
    let gpus = seen.gpus(viewer);
    let mut listed = gpush_core::devices::list(&gpus, daemons, &open);
    let needed_by = |device: &MigDevice| {
        let needs = Need::Parts(device.uuid.clone().into_iter().collect());
        let ahead = leases.handles.lanes.would_wait_for(&Needs::from([(device.gpu_uuid.clone(), needs)]));
        ahead.map(|ahead| ahead.waiter.to_string())
    };
    let snapshot = snapshot(leases, seen);
    let takers = takers(leases, &snapshot);
    let slurm = if viewer == Viewer::Hook { BTreeSet::new() } else { slurm_gpus(&seen.host) };
    let held = HeldLeases::of(leases.handles.users.accounts(), &leases.handles.state.leases());
    let known = known.map(|(account, effective)| (effective, held.by(account)));
    let quota = known.as_ref().map(|(effective, held)| CallerQuota { effective, held, gpus: &gpus });
    let offers = Offers { host: &snapshot.host, takers: &takers, slurm: &slurm, quota };
    gpush_core::devices::apply_queue(&mut listed, needed_by, offers);
    listed
}

/// Returns the free MIG devices that queued requests and operations get first. The map contains the UUID of each such
/// device, and the request or operation that gets it.
fn takers(leases: &Leases, snapshot: &PlacementSnapshot) -> BTreeMap<String, String> {
    let entries = leases.handles.lanes.entries();
    let named = snapshot.schedule().takers.iter().filter_map(|(uuid, ticket)| {
        let (_, entry) = entries.iter().find(|(one, _)| one.0 == ticket.0)?;
        Some((uuid.clone(), entry.waiter.to_string()))
    });
    named.collect()
}

/// Returns the current snapshot of everything that a placement depends on.
fn snapshot(leases: &Leases, seen: &Observed) -> Arc<PlacementSnapshot> {
    let gpus = seen.gpus(Viewer::Log);
    let _placing = leases.lock_placement();
    let left_out = &waiting::beyond_quota(leases);
    PlacementSnapshot::current(leases, &seen.host, &gpus, &leases.handles.state.now(), left_out)
}
