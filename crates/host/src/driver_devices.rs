//! Major numbers of the driver's devices, and whether systemd lets this process open them.
//!
//! systemd resolves `DeviceAllow=char-nvidia` when it starts a unit: it allows the numbers that
//! `/proc/devices` lists at that time. If the driver is loaded later, all its device nodes stay
//! denied until the unit is restarted.

use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    io,
    path::Path,
};

/// Names in `/proc/devices` of the devices that NVML opens. The first one depends on the driver's
/// version. The names of other modules, such as `nvidia-uvm`, are not listed: these modules are
/// often loaded later, and NVML does not need them.
const NAMES: [&str; 4] = ["nvidia", "nvidia-frontend", "nvidiactl", "nvidia-caps"];

/// Returns the major numbers of the driver's devices.
pub fn majors(proc: &Path) -> BTreeSet<u32> {
    let text = fs::read_to_string(proc.join("devices")).unwrap_or_default();
    let character_devices = text.lines().take_while(|line| !line.starts_with("Block devices"));
    let of_driver = |line: &str| {
        let (major, name) = line.trim().split_once(' ')?;
        NAMES.contains(&name.trim()).then(|| major.parse().ok())?
    };
    character_devices.filter_map(of_driver).collect()
}

/// Returns whether the kernel denies this process the control device of the driver below `root`, as it
/// does if the rules of the process's cgroup do not allow the device.
pub fn is_denied(root: &Path) -> bool {
    let opened = OpenOptions::new().read(true).write(true).open(root.join("dev/nvidiactl"));
    // The device rules of a cgroup cause EPERM. Missing permission of the file itself would cause EACCES.
    opened.is_err_and(|error: io::Error| error.raw_os_error() == Some(nix::libc::EPERM))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_devices_that_nvml_opens_count() {
        let scratch = tempfile::tempdir().unwrap();
        assert_eq!(majors(scratch.path()), BTreeSet::new());
        let text = "Character devices:\n  1 mem\n195 nvidia\n234 nvidia-caps\n235 nvidia-uvm\n236 nvidia-caps-imex-channels\n\
                    \nBlock devices:\n 99 nvidia\n";
        fs::write(scratch.path().join("devices"), text).unwrap();
        assert_eq!(majors(scratch.path()), BTreeSet::from([195, 234]));
        fs::write(scratch.path().join("devices"), "195 nvidia-frontend\n").unwrap();
        assert_eq!(majors(scratch.path()), BTreeSet::from([195]));
    }

    #[test]
    fn missing_device_is_not_denied() {
        assert!(!is_denied(tempfile::tempdir().unwrap().path()));
    }
}
