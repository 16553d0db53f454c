//! The lock of the state directory. gpushd holds the lock until gpushd exits.
//!
//! Without the lock, two gpushd could change the same GPUs. The lock is an `flock`, so the kernel
//! releases the lock when the process ends. The file contains the holder's pid, which a second
//! gpushd reports.
//!
//! Between `fork` and `exec`, a child process has all descriptors of its parent. If gpushd is
//! killed in this interval, its child holds the lock for a moment. So the next gpushd tries to get
//! the lock for [`PATIENCE`].

use std::{
    fs,
    io::{self, Read, Seek, Write},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::signal::kill,
    unistd::Pid,
};

use crate::{error::OpenError, ownership};

/// How long gpushd tries to get a lock that another process holds.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(5);

/// The lock of a state directory. Dropping this value releases the lock.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: Flock<fs::File>,
}

impl Lock {
    /// Takes the lock of an existing directory.
    pub(crate) fn take(directory: &Path) -> Result<Self, OpenError> {
        let until = Instant::now() + PATIENCE;
        Self::take_while(directory, || {
            thread::sleep(PAUSE);
            Instant::now() < until
        })
    }

    /// Takes the lock, and retries while `again` returns true.
    fn take_while(directory: &Path, mut again: impl FnMut() -> bool) -> Result<Self, OpenError> {
        let path = directory.join("lock");
        let unusable = |cause: io::Error| OpenError::Unusable { path: path.clone(), cause };
        let mut file = ownership::open_file(&path, true)?;
        let mut lock = loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => break lock,
                Err((file, Errno::EWOULDBLOCK)) if again() => file,
                Err((file, Errno::EWOULDBLOCK)) => {
                    return Err(OpenError::Held { path: directory.to_owned(), holder: holder(file) });
                }
                Err((_, errno)) => return Err(unusable(errno.into())),
            };
        };
        let pid = format!("{}\n", std::process::id());
        let note = lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| lock.write_all(pid.as_bytes()));
        match note {
            Ok(()) => {}
            // Ignore the error: on a full disk, the pid cannot be written, but gpushd must start
            // nevertheless. Other processes use the pid only in a message.
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {}
            Err(error) => return Err(unusable(error)),
        }
        Ok(Self { _file: lock })
    }
}

/// Returns the pid in the file if that process exists. The process that wrote the pid may have
/// ended.
fn holder(mut file: fs::File) -> Option<u32> {
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    let pid: u32 = text.trim().parse().ok()?;
    let is_there = kill(Pid::from_raw(i32::try_from(pid).ok()?), None) != Err(Errno::ESRCH);
    is_there.then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_that_is_released_meanwhile_is_taken() {
        let scratch = tempfile::tempdir().unwrap();
        let mut first = Some(Lock::take(scratch.path()).unwrap());
        let taken = Lock::take_while(scratch.path(), || first.take().is_some());
        assert!(taken.is_ok(), "{taken:?}");
    }

    #[test]
    fn holder_is_named_only_while_it_is_there() {
        let scratch = tempfile::tempdir().unwrap();
        let _first = Lock::take(scratch.path()).unwrap();
        let held = || match Lock::take_while(scratch.path(), || false) {
            Err(OpenError::Held { holder, .. }) => holder,
            other => panic!("{other:?}"),
        };
        assert_eq!(held(), Some(std::process::id()));
        fs::write(scratch.path().join("lock"), format!("{}\n", i32::MAX)).unwrap();
        assert_eq!(held(), None);
    }
}
