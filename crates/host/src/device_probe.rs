//! A program that tries to open a device, and says whether the kernel denies it.
//!
//! The kernel checks the rights of the node before it checks the cgroup. Root may open every node, so only the cgroup can
//! deny the open to a program of root: `EPERM`. Any other error means that the cgroup allows the device. For example,
//! `ENXIO` means that no driver has the number.
//!
//! If the node does not exist, the program tries to create one, which the kernel allows to the same cgroups.

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    path::Path,
    process::ExitCode,
};

use nix::{
    libc,
    sys::stat::{Mode, SFlag, major, makedev, minor, mknod},
};

/// Exit status if the kernel denies the device.
pub const DENIED: u8 = 10;

/// Exit status if the kernel allows the device.
pub const ALLOWED: u8 = 11;

/// Exit status if the program cannot tell.
pub const UNKNOWN: u8 = 12;

/// Runs the program. `path` is the path of the node with these numbers, or a path at which a node may be created.
pub fn main(major: u32, minor: u32, path: &Path) -> ExitCode {
    match is_denied(major, minor, path) {
        Ok(true) => ExitCode::from(DENIED),
        Ok(false) => ExitCode::from(ALLOWED),
        Err(error) => {
            eprintln!("gpushd: cannot probe {}: {error}", path.display());
            ExitCode::from(UNKNOWN)
        }
    }
}

/// Returns whether a path is the node with these numbers.
#[must_use]
pub fn is_node(path: &Path, wanted: (u32, u32)) -> bool {
    fs::metadata(path).is_ok_and(|file| {
        let numbers = (major(file.rdev()), minor(file.rdev()));
        file.file_type().is_char_device() && numbers == (u64::from(wanted.0), u64::from(wanted.1))
    })
}

fn is_denied(major: u32, minor: u32, path: &Path) -> io::Result<bool> {
    if is_node(path, (major, minor)) {
        let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path);
        return Ok(opened.is_err_and(|error| error.raw_os_error() == Some(libc::EPERM)));
    }
    let number = makedev(u64::from(major), u64::from(minor));
    match mknod(path, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, number) {
        Ok(()) => fs::remove_file(path).map(|()| false),
        Err(nix::Error::EPERM) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_is_known_by_its_numbers() {
        assert!(is_node(Path::new("/dev/null"), (1, 3)));
        assert!(!is_node(Path::new("/dev/null"), (1, 5)) && !is_node(Path::new("/none"), (1, 3)));
        assert!(!is_node(Path::new("/proc/self/status"), (0, 0)));
    }

    #[test]
    fn device_of_every_process_is_not_denied() {
        assert!(!is_denied(1, 3, Path::new("/dev/null")).unwrap());
        assert!(is_denied(195, 0, Path::new("/proc/none/node")).is_err());
    }
}
