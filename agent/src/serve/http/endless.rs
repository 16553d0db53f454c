//! Responses without an end: streams of events.

/// Marks a response as an endless stream. The handler of such a response writes at least every 15
/// s. So if nothing can be written for longer, the client does not read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Endless;
