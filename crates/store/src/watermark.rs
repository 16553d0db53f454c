//! How far the database had come, kept beside it.
//!
//! SQLite takes a damaged tail of its log for a write that a crash tore, and goes on without it:
//! right for what nobody was told of, silent loss for the rest. So the sequence number of each
//! commit is noted here after its sync and before its reply. The note itself is not synced at each
//! commit; it can therefore be older than the database, never newer. A database that is behind it
//! has lost commits: a damaged log, a log or a database that was deleted, an old copy put back.
//!
//! After a power failure the note may be as old as the last quiet moment, when it is synced: then
//! damage to the last commits' log alone can still be taken for a torn write.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path};

use crate::{error::OpenError, own, record::digest};

const MAGIC: &[u8; 8] = b"gpushwm1";
const LENGTH: usize = 24;

/// The note.
#[derive(Debug)]
pub(crate) struct Watermark {
    file: File,
}

impl Watermark {
    /// Opens it. `None` as the number when there is none or it can't be trusted.
    pub(crate) fn open(directory: &Path) -> Result<(Self, Option<u64>), OpenError> {
        let path = directory.join("watermark");
        let file = own::file(&path, true)?;
        let mut bytes = [0; LENGTH];
        let sequence = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => decode(&bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(source) => return Err(OpenError::Unusable { path, source }),
        };
        Ok((Self { file }, sequence))
    }

    /// Notes a sequence number.
    pub(crate) fn set(&self, sequence: u64) -> io::Result<()> {
        self.file.write_all_at(&encode(sequence), 0)
    }

    /// Makes the last note durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

fn encode(sequence: u64) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
    let sum = digest(&bytes[..16]);
    bytes[16..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8; LENGTH]) -> Option<u64> {
    let sequence = u64::from_le_bytes(bytes[8..16].try_into().ok()?);
    (*bytes == encode(sequence)).then_some(sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_note_is_no_note() {
        let good = encode(77);
        assert_eq!(decode(&good), Some(77));
        for bit in 0..LENGTH * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&bad), None, "bit {bit}");
        }
    }
}
