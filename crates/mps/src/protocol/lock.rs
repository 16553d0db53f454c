//! Finds the daemon of a directory by its lock. The daemon holds a write lock on `control_lock` as
//! long as it runs, and the kernel reports the holder. The pid file is less reliable: the daemon
//! does not truncate the file, and the file remains after the daemon has ended.
//!
//! Any user with access to the directory can lock the file: a process that waits for the lock gets it when the daemon
//! ends. So other facts must confirm that the holder is the daemon.

use std::{fs::File, io, path::Path};

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
};

/// The holder of the lock of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// No process.
    Free,
    /// The process with this positive pid.
    Process(i32),
    /// A holder that the kernel does not identify: either the lock belongs to an open file (pid
    /// -1), or the process is in another pid namespace (pid 0). A daemon of gpushd never holds the
    /// lock in these ways.
    Unnamed,
}

/// Returns the holder of the lock of a directory. A directory without a lock file has no daemon.
///
/// # Errors
/// The lock cannot be queried.
pub fn taken_by(directory: &Path) -> io::Result<Holder> {
    let file = match File::open(directory.join("control_lock")) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Holder::Free),
        Err(error) => return Err(error),
    };
    let mut asked = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_GETLK(&mut asked))?;
    if i32::from(asked.l_type) == libc::F_UNLCK {
        return Ok(Holder::Free);
    }
    Ok(if asked.l_pid > 0 { Holder::Process(asked.l_pid) } else { Holder::Unnamed })
}

/// Returns the pid of the process that holds the lock of a directory; `None` if no process holds
/// the lock, or the kernel does not identify the process.
///
/// # Errors
/// The lock cannot be queried.
pub fn holder(directory: &Path) -> io::Result<Option<i32>> {
    Ok(match taken_by(directory)? {
        Holder::Process(pid) => Some(pid),
        Holder::Free | Holder::Unnamed => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_file_lock_has_no_pid() {
        let scratch = tempfile::tempdir().unwrap();
        assert_eq!(taken_by(scratch.path()).unwrap(), Holder::Free);
        let file = File::create(scratch.path().join("control_lock")).unwrap();
        assert_eq!(taken_by(scratch.path()).unwrap(), Holder::Free);
        let whole = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        fcntl(&file, FcntlArg::F_OFD_SETLK(&whole)).unwrap();
        assert_eq!(taken_by(scratch.path()).unwrap(), Holder::Unnamed);
        assert_eq!(holder(scratch.path()).unwrap(), None);
    }
}
