//! Answers about all GPUs that were written, kept as long as what they are made of stays the same.
//!
//! Who waits for an instance asks every second, monitors ask all the time, and most answers are the
//! last one again. Nothing here is told when something changes, so nothing can be forgotten: the facts
//! are gathered anew for each request, and an answer is given again only if they are equal to those
//! that it was made of. That is cheap beside making it, and needs no turn at the [`super::desk`].

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use axum::body::Bytes;

use crate::view::{Facts, Viewer};

/// Answers that are kept: to admins, to users with something of theirs in it, to all others.
const MOST: usize = 8;

/// The last answers.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<Option<Answers>>);

#[derive(Debug)]
struct Answers {
    facts: Facts,
    written: BTreeMap<Viewer, Bytes>,
}

impl Kept {
    /// What was answered to such a viewer of the same facts.
    pub(super) fn answer(&self, facts: &Facts, viewer: Viewer) -> Option<Bytes> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let answers = kept.as_ref().filter(|answers| answers.facts == *facts)?;
        answers.written.get(&viewer).cloned()
    }

    /// Keeps an answer.
    pub(super) fn keep(&self, facts: Facts, viewer: Viewer, written: Bytes) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.as_mut().filter(|answers| answers.facts == facts) {
            Some(answers) if answers.written.len() < MOST => {
                answers.written.insert(viewer, written);
            }
            Some(_) => {}
            None => *kept = Some(Answers { facts, written: BTreeMap::from([(viewer, written)]) }),
        }
    }
}
