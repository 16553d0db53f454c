//! The files that the driver shows in `/proc/driver`. They are in `proc/driver` in the host's directory.
//!
//! ```text
//! nvidia-caps/mig-minors                        minor numbers of all possible capabilities; never changes
//! nvidia/capabilities/mig/{config,monitor}      capabilities of the host
//! nvidia/capabilities/gpuN/mig/giN/access       capabilities of the instances that exist
//! nvidia/capabilities/gpuN/mig/giN/ciN/access
//! ```
//!
//! Programs open these files by absolute path, so `gpush-sim exec` mounts the directory over `/proc/driver`. When a
//! process changes instances, it updates the files while it holds the host's lock. If a host was created without these
//! files, as in tests of the state machine, no process adds them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use super::{Host, PROC};
use crate::machine::{Gpu, Machine, capability};

/// Name of the directory that replaces `/proc/driver`, relative to [`PROC`].
pub const DRIVER: &str = "driver";

/// Number of GPUs for which the driver defines minor numbers.
const GPUS: u32 = 32;
/// Number of GPU instance ids of a GPU.
const GPU_INSTANCES: u32 = 15;
/// Number of compute instance ids of a GPU instance.
const COMPUTE_INSTANCES: u32 = 8;

/// Mode of the device files that only root may open.
const ADMINISTRATORS: u32 = 0o400;
const EVERYBODY: u32 = 0o444;

impl Host {
    /// Creates the files of a new host.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn create_driver_files(&self) -> io::Result<()> {
        let root = self.dir().join(PROC).join(DRIVER);
        std::fs::create_dir_all(root.join("nvidia-caps"))?;
        std::fs::write(root.join("nvidia-caps/mig-minors"), minors())?;
        let capabilities = root.join("nvidia/capabilities");
        std::fs::create_dir_all(capabilities.join("mig"))?;
        std::fs::write(capabilities.join("mig/config"), access(capability::CONFIG, ADMINISTRATORS))?;
        std::fs::write(capabilities.join("mig/monitor"), access(capability::MONITOR, EVERYBODY))?;
        let machine = self.read().map_err(io::Error::other)?;
        for gpu in machine.gpus() {
            write_gpu(&gpu_dir(&capabilities, &machine, gpu.index), &machine, gpu)?;
        }
        Ok(())
    }

    /// Updates the files of the GPUs whose instances have changed.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub(super) fn update_driver_files(&self, before: &Machine, after: &Machine) -> io::Result<()> {
        let changed: Vec<&Gpu> = before
            .gpus()
            .iter()
            .zip(after.gpus())
            .filter(|(before, after)| (before.mig, ids(before)) != (after.mig, ids(after)))
            .map(|(_, after)| after)
            .collect();
        if changed.is_empty() {
            return Ok(());
        }
        let capabilities = self.dir().join(PROC).join(DRIVER).join("nvidia/capabilities");
        if !capabilities.is_dir() {
            return Ok(());
        }
        changed.into_iter().try_for_each(|gpu| write_gpu(&gpu_dir(&capabilities, after, gpu.index), after, gpu))
    }
}

/// Returns the ids of a GPU's GPU instances, each with the ids of its compute instances.
fn ids(gpu: &Gpu) -> Vec<(u32, Vec<u32>)> {
    gpu.instances.iter().map(|gi| (gi.id, gi.instances.iter().map(|ci| ci.id).collect())).collect()
}

fn gpu_dir(capabilities: &Path, machine: &Machine, gpu: u32) -> PathBuf {
    let minor = machine.identity(gpu).map_or(gpu, |identity| identity.minor);
    capabilities.join(format!("gpu{minor}"))
}

/// Writes the files of a GPU's instances to the directory of the GPU, and removes all other files from it.
fn write_gpu(dir: &Path, machine: &Machine, gpu: &Gpu) -> io::Result<()> {
    let minor = machine.identity(gpu.index).map_or(gpu.index, |identity| identity.minor);
    let mut wanted: BTreeMap<PathBuf, String> = BTreeMap::new();
    for gi in &gpu.instances {
        let at = dir.join(format!("mig/gi{}", gi.id));
        wanted.insert(at.join("access"), access(capability::gpu_instance(minor, gi.id), EVERYBODY));
        for ci in &gi.instances {
            let number = capability::compute_instance(minor, gi.id, ci.id);
            wanted.insert(at.join(format!("ci{}/access", ci.id)), access(number, EVERYBODY));
        }
    }
    if gpu.mig {
        std::fs::create_dir_all(dir.join("mig"))?;
    } else if dir.is_dir() {
        // A GPU has capability files only in MIG mode.
        std::fs::remove_dir_all(dir)?;
    }
    remove_others(&dir.join("mig"), &wanted)?;
    for (path, text) in wanted {
        if !path.is_file() {
            path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            std::fs::write(path, text)?;
        }
    }
    Ok(())
}

/// Removes the directories of instances that no longer exist.
fn remove_others(dir: &Path, wanted: &BTreeMap<PathBuf, String>) -> io::Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        if !path.is_dir() {
            continue;
        }
        if wanted.contains_key(&path.join("access")) {
            remove_others(&path, wanted)?;
        } else {
            std::fs::remove_dir_all(path)?;
        }
    }
    Ok(())
}

/// Returns the content of an access file.
fn access(minor: u32, mode: u32) -> String {
    format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n")
}

/// Returns the content of `mig-minors`.
fn minors() -> String {
    let mut text = format!("config {}\nmonitor {}\n", capability::CONFIG, capability::MONITOR);
    for gpu in 0..GPUS {
        for gi in 0..GPU_INSTANCES {
            let _infallible = writeln!(text, "gpu{gpu}/gi{gi}/access {}", capability::gpu_instance(gpu, gi));
            for ci in 0..COMPUTE_INSTANCES {
                let minor = capability::compute_instance(gpu, gi, ci);
                let _infallible = writeln!(text, "gpu{gpu}/gi{gi}/ci{ci}/access {minor}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minors_are_those_of_the_driver() {
        let text = minors();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..5],
            ["config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4", "gpu0/gi0/ci1/access 5"]
        );
        assert_eq!(lines.last(), Some(&"gpu31/gi14/ci7/access 4322"));
        assert_eq!(lines.len(), 4322);
    }
}
