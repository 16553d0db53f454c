//! The boot id, which changes when the host reboots.

use std::path::Path;

use gpush_api::{ApiError, Code};

use crate::proc;

/// Reads the boot id from `file`, usually `/proc/sys/kernel/random/boot_id`.
///
/// # Errors
/// The file cannot be read, or is empty.
pub fn id(file: &Path) -> Result<String, ApiError> {
    let broken = |why: String| {
        ApiError::new(Code::Internal, format!("cannot read the boot id from {}", file.display())).cause(why)
    };
    let bytes = proc::read(file).map_err(|error| broken(error.to_string()))?;
    let boot_id = String::from_utf8_lossy(&bytes).trim().to_owned();
    if boot_id.is_empty() { Err(broken("the file is empty".to_owned())) } else { Ok(boot_id) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_or_empty_boot_id_is_an_error() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("boot_id");
        assert!(id(&file).unwrap_err().message.contains("boot_id"));
        std::fs::write(&file, "\n").unwrap();
        assert_eq!(id(&file).unwrap_err().causes, ["the file is empty"]);
        std::fs::write(&file, "b-1\n").unwrap();
        assert_eq!(id(&file).unwrap(), "b-1");
    }
}
