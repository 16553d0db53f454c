//! Ownership and permissions of the state directory and its files.
//!
//! gpushd relies on the content of these files: which GPUs are held, which operations are unfinished, and what the
//! previous layouts were. So root or gpushd's own user must own the files, and no other user may have write access to
//! them. gpushd does not follow symbolic links to files; the path of the directory may contain links.

use std::{
    fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
};

use nix::{errno::Errno, fcntl::OFlag, unistd::Uid};

use crate::error::{OpenError, Untrusted};

/// Modes of new directories and files. Other users cannot read them.
const DIRECTORY: u32 = 0o700;
const FILE: u32 = 0o600;

/// Write permission of the group and of others.
const WRITE_OF_OTHERS: u32 = 0o022;

/// Creates the state directory if it is missing, and checks its owner and mode. Creates missing
/// parents with default modes.
pub(crate) fn create_directory(path: &Path) -> Result<(), OpenError> {
    let unusable = |cause| OpenError::Unusable { path: path.to_owned(), cause };
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(unusable)?;
    }
    match DirBuilder::new().mode(DIRECTORY).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.map_err(unusable)?,
    }
    let found = fs::metadata(path).map_err(unusable)?;
    if !found.is_dir() {
        return Err(unusable(io::ErrorKind::NotADirectory.into()));
    }
    trusted(path, &found)
}

/// Opens a file for reading and writing, and checks its owner and mode. Without `create` the file must exist.
pub(crate) fn open_file(path: &Path, create: bool) -> Result<File, OpenError> {
    let unusable = |cause| OpenError::Unusable { path: path.to_owned(), cause };
    // With these flags, a pipe or a device in place of the file does not block the call.
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(create).truncate(false).mode(FILE).custom_flags(flags.bits());
    let file = match options.open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::ELOOP as i32) => {
            return Err(OpenError::Untrusted { path: path.to_owned(), why: Untrusted::Link });
        }
        opened => opened.map_err(unusable)?,
    };
    let found = file.metadata().map_err(unusable)?;
    if !found.is_file() {
        return Err(OpenError::Untrusted { path: path.to_owned(), why: Untrusted::NoFile });
    }
    trusted(path, &found)?;
    // An earlier version may have created the file readable for all users, so correct the mode.
    if found.mode() & 0o7777 != FILE && found.uid() == Uid::effective().as_raw() {
        file.set_permissions(Permissions::from_mode(FILE)).map_err(unusable)?;
    }
    Ok(file)
}

/// Checks a file that other code will open, if it exists.
pub(crate) fn check_existing(path: &Path) -> Result<(), OpenError> {
    match open_file(path, false) {
        Err(OpenError::Unusable { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        looked => looked.map(|_| ()),
    }
}

fn trusted(path: &Path, found: &Metadata) -> Result<(), OpenError> {
    let own = Uid::effective().as_raw();
    let untrusted = |why| Err(OpenError::Untrusted { path: path.to_owned(), why });
    if found.uid() != own && found.uid() != 0 {
        return untrusted(Untrusted::Owner { uid: found.uid(), own });
    }
    if found.mode() & WRITE_OF_OTHERS != 0 {
        return untrusted(Untrusted::Mode { uid: found.uid(), mode: found.mode() & 0o7777 });
    }
    Ok(())
}
