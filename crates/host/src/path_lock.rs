//! A lock that goes with a path: one agent at a time uses a socket path, or the directory of MPS daemons.
//!
//! Of two agents that start at the same moment, each would find the other's socket stale or missing. Both
//! would serve, one of them on a socket without a name. The lock is an `flock` on `PATH.lock`, so it ends with
//! its process however that ends. The file stays: to remove it would let a third agent lock another file of
//! the same name.

use std::{
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::proc;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg, OFlag},
};

/// How long the loser waits for the winner to write down its pid.
const NOTE: Duration = Duration::from_millis(500);

/// Why there is no lock.
#[derive(Debug)]
pub enum LockError {
    /// Another process has it.
    Held {
        /// Its pid, when it could be read.
        holder: Option<u32>,
    },
    /// The file can't be opened or locked.
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The lock of a path, ours until dropped.
#[derive(Debug)]
pub struct PathLock {
    _file: Flock<File>,
}

impl PathLock {
    /// Takes the lock of a path, whose directory exists.
    ///
    /// # Errors
    /// When another process has it, or the file cannot be opened or locked.
    pub fn take(of: &Path) -> Result<Self, LockError> {
        let mut path = OsString::from(of);
        path.push(".lock");
        let path = PathBuf::from(path);
        let unusable = |source| LockError::Unusable { path: path.clone(), source };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            // The directory may be one that others write to: what they put there is not followed.
            .custom_flags(OFlag::O_NOFOLLOW.bits())
            .open(&path)
            .map_err(unusable)?;
        let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((file, Errno::EWOULDBLOCK)) => return Err(LockError::Held { holder: holder(file) }),
            Err((_, errno)) => return Err(unusable(errno.into())),
        };
        let pid = format!("{}\n", std::process::id());
        // It is only for the message of whoever is refused: a full disk keeps nobody from serving.
        let _ = lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| lock.write_all(pid.as_bytes()));
        Ok(Self { _file: lock })
    }
}

/// The pid in the file. The holder may not have written it yet: until then the file is empty, or
/// has the pid of one that was killed.
fn holder(mut file: File) -> Option<u32> {
    let until = Instant::now() + NOTE;
    loop {
        let mut text = String::new();
        let read = file.rewind().and_then(|()| file.read_to_string(&mut text));
        let pid = read.ok().and_then(|_| text.trim().parse::<u32>().ok());
        if let Some(pid) = pid.filter(|pid| proc::is_alive(*pid)) {
            return Some(pid);
        }
        if Instant::now() >= until {
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_second_one_is_told_who_has_it_and_may_have_it_afterwards() {
        let scratch = tempfile::tempdir().unwrap();
        let socket = scratch.path().join("gpushd.sock");
        let first = PathLock::take(&socket).unwrap();
        let mode = std::fs::metadata(scratch.path().join("gpushd.sock.lock")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let held = PathLock::take(&socket).unwrap_err();
        assert!(matches!(held, LockError::Held { holder: Some(pid) } if pid == std::process::id()), "{held:?}");
        drop(first);
        PathLock::take(&socket).unwrap();
    }

    #[test]
    fn a_link_in_its_place_is_not_followed() {
        let scratch = tempfile::tempdir().unwrap();
        let precious = scratch.path().join("precious");
        std::fs::write(&precious, "precious").unwrap();
        symlink(&precious, scratch.path().join("s.lock")).unwrap();
        assert!(matches!(PathLock::take(&scratch.path().join("s")), Err(LockError::Unusable { .. })));
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "precious");
    }
}
