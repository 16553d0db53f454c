//! Progress of the database, recorded in files outside of the database.
//!
//! If the end of SQLite's log is damaged, SQLite assumes that a crash interrupted a write, and ignores that write. This
//! is correct for a commit that was never reported. Any other commit would be lost without a message. So after each
//! sync and before the reply, the store writes the commit's sequence number to two files:
//!
//! - the **watermark** in the state directory, which survives a reboot;
//! - the **marker** in the runtime directory (`/run/gpush`), which a reboot removes. The marker
//!   survives if the whole state directory is emptied, and proves that gpushd ran on this boot.
//!
//! Both files contain the ids of the database and of the boot. Not every commit syncs these files,
//! so the files can be older than the database, but never newer. A database that is behind one of
//! the files has lost commits.
//!
//! The store syncs the watermark only at quiet moments. After a power failure, the watermark may be
//! as old as the last quiet moment. If the log of the commits since then is damaged too, the store
//! can still mistake this damage for an interrupted write.

use std::{
    fs::{DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, FileExt},
    path::Path,
};

use uuid::Uuid;

use crate::{error::OpenError, ownership, record::digest};

/// Format 1: magic, sequence, checksum. It contains neither the id of the database nor that of the boot.
const MAGIC_1: &[u8; 8] = b"gpushwm1";
const LENGTH_1: usize = 24;
/// Format 2: magic, sequence, database, boot, checksum.
const MAGIC: &[u8; 8] = b"gpushwm2";
const LENGTH: usize = 48;

/// A database and the boot on which it was last open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Id of the database.
    pub(crate) store: Uuid,
    /// Digest of the boot id.
    pub(crate) boot: u64,
}

/// The progress of a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Sequence number of the last commit.
    pub(crate) sequence: u64,
    /// The database and its boot; `None` in format 1.
    pub(crate) origin: Option<Origin>,
}

/// Content of a watermark or a marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recorded {
    /// There is no file, or it is empty.
    Missing,
    /// The file is damaged.
    Damaged,
    /// The file is sound.
    Progress(Progress),
}

impl Recorded {
    /// Returns the progress of a sound file.
    pub(crate) fn progress(&self) -> Option<&Progress> {
        match self {
            Self::Progress(progress) => Some(progress),
            Self::Missing | Self::Damaged => None,
        }
    }
}

/// Returns the digest of a boot id, as in [`Origin::boot`].
pub(crate) fn boot_digest(boot_id: &str) -> u64 {
    digest(boot_id.as_bytes())
}

/// An open watermark or marker file, which records the progress of a database.
#[derive(Debug)]
pub(crate) struct ProgressFile {
    file: File,
}

impl ProgressFile {
    /// Opens the file, creates it if there is none, and reads it.
    ///
    /// # Errors
    /// The file cannot be opened or read, or belongs to another user.
    pub(crate) fn open(path: &Path) -> Result<(Self, Recorded), OpenError> {
        let file = ownership::open_file(path, true)?;
        let mut bytes = [0; LENGTH];
        let mut length = 0;
        while length < LENGTH {
            match file.read_at(&mut bytes[length..], length as u64) {
                Ok(0) => break,
                Ok(read) => length += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(OpenError::Unusable { path: path.to_owned(), cause }),
            }
        }
        Ok((Self { file }, decode(&bytes[..length])))
    }

    /// Opens the marker. Creates its directory if necessary.
    ///
    /// # Errors
    /// As [`ProgressFile::open`].
    pub(crate) fn open_marker(path: &Path) -> Result<(Self, Recorded), OpenError> {
        if let Some(parent) = path.parent() {
            let made = DirBuilder::new().recursive(true).mode(0o755).create(parent);
            made.map_err(|cause| OpenError::Unusable { path: parent.to_owned(), cause })?;
        }
        Self::open(path)
    }

    /// Records progress.
    pub(crate) fn set(&self, sequence: u64, origin: Origin) -> io::Result<()> {
        self.file.write_all_at(&encode(sequence, origin), 0)
    }

    /// Makes the last progress durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// The watermark of an open database, and the marker if there is one.
#[derive(Debug)]
pub(crate) struct Watermarks {
    pub(crate) watermark: ProgressFile,
    pub(crate) marker: Option<ProgressFile>,
    pub(crate) origin: Origin,
}

impl Watermarks {
    /// Records progress in both files. A failure is only logged: with an outdated file, the store detects
    /// fewer losses, but never reports a false loss.
    pub(crate) fn set(&self, sequence: u64) {
        for (name, file) in [("watermark", Some(&self.watermark)), ("marker", self.marker.as_ref())] {
            if let Some(Err(error)) = file.map(|file| file.set(sequence, self.origin)) {
                tracing::warn!(%error, "cannot write the {name} of the database");
            }
        }
    }

    /// Makes the watermark durable. For the marker this is not necessary, because the marker does not outlive the boot.
    pub(crate) fn sync(&self) {
        if let Err(error) = self.watermark.sync() {
            tracing::warn!(%error, "cannot sync the watermark of the database to disk");
        }
    }
}

fn encode(sequence: u64, origin: Origin) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
    bytes[16..32].copy_from_slice(origin.store.as_bytes());
    bytes[32..40].copy_from_slice(&origin.boot.to_le_bytes());
    let sum = digest(&bytes[..40]);
    bytes[40..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Recorded {
    let number = |at: usize| bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok()).map(u64::from_le_bytes);
    let sum = |at: usize| bytes.get(..at).map(digest);
    if bytes.is_empty() {
        return Recorded::Missing;
    }
    let decoded = if bytes.starts_with(MAGIC_1) {
        let at = LENGTH_1 - 8;
        number(8).filter(|_| number(at).is_some() && number(at) == sum(at)).map(|sequence| (sequence, None))
    } else if bytes.starts_with(MAGIC) {
        let at = LENGTH - 8;
        let store = bytes.get(16..32).and_then(|id| Uuid::from_slice(id).ok());
        let origin = store.zip(number(32)).map(|(store, boot)| Origin { store, boot });
        number(8).filter(|_| number(at).is_some() && number(at) == sum(at)).map(|sequence| (sequence, origin))
    } else {
        None
    };
    decoded.map_or(Recorded::Damaged, |(sequence, origin)| Recorded::Progress(Progress { sequence, origin }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_with_any_bit_flipped_is_damaged() {
        let origin = Origin { store: Uuid::from_u128(7), boot: boot_digest("boot") };
        let good = encode(77, origin);
        assert_eq!(decode(&good), Recorded::Progress(Progress { sequence: 77, origin: Some(origin) }));
        for bit in 0..LENGTH * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&bad), Recorded::Damaged, "bit {bit}");
        }
        for length in 1..LENGTH {
            assert_eq!(decode(&good[..length]), Recorded::Damaged, "{length} bytes");
        }
        assert_eq!(decode(&[]), Recorded::Missing);
    }

    #[test]
    fn progress_of_format_1_is_read_without_origin() {
        let mut old = [0; LENGTH_1];
        old[..8].copy_from_slice(MAGIC_1);
        old[8..16].copy_from_slice(&5u64.to_le_bytes());
        let sum = digest(&old[..16]);
        old[16..].copy_from_slice(&sum.to_le_bytes());
        let expected = Recorded::Progress(Progress { sequence: 5, origin: None });
        assert_eq!(decode(&old), expected);
        // An older gpushd wrote format 1 over the beginning of a file of format 2.
        assert_eq!(decode(&[&old[..], &[9; 24]].concat()), expected);
    }
}
