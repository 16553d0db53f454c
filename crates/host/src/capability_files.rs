//! The numbers of the nodes of MIG capabilities, from the driver's files in `/proc`.
//!
//! ```text
//! devices                                        236 nvidia-caps
//! driver/nvidia/capabilities/gpu0/mig/gi7/access     DeviceFileMinor: 66
//! driver/nvidia/capabilities/gpu0/mig/gi7/ci0/access DeviceFileMinor: 67
//! ```

use std::{fs, io, path::Path};

use gpush_core::lease::access::{Capability, CapabilityMinors, CharacterMajors};

/// Name of the nodes of capabilities in `/proc/devices`.
const NAME: &str = "nvidia-caps";

/// Reads the numbers of the capabilities of all MIG instances that exist. `proc` is the `/proc` of this host, or of a
/// simulated host.
///
/// # Errors
/// If a directory or a file cannot be read. An instance that is destroyed meanwhile is left out.
pub fn read(proc: &Path) -> io::Result<CapabilityMinors> {
    let mut found = CapabilityMinors { major: major(proc), ..CapabilityMinors::default() };
    for (gpu, dir) in numbered(&proc.join("driver/nvidia/capabilities"), "gpu")? {
        for (gi, dir) in numbered(&dir.join("mig"), "gi")? {
            let mut put = |ci, dir: &Path| -> io::Result<()> {
                if let Some(text) = unless_missing(fs::read_to_string(dir.join("access")))? {
                    let minor = CapabilityMinors::minor_in(&text);
                    found.minors.extend(minor.map(|minor| (Capability { gpu, gi, ci }, minor)));
                }
                Ok(())
            };
            put(None, &dir)?;
            for (ci, dir) in numbered(&dir, "ci")? {
                put(Some(ci), &dir)?;
            }
        }
    }
    Ok(found)
}

/// Returns the major numbers of the character devices of the kernel. Also for a simulated host, the kernel decides.
#[must_use]
pub fn kernel_majors() -> CharacterMajors {
    CharacterMajors::of(&fs::read_to_string("/proc/devices").unwrap_or_default())
}

/// Returns the major number of the nodes of capabilities; `None` if the driver has no such nodes.
fn major(proc: &Path) -> Option<u32> {
    let text = fs::read_to_string(proc.join("devices")).ok()?;
    let character_devices = text.lines().take_while(|line| !line.starts_with("Block devices"));
    let numbers = character_devices.filter_map(|line| line.trim().split_once(' '));
    numbers.filter(|(_, name)| name.trim() == NAME).find_map(|(major, _)| major.parse().ok())
}

/// Lists the subdirectories whose names are `prefix` and a number. A directory that does not exist has none.
fn numbered(dir: &Path, prefix: &str) -> io::Result<Vec<(u32, std::path::PathBuf)>> {
    let Some(entries) = unless_missing(fs::read_dir(dir))? else { return Ok(Vec::new()) };
    let number = |entry: &fs::DirEntry| entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok();
    Ok(entries.filter_map(Result::ok).filter_map(|entry| Some((number(&entry)?, entry.path()))).collect())
}

fn unless_missing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_from_the_files_of_the_driver() {
        let scratch = tempfile::tempdir().unwrap();
        assert_eq!(read(scratch.path()).unwrap(), CapabilityMinors::default());
        let write = |path: &str, text: &str| {
            let path = scratch.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("devices", "Character devices:\n195 nvidia\n236 nvidia-caps\n238 nvidia-caps-imex-channels\n");
        write("driver/nvidia/capabilities/mig/config", "DeviceFileMinor: 1\n");
        write("driver/nvidia/capabilities/gpu2/mig/gi7/access", "DeviceFileMinor: 66\nDeviceFileMode: 292\n");
        write("driver/nvidia/capabilities/gpu2/mig/gi7/ci0/access", "DeviceFileMinor: 67\n");
        write("driver/nvidia/capabilities/gpu2/mig/gi7/ci1/other", "DeviceFileMinor: 68\n");
        let found = read(scratch.path()).unwrap();
        assert_eq!(found.major, Some(236));
        let minors: Vec<_> = found.minors.into_iter().map(|(key, minor)| (key.gpu, key.gi, key.ci, minor)).collect();
        assert_eq!(minors, [(2, 7, None, 66), (2, 7, Some(0), 67)]);
    }
}
