//! Free space where gpushd stores its database.

use std::path::PathBuf;

use crate::{Area, Finding, Host};

const DIRECTORY: &str = "/var/lib/gpush";

/// Free space in MiB that is several times larger than the database, its log and the reserve
/// together.
const ENOUGH_MIB: u64 = 64;

/// Free space in MiB below which gpushd will soon refuse changes.
const LITTLE_MIB: u64 = 8;

pub(crate) fn examine(host: &Host) -> Vec<Finding> {
    let mut directory: PathBuf = host.path(DIRECTORY);
    while !directory.exists() && directory.pop() {}
    match nix::sys::statvfs::statvfs(&directory) {
        Ok(found) => vec![judge(found.blocks_available().saturating_mul(found.fragment_size()) >> 20)],
        Err(error) => {
            let message = format!("the free space of {DIRECTORY} is unknown");
            vec![Finding::warning(Area::Disk, message, format!("see `df {DIRECTORY}`")).cause(error.to_string())]
        }
    }
}

fn judge(free_mib: u64) -> Finding {
    let message = format!("{free_mib} MiB free for {DIRECTORY}");
    let hint = format!("delete files from the file system that `df -h {DIRECTORY}` shows");
    match free_mib {
        0..LITTLE_MIB => {
            Finding::problem(Area::Disk, message, hint).cause("gpushd refuses changes that it cannot record")
        }
        LITTLE_MIB..ENOUGH_MIB => Finding::warning(Area::Disk, message, hint),
        ENOUGH_MIB.. => Finding::ok(Area::Disk, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Severity;

    #[test]
    fn little_space_is_a_warning_and_less_a_problem() {
        let severities = [7, 8, 63, 64].map(|free| judge(free).severity);
        assert_eq!(severities, [Severity::Problem, Severity::Warning, Severity::Warning, Severity::Ok]);
    }
}
