//! Whose the state directory and the files in it are.
//!
//! What they say is believed: which GPUs are held, what is half done and how it was before. So they
//! must be root's or our own, and nobody else may write them; a name that leads elsewhere by a
//! symbolic link is not followed. The directory itself may be reached through one.

use std::{
    fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
};

use nix::{errno::Errno, fcntl::OFlag, unistd::Uid};

use crate::error::{OpenError, Untrusted};

/// Mode of the directory and of a file when we make them: nobody else reads what is in there.
const DIRECTORY: u32 = 0o700;
const FILE: u32 = 0o600;

/// Bits by which the group or everybody else may write.
const WRITE_OF_OTHERS: u32 = 0o022;

/// Makes the state directory if it is not there, the directories above it as any others.
pub(crate) fn directory(path: &Path) -> Result<(), OpenError> {
    let unusable = |source| OpenError::Unusable { path: path.to_owned(), source };
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

/// Opens a file of ours for reading and writing; without `create` there must be one.
pub(crate) fn file(path: &Path, create: bool) -> Result<File, OpenError> {
    let unusable = |source| OpenError::Unusable { path: path.to_owned(), source };
    // Neither a pipe nor a device that somebody put there holds us up.
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
    // One of an earlier version may be readable to all.
    if found.mode() & 0o7777 != FILE && found.uid() == Uid::effective().as_raw() {
        file.set_permissions(Permissions::from_mode(FILE)).map_err(unusable)?;
    }
    Ok(file)
}

/// Looks at a file of ours that somebody else will open, if it is there.
pub(crate) fn look(path: &Path) -> Result<(), OpenError> {
    match file(path, false) {
        Err(OpenError::Unusable { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
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
