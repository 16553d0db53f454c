//! Answers without an end: streams of events.

/// Marks a response without an end, in its extensions. Its handler writes at least every 15 s, so that a connection
/// that takes nothing is told apart from a quiet one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Endless;
