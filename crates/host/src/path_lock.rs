//! A lock for a path: only one gpushd at a time uses a socket path, or the directory of MPS daemons.
//!
//! Without the lock, two gpushd that start at the same time could each conclude that the other's
//! socket is stale or missing. Both would then serve, one of them on a socket that no longer has a
//! path. The lock is an `flock` on `PATH.lock`, so the kernel releases it when the process ends.
//! gpushd never removes the file: otherwise another gpushd could lock a new file with the same
//! name.
//!
//! Between `fork` and `exec`, a child has all descriptors of its parent. If gpushd is killed in this interval, its
//! child holds the lock a moment longer: see [`PATIENCE`].

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

/// How long gpushd retries while the holder of the lock is unknown: the holder has not written its pid yet, or the pid
/// in the file belongs to a process that has ended.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(2);

/// Why the lock was not taken.
#[derive(Debug)]
pub enum LockError {
    /// Another process holds the lock.
    Held {
        /// Pid of the holder, if it could be read.
        holder: Option<u32>,
    },
    /// The file cannot be opened or locked.
    Unusable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The lock of a path. Dropping this value releases the lock.
#[derive(Debug)]
pub struct PathLock {
    _file: Flock<File>,
}

impl PathLock {
    /// Takes the lock of a path. The directory of the path must exist.
    ///
    /// # Errors
    /// Another process holds the lock, or the file cannot be opened or locked.
    pub fn take(of: &Path) -> Result<Self, LockError> {
        let mut path = OsString::from(of);
        path.push(".lock");
        let path = PathBuf::from(path);
        let unusable = |source| LockError::Unusable { path: path.clone(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            // Other users may be able to write to the directory, so do not follow a symbolic link.
            .custom_flags(OFlag::O_NOFOLLOW.bits())
            .open(&path)
            .map_err(unusable)?;
        let until = Instant::now() + PATIENCE;
        let mut lock = loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => break lock,
                Err((mut file, Errno::EWOULDBLOCK)) => match holder(&mut file) {
                    None if Instant::now() < until => file,
                    holder => return Err(LockError::Held { holder }),
                },
                Err((_, errno)) => return Err(unusable(errno.into())),
            };
            thread::sleep(PAUSE);
        };
        let pid = format!("{}\n", std::process::id());
        // The pid is only for a message, so an error is ignored: gpushd must start even if the disk
        // is full.
        let _ = lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| lock.write_all(pid.as_bytes()));
        Ok(Self { _file: lock })
    }
}

/// Returns the pid in the file, if that process is alive.
fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().and_then(|()| file.read_to_string(&mut text)).ok()?;
    text.trim().parse().ok().filter(|pid: &u32| proc::is_alive(*pid))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn second_agent_learns_the_holder_and_may_lock_afterwards() {
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

    /// After gpushd was killed, its child holds the lock until the child executes its program.
    #[test]
    fn lock_held_by_a_child_of_an_ended_agent_is_awaited() {
        let scratch = tempfile::tempdir().unwrap();
        let socket = scratch.path().join("gpushd.sock");
        let first = PathLock::take(&socket).unwrap();
        std::fs::write(scratch.path().join("gpushd.sock.lock"), format!("{}\n", i32::MAX)).unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| PathLock::take(&socket));
            drop(first);
            second.join().unwrap().unwrap();
        });
    }

    #[test]
    fn link_in_place_of_the_lock_is_not_followed() {
        let scratch = tempfile::tempdir().unwrap();
        let precious = scratch.path().join("precious");
        std::fs::write(&precious, "precious").unwrap();
        symlink(&precious, scratch.path().join("s.lock")).unwrap();
        assert!(matches!(PathLock::take(&scratch.path().join("s")), Err(LockError::Unusable { .. })));
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "precious");
    }
}
