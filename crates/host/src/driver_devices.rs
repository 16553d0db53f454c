//! Major numbers of the driver's devices. This module opens no device.
//!
//! systemd resolves `DeviceAllow=char-nvidia` when it starts a unit: it allows the numbers that
//! `/proc/devices` lists at that time. If the driver is loaded later, all its device nodes stay
//! denied until the unit is restarted.

use std::{collections::BTreeSet, fs, path::Path};

/// Names in `/proc/devices` of the devices that NVML opens. Whether the GPUs' devices are named
/// `nvidia` or `nvidia-frontend` depends on the driver's version. The names of other modules, such
/// as `nvidia-uvm`, are not listed: these modules are often loaded later, and NVML does not need
/// them.
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
}
