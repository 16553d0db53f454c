//! Opens the store when gpushd starts, and reads what the previous gpushd recorded.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::Arc,
};

use gpush_api::{ApiError, Code, EndReason, GpuUuid, LeaseId, text};
use gpush_core::mps::MpsTargetRecord;
use gpush_host::accounts::{Account, Accounts};
use gpush_nvml::RemappedRows;
use gpush_store::{
    AuditEvent, BootRecord, Bounds, Condition, CreatedInstances, DONE, Intent, LeaseRecord, Lost, Note, OpenError,
    Opened, OperationId, Options, Override, Scope, SharedGpu, Store, StoreError, UnfinishedOperation, View,
};

use crate::{
    leases::StoredNotices,
    operations::{apply::Part, operation},
    state::{Recorded, RecoveryCheck},
};

/// The state that the previous gpushd left.
#[derive(Debug)]
pub(crate) struct StoredState {
    pub(crate) store: Store,
    /// The notes that the store made when gpushd opened it.
    pub(crate) notes: Vec<Note>,
    /// How far the previous gpushd applied the layouts on the last boot.
    pub(crate) last_boot: Option<BootRecord>,
    /// Operations that have not ended, and ended operations whose stopped services must still be started. Oldest first.
    pub(crate) unfinished: Vec<UnfinishedOperation>,
    /// Operations that must have ended, although no end is recorded: a later operation has begun on one of their GPUs.
    /// The key is the earlier operation, the value is the later one.
    pub(crate) superseded: BTreeMap<OperationId, OperationId>,
    /// Conditions of GPUs, such as degraded. A condition that an operation set includes the operation's
    /// plan for the GPU.
    pub(crate) conditions: Recorded,
    /// Overrides, including expired ones.
    pub(crate) overrides: Vec<Override>,
    /// Leases that have not ended.
    pub(crate) leases: Vec<LeaseRecord>,
    /// Whether the leases could be read.
    pub(crate) are_leases_known: bool,
    /// The last notices and keeps of these leases.
    pub(crate) notices: StoredNotices,
    /// Instances that gpushd created on this boot.
    pub(crate) created: CreatedInstances,
    pub(crate) mps_targets: Vec<MpsTargetRecord>,
    pub(crate) shared_gpus: Vec<SharedGpu>,
    /// Generation of the desired state.
    pub(crate) generation: u64,
    /// The last recorded numbers of remapped memory rows, by UUID of the GPU.
    pub(crate) noticed: BTreeMap<GpuUuid, RemappedRows>,
    /// The loss of the database, if the loss was on this boot and no administrator has accepted it yet.
    pub(crate) lost: Option<Lost>,
    /// Time from which gpushd has recorded every grant on this boot. `None` if no loss of the database was accepted on
    /// this boot.
    pub(crate) known_since: Option<u64>,
}

/// The location and identity of the store.
#[derive(Debug)]
pub(crate) struct Origin<'a> {
    /// State directory.
    pub(crate) directory: &'a Path,
    /// Id of this boot.
    pub(crate) boot_id: &'a str,
    /// Path of a marker file. It lies in a directory that a reboot clears, and shows that a database existed on this
    /// boot.
    pub(crate) marker: &'a Path,
    /// Root of the host's file system, with `etc/machine-id`.
    pub(crate) host_root: &'a Path,
    /// Finds the account of a uid. Limits for records count per account.
    pub(crate) accounts: &'a Accounts,
}

/// Returns the machine id. `None` if the host has no machine id, for example if the host is an image that was never
/// booted.
fn machine_id(host_root: &Path) -> Option<String> {
    let text = fs::read_to_string(host_root.join("etc/machine-id")).ok()?;
    let id = text.trim();
    (!id.is_empty() && id != "uninitialized").then(|| text::plain(id))
}

/// Opens the store of a state directory. Locks the store until the last handle is dropped. Blocks, so call this
/// function before the runtime starts.
///
/// # Errors
/// If the store cannot be opened, usually because another gpushd uses it.
pub(crate) fn open(origin: &Origin<'_>) -> Result<StoredState, OpenError> {
    let boot_id = origin.boot_id;
    let accounts = origin.accounts.clone();
    let options = Options {
        boot_id: boot_id.to_owned(),
        bounds: Bounds::default(),
        marker: Some(origin.marker.to_owned()),
        machine_id: machine_id(origin.host_root),
        account_of: Arc::new(move |uid| accounts.last(uid).ok().map(Account::number)),
        ..Options::default()
    };
    let Opened { store, mut notes } = Store::open(origin.directory, options)?;
    let lost = accept_of_another_boot(&store, &mut notes, boot_id);
    record_other_host(&store, &notes);
    for note in &notes {
        if is_trouble(note) {
            tracing::warn!("{note}");
        } else {
            tracing::info!("{note}");
        }
    }
    let boot = boot_id.to_owned();
    let cleared = store.write_ending(move |tx| {
        for lease in tx.end_leases_of_other_boots()? {
            let event = AuditEvent::LeaseEnd { devices: None, request_spec: None, holder: lease.holder };
            tx.audit(event.record(None, lease.id.to_string(), EndReason::Rebooted.name()))?;
        }
        tx.forget_mps_of_other_boots()?;
        tx.forget_shared_gpus_of_other_boots()?;
        tx.forget_conditions_of_other_boots(&boot)
    });
    if let Err(error) = cleared.wait() {
        tracing::warn!("cannot delete the records of GPU states from an earlier boot: {error}");
    }
    let this_boot = boot_id.to_owned();
    let remembered = store.read(move |view: &View<'_>| {
        let mut conditions = Recorded::new();
        for one in view.conditions()? {
            let check = plan_of_condition(view, &one)?.map(|part| Arc::new(part) as Arc<dyn RecoveryCheck>);
            conditions.push((one, check));
        }
        let mut noticed = BTreeMap::new();
        for (uuid, rows) in view.observations()? {
            // Ignore a record that another version wrote in another format. gpushd records the rows again later.
            noticed.extend(serde_json::from_value(rows).ok().map(|rows| (uuid, rows)));
        }
        let unfinished = view.unfinished()?;
        let superseded = superseded(view, &unfinished)?;
        let left = (unfinished, superseded);
        let known_since = view.known_since()?.filter(|known| known.boot_id == this_boot).map(|known| known.ticks);
        let open = view.open_leases()?;
        let ids: Vec<LeaseId> = open.iter().map(|lease| lease.id).collect();
        let notices = StoredNotices { notices: view.lease_notices(&ids)?, keeps: view.lease_keeps(&ids)? };
        let leases = (open, notices, view.created_instances(&this_boot)?);
        let shared = (view.mps_targets()?, view.shared_gpus()?, known_since, leases);
        Ok((view.last_boot()?, left, conditions, noticed, view.overrides()?, view.generation(), shared))
    });
    // A newer gpushd may have written records that this gpushd cannot read. In this case gpushd uses none of the
    // records, and a note reports the problem.
    let remembered = remembered.wait();
    let are_leases_known = remembered.is_ok();
    let (last_boot, left, conditions, noticed, overrides, generation, shared) = remembered.unwrap_or_else(|error| {
        tracing::error!("cannot read what the previous gpushd left unfinished: {error}");
        Default::default()
    });
    let (unfinished, superseded) = left;
    let (mps_targets, shared_gpus, known_since, (leases, notices, created)) = shared;
    Ok(StoredState {
        store,
        notes,
        last_boot,
        unfinished,
        superseded,
        conditions,
        overrides,
        leases,
        are_leases_known,
        notices,
        created,
        mps_targets,
        shared_gpus,
        generation,
        noticed,
        lost,
        known_since,
    })
}

/// If the database was lost on an earlier boot, accepts the loss, because no grant survives a reboot. Returns the loss
/// if it happened on this boot.
fn accept_of_another_boot(store: &Store, notes: &mut Vec<Note>, boot_id: &str) -> Option<Lost> {
    let lost = notes.iter().find_map(|note| match note {
        Note::Lost(lost) => Some(lost.clone()),
        Note::Created
        | Note::Migrated { .. }
        | Note::Volatile { .. }
        | Note::Opaque { .. }
        | Note::NewerSchema { .. }
        | Note::OtherHost { .. }
        | Note::NoReserve { .. }
        | Note::ClockBack { .. } => None,
    })?;
    if lost.boot_id == boot_id {
        return Some(lost);
    }
    let (cause, reason) = (Some(lost.cause.clone()), Some("the host was rebooted".to_owned()));
    let audit = AuditEvent::Recover { cause, kept: None, reason }.record(None, "host", DONE);
    let accepted = store.write_ending(move |tx| {
        tx.accept_loss()?;
        tx.audit(audit.clone()).map(|_| ())
    });
    match accepted.wait() {
        Ok(()) => {
            tracing::info!(
                "the database was lost on an earlier boot ({}); the reboot has released the \
                GPUs",
                lost.cause
            );
            notes.retain(|note| !matches!(note, Note::Lost(_)));
            None
        }
        Err(error) => {
            tracing::error!("cannot record that the reboot has released the GPUs: {error}");
            Some(lost)
        }
    }
}

/// Records in the new database that gpushd has set aside the database of another host.
fn record_other_host(store: &Store, notes: &[Note]) {
    let Some(note @ Note::OtherHost { kept, .. }) = notes.iter().find(|note| matches!(note, Note::OtherHost { .. }))
    else {
        return;
    };
    let (cause, kept) = (Some(note.to_string()), kept.as_ref().map(|kept| kept.display().to_string()));
    let audit = AuditEvent::Recover { cause, kept, reason: None }.record(None, "host", DONE);
    if let Err(error) = store.write_ending(move |tx| tx.audit(audit.clone()).map(|_| ())).wait() {
        tracing::error!("cannot record that gpushd has renamed the database of another host: {error}");
    }
}

/// If a newer gpushd has written the database, returns the error with which gpushd refuses every change.
pub(crate) fn read_only(notes: &[Note]) -> Option<ApiError> {
    notes.iter().find_map(|note| match note {
        Note::NewerSchema { file, found, known } => {
            Some(StoreError::ReadOnly { file: file.clone(), found: *found, known: *known }.into())
        }
        Note::Created
        | Note::Migrated { .. }
        | Note::Volatile { .. }
        | Note::Opaque { .. }
        | Note::Lost(_)
        | Note::OtherHost { .. }
        | Note::NoReserve { .. }
        | Note::ClockBack { .. } => None,
    })
}

/// If an operation set the condition, returns the plan of this operation for the GPU. Otherwise returns `None`.
fn plan_of_condition(view: &View<'_>, condition: &Condition) -> Result<Option<Part>, StoreError> {
    let (Scope::Gpu(uuid), Some(operation)) = (&condition.scope, operation::id(&condition.cause)) else {
        return Ok(None);
    };
    let intent = view.intent(operation)?.unwrap_or_default();
    let mut gpus = intent.gpus.iter().enumerate();
    Ok(gpus.find(|(_, gpu)| gpu.plan.gpu_uuid == *uuid).map(|(position, gpu)| Part::recorded(position, gpu)))
}

/// Finds operations without a recorded end that must have ended, because a later operation has begun on one of their
/// GPUs. An operation keeps its GPUs until it ends. The order of the requests does not show which operation began
/// first, because operations may wait in the queue. So this function compares when the operations began.
fn superseded(
    view: &View<'_>,
    unfinished: &[UnfinishedOperation],
) -> Result<BTreeMap<OperationId, OperationId>, StoreError> {
    let mut superseded = BTreeMap::new();
    let left: Vec<_> = unfinished.iter().filter(|left| !left.record.stage.is_final()).collect();
    let first = left.iter().filter_map(|left| left.intent.begun).min();
    // Skip operations whose records last changed before the first unfinished operation began: they cannot have begun
    // later.
    for other in view.operations()?.into_iter().filter(|other| first.is_some_and(|first| other.sequence > first)) {
        let intent = view.intent(other.id)?.unwrap_or_default();
        let gpus = claimed(&intent);
        for left in left.iter().filter(|left| left.intent.begun.is_some() && left.intent.begun < intent.begun) {
            if !gpus.is_disjoint(&claimed(&left.intent)) {
                superseded.insert(left.record.id, other.id);
            }
        }
    }
    Ok(superseded)
}

/// Returns the UUIDs of the GPUs that an operation claims when it begins.
fn claimed(intent: &Intent) -> BTreeSet<GpuUuid> {
    operation::gpus(intent.gpus.iter().map(|gpu| &gpu.plan)).into_iter().map(|(_, uuid)| uuid).collect()
}

fn is_trouble(note: &Note) -> bool {
    match note {
        Note::Created | Note::Migrated { .. } => false,
        Note::Volatile { .. }
        | Note::Opaque { .. }
        | Note::NewerSchema { .. }
        | Note::Lost(_)
        | Note::OtherHost { .. }
        | Note::NoReserve { .. }
        | Note::ClockBack { .. } => true,
    }
}

/// Returns health errors for the store's notes, except for a lost database, which is reported separately.
pub(crate) fn health(notes: &[Note]) -> impl Iterator<Item = ApiError> {
    notes.iter().filter_map(|note| {
        let code = match note {
            Note::NewerSchema { .. } => Code::Unavailable,
            // The store reports these problems itself, as long as they exist.
            Note::NoReserve { .. }
            | Note::Created
            | Note::Migrated { .. }
            | Note::Volatile { .. }
            | Note::Opaque { .. }
            | Note::Lost(_)
            | Note::OtherHost { .. }
            | Note::ClockBack { .. } => return None,
        };
        let text = note.to_string();
        Some(match text.split_once("; ") {
            Some((message, hint)) => ApiError::new(code, message).hint(hint),
            None => ApiError::new(code, text),
        })
    })
}

#[cfg(test)]
mod tests {
    use gpush_api::{Actor, GpuIndex, GpuPlan, OperationState};
    use gpush_host::identity::Users;
    use gpush_store::{GpuIntent, NewOperation};

    use super::*;

    fn intent(gpus: &[u32]) -> Intent {
        let plan =
            |gpu: &u32| GpuPlan { gpu: GpuIndex(*gpu), gpu_uuid: format!("GPU-{gpu}").into(), ..GpuPlan::default() };
        let gpus = gpus.iter().map(|gpu| GpuIntent { before: None, plan: plan(gpu) });
        Intent { gpus: gpus.collect(), ..Intent::default() }
    }

    fn new(gpus: &[u32]) -> NewOperation {
        NewOperation {
            kind: "mig.apply".to_owned(),
            by: Actor { uid: 0, user: None, pid: None },
            reason: None,
            intent: intent(gpus),
            progress: Vec::new(),
        }
    }

    #[test]
    fn later_operation_on_gpu_proves_earlier_one_ended() {
        let state = tempfile::tempdir().unwrap();
        let marker = state.path().join("marker");
        let users = Users::start(state.path()).unwrap();
        let (directory, accounts) = (state.path(), users.accounts());
        let origin = Origin { directory, boot_id: "a boot", marker: &marker, host_root: directory, accounts };
        let open = || open(&origin).unwrap();
        let StoredState { store, .. } = open();
        let begin = |gpus: &'static [u32]| store.write(move |tx| Ok(tx.begin(new(gpus))?.id)).wait().unwrap();
        let end = |id| store.write_ending(move |tx| tx.end(id, OperationState::Done, None)).wait().map(drop).unwrap();
        // This operation waits in the queue. It begins only after the next operation has ended.
        let patient = store.write(|tx| Ok(tx.enqueue(new(&[0]))?.id)).wait().unwrap();
        end(begin(&[0, 1]));
        store.write(move |tx| tx.start(patient, intent(&[0]), Vec::new())).wait().unwrap();
        // The test does not record the end of the next three operations.
        let lost = begin(&[2, 3]);
        let lost_too = begin(&[3, 4]);
        let last = begin(&[3]);
        // This operation waits in the queue, because other operations have claimed its GPUs.
        store.write(|tx| tx.enqueue(new(&[0, 2, 3]))).wait().unwrap();
        // The record of the operation `lost` changes last, although the operation began before the others.
        store.write(move |tx| tx.notes(lost, vec!["late".to_owned()])).wait().unwrap();
        drop(store);
        let again = open();
        assert_eq!(again.superseded, BTreeMap::from([(lost, last), (lost_too, last)]));
        assert_eq!(again.unfinished.len(), 5);
    }
}
