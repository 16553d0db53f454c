//! Responses without an end: streams of events.

/// Marks an endless response, in its extensions. Its handler writes at least every 15 s. So gpushd can distinguish a
/// client that does not read from a quiet stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Endless;
