//! Reserved disk space, so that operations can be ended on a full disk.
//!
//! ```text
//! reserved ──an ending meets a full disk──► released ──space again──► reserved
//!     └ ordinary writes are accepted            └ ordinary writes are refused
//! ```
//!
//! The reserve is a file with allocated blocks. If an ending needs space, the store empties the file. Another program
//! could then take the space before the ending is written. On a copy-on-write file system (btrfs, ZFS), allocated
//! blocks do not guarantee space. In these two rare cases, the ending fails like any other write.

use std::{fs::File, path::Path};

use nix::fcntl::posix_fallocate;

use crate::{error::OpenError, ownership};

/// Free space in bytes, in addition to the reserve, that ordinary writes require.
const ROOM: i64 = 256 << 10;

/// The file with the reserved space.
#[derive(Debug)]
pub(crate) struct Reserve {
    file: File,
    bytes: u64,
    standing: bool,
}

impl Reserve {
    /// Opens the file, and allocates missing blocks if there is space.
    pub(crate) fn open(directory: &Path, bytes: u64) -> Result<Self, OpenError> {
        let file = ownership::open_file(&directory.join("reserve"), true)?;
        let mut reserve = Self { file, bytes, standing: false };
        reserve.restore();
        Ok(reserve)
    }

    /// Returns whether the space is reserved.
    pub(crate) fn is_reserved(&self) -> bool {
        self.standing
    }

    /// Frees the reserved space.
    pub(crate) fn release(&mut self) {
        self.standing = false;
        if let Err(error) = self.file.set_len(0) {
            tracing::error!(%error, "cannot release the disk space reserve");
        }
    }

    /// Returns whether the disk has free space for ordinary writes, in addition to the reserve.
    pub(crate) fn has_room_for_writes(&mut self) -> bool {
        let (start, length) = (i64::try_from(self.bytes).unwrap_or(i64::MAX), ROOM);
        let found = posix_fallocate(&self.file, start, length).is_ok();
        if let Err(error) = self.file.set_len(self.bytes) {
            tracing::warn!(%error, "cannot set the size of the disk space reserve");
        }
        found
    }

    /// Reserves the space again, if possible. Returns whether the space is reserved now.
    pub(crate) fn restore(&mut self) -> bool {
        if !self.standing {
            let length = i64::try_from(self.bytes).unwrap_or(i64::MAX);
            self.standing = posix_fallocate(&self.file, 0, length).is_ok();
            if !self.standing {
                // A partial reserve would take disk space that gpushd needs to record how
                // operations and leases end.
                self.release();
            }
        }
        self.standing
    }
}
