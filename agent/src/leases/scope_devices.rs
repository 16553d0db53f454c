//! The devices that the scope of each lease may open. [`gpush_core::lease::access`] derives them from the lease.
//!
//! ```text
//! new scope ─► created with its devices ───────────────┐
//! MIG device made again, host's part on or off ────────┼─► set on the running scope
//! gpushd started, the scope of an earlier gpushd ──────┘
//! lease ends ─► no GPU, before gpushd answers: processes keep what they have open
//! ```
//!
//! A scope is not below `user.slice`. So while the kernel denies the GPUs to login sessions, every scope needs a list of
//! devices, also that of a lease whose rule does not enforce leases.

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{ApiError, DeviceAccess, EnforcementState, Lease, LeaseBinding, LeaseId, LeaseState};
use gpush_core::lease::access::{AllowedDevice, Nodes};
use gpush_host::{
    cgroup, subtask,
    systemd::{Lasts, Manager},
};
use gpush_locked::Locked;
use gpush_store::LeaseRecord;

use super::{Leases, scope_unit};
use crate::state::{HostState, OpenLease};

/// The devices that scopes may open, as gpushd last set them.
#[derive(Debug, Default)]
pub(super) struct ScopeDevices(Locked<BTreeMap<LeaseId, ScopeAccess>>);

/// What a scope may open.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ScopeAccess {
    /// The devices of its lease, which were at these places.
    Own(Vec<DevicePlace>),
    /// No GPU.
    Closed,
}

/// Minor number of a GPU, and the ids of the GPU instance and of the compute instance of a MIG device. They determine the
/// numbers of the device nodes.
type DevicePlace = (Option<u32>, Option<(u32, u32)>);

/// Returns the devices for a scope that is being created; `None` if it may open all devices.
///
/// # Errors
/// If the devices of the lease are not known.
pub(super) async fn of_new_scope(
    leases: &Leases,
    record: &LeaseRecord,
) -> Result<Option<Vec<AllowedDevice>>, ApiError> {
    leases.handles.enforcement.known().await;
    if !leases.handles.enforcement.limits_scopes() {
        return Ok(None);
    }
    let places = places(&leases.handles.context.state.now(), record);
    let nodes = nodes(leases, record).await?;
    leases.devices.0.lock().insert(record.id, ScopeAccess::Own(places));
    Ok(Some(nodes.allowed()))
}

/// Closes a scope that has just been created, if its lease has ended meanwhile: [`close`] did not find the scope.
pub(super) async fn check_new_scope(leases: &Leases, record: &LeaseRecord) {
    let is_closed = leases.devices.0.lock().get(&record.id) == Some(&ScopeAccess::Closed);
    if is_closed && let Some((manager, unit, _)) = scope(leases, record) {
        set(&manager, record.id, unit, Some(&closed(leases).await)).await;
    }
}

async fn nodes(leases: &Leases, record: &LeaseRecord) -> Result<Nodes, ApiError> {
    leases.handles.enforcement.nodes(record.members.clone()).await
}

/// Returns the devices for the scope of a process that enters a lease; `None` if login sessions may open all devices.
///
/// # Errors
/// If the devices of the lease are not known.
pub(super) async fn of_entered_scope(
    leases: &Leases,
    record: &LeaseRecord,
) -> Result<Option<Vec<AllowedDevice>>, ApiError> {
    leases.handles.enforcement.known().await;
    if !leases.handles.enforcement.is_installed() {
        return Ok(None);
    }
    let places = places(&leases.handles.context.state.now(), record);
    let nodes = nodes(leases, record).await?;
    leases.devices.0.lock().entry(record.id).or_insert(ScopeAccess::Own(places));
    Ok(Some(nodes.allowed()))
}

/// Takes the GPUs from the processes of a lease that ends. Returns after the kernel denies further opens.
pub(super) async fn close(leases: &Leases, record: &LeaseRecord) {
    if !leases.handles.enforcement.limits_scopes() {
        return;
    }
    let is_known = leases.devices.0.lock().insert(record.id, ScopeAccess::Closed).is_some();
    // Without a scope of its own, only processes that entered the lease have scopes.
    if is_known || scope(leases, record).is_some() {
        close_entered(leases, record.id).await;
    }
    let Some((manager, unit, cgroup)) = scope(leases, record) else { return };
    // Most leases end because their scope is empty. systemd has then unloaded the scope.
    let cgroup = cgroup.to_owned();
    let is_empty = subtask::blocking(move || cgroup::processes(&cgroup).is_none_or(|found| found.is_empty())).await;
    if is_empty != Some(true) {
        set(&manager, record.id, unit, Some(&closed(leases).await)).await;
    }
}

/// Takes the GPUs from the processes that have entered a lease.
pub(super) async fn close_entered(leases: &Leases, id: LeaseId) {
    set_entered(leases, id, Some(&closed(leases).await)).await;
}

/// Sets the devices of the scopes of processes that have entered a lease; `None` for all devices.
async fn set_entered(leases: &Leases, id: LeaseId, devices: Option<&[AllowedDevice]>) {
    let Ok(manager) = leases.handles.scopes.manager() else { return };
    let pattern = scope_unit::entered_pattern(leases.handles.context.store.epoch(), id);
    match manager.running(&pattern).await {
        Ok(units) => {
            for unit in units {
                set(&manager, id, &unit, devices).await;
            }
        }
        Err(error) => {
            tracing::warn!(lease = %id, "lease {id}: cannot list the scopes of its processes: {}", error.in_full());
        }
    }
}

/// Returns the devices that a scope may open without a lease.
async fn closed(leases: &Leases) -> Vec<AllowedDevice> {
    let none = leases.handles.enforcement.nodes(Vec::new()).await;
    none.unwrap_or_default().closed()
}

/// Forgets the scope of a lease that has ended.
pub(super) fn forget(leases: &Leases, id: LeaseId) {
    leases.devices.0.lock().remove(&id);
}

/// Adds to each lease whether only its processes can open its devices.
pub(super) fn add_device_access(leases: &Leases, shown: &mut [Lease]) {
    let is_verified = leases.handles.context.state.now().enforcement.state == EnforcementState::Verified;
    let access = if is_verified { DeviceAccess::Verified } else { DeviceAccess::Unverified };
    let known = leases.devices.0.lock();
    for lease in shown.iter_mut().filter(|lease| known.contains_key(&lease.id)) {
        lease.device_access = Some(access);
    }
}

/// Sets the devices of scopes whenever they must change. Runs until gpushd stops.
pub(super) async fn run(leases: Leases) {
    let stopping = leases.handles.context.stopping.clone();
    let mut snapshots = leases.handles.context.state.watch();
    loop {
        let host = Arc::clone(&snapshots.borrow_and_update());
        update(&leases, &host).await;
        tokio::select! {
            changed = snapshots.changed() => if changed.is_err() { return },
            () = stopping.cancelled() => return,
        }
    }
}

/// Sets the devices of the scopes whose devices differ from those that gpushd last set.
async fn update(leases: &Leases, host: &HostState) {
    let limits = leases.handles.enforcement.limits_scopes();
    if !limits && leases.devices.0.lock().is_empty() {
        return;
    }
    for lease in host.leases.open.values() {
        let id = lease.id();
        let own = scope(leases, &lease.record);
        let known = leases.devices.0.lock().get(&id).cloned();
        if own.is_none() && known.is_none() {
            continue;
        }
        let wanted = limits.then(|| wanted(host, lease)).flatten();
        if known == wanted {
            continue;
        }
        let devices = match &wanted {
            None => None,
            Some(ScopeAccess::Closed) => Some(closed(leases).await),
            Some(ScopeAccess::Own(_)) => match nodes(leases, &lease.record).await {
                Ok(nodes) => Some(nodes.allowed()),
                Err(error) => {
                    // A later reading of the GPU may know the device.
                    tracing::debug!(lease = %id, "lease {id}: {}", error.message);
                    continue;
                }
            },
        };
        // Set this first: a lease that ends meanwhile removes it.
        match wanted {
            Some(wanted) => leases.devices.0.lock().insert(id, wanted),
            None => leases.devices.0.lock().remove(&id),
        };
        if let Some((manager, unit, _)) = own {
            set(&manager, id, unit, devices.as_deref()).await;
        }
        set_entered(leases, id, devices.as_deref()).await;
    }
}

/// Returns what the scope of a lease may open; `None` while it has no scope.
fn wanted(host: &HostState, lease: &OpenLease) -> Option<ScopeAccess> {
    match lease.state.name() {
        LeaseState::Queued | LeaseState::Granting | LeaseState::Ended => None,
        LeaseState::Active => Some(ScopeAccess::Own(places(host, &lease.record))),
        LeaseState::Releasing => Some(ScopeAccess::Closed),
    }
}

/// Returns the places of the devices of a lease.
fn places(host: &HostState, record: &LeaseRecord) -> Vec<DevicePlace> {
    let place = |member: &gpush_api::LeaseMember| {
        let Some(gpu) = host.gpu(&member.gpu_uuid).map(|gpu| &gpu.gpu) else { return (None, None) };
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        let mut devices = instances.flat_map(|gi| gi.compute.iter().map(move |ci| (ci, (gi.id, ci.id))));
        let device = devices.find(|(ci, _)| ci.uuid.as_ref() == Some(&member.target)).map(|(_, ids)| ids);
        (Some(gpu.minor), device)
    };
    record.members.iter().map(place).collect()
}

/// Returns systemd's manager, and the scope of a lease; `None` if gpushd has created no scope for the lease.
fn scope<'a>(leases: &Leases, record: &'a LeaseRecord) -> Option<(Arc<Manager>, &'a str, &'a str)> {
    match &record.binding {
        LeaseBinding::Scope { unit: Some(unit), cgroup: Some(cgroup) } => {
            Some((leases.handles.scopes.manager().ok()?, unit, cgroup))
        }
        _ => None,
    }
}

/// Sets the devices of a running scope; `None` for all devices.
async fn set(manager: &Manager, id: LeaseId, unit: &str, devices: Option<&[AllowedDevice]>) {
    let result = match devices {
        Some(devices) => manager.set_devices(unit, Lasts::UntilBoot, devices).await,
        None => manager.open_devices(unit, Lasts::UntilBoot).await,
    };
    match result {
        Ok(()) => {}
        Err(error) if error.is_not_loaded() => {}
        Err(error) => tracing::warn!(lease = %id, "lease {id}: cannot set the devices of {unit}: {}", error.in_full()),
    }
}

#[cfg(test)]
mod tests {
    use gpush_core::lease::machine::State;

    use super::*;
    use crate::state::leases::tests::record;

    #[test]
    fn scope_opens_devices_only_while_its_lease_is_active() {
        let mut lease = OpenLease::new(record(1, 1000, "GPU-0"));
        let host = crate::state::tests::host_of(Vec::new());
        let of = |lease: &OpenLease| wanted(&host, lease);
        assert!(matches!(of(&lease), Some(ScopeAccess::Own(places)) if places.len() == 1));
        lease.state = State::Queued { recorded: true };
        assert_eq!(of(&lease), None);
    }
}
