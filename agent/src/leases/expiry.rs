//! Ends leases whose time is over, or whose GPU or MIG device is gone.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_api::{GpuState, LeaseId, LeaseState};
use gpush_core::lease::machine::Event;
use jiff::Timestamp;

use super::{Leases, lease_end::begin_end};
use crate::state::HostState;

/// Interval at which gpushd reads the clock. If the clock is set forward past the end time of a
/// lease, the lease ends at most this much later.
const CLOCK: Duration = Duration::from_secs(30);

/// Ends expired leases until gpushd stops.
pub(super) async fn expire(leases: Leases) {
    let mut ends_changed = leases.ends_changed.subscribe();
    loop {
        let (wall, at) = (Timestamp::now(), Instant::now());
        let table = leases.handles.state.leases();
        let active = || table.open.values().filter(|lease| lease.state.name() == LeaseState::Active);
        let over: Vec<LeaseId> = active().filter(|lease| lease.has_expired(wall, at)).map(|lease| lease.id()).collect();
        for id in over {
            tracing::info!(lease = %id, "lease {id} has expired");
            begin_end(&leases, id, Event::Expired(None)).await;
        }
        let next = leases.handles.state.leases();
        let next = next.open.values().filter(|lease| lease.state.name() == LeaseState::Active);
        let next = next.filter_map(|lease| lease.deadline).min();
        let pause = next.map(|next| next.saturating_duration_since(Instant::now()).min(CLOCK));
        tokio::select! {
            () = leases.handles.stopping.cancelled() => return,
            _ = ends_changed.changed() => {}
            () = tokio::time::sleep(pause.unwrap_or(CLOCK)), if pause.is_some() => {}
        }
    }
}

/// Ends the leases of GPUs and MIG devices that are gone, until gpushd stops.
pub(super) async fn end_lost(leases: Leases) {
    let mut snapshots = leases.handles.state.watch();
    let mut is_logged = false;
    loop {
        let host = Arc::clone(&snapshots.borrow_and_update());
        let gone: BTreeSet<LeaseId> = host
            .leases
            .open
            .values()
            .filter(|lease| lease.state.name() == LeaseState::Active)
            .filter(|lease| lease.record.members.iter().any(|member| is_gone(&host, &member.gpu, &member.target)))
            .map(|lease| lease.id())
            .collect();
        for id in gone {
            tracing::warn!(lease = %id, "lease {id} ends: its GPU or MIG device does not exist any more");
            begin_end(&leases, id, Event::GpuLost).await;
        }
        match forget_gone(&leases, &host).await {
            Ok(()) => is_logged = false,
            // gpushd tries again when the state of the host changes next.
            Err(error) if !is_logged => {
                tracing::warn!(
                    "cannot record which MIG devices are gone; gpushd tries again until it succeeds: {error}"
                );
                is_logged = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = leases.handles.stopping.cancelled() => return,
            changed = snapshots.changed() => if changed.is_err() { return },
        }
    }
}

/// The store records which instances gpushd created. Removes the instances that no longer exist
/// from this record, because another program may create an instance at the same placement.
///
/// # Errors
/// If the change cannot be recorded.
async fn forget_gone(leases: &Leases, host: &HostState) -> Result<(), gpush_store::StoreError> {
    for (gpu, created) in &host.leases.created {
        let Some(snapshot) = host.gpu(gpu) else { continue };
        let is_read = matches!(snapshot.gpu.state, GpuState::Ready | GpuState::Cordoned | GpuState::Degraded);
        if !is_read || snapshot.gpu.stale || snapshot.is_unread() {
            continue;
        }
        let instances = snapshot.gpu.mig.iter().flat_map(|mig| &mig.instances);
        let present: BTreeSet<_> = instances.map(|instance| instance.placement).collect();
        let left: BTreeSet<_> = created.intersection(&present).copied().collect();
        if left == *created {
            continue;
        }
        let (uuid, recorded) = (gpu.clone(), left.clone());
        leases.handles.store.write_ending(move |tx| tx.set_created_instances(&uuid, recorded.clone())).await?;
        leases.handles.state.change_leases(|table| drop(table.created.insert(gpu.clone(), left)));
    }
    Ok(())
}

/// Returns whether the GPU is lost, or a reading of the GPU does not show the leased MIG device.
fn is_gone(host: &Arc<HostState>, gpu: &str, target: &str) -> bool {
    let Some(snapshot) = host.gpu(gpu) else { return false };
    let one = &snapshot.gpu;
    match one.state {
        GpuState::Lost => true,
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded if !one.stale && target != gpu => {
            let instances = one.mig.iter().flat_map(|mig| &mig.instances);
            let mut devices = instances.flat_map(|instance| &instance.compute);
            !snapshot.is_unread() && !devices.any(|device| device.uuid.as_deref() == Some(target))
        }
        GpuState::Ready
        | GpuState::Cordoned
        | GpuState::Degraded
        | GpuState::Changing
        | GpuState::Held
        | GpuState::Unknown
        | GpuState::Maintenance => false,
    }
}
