//! Bounded reads of files in `/proc`.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

/// Maximum number of bytes that gpushd reads from one file of a process.
pub const LIMIT: u64 = 64 << 10;

/// Reads at most [`LIMIT`] bytes of a file.
///
/// # Errors
/// The file cannot be opened or read.
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    up_to_limit(File::open(path)?)
}

/// Reads at most [`LIMIT`] bytes.
pub(super) fn up_to_limit(file: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(LIMIT).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads at most [`LIMIT`] bytes as text, and replaces bytes that are not UTF-8.
pub(super) fn text(file: impl Read) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&up_to_limit(file)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_file_is_read_up_to_the_limit() {
        assert_eq!(read("/dev/zero").unwrap().len() as u64, LIMIT);
        assert!(read("/no/such/file").is_err());
    }
}
