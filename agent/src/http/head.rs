//! Heads of requests.

/// Largest request head in bytes; hyper's smallest buffer.
pub(crate) const MOST_BYTES: usize = 8 << 10;
