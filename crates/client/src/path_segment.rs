//! Percent-encoding of the segments of a path.

/// Percent-encodes the characters that a path segment must not contain.
pub(crate) fn segment(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~:".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_segments_keep_gpu_names_and_escape_the_rest() {
        assert_eq!(segment("0000:07:00.0"), "0000:07:00.0");
        assert_eq!(segment("0:2g.20gb@2"), "0:2g.20gb%402");
        assert_eq!(segment("GPU-5e8c/../x y?"), "GPU-5e8c%2F..%2Fx%20y%3F");
        assert_eq!(segment("ü"), "%C3%BC");
    }
}
