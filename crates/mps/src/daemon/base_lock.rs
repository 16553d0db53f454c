//! The lock of the directory of MPS daemons.
//!
//! gpushd adopts every daemon in the directory, and ends the daemons that its config does not
//! contain. Two gpushd processes with different state directories would end each other's daemons.
//! So only one gpushd at a time uses the directory, and it holds the lock until it exits.

use std::{
    io,
    path::{Path, PathBuf},
};

use gpush_host::path_lock::{LockError, PathLock};

use super::target_dir;

/// Another gpushd uses the directory of MPS daemons.
#[derive(Debug, thiserror::Error)]
#[error("another gpushd {}uses the directory of MPS daemons {}; stop that gpushd{}, or give another directory with \
         --mps-dir",
        pid(*.holder, "(pid ", ") "), base.display(), pid(*.holder, " (`kill ", "`)"))]
pub struct BaseHeld {
    base: PathBuf,
    holder: Option<u32>,
}

fn pid(pid: Option<u32>, before: &str, after: &str) -> String {
    pid.map_or_else(String::new, |pid| format!("{before}{pid}{after}"))
}

/// Creates the directory if necessary, and takes its lock. If a system call fails, logs the error
/// and returns `None`. In that case, no daemon can be started in the directory.
///
/// # Errors
/// Another gpushd holds the lock.
pub fn take(base: &Path) -> Result<Option<PathLock>, BaseHeld> {
    let made = if base.is_dir() { Ok(()) } else { target_dir::directory(base, 0o711) };
    let taken = made.map_err(|source| LockError::Unusable { path: base.to_owned(), source });
    match taken.and_then(|()| PathLock::take(&base.join("agent"))) {
        Ok(lock) => Ok(Some(lock)),
        Err(LockError::Held { holder }) => Err(BaseHeld { base: base.to_owned(), holder }),
        Err(LockError::Unusable { path, source }) => {
            log(&path, &source);
            Ok(None)
        }
    }
}

/// Returns the path of the lock file of a directory.
pub fn path(base: &Path) -> PathBuf {
    base.join("agent.lock")
}

fn log(path: &Path, error: &io::Error) {
    let path = path.display();
    tracing::warn!("cannot lock the directory of MPS daemons {path}, so no MPS daemon can be started: {error}");
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn second_agent_is_refused_until_the_first_has_ended() {
        let scratch = tempfile::tempdir().unwrap();
        let base = scratch.path().join("gpush-mps");
        let first = take(&base).unwrap();
        assert_eq!(fs::metadata(&base).unwrap().permissions().mode() & 0o777, 0o711);
        let error = take(&base).unwrap_err().to_string();
        let own = std::process::id();
        assert!(error.starts_with(&format!("another gpushd (pid {own}) uses the directory")), "{error}");
        assert!(error.contains("--mps-dir"), "{error}");
        assert!(path(&base).is_file());
        drop(first);
        assert!(take(&base).unwrap().is_some());
        assert!(take(Path::new("/proc/none/gpush-mps")).unwrap().is_none());
    }
}
