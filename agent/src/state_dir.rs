//! The state directory: locked for as long as this agent lives.
//!
//! Two agents on one host would take turns in reshaping the same GPUs. The lock is an `flock` on
//! a file in the state directory, so it ends with its process however that ends, and the file
//! holds the pid so that whoever is refused can be told by whom.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

/// Why the state directory can't be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateDirError {
    /// It can't be made or written.
    #[error("the state directory {} can't be used; give a writable one with --state-dir", path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another agent has it.
    #[error("another gpushd {}has the state directory {}; stop it (`systemctl stop gpushd`{}), or give another \
             directory with --state-dir", by(*.holder, "(pid ", ") "), path.display(), by(*.holder, " or `kill ", "`"))]
    Held {
        /// The directory.
        path: PathBuf,
        /// The other one, when it could be read.
        holder: Option<u32>,
    },
}

fn by(pid: Option<u32>, before: &str, after: &str) -> String {
    pid.map_or_else(String::new, |pid| format!("{before}{pid}{after}"))
}

/// The state directory, ours until dropped.
#[derive(Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
    _lock: Flock<fs::File>,
}

impl StateDir {
    /// Makes the directory if need be, and locks it.
    pub(crate) fn lock(path: &Path) -> Result<Self, StateDirError> {
        let unusable = |source| StateDirError::Unusable { path: path.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(unusable)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .open(path.join("lock"))
            .map_err(unusable)?;
        let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut text = String::new();
                let holder = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
                return Err(StateDirError::Held { path: path.to_owned(), holder });
            }
            Err((_, errno)) => return Err(unusable(errno.into())),
        };
        let mut note = || -> io::Result<()> {
            lock.set_len(0)?;
            lock.rewind()?;
            writeln!(lock, "{}", std::process::id())
        };
        note().map_err(unusable)?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces a file of the directory as a whole: after a crash or a power failure it holds the
    /// old text or the new one.
    pub(crate) fn replace(&self, name: &str, text: &str) -> io::Result<()> {
        let target = self.path.join(name);
        let draft = self.path.join(format!("{name}.new"));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&draft, &target)?;
        fs::File::open(&self.path)?.sync_all()
    }

    /// Reads a file of the directory; `None` when there is none.
    pub(crate) fn read(&self, name: &str) -> io::Result<Option<String>> {
        match fs::read_to_string(self.path.join(name)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_agent_is_told_who_has_the_directory_and_may_have_it_afterwards() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("a/b");
        let first = StateDir::lock(&path).unwrap();
        let error = StateDir::lock(&path).unwrap_err().to_string();
        let pid = std::process::id();
        assert!(error.starts_with(&format!("another gpushd (pid {pid}) has the state directory")), "{error}");
        assert!(error.contains(&format!("`kill {pid}`")), "{error}");
        drop(first);
        StateDir::lock(&path).unwrap();
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = StateDir::lock(scratch.path()).unwrap();
        assert_eq!(dir.read("boot").unwrap(), None);
        dir.replace("boot", "a long first text").unwrap();
        dir.replace("boot", "short").unwrap();
        assert_eq!(dir.read("boot").unwrap().as_deref(), Some("short"));
        assert!(!dir.path().join("boot.new").exists());
    }

    #[test]
    fn a_directory_that_cannot_be_made_names_the_option() {
        let error = StateDir::lock(Path::new("/dev/null/gpush")).unwrap_err();
        assert!(error.to_string().contains("--state-dir"), "{error}");
    }
}
