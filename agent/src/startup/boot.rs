//! The boot, and the record of what was done on it.

use std::{collections::BTreeSet, io, path::Path};

use gpush_api::{ApiError, Code};
use serde::{Deserialize, Serialize};

use crate::state_dir::StateDir;

/// File of the state directory that holds the record.
pub(super) const FILE: &str = "boot.json";

/// What was done on a boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The kernel's id of the boot.
    pub(super) boot_id: String,
    /// GPUs, by UUID, on which no layout of this boot is due any more: they have it, it was
    /// refused for good, or no rule claims them.
    #[serde(default)]
    pub(super) settled: BTreeSet<String>,
    /// Whether none is due on any GPU. A record without it is of a version that wrote it last.
    #[serde(default = "yes")]
    pub(super) complete: bool,
}

fn yes() -> bool {
    true
}

impl Record {
    /// Of a boot on which nothing was done yet.
    pub(super) fn new(boot_id: String) -> Self {
        Self { boot_id, settled: BTreeSet::new(), complete: false }
    }

    /// The one in the state directory. What can't be read counts as none.
    pub(super) fn read(state_dir: &StateDir) -> Option<Self> {
        let text = match state_dir.read(FILE) {
            Ok(text) => text?,
            Err(error) => {
                tracing::warn!("{FILE} in the state directory can't be read, as if there were none: {error}");
                return None;
            }
        };
        match serde_json::from_str(&text) {
            Ok(record) => Some(record),
            Err(error) => {
                tracing::warn!("{FILE} in the state directory makes no sense, as if there were none: {error}");
                None
            }
        }
    }

    /// Puts it in place of the one in the state directory.
    pub(super) fn write(&self, state_dir: &StateDir) -> io::Result<()> {
        state_dir.replace(FILE, &serde_json::to_string(self)?)
    }
}

/// This boot's id.
///
/// # Errors
/// When it can't be told.
pub(super) fn id(file: &Path) -> Result<String, ApiError> {
    let broken = |why: String| {
        ApiError::new(Code::Internal, format!("the boot id can't be read from {}", file.display())).cause(why)
    };
    let text = std::fs::read_to_string(file).map_err(|error| broken(error.to_string()))?;
    let boot_id = text.trim().to_owned();
    if boot_id.is_empty() { Err(broken("the file is empty".to_owned())) } else { Ok(boot_id) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_and_nonsense_counts_as_none() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = StateDir::lock(scratch.path()).unwrap();
        assert_eq!(Record::read(&dir), None);
        let mut record = Record::new("b-1".to_owned());
        record.settled.insert("GPU-1".to_owned());
        record.write(&dir).unwrap();
        assert_eq!(Record::read(&dir), Some(record));
        for nonsense in ["", "{", "[]", "{\"boot_id\": 7}"] {
            dir.replace(FILE, nonsense).unwrap();
            assert_eq!(Record::read(&dir), None, "{nonsense}");
        }
    }

    #[test]
    fn a_record_that_names_no_gpus_was_written_when_all_was_done() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = StateDir::lock(scratch.path()).unwrap();
        dir.replace(FILE, "{\"boot_id\":\"b-1\"}").unwrap();
        assert!(Record::read(&dir).is_some_and(|record| record.complete));
    }

    #[test]
    fn a_boot_id_that_is_missing_or_empty_is_said() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("boot_id");
        assert!(id(&file).unwrap_err().message.contains("boot_id"));
        std::fs::write(&file, "\n").unwrap();
        assert_eq!(id(&file).unwrap_err().causes, ["the file is empty"]);
        std::fs::write(&file, "b-1\n").unwrap();
        assert_eq!(id(&file).unwrap(), "b-1");
    }
}
