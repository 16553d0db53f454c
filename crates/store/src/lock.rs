//! The state directory is one agent's for as long as that agent lives.
//!
//! Two agents would take turns in reshaping the same GPUs. The lock is an `flock`, so it ends with
//! its process however that ends; the file holds the pid so that the other one can be told by whom.

use std::{
    fs,
    io::{self, Read, Seek, Write},
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use crate::{error::OpenError, own};

/// The lock, ours until dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: Flock<fs::File>,
}

impl Lock {
    /// Takes the lock of a directory that exists.
    pub(crate) fn take(directory: &Path) -> Result<Self, OpenError> {
        let path = directory.join("lock");
        let unusable = |source: io::Error| OpenError::Unusable { path: path.clone(), source };
        let file = own::file(&path, true)?;
        let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut text = String::new();
                let holder = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
                return Err(OpenError::Held { path: directory.to_owned(), holder });
            }
            Err((_, errno)) => return Err(unusable(errno.into())),
        };
        let pid = format!("{}\n", std::process::id());
        let note = lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| lock.write_all(pid.as_bytes()));
        match note {
            Ok(()) => {}
            // Only the pid for a message is missing: a full disk must not keep the agent from starting.
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {}
            Err(error) => return Err(unusable(error)),
        }
        Ok(Self { _file: lock })
    }
}
