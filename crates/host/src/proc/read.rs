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

/// First size of the buffer, in bytes. Most files of a process are smaller, so one read(2) gets the
/// whole file. For each further read(2), the kernel generates the whole text again.
const FIRST: usize = 4096;

/// Reads at most [`LIMIT`] bytes.
pub(super) fn up_to_limit(file: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(FIRST);
    file.take(LIMIT).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads the beginning of a file as text, with one read(2): at most `N` bytes. Bytes that are not UTF-8 are replaced.
pub(super) fn beginning<const N: usize>(mut file: impl Read) -> io::Result<String> {
    let mut bytes = [0; N];
    let length = file.read(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
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
