//! The devices that the scope of each lease may open. [`gpush_core::lease::access`] derives them from the lease.
//!
//! ```text
//! new scope ─► created with its devices
//! MIG device made again, host's part on or off,
//! the scope of an earlier gpushd ──────────────► its devices are set on the running scope
//! lease ends ─► no GPU, before gpushd answers: processes keep what they have open
//!                 └ systemd did not do so ──────► again each second, also after the end is recorded
//! start, each minute ─► gpushd lists all scopes: no GPU in those of ended leases
//! ```
//!
//! Changes of one scope wait for each other, so no GPU is opened after the end of the lease has closed them.
//!
//! A scope is not below `user.slice`. So while the kernel denies the GPUs to login sessions, every scope needs a list of
//! devices, even if the rule of its lease does not enforce leases.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use gpush_api::{ApiError, Code, DeviceAccess, EnforcementState, Lease, LeaseBinding, LeaseId, LeaseState};
use gpush_core::lease::access::{AllowedDevice, Nodes};
use gpush_host::{
    cgroup, subtask,
    systemd::{Lasts, Manager},
};
use gpush_locked::Locked;
use gpush_store::LeaseRecord;
use tokio::{
    sync::{Mutex, Notify},
    time::Instant,
};

use super::{Leases, scope_unit};
use crate::state::{HostState, OpenLease};

/// Pause before gpushd sets devices again that systemd did not set.
const RETRY: Duration = Duration::from_secs(1);

/// Interval between two lists of all scopes: systemd may create a scope late, after its lease has ended.
const INTERVAL: Duration = Duration::from_secs(60);

/// The devices that scopes may open.
#[derive(Debug, Default)]
pub(super) struct ScopeDevices {
    of_leases: Locked<BTreeMap<LeaseId, Arc<Mutex<ScopeState>>>>,
    /// Whether gpushd has listed the scopes of an earlier gpushd. Until then, any lease may have scopes.
    is_listed: AtomicBool,
    /// systemd did not set the devices of a scope.
    failed: Notify,
}

/// The scopes of a lease: its own, and those of processes that have entered the lease.
#[derive(Debug, Default)]
struct ScopeState {
    /// What gpushd has set; `None` if gpushd does not know what the scopes may open.
    set: Option<ScopeAccess>,
    /// Whether the lease ends. Its scopes then never open a GPU again.
    ends: bool,
    /// Whether processes have entered the lease, and so may have scopes.
    has_entered: bool,
}

/// The devices that the scopes of a lease may open.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ScopeAccess {
    /// All devices.
    All,
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
    let state = leases.devices.of(record.id);
    let mut state = state.lock().await;
    if state.ends {
        return Err(ApiError::new(Code::Conflict, format!("lease {} has ended", record.id)));
    }
    state.set = Some(ScopeAccess::Own(places));
    Ok(Some(nodes.allowed()))
}

/// Closes a scope that has just been created, if its lease has ended meanwhile: [`close`] did not find the scope.
pub(super) async fn check_new_scope(leases: &Leases, record: &LeaseRecord) {
    let state = leases.devices.known(record.id);
    let ends = match &state {
        Some(state) => state.lock().await.ends,
        None => false,
    };
    if ends {
        close(leases, record).await;
    }
}

async fn nodes(leases: &Leases, record: &LeaseRecord) -> Result<Nodes, ApiError> {
    leases.handles.enforcement.nodes(record.members.clone()).await
}

/// Returns the devices for a new scope of a process that enters a lease: no GPU. [`open_entered`] opens the devices of the
/// lease. Returns `None` if login sessions may open all devices.
pub(super) async fn of_entered_scope(leases: &Leases, id: LeaseId) -> Option<Vec<AllowedDevice>> {
    leases.handles.enforcement.known().await;
    if !leases.handles.enforcement.is_installed() {
        return None;
    }
    leases.devices.of(id).lock().await.has_entered = true;
    Some(closed(leases).await)
}

/// Opens the devices of a lease to the scope of a process that has entered the lease. Returns `false` if the lease has
/// ended.
///
/// # Errors
/// If the devices of the lease are not known, or systemd does not open them.
pub(super) async fn open_entered(leases: &Leases, record: &LeaseRecord, unit: &str) -> Result<bool, ApiError> {
    let state = leases.devices.of(record.id);
    let mut state = state.lock().await;
    if state.ends || !is_active(leases, record.id) {
        if leases.handles.context.state.leases().get(record.id).is_none() {
            forget(leases, record.id);
        }
        return Ok(false);
    }
    let places = places(&leases.handles.context.state.now(), record);
    let nodes = nodes(leases, record).await?;
    let manager = leases.handles.scopes.manager().map_err(|reason| {
        ApiError::new(Code::Unsupported, "this gpushd cannot create scopes").cause(reason.to_owned())
    })?;
    let opened = manager.set_devices(unit, Lasts::UntilBoot, &nodes.allowed()).await;
    opened.map_err(|error| scope_unit::no_scope(&error))?;
    state.set.get_or_insert(ScopeAccess::Own(places));
    Ok(true)
}

fn is_active(leases: &Leases, id: LeaseId) -> bool {
    leases.handles.context.state.leases().get(id).is_some_and(|lease| lease.state.name() == LeaseState::Active)
}

/// Takes the GPUs from the processes of a lease that ends. Returns after the kernel denies further opens; if systemd does
/// not answer, [`run`] tries again.
pub(super) async fn close(leases: &Leases, record: &LeaseRecord) {
    if !leases.handles.enforcement.limits_scopes() {
        return;
    }
    let known = leases.devices.known(record.id);
    let may_be_entered = !leases.devices.is_listed.load(Ordering::Acquire);
    // Without a scope of its own, only processes that entered the lease have scopes.
    if known.is_none() && own_scope(leases, record).is_none() && !may_be_entered {
        return;
    }
    let state = known.unwrap_or_else(|| leases.devices.of(record.id));
    let mut state = state.lock().await;
    state.ends = true;
    let own = match own_scope(leases, record) {
        Some((manager, unit, cgroup)) if has_processes(cgroup).await => Some((manager, unit)),
        // Most leases end because their scope is empty. systemd has then unloaded the scope.
        Some(_) | None => None,
    };
    let mut is_closed = true;
    state.has_entered |= may_be_entered;
    if own.is_some() || state.has_entered {
        let devices = closed(leases).await;
        if let Some((manager, unit)) = own {
            is_closed &= set(&manager, record.id, unit, Some(&devices)).await;
        }
        if state.has_entered {
            is_closed &= set_entered(leases, record.id, Some(&devices)).await;
        }
    }
    state.set = is_closed.then_some(ScopeAccess::Closed);
    if !is_closed {
        leases.devices.failed.notify_one();
    }
}

/// Sets the devices of the scopes of processes that have entered a lease; `None` for all devices. Returns whether systemd
/// has set them all.
async fn set_entered(leases: &Leases, id: LeaseId, devices: Option<&[AllowedDevice]>) -> bool {
    let Ok(manager) = leases.handles.scopes.manager() else { return true };
    let pattern = scope_unit::entered_pattern(leases.handles.context.store.epoch(), id);
    match manager.running(&pattern).await {
        Ok(units) => {
            for unit in units {
                // A systemd that does not answer delays the end of the lease only once.
                if !set(&manager, id, &unit, devices).await {
                    return false;
                }
            }
            true
        }
        Err(error) => {
            tracing::warn!(lease = %id, "lease {id}: cannot list the scopes of its processes: {}", error.in_full());
            false
        }
    }
}

async fn has_processes(cgroup: &str) -> bool {
    let cgroup = cgroup.to_owned();
    let is_empty = subtask::blocking(move || cgroup::processes(&cgroup).is_none_or(|found| found.is_empty())).await;
    is_empty != Some(true)
}

/// Returns the devices that a scope may open without a lease.
async fn closed(leases: &Leases) -> Vec<AllowedDevice> {
    let none = leases.handles.enforcement.nodes(Vec::new()).await;
    none.unwrap_or_default().closed()
}

impl ScopeDevices {
    /// Returns the scopes of a lease; `None` if gpushd has not limited them.
    fn known(&self, id: LeaseId) -> Option<Arc<Mutex<ScopeState>>> {
        self.of_leases.lock().get(&id).cloned()
    }

    /// Returns the scopes of a lease, which gpushd limits from now on.
    fn of(&self, id: LeaseId) -> Arc<Mutex<ScopeState>> {
        Arc::clone(self.of_leases.lock().entry(id).or_default())
    }
}

/// Forgets the scopes of a lease that has ended. If one may still be open, [`run`] finds it among those of ended leases.
pub(super) fn forget(leases: &Leases, id: LeaseId) {
    let Some(state) = leases.devices.of_leases.lock().remove(&id) else { return };
    let is_closed = state.try_lock().is_ok_and(|state| state.set == Some(ScopeAccess::Closed));
    if !is_closed {
        leases.devices.failed.notify_one();
    }
}

/// Adds to each lease whether only its processes can open its devices.
pub(super) fn add_device_access(leases: &Leases, shown: &mut [Lease]) {
    let is_verified = leases.handles.context.state.now().enforcement.state == EnforcementState::Verified;
    let access = if is_verified { DeviceAccess::Verified } else { DeviceAccess::Unverified };
    let known = leases.devices.of_leases.lock();
    for lease in shown.iter_mut().filter(|lease| known.contains_key(&lease.id)) {
        lease.device_access = Some(access);
    }
}

/// Sets the devices of scopes whenever they must change. Runs until gpushd stops.
pub(super) async fn run(leases: Leases) {
    let stopping = leases.handles.context.stopping.clone();
    let mut snapshots = leases.handles.context.state.watch();
    let mut closed = BTreeSet::new();
    let mut limited = false;
    // An earlier gpushd may have created scopes, and may have ended before it closed others.
    let mut next_list = Instant::now();
    loop {
        let limits = leases.handles.enforcement.limits_scopes();
        if limits && !limited {
            next_list = Instant::now();
        }
        limited = limits;
        if Instant::now() >= next_list {
            let is_done = list(&leases, &mut closed).await;
            next_list = Instant::now() + if is_done { INTERVAL } else { RETRY };
        }
        let host = Arc::clone(&snapshots.borrow_and_update());
        if !update(&leases, &host).await {
            next_list = next_list.min(Instant::now() + RETRY);
        }
        tokio::select! {
            changed = snapshots.changed() => if changed.is_err() { return },
            () = leases.devices.failed.notified() => next_list = next_list.min(Instant::now() + RETRY),
            () = tokio::time::sleep_until(next_list) => {}
            () = stopping.cancelled() => return,
        }
    }
}

/// Lists the scopes of leases. Closes those of ended leases, and notes those of open leases, so that [`update`] sets their
/// devices. `closed` are the scopes of ended leases that are closed already. Returns whether systemd has done so.
async fn list(leases: &Leases, closed: &mut BTreeSet<String>) -> bool {
    leases.handles.enforcement.known().await;
    if !leases.handles.enforcement.limits_scopes() {
        closed.clear();
        return true;
    }
    let Ok(manager) = leases.handles.scopes.manager() else { return true };
    let epoch = leases.handles.context.store.epoch();
    let units = match manager.running(&scope_unit::pattern(epoch)).await {
        Ok(units) => units,
        Err(error) => {
            tracing::warn!("cannot list the scopes of leases: {}", error.in_full());
            return false;
        }
    };
    // A lease is in the table before systemd creates its scope, so read the table now.
    let table = leases.handles.context.state.leases();
    closed.retain(|unit| units.contains(unit));
    for unit in units {
        let Some(id) = scope_unit::lease(epoch, &unit) else { continue };
        let has_entered = scope_unit::entered_lease(epoch, &unit).is_some();
        let lease = table.open.get(&id);
        let is_of_lease = lease.is_some_and(|lease| has_entered || own_scope(leases, &lease.record).is_some());
        if is_of_lease {
            let state = leases.devices.of(id);
            let mut state = state.lock().await;
            if has_entered && !state.has_entered {
                (state.has_entered, state.set) = (true, None);
            }
        } else if (lease.is_some() || leases.handles.are_leases_known) && !closed.contains(&unit) {
            // The lease has ended, or does not use the scope, because systemd may have moved another process into it.
            if !set(&manager, id, &unit, Some(&self::closed(leases).await)).await {
                return false;
            }
            closed.insert(unit);
        }
    }
    leases.devices.is_listed.store(true, Ordering::Release);
    true
}

/// Sets the devices of the scopes whose devices differ from those that gpushd last set. Returns whether systemd has set
/// them all.
async fn update(leases: &Leases, host: &HostState) -> bool {
    let limits = leases.handles.enforcement.limits_scopes();
    if !limits && leases.devices.of_leases.lock().is_empty() {
        return true;
    }
    let mut all = true;
    for lease in host.leases.open.values() {
        let id = lease.id();
        let known = leases.devices.known(id);
        if known.is_none() && own_scope(leases, &lease.record).is_none() {
            continue;
        }
        let Some(wanted) = (if limits { wanted(host, lease) } else { Some(ScopeAccess::All) }) else { continue };
        all &= update_one(leases, &lease.record, known, wanted).await;
    }
    all
}

/// Sets the devices of the scopes of one lease. Returns whether systemd has set them.
async fn update_one(
    leases: &Leases,
    record: &LeaseRecord,
    known: Option<Arc<Mutex<ScopeState>>>,
    wanted: ScopeAccess,
) -> bool {
    let id = record.id;
    if known.is_none() && wanted == ScopeAccess::All {
        return true;
    }
    let state = known.unwrap_or_else(|| leases.devices.of(id));
    let mut state = state.lock().await;
    let wanted = match wanted {
        ScopeAccess::Own(_) if state.ends || !is_active(leases, id) => ScopeAccess::Closed,
        wanted => wanted,
    };
    if state.set.as_ref() == Some(&wanted) {
        return true;
    }
    let devices = match &wanted {
        ScopeAccess::All => None,
        ScopeAccess::Closed => Some(closed(leases).await),
        ScopeAccess::Own(_) => match nodes(leases, record).await {
            Ok(nodes) => Some(nodes.allowed()),
            Err(error) => {
                // A later reading of the GPU may know the device.
                tracing::debug!(lease = %id, "lease {id}: {}", error.message);
                return true;
            }
        },
    };
    let is_own_set = match own_scope(leases, record) {
        Some((manager, unit, _)) => set(&manager, id, unit, devices.as_deref()).await,
        None => true,
    };
    let is_entered_set = !state.has_entered || set_entered(leases, id, devices.as_deref()).await;
    let is_set = is_own_set && is_entered_set;
    let is_open = wanted == ScopeAccess::All;
    state.set = is_set.then_some(wanted);
    if is_set && is_open {
        leases.devices.of_leases.lock().remove(&id);
    }
    is_set
}

/// Returns what the scope of a lease may open; `None` while it has no scope.
fn wanted(host: &HostState, lease: &OpenLease) -> Option<ScopeAccess> {
    match lease.state.name() {
        LeaseState::Queued | LeaseState::Granting | LeaseState::Ended => None,
        LeaseState::Active => Some(ScopeAccess::Own(places(host, &lease.record))),
        LeaseState::Releasing => Some(ScopeAccess::Closed),
    }
}

/// Returns the GPU minor number and the MIG instance ids of each device of a lease.
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
fn own_scope<'a>(leases: &Leases, record: &'a LeaseRecord) -> Option<(Arc<Manager>, &'a str, &'a str)> {
    match &record.binding {
        LeaseBinding::Scope { unit: Some(unit), cgroup: Some(cgroup) } => {
            Some((leases.handles.scopes.manager().ok()?, unit, cgroup))
        }
        _ => None,
    }
}

/// Sets the devices of a running scope; `None` for all devices. Returns whether systemd has set them, or the scope has
/// ended.
async fn set(manager: &Manager, id: LeaseId, unit: &str, devices: Option<&[AllowedDevice]>) -> bool {
    let result = match devices {
        Some(devices) => manager.set_devices(unit, Lasts::UntilBoot, devices).await,
        None => manager.open_devices(unit, Lasts::UntilBoot).await,
    };
    match result {
        Ok(()) => true,
        Err(error) if error.is_not_loaded() => true,
        Err(error) => {
            tracing::warn!(lease = %id, "lease {id}: cannot set the devices of {unit}: {}", error.in_full());
            false
        }
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
