//! The store as the agent finds it at start: opened, what it remembers, what it has to say.

use std::{collections::BTreeMap, path::Path};

use gpush_api::{ApiError, Code, OperationState};
use gpush_nvml::RemappedRows;
use gpush_store::{
    BootRecord, Bounds, Condition, Lost, NewAudit, Note, OpenError, Opened, OperationId, Options, Override, Scope,
    Store, StoreError, UnfinishedOperation, View,
};

use crate::{apply::Part, operation};

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
    /// Of those that have not ended, the ones on whose GPUs another one has ended since, with that one:
    /// their own end could not be recorded.
    pub(crate) superseded: BTreeMap<OperationId, OperationId>,
    /// Conditions of GPUs, those that an operation left with its part for the GPU.
    pub(crate) conditions: Vec<(Condition, Option<Part>)>,
    /// Overrides, those past their time included.
    pub(crate) overrides: Vec<Override>,
    /// Generation of what is wanted.
    pub(crate) generation: u64,
    /// What was last noticed about the memory of each GPU, by UUID.
    pub(crate) noticed: BTreeMap<String, RemappedRows>,
    /// What was lost on this boot, and nobody has accepted yet.
    pub(crate) lost: Option<Lost>,
}

/// Opens the store of a state directory, which is this process's until the last handle is gone.
/// Blocks: it is for the time before there is a runtime.
///
/// # Errors
/// When it can't be had, above all because another agent has it.
pub(crate) fn open(directory: &Path, boot_id: &str) -> Result<Remembered, OpenError> {
    let options = Options { boot_id: boot_id.to_owned(), bounds: Bounds::default(), ..Options::default() };
    let Opened { store, mut notes } = Store::open(directory, options)?;
    let lost = accept_of_another_boot(&store, &mut notes, boot_id);
    for note in &notes {
        if is_trouble(note) {
            tracing::warn!("{note}");
        } else {
            tracing::info!("{note}");
        }
    }
    let boot = boot_id.to_owned();
    let cleared = store.write_ending(move |tx| tx.forget_conditions_of_other_boots(&boot));
    if let Err(error) = cleared.wait() {
        tracing::warn!("conditions of an earlier boot can't be cleared: {error}");
    }
    let remembered = store.read(|view: &View<'_>| {
        let mut conditions = Vec::new();
        for one in view.conditions()? {
            let open = left_open(view, &one)?;
            conditions.push((one, open));
        }
        let mut noticed = BTreeMap::new();
        for (uuid, rows) in view.noticed()? {
            // Of another version's making it is noticed anew.
            noticed.extend(serde_json::from_value(rows).ok().map(|rows| (uuid, rows)));
        }
        let unfinished = view.unfinished()?;
        let superseded = superseded(view, &unfinished)?;
        let left = (unfinished, superseded);
        Ok((view.last_boot()?, left, conditions, noticed, view.overrides()?, view.generation()))
    });
    // A newer gpushd's records may be such that nothing can be read: that is said, and nothing is
    // taken over.
    let (last_boot, left, conditions, noticed, overrides, generation) = remembered.wait().unwrap_or_else(|error| {
        tracing::error!("what the agent before left can't be read: {error}");
        Default::default()
    });
    let (unfinished, superseded) = left;
    Ok(Remembered { store, notes, last_boot, unfinished, superseded, conditions, overrides, generation, noticed, lost })
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

/// Of operations that have not ended, those on whose GPUs a later one has ended.
fn superseded(
    view: &View<'_>,
    unfinished: &[UnfinishedOperation],
) -> Result<BTreeMap<OperationId, OperationId>, StoreError> {
    let mut superseded = BTreeMap::new();
    if unfinished.is_empty() {
        return Ok(superseded);
    }
    for later in view.operations()?.into_iter().filter(|later| later.stage == OperationState::Done) {
        for left in unfinished.iter().filter(|left| !left.record.stage.is_final() && left.record.id < later.id) {
            let begun = !matches!(left.record.stage, OperationState::Queued | OperationState::Waiting);
            let gpus = view.intent(later.id)?.unwrap_or_default().gpus;
            let has = |uuid: &str| gpus.iter().any(|gpu| gpu.plan.uuid == uuid);
            if begun && left.intent.gpus.iter().any(|gpu| has(&gpu.plan.uuid)) {
                superseded.insert(left.record.id, later.id);
            }
        }
    }
    Ok(superseded)
}

fn is_trouble(note: &Note) -> bool {
    match note {
        Note::Created | Note::Migrated { .. } => false,
        Note::Volatile { .. }
        | Note::Opaque { .. }
        | Note::NewerSchema { .. }
        | Note::Lost(_)
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
            | Note::ClockBack { .. } => return None,
        };
        let text = note.to_string();
        Some(match text.split_once("; ") {
            Some((message, hint)) => ApiError::new(code, message).hint(hint),
            None => ApiError::new(code, text),
        })
    })
}
