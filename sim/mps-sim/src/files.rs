//! The files of a daemon in its pipe directory.
//!
//! | file | mode | remains after `quit` |
//! |---|---|---|
//! | `control` | 0666 | yes |
//! | `control_privileged` | 0755 by the umask | yes |
//! | `control_lock`, locked until the daemon ends | 0666 | yes |
//! | `log`, a FIFO | 0777 | no |
//! | `nvidia-cuda-mps-control.pid`, from 550 on, not truncated when written | 0666 | no |

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    libc,
};

use crate::{
    fault::Kind,
    place::{Environment, Version, without_umask},
    wire::Socket,
};

/// If the path of a pipe directory has at least this length in bytes, the daemon does not start,
/// because the paths of the sockets would be too long.
const TOO_LONG: usize = 88;
const PID: &str = "nvidia-cuda-mps-control.pid";
/// A pid that no process has, because it is higher than any pid on Linux.
const NOBODYS_PID: u32 = 4_194_304;

/// The open files of a daemon.
pub(crate) struct Files {
    pub(crate) control: Socket,
    pub(crate) privileged: Socket,
    /// The open lock file, which holds the lock until the process ends.
    _lock: File,
}

/// The reason why a daemon does not start.
pub(crate) enum NoFiles {
    /// Another daemon uses this pipe directory.
    Taken,
    /// The path of the pipe directory is too long. The real daemon then ends without a message.
    TooLong,
    System(io::Error),
}

impl From<io::Error> for NoFiles {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

/// Creates a pipe directory, and locks it.
pub(crate) fn lock(pipe: &Path) -> Result<File, NoFiles> {
    if pipe.as_os_str().len() >= TOO_LONG {
        return Err(NoFiles::TooLong);
    }
    without_umask(|| {
        match std::fs::create_dir(pipe) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
            Ok(()) | Err(_) => {}
        }
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(pipe.join("control_lock"))?;
        let wanted = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        match fcntl(&file, FcntlArg::F_SETLK(&wanted)) {
            Ok(_) => Ok(file),
            Err(Errno::EAGAIN | Errno::EACCES) => Err(NoFiles::Taken),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    })
}

/// Creates the sockets in a locked pipe directory, and listens on them. The daemon keeps `lock`
/// until its end.
pub(crate) fn listen(place: &Environment, lock: File) -> io::Result<Files> {
    let privileged = Socket::listen(&place.pipe.join("control_privileged"))?;
    let control = Socket::listen(&place.pipe.join("control"))?;
    std::fs::set_permissions(place.pipe.join("control"), PermissionsExt::from_mode(0o666))?;
    if place.version() >= Version::V550 {
        let pid = match place.faults.fires(Kind::StalePidFile) {
            Some(_) => NOBODYS_PID,
            None => std::process::id(),
        };
        let open = || OpenOptions::new().write(true).create(true).truncate(false).open(place.pipe.join(PID));
        write!(without_umask(open)?, "{pid}")?;
    }
    Ok(Files { control, privileged, _lock: lock })
}

/// Removes the files that `quit` removes.
pub(crate) fn remove(pipe: &Path) {
    for name in ["log", PID] {
        // Ignore an error: the file may be gone already.
        let _gone = std::fs::remove_file(pipe.join(name));
    }
}
