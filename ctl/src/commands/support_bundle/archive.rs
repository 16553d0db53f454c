//! The archive: a tar file, compressed with gzip. Only its owner can read it.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use flate2::{Compression, write::GzEncoder};
use gpush_api::{ApiError, Code};

/// Packs the files into a directory of the archive. `time` is their modification time in seconds since 1970.
pub(super) fn pack<'f>(
    directory: &str,
    files: impl Iterator<Item = (&'f str, &'f [u8])>,
    time: u64,
) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(time);
        archive.append_data(&mut header, format!("{directory}/{name}"), bytes)?;
    }
    archive.into_inner()?.finish()
}

/// Returns an error if the file already exists. Call this before collecting anything. [`write()`] checks again.
pub(super) fn check_absent(path: &Path) -> Result<(), ApiError> {
    if path.symlink_metadata().is_ok() { Err(exists(path)) } else { Ok(()) }
}

/// Writes a new file with mode 0600. If this fails, removes the incomplete file.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), ApiError> {
    let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let mut file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(exists(path)),
        Err(error) => return Err(unwritable(path, &error)),
    };
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|error| {
        let _ = fs::remove_file(path);
        unwritable(path, &error)
    })
}

fn exists(path: &Path) -> ApiError {
    let message = format!("{} exists already, and is not overwritten", path.display());
    ApiError::new(Code::BadRequest, message).hint("name another file: `gpushctl support-bundle --file FILE`")
}

fn unwritable(path: &Path, cause: &io::Error) -> ApiError {
    crate::exit::io(format!("cannot write {}", path.display()), cause)
        .hint("name a file in a directory that you can write: `gpushctl support-bundle --file /tmp/gpush.tar.gz`")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn file_is_private_and_never_overwritten() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("b.tar.gz");
        check_absent(&path).unwrap();
        write(&path, b"one").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for error in [check_absent(&path).unwrap_err(), write(&path, b"two").unwrap_err()] {
            assert!(error.message.contains("b.tar.gz exists already") && error.hint.is_some(), "{error:?}");
        }
        assert_eq!(fs::read(&path).unwrap(), b"one");
        let dangling = scratch.path().join("link");
        std::os::unix::fs::symlink("nowhere", &dangling).unwrap();
        assert!(check_absent(&dangling).is_err() && write(&dangling, b"x").is_err());
    }
}
