//! Ends leases whose GPU or MIG device is gone.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{GpuState, GpuUuid, LeaseId, LeaseState, TargetUuid};

use super::{Leases, actor::LeaseCommand};
use crate::state::HostState;

/// Ends the leases of GPUs and MIG devices that are gone, until gpushd stops.
pub(super) async fn end_lost(leases: Leases) {
    let mut snapshots = leases.handles.context.state.watch();
    let mut is_logged = false;
    loop {
        let host = Arc::clone(&snapshots.borrow_and_update());
        let gone: BTreeSet<LeaseId> = host
            .leases
            .open
            .values()
            .filter(|lease| lease.state.name() == LeaseState::Active)
            .filter(|lease| lease.record.members.iter().any(|member| is_gone(&host, &member.gpu_uuid, &member.target)))
            .map(|lease| lease.id())
            .collect();
        for id in gone {
            leases.actors.send(id, LeaseCommand::GpuLost);
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
            () = leases.handles.context.stopping.cancelled() => return,
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
        leases.handles.context.store.write_ending(move |tx| tx.set_created_instances(&uuid, recorded.clone())).await?;
        leases.handles.context.state.change_leases(|table| drop(table.created.insert(gpu.clone(), left)));
    }
    Ok(())
}

/// Returns whether the GPU is lost, or a reading of the GPU does not show the leased MIG device.
fn is_gone(host: &Arc<HostState>, gpu: &GpuUuid, target: &TargetUuid) -> bool {
    let Some(snapshot) = host.gpu(gpu) else { return false };
    let one = &snapshot.gpu;
    match one.state {
        GpuState::Lost => true,
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded if !one.stale && target != gpu => {
            let instances = one.mig.iter().flat_map(|mig| &mig.instances);
            let mut devices = instances.flat_map(|instance| &instance.compute);
            !snapshot.is_unread() && !devices.any(|device| device.uuid.as_ref() == Some(target))
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

#[cfg(test)]
mod tests {
    use gpush_core::preset;

    use super::*;
    use crate::state::tests::host_of;

    #[test]
    fn only_current_readings_show_that_a_device_is_gone() {
        let gpus = preset::gpus("dgx-a100").expect("a preset");
        let (uuid, device) = (gpus[0].uuid.clone(), "MIG-gone");
        let gone = |state, stale, target: &str| {
            let mut gpu = gpus[0].clone();
            (gpu.state, gpu.stale) = (state, stale);
            is_gone(&Arc::new(host_of(vec![gpu])), &uuid, &target.into())
        };
        assert!(gone(GpuState::Ready, false, device) && gone(GpuState::Degraded, false, device));
        assert!(!gone(GpuState::Ready, true, device), "an old reading shows nothing");
        for state in [GpuState::Changing, GpuState::Held, GpuState::Unknown, GpuState::Maintenance] {
            assert!(!gone(state, false, device), "{state:?}");
        }
        assert!(gone(GpuState::Lost, true, device) && gone(GpuState::Lost, true, uuid.as_str()));
        assert!(!gone(GpuState::Ready, false, uuid.as_str()), "the GPU is there");
        assert!(!is_gone(&Arc::new(host_of(Vec::new())), &uuid, &device.into()), "gpushd has not listed the GPUs yet");
    }
}
