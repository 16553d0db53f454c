//! Checks whether the open files still exist under their names. Writes to a deleted database succeed, but are lost.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::error::StoreError;

/// A file whose identity must not change.
#[derive(Debug)]
struct Watched {
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// The files to watch: database, log, lock.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) directory: PathBuf,
    pub(crate) database: PathBuf,
    watched: Vec<Watched>,
}

impl Files {
    /// Records the files of an open database.
    pub(crate) fn of(directory: &Path, database: &Path) -> Self {
        let log = PathBuf::from(format!("{}-wal", database.display()));
        let watched = [database.to_owned(), log, directory.join("lock")];
        let watched = watched.into_iter().map(|path| Watched { identity: identity(&path), path }).collect();
        Self { directory: directory.to_owned(), database: database.to_owned(), watched }
    }

    /// Returns the first file that is missing or was replaced.
    pub(crate) fn find_missing_or_replaced(&mut self) -> Option<&Path> {
        for file in &mut self.watched {
            let found = identity(&file.path);
            // The log may be missing until the first commit creates it. Its identity is recorded when it first exists.
            let first = file.identity.is_none().then(|| file.identity = found).is_some();
            if found.is_none() || (!first && found != file.identity) {
                return Some(&file.path);
            }
        }
        None
    }

    /// Adds the path of the file to an error. SQLite's error does not contain the path.
    pub(crate) fn locate(&self, error: StoreError) -> StoreError {
        match error {
            StoreError::Full { path } if path.as_os_str().is_empty() => {
                StoreError::Full { path: self.directory.clone() }
            }
            StoreError::Broken { file, cause } if file.as_os_str().is_empty() => {
                StoreError::Broken { file: self.database.clone(), cause }
            }
            other => other,
        }
    }
}
