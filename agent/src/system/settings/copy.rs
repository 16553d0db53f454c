//! The copy of the last valid config file, in the state directory.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use gpush_core::config::Config;

use super::file;
use crate::system::options::Trust;

/// First line of the copy. A copy without content is damaged, because even the copy of an empty file has this line.
const HEADER: &str = "# gpushd's copy of the last valid config. gpushd replaces this file.\n";

/// The copy of the last valid config file.
#[derive(Debug)]
pub(super) struct ConfigCopy(PathBuf);

/// Why gpushd cannot use the copy.
#[derive(Debug, thiserror::Error)]
pub(super) enum CopyError {
    /// There is no copy.
    #[error("there is no copy of the last valid config")]
    Absent,
    /// The copy is damaged, or another version of gpushd has written it.
    #[error("the copy of the last valid config can't be used: {0}")]
    Unusable(String),
}

impl ConfigCopy {
    pub(super) fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Reads the copy.
    ///
    /// # Errors
    /// If there is no copy, or gpushd cannot use it.
    pub(super) fn read(&self, trust: Trust) -> Result<Config, CopyError> {
        let unusable = |why: String| CopyError::Unusable(format!("{}: {why}", self.0.display()));
        let bytes = match fs::read(&self.0) {
            Ok(bytes) if bytes.is_empty() => return Err(unusable("it is empty".to_owned())),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(CopyError::Absent),
            Err(error) => return Err(unusable(error.to_string())),
        };
        let content = bytes.strip_prefix(HEADER.as_bytes()).unwrap_or(&bytes);
        file::parse(content, &self.0, trust).map_err(|error| {
            let error = error.to_api();
            unusable(error.causes.first().unwrap_or(&error.message).clone())
        })
    }

    /// Replaces the copy, unless it already has this content. After a crash of the host, either the old copy or the new
    /// copy is complete.
    pub(super) fn write(&self, content: &[u8]) {
        let content = [HEADER.as_bytes(), content].concat();
        if fs::read(&self.0).is_ok_and(|kept| kept == content) {
            return;
        }
        if let Err(error) = self.replace(&content) {
            tracing::warn!("cannot write {}: {error}", self.0.display());
        }
    }

    fn replace(&self, content: &[u8]) -> io::Result<()> {
        let new = self.0.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&new, &self.0)?;
        // Make the rename durable too.
        File::open(self.0.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_is_read_back_and_an_empty_copy_is_damaged() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("copy.toml");
        let copy = ConfigCopy::new(&path);
        assert!(matches!(copy.read(Trust::Logged), Err(CopyError::Absent)));
        copy.write(b"");
        assert_eq!(copy.read(Trust::Logged).unwrap(), Config::default());
        copy.write(b"auto_reconcile = true\n");
        assert!(copy.read(Trust::Logged).unwrap().auto_reconcile);
        assert!(!scratch.path().join("copy.new").exists());
        for damaged in ["", "unknown = 1\n"] {
            fs::write(&path, damaged).unwrap();
            let Err(CopyError::Unusable(why)) = copy.read(Trust::Logged) else { panic!("{damaged:?}") };
            assert!(why.contains("copy.toml: "), "{why}");
        }
    }
}
