//! Limits of request heads.

/// Maximum size of a request head in bytes. hyper does not accept a smaller buffer.
pub(crate) const MOST_BYTES: usize = 8 << 10;
