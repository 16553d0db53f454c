//! The store as the agent finds it at start: opened, what it remembers, what it has to say.

use std::path::Path;

use gpush_api::{ApiError, Code};
use gpush_store::{
    BootRecord, Bounds, Condition, Note, OpenError, Opened, Options, Override, Scope, Store, StoreError,
    UnfinishedOperation, View,
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
    /// Conditions of GPUs, those that an operation left with its part for the GPU.
    pub(crate) conditions: Vec<(Condition, Option<Part>)>,
    /// Overrides, those past their time included.
    pub(crate) overrides: Vec<Override>,
    /// Generation of what is wanted.
    pub(crate) generation: u64,
}

/// Opens the store of a state directory, which is this process's until the last handle is gone.
/// Blocks: it is for the time before there is a runtime.
///
/// # Errors
/// When it can't be had, above all because another agent has it.
pub(crate) fn open(directory: &Path, boot_id: &str) -> Result<Remembered, OpenError> {
    let options = Options { boot_id: boot_id.to_owned(), bounds: Bounds::default(), ..Options::default() };
    let Opened { store, notes } = Store::open(directory, options)?;
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
        Ok((view.last_boot()?, view.unfinished()?, conditions, view.overrides()?, view.generation()))
    });
    // A newer gpushd's records may be such that nothing can be read: that is said, and nothing is
    // taken over.
    let (last_boot, unfinished, conditions, overrides, generation) = remembered.wait().unwrap_or_else(|error| {
        tracing::error!("what the agent before left can't be read: {error}");
        Default::default()
    });
    Ok(Remembered { store, notes, last_boot, unfinished, conditions, overrides, generation })
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
            Note::NewerSchema { .. } | Note::NoReserve { .. } => Code::Unavailable,
            Note::Created
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
