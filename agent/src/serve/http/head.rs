//! Limits of request heads.

/// Maximum size of a request head in bytes. This is the smallest buffer that hyper accepts.
pub(crate) const MOST_BYTES: usize = 8 << 10;
