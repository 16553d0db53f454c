//! Space kept back, so that what was begun can be ended on a full disk.
//!
//! ```text
//! standing ──an ending meets a full disk──► released ──space again──► standing
//!     └ ordinary writes are taken               └ ordinary writes are refused
//! ```
//!
//! The file is allocated, not merely long, and is emptied when an ending needs its blocks. Between
//! that and the ending's own write another program could take them; on a file system that copies
//! on write (btrfs, ZFS) allocation promises less. Both are narrow, and then the ending fails as
//! any write would.

use std::{fs::File, path::Path};

use nix::fcntl::posix_fallocate;

use crate::{error::OpenError, own};

/// Bytes beside the reserve that ordinary writes want.
const ROOM: i64 = 256 << 10;

/// The reserve.
#[derive(Debug)]
pub(crate) struct Reserve {
    file: File,
    bytes: u64,
    standing: bool,
}

impl Reserve {
    /// Opens it, and allocates what is missing if there is space.
    pub(crate) fn open(directory: &Path, bytes: u64) -> Result<Self, OpenError> {
        let file = own::file(&directory.join("reserve"), true)?;
        let mut reserve = Self { file, bytes, standing: false };
        reserve.restore();
        Ok(reserve)
    }

    /// Whether the space is kept.
    pub(crate) fn standing(&self) -> bool {
        self.standing
    }

    /// Gives the space back to the disk.
    pub(crate) fn release(&mut self) {
        self.standing = false;
        if let Err(error) = self.file.set_len(0) {
            tracing::error!(%error, "the reserve of disk space can't be released");
        }
    }

    /// Whether there is space beside it, for ordinary writes.
    pub(crate) fn has_room_beside(&mut self) -> bool {
        let (start, length) = (i64::try_from(self.bytes).unwrap_or(i64::MAX), ROOM);
        let found = posix_fallocate(&self.file, start, length).is_ok();
        if let Err(error) = self.file.set_len(self.bytes) {
            tracing::warn!(%error, "the reserve of disk space can't be cut to its size");
        }
        found
    }

    /// Takes the space again if it is to be had; whether it is kept now.
    pub(crate) fn restore(&mut self) -> bool {
        if !self.standing {
            let length = i64::try_from(self.bytes).unwrap_or(i64::MAX);
            self.standing = posix_fallocate(&self.file, 0, length).is_ok();
            if !self.standing {
                // Half a reserve would keep endings from the space that is left.
                self.release();
            }
        }
        self.standing
    }
}
