//! The store as the agent finds it at start: opened, what it remembers, what it has to say.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::Arc,
};

use gpush_api::{ApiError, Code, text};
use gpush_nvml::RemappedRows;
use gpush_store::{
    BootRecord, Bounds, Condition, Intent, LeaseRecord, Lost, MpsTarget, NewAudit, Note, OpenError, Opened,
    OperationId, Options, Override, Scope, SharedGpu, Store, StoreError, UnfinishedOperation, View,
};

use crate::{
    apply::Part,
    operation,
    state::{Recorded, RecoveryCheck},
};

/// What the agent before left.
#[derive(Debug)]
pub(crate) struct Remembered {
    /// The store.
    pub(crate) store: Store,
    /// What was noticed while opening it.
    pub(crate) notes: Vec<Note>,
    /// How far the layouts of the last boot were.
    pub(crate) last_boot: Option<BootRecord>,
    /// Operations that have not ended, or not taken back everything, oldest first.
    pub(crate) unfinished: Vec<UnfinishedOperation>,
    /// Of those that were begun and have not ended, the ones on whose GPUs another one was begun later,
    /// with that one: they had ended, and could not record it.
    pub(crate) superseded: BTreeMap<OperationId, OperationId>,
    /// Conditions of GPUs, those that an operation left with its part for the GPU.
    pub(crate) conditions: Recorded,
    /// Overrides, those past their time included.
    pub(crate) overrides: Vec<Override>,
    /// Leases that have not ended.
    pub(crate) leases: Vec<LeaseRecord>,
    /// What was made of MPS targets above their rules.
    pub(crate) mps_targets: Vec<MpsTarget>,
    /// What was set on GPUs that are shared whole.
    pub(crate) shared_gpus: Vec<SharedGpu>,
    /// Generation of what is wanted.
    pub(crate) generation: u64,
    /// What was last noticed about the memory of each GPU, by UUID.
    pub(crate) noticed: BTreeMap<String, RemappedRows>,
    /// What was lost on this boot, and nobody has accepted yet.
    pub(crate) lost: Option<Lost>,
    /// Since when it is known on this boot who was given what, where one was accepted on it.
    pub(crate) known_since: Option<u64>,
}

/// Where the store is opened.
#[derive(Debug)]
pub(crate) struct Origin<'a> {
    /// State directory.
    pub(crate) directory: &'a Path,
    /// This boot's id.
    pub(crate) boot_id: &'a str,
    /// Marker of the database, in a directory that a reboot clears.
    pub(crate) marker: &'a Path,
    /// Root of the host's file system, with `etc/machine-id`.
    pub(crate) host_root: &'a Path,
}

/// The machine's id; `None` when it has none, as in an image that was not booted yet.
fn machine_id(host_root: &Path) -> Option<String> {
    let text = fs::read_to_string(host_root.join("etc/machine-id")).ok()?;
    let id = text.trim();
    (!id.is_empty() && id != "uninitialized").then(|| text::plain(id))
}

/// Opens the store of a state directory, which belongs to this process until the last handle is dropped.
/// Blocks: call it before there is a runtime.
///
/// # Errors
/// When it cannot be opened, above all because another agent has it.
pub(crate) fn open(origin: &Origin<'_>) -> Result<Remembered, OpenError> {
    let boot_id = origin.boot_id;
    let options = Options {
        boot_id: boot_id.to_owned(),
        bounds: Bounds::default(),
        marker: Some(origin.marker.to_owned()),
        machine_id: machine_id(origin.host_root),
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
            tx.audit(NewAudit {
                by: None,
                action: "lease.end".to_owned(),
                object: lease.id.to_string(),
                result: "rebooted".to_owned(),
                detail: serde_json::json!({ "uid": lease.holder.uid }),
            })?;
        }
        tx.forget_mps_of_other_boots()?;
        tx.forget_shared_gpus_of_other_boots()?;
        tx.forget_conditions_of_other_boots(&boot)
    });
    if let Err(error) = cleared.wait() {
        tracing::warn!("conditions of an earlier boot can't be cleared: {error}");
    }
    let this_boot = boot_id.to_owned();
    let remembered = store.read(move |view: &View<'_>| {
        let mut conditions = Recorded::new();
        for one in view.conditions()? {
            let check = left_open(view, &one)?.map(|part| Arc::new(part) as Arc<dyn RecoveryCheck>);
            conditions.push((one, check));
        }
        let mut noticed = BTreeMap::new();
        for (uuid, rows) in view.noticed()? {
            // Of another version's making it is noticed anew.
            noticed.extend(serde_json::from_value(rows).ok().map(|rows| (uuid, rows)));
        }
        let unfinished = view.unfinished()?;
        let superseded = superseded(view, &unfinished)?;
        let left = (unfinished, superseded);
        let known_since = view.known_since()?.filter(|known| known.boot_id == this_boot).map(|known| known.ticks);
        let shared = (view.mps_targets()?, view.shared_gpus()?, known_since, view.open_leases()?);
        Ok((view.last_boot()?, left, conditions, noticed, view.overrides()?, view.generation(), shared))
    });
    // A newer gpushd's records may be such that nothing can be read: that is said, and nothing is
    // taken over.
    let (last_boot, left, conditions, noticed, overrides, generation, shared) =
        remembered.wait().unwrap_or_else(|error| {
            tracing::error!("what the agent before left can't be read: {error}");
            Default::default()
        });
    let (unfinished, superseded) = left;
    let (mps_targets, shared_gpus, known_since, leases) = shared;
    Ok(Remembered {
        store,
        notes,
        last_boot,
        unfinished,
        superseded,
        conditions,
        overrides,
        leases,
        mps_targets,
        shared_gpus,
        generation,
        noticed,
        lost,
        known_since,
    })
}

/// What was promised about GPUs does not outlive a boot, and neither does its loss: one of another
/// boot is accepted. What stands of this boot is given back.
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
    let audit = NewAudit {
        by: None,
        action: "recover".to_owned(),
        object: "host".to_owned(),
        result: "done".to_owned(),
        detail: serde_json::json!({ "cause": lost.cause, "reason": "the host was rebooted" }),
    };
    let accepted = store.write_ending(move |tx| {
        tx.accept_loss()?;
        tx.audit(audit.clone()).map(|_| ())
    });
    match accepted.wait() {
        Ok(()) => {
            tracing::info!("a database was lost on an earlier boot ({}); that is over with the reboot", lost.cause);
            notes.retain(|note| !matches!(note, Note::Lost(_)));
            None
        }
        Err(error) => {
            tracing::error!("that a loss is over with the reboot can't be recorded: {error}");
            Some(lost)
        }
    }
}

/// Records in the new database that the one of another host was set aside.
fn record_other_host(store: &Store, notes: &[Note]) {
    let Some(note @ Note::OtherHost { kept, .. }) = notes.iter().find(|note| matches!(note, Note::OtherHost { .. }))
    else {
        return;
    };
    let audit = NewAudit {
        by: None,
        action: "recover".to_owned(),
        object: "host".to_owned(),
        result: "done".to_owned(),
        detail: serde_json::json!({ "cause": note.to_string(), "kept": kept }),
    };
    if let Err(error) = store.write_ending(move |tx| tx.audit(audit.clone()).map(|_| ())).wait() {
        tracing::error!("cannot record that the database of another host was set aside: {error}");
    }
}

/// Why nothing can be changed, when a newer gpushd wrote the database.
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

/// What was under way when an operation left a GPU in this condition.
fn left_open(view: &View<'_>, condition: &Condition) -> Result<Option<Part>, StoreError> {
    let (Scope::Gpu(uuid), Some(operation)) = (&condition.scope, operation::id(&condition.cause)) else {
        return Ok(None);
    };
    let intent = view.intent(operation)?.unwrap_or_default();
    let mut gpus = intent.gpus.iter().enumerate();
    Ok(gpus.find(|(_, gpu)| gpu.plan.uuid == *uuid).map(|(position, gpu)| Part::recorded(position, gpu)))
}

/// Of operations that were begun and have not ended, those on whose GPUs another one was begun later.
/// It got the GPU because they had let go of it: they had ended, though that could not be recorded.
/// In which order they were asked for says nothing: one may have stood in line.
fn superseded(
    view: &View<'_>,
    unfinished: &[UnfinishedOperation],
) -> Result<BTreeMap<OperationId, OperationId>, StoreError> {
    let mut superseded = BTreeMap::new();
    let left: Vec<_> = unfinished.iter().filter(|left| !left.record.stage.is_final()).collect();
    let first = left.iter().filter_map(|left| left.intent.begun).min();
    // What last changed before any of them was begun can't have begun later.
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

/// UUIDs of the GPUs that an operation has for itself once it has begun.
fn claimed(intent: &Intent) -> BTreeSet<String> {
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

/// What was noticed while opening, as causes of ill health. A loss is told by the GPUs that are
/// held for it.
pub(crate) fn health(notes: &[Note]) -> impl Iterator<Item = ApiError> {
    notes.iter().filter_map(|note| {
        let code = match note {
            Note::NewerSchema { .. } => Code::Unavailable,
            // The store tells how it is now.
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
    use gpush_api::{Actor, GpuPlan, OperationState};
    use gpush_store::{GpuIntent, NewOperation};

    use super::*;

    fn intent(gpus: &[u32]) -> Intent {
        let plan = |gpu: &u32| GpuPlan { gpu: *gpu, uuid: format!("GPU-{gpu}"), ..GpuPlan::default() };
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
    fn who_got_a_gpu_later_proves_that_those_before_had_ended() {
        let state = tempfile::tempdir().unwrap();
        let marker = state.path().join("marker");
        let origin = Origin { directory: state.path(), boot_id: "a boot", marker: &marker, host_root: state.path() };
        let open = || open(&origin).unwrap();
        let Remembered { store, .. } = open();
        let begin = |gpus: &'static [u32]| store.write(move |tx| Ok(tx.begin(new(gpus))?.id)).wait().unwrap();
        let end = |id| store.write_ending(move |tx| tx.end(id, OperationState::Done, None)).wait().map(drop).unwrap();
        // Stands in line while another one comes and goes, and begins after it.
        let patient = store.write(|tx| Ok(tx.enqueue(new(&[0]))?.id)).wait().unwrap();
        end(begin(&[0, 1]));
        store.write(move |tx| tx.start(patient, intent(&[0]), Vec::new())).wait().unwrap();
        // Their ends are not on record.
        let lost = begin(&[2, 3]);
        let lost_too = begin(&[3, 4]);
        let last = begin(&[3]);
        // Stands in line for GPUs that others have.
        store.write(|tx| tx.enqueue(new(&[0, 2, 3]))).wait().unwrap();
        // Its end comes late: it was begun before all the same.
        store.write(move |tx| tx.notes(lost, vec!["late".to_owned()])).wait().unwrap();
        drop(store);
        let again = open();
        assert_eq!(again.superseded, BTreeMap::from([(lost, last), (lost_too, last)]));
        assert_eq!(again.unfinished.len(), 5);
    }
}
