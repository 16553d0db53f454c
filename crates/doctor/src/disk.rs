//! The directory where gpushd stores its database: whether gpushd can write to it, and its free space.

use std::path::{Path, PathBuf};

use nix::{
    sys::statvfs::{FsFlags, statvfs},
    unistd::{AccessFlags, access, geteuid},
};

use crate::{Area, Finding, Host};

const DIRECTORY: &str = "/var/lib/gpush";

/// Free space in KiB that is several times larger than the database, its log and the reserve
/// together.
const ENOUGH_KIB: u64 = 64 << 10;

/// Free space in KiB that the store requires for ordinary writes, in addition to its reserve, after the disk was full.
const ROOM_KIB: u64 = 256;

pub(crate) fn examine(host: &Host) -> Vec<Finding> {
    let mut directory: PathBuf = host.path(DIRECTORY);
    if directory.exists() && !directory.is_dir() {
        let hint = format!("run `mv {DIRECTORY} {DIRECTORY}.old`, then run `systemctl restart gpushd`");
        let message = format!("{DIRECTORY} is not a directory, so gpushd cannot start");
        return vec![Finding::problem(Area::Disk, message, hint)];
    }
    while !directory.exists() && directory.pop() {}
    let found = match statvfs(&directory) {
        Ok(found) => found,
        Err(error) => {
            let message = format!("the free space of {DIRECTORY} is unknown");
            let finding = Finding::warning(Area::Disk, message, format!("see `df {DIRECTORY}`"));
            return vec![finding.cause(error.to_string())];
        }
    };
    if found.flags().contains(FsFlags::ST_RDONLY) {
        let mounts = host.read("proc/self/mountinfo").unwrap_or_default();
        return vec![read_only(mount_point(&mounts))];
    }
    // gpushd runs as root. For other users, access(2) says nothing about root.
    if geteuid().is_root()
        && let Err(error) = access(&directory, AccessFlags::W_OK)
    {
        let hint = format!("see `ls -ld {DIRECTORY}` and `lsattr -d {DIRECTORY}`, then run `systemctl restart gpushd`");
        let message = format!("gpushd cannot write to {DIRECTORY}");
        return vec![Finding::problem(Area::Disk, message, hint).cause(error.desc())];
    }
    let kib = |blocks: u64| blocks.saturating_mul(found.fragment_size()) >> 10;
    vec![judge_space(kib(found.blocks_available()), kib(found.blocks_free()))]
}

/// Returns the mount point of the file system with the state directory, from the text of `/proc/self/mountinfo`.
fn mount_point(mounts: &str) -> &str {
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let around = points.filter(|point| Path::new(DIRECTORY).starts_with(point));
    // A later mount covers an earlier mount with the same path.
    around.max_by_key(|point| point.len()).unwrap_or("/")
}

fn read_only(mount_point: &str) -> Finding {
    let message = format!("the file system of {DIRECTORY} is mounted read-only, so gpushd cannot write its database");
    let hint = format!(
        "run `mount -o remount,rw {mount_point}`, then run `systemctl restart gpushd`; if the mount fails, `dmesg` \
        shows the errors of the disk"
    );
    Finding::problem(Area::Disk, message, hint)
}

/// Judges the free space in KiB. `free_for_root` includes the blocks that only root may use, and gpushd runs as root.
fn judge_space(free: u64, free_for_root: u64) -> Finding {
    let size = if free < 1 << 10 { format!("{free} KiB") } else { format!("{} MiB", free >> 10) };
    let message = format!("{size} free for {DIRECTORY}");
    let hint = format!("delete files from the file system that `df -h {DIRECTORY}` shows");
    if free_for_root < ROOM_KIB {
        let cause = "the disk is full: gpushd refuses new leases and other changes that it cannot record";
        return Finding::problem(Area::Disk, message, hint).cause(cause);
    }
    if free < ENOUGH_KIB {
        let cause = format!("gpushd still records changes; below {ROOM_KIB} KiB, it may refuse new leases and changes");
        return Finding::warning(Area::Disk, message, hint).cause(cause);
    }
    Finding::ok(Area::Disk, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Severity;

    /// Earlier fault: with 1 MiB of free space, the finding said that gpushd refuses changes, but gpushd still granted
    /// leases.
    #[test]
    fn little_space_is_a_warning_and_a_full_disk_a_problem() {
        let severities = [0, 255, 256, 1 << 10, (64 << 10) - 1, 64 << 10].map(|free| judge_space(free, free).severity);
        let (ok, warning, problem) = (Severity::Ok, Severity::Warning, Severity::Problem);
        assert_eq!(severities, [problem, problem, warning, warning, warning, ok]);
        let of_root = judge_space(0, 1 << 20);
        assert_eq!((of_root.severity, of_root.message.as_str()), (warning, "0 KiB free for /var/lib/gpush"));
        assert_eq!(judge_space(1100, 1100).message, "1 MiB free for /var/lib/gpush");
    }

    #[test]
    fn read_only_file_system_is_named_by_its_mount_point() {
        let mounts = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n\
                      30 22 8:2 / /var rw,relatime shared:4 - ext4 /dev/sda2 rw\n\
                      31 30 8:3 / /var/lib/gpush-sim ro - ext4 /dev/sda3 ro\n";
        assert_eq!(mount_point(mounts), "/var");
        assert_eq!(mount_point(""), "/");
        let hint = read_only("/var").hint.expect("a hint");
        assert!(hint.contains("`mount -o remount,rw /var`"), "{hint}");
    }
}
