//! Responses without an end: streams of events.

/// Marks a response without an end, in its extensions. Its handler writes at least every 15 s, so a client that does
/// not read can be told from a quiet stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Endless;
