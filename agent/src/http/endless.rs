//! Responses without an end: streams of events.

/// Marks a response as endless, in the response's extensions. The handler of such a response writes
/// at least every 15 s. So gpushd can distinguish a client that does not read from a quiet stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Endless;
