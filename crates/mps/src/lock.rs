//! Who the daemon of a directory is: it holds a write lock on `control_lock` for life, whose holder the
//! kernel names. Its pid file is not truncated when it is written, and outlives it; the lock does neither.

use std::{fs::File, io, path::Path};

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
};

/// Pid of the daemon that has a directory; `None` when none has.
///
/// # Errors
/// When the lock can't be asked for. A directory without a lock file has no daemon.
pub fn holder(directory: &Path) -> io::Result<Option<i32>> {
    let file = match File::open(directory.join("control_lock")) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
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
    Ok((i32::from(asked.l_type) != libc::F_UNLCK).then_some(asked.l_pid))
}
