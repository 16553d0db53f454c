//! The boot in which the agent runs.

use std::path::Path;

use gpush_api::{ApiError, Code};

/// This boot's id.
///
/// # Errors
/// When it can't be told.
pub fn id(file: &Path) -> Result<String, ApiError> {
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
