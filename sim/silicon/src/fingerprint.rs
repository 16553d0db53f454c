//! Fingerprints of texts, which identify a description or a fault rule in the shared state.

/// Computes the FNV-1a hash.
pub(crate) fn of(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
