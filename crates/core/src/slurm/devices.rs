//! The devices that Slurm allocated to a job.
//!
//! `SLURM_JOB_GPUS` has indexes of gres.conf. They are neither minor numbers nor the driver's indexes. A device is found
//!
//! 1. by its UUID, where `CUDA_VISIBLE_DEVICES` has one: Slurm names MIG devices so;
//! 2. else by its device file in gres.conf, `/dev/nvidia<minor>`.

use std::fmt;

use gpush_api::{SlurmDevice, SlurmGpu};

use super::Job;
use crate::{lease::environment::DeviceUuid, quote::Quoted};

/// Why a device cannot be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotMapped {
    /// gres.conf has no device file for an index.
    NoFile {
        /// The index.
        index: u32,
    },
    /// A device file of gres.conf is not that of a GPU.
    NotAGpu {
        /// The index.
        index: u32,
        /// The device file, quoted.
        file: String,
    },
    /// `SLURM_JOB_GPUS` and `CUDA_VISIBLE_DEVICES` have different lengths, and one of them has UUIDs.
    Differ {
        /// Number of indexes.
        indexes: usize,
        /// Number of entries of `CUDA_VISIBLE_DEVICES`.
        visible: usize,
    },
}

impl fmt::Display for NotMapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoFile { index } => write!(f, "gres.conf has no File for GPU {index} of the job"),
            Self::NotAGpu { index, file } => {
                write!(f, "gres.conf has {file} for GPU {index} of the job: it is not /dev/nvidia and a number")
            }
            Self::Differ { indexes, visible } => {
                write!(f, "SLURM_JOB_GPUS has {indexes} devices, and CUDA_VISIBLE_DEVICES has {visible}")
            }
        }
    }
}

impl std::error::Error for NotMapped {}

/// Returns the devices of a job, in Slurm's order. `file` returns the device file of an index in gres.conf.
///
/// # Errors
/// The first device that cannot be found.
pub fn devices(job: &Job, file: impl Fn(u32) -> Option<String>) -> Result<Vec<SlurmDevice>, NotMapped> {
    let is_uuid = |entry: &String| DeviceUuid::new(entry).is_ok();
    let uuid = |entry: &String| SlurmDevice::Uuid(entry.clone());
    if job.gres.is_empty() {
        // Other entries are not devices of the job: Slurm sets both variables, or none.
        return Ok(job.visible.iter().filter(|entry| is_uuid(entry)).map(uuid).collect());
    }
    if job.visible.iter().any(is_uuid) {
        if job.visible.len() != job.gres.len() {
            return Err(NotMapped::Differ { indexes: job.gres.len(), visible: job.visible.len() });
        }
        let pairs = job.gres.iter().zip(&job.visible);
        return pairs
            .map(|(index, entry)| if is_uuid(entry) { Ok(uuid(entry)) } else { by_file(*index, &file) })
            .collect();
    }
    job.gres.iter().map(|index| by_file(*index, &file)).collect()
}

fn by_file(index: u32, file: impl Fn(u32) -> Option<String>) -> Result<SlurmDevice, NotMapped> {
    let file = file(index).ok_or(NotMapped::NoFile { index })?;
    match minor(&file) {
        Some(minor) => Ok(SlurmDevice::Minor(minor)),
        None => Err(NotMapped::NotAGpu { index, file: Quoted(&file).to_string() }),
    }
}

/// Minor number of `/dev/nvidia3`. Of several files, the first is the GPU's.
fn minor(file: &str) -> Option<u32> {
    let first = file.split(',').next()?;
    let digits = first.rsplit('/').next()?.strip_prefix("nvidia")?;
    let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}

/// Whether a job has devices that only Slurm's jobs can lease, while gpushd does not answer. `cached` is what gpushd said
/// last; without it, a rule of the config with `owner = "slurm"` counts for every device.
#[must_use]
pub fn is_owned(devices: &[SlurmDevice], cached: Option<&[SlurmGpu]>, has_rule: bool) -> bool {
    let Some(cached) = cached else { return has_rule && !devices.is_empty() };
    devices.iter().any(|device| {
        cached.iter().any(|gpu| match device {
            SlurmDevice::Minor(minor) => gpu.minor == *minor,
            SlurmDevice::Uuid(uuid) => gpu.uuid == *uuid || gpu.mig_devices.contains(uuid),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIG: &str = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd";

    fn job(gres: &[u32], visible: &[&str]) -> Job {
        Job { id: 1, gres: gres.to_vec(), visible: visible.iter().map(|one| (*one).to_owned()).collect(), ..Job::default() }
    }

    fn file(index: u32) -> Option<String> {
        // File=/dev/nvidia[2-3], then a MIG device and a wrong line.
        ["/dev/nvidia2", "/dev/nvidia3", "/dev/nvidia0,/dev/nvidia-caps/nvidia-cap21", "/dev/nvidiactl"]
            .get(index as usize)
            .map(|file| (*file).to_owned())
    }

    #[test]
    fn index_of_gres_conf_is_mapped_by_its_device_file() {
        // CUDA_VISIBLE_DEVICES has indexes of Slurm too: they are never used.
        assert_eq!(devices(&job(&[0], &["0"]), file), Ok(vec![SlurmDevice::Minor(2)]));
        assert_eq!(devices(&job(&[1, 0], &["1", "0"]), file).unwrap(), [SlurmDevice::Minor(3), SlurmDevice::Minor(2)]);
        assert_eq!(devices(&job(&[2], &[]), file), Ok(vec![SlurmDevice::Minor(0)]));
        assert_eq!(devices(&job(&[9], &["9"]), file), Err(NotMapped::NoFile { index: 9 }));
        assert!(matches!(devices(&job(&[3], &[]), file), Err(NotMapped::NotAGpu { index: 3, .. })));
    }

    #[test]
    fn uuid_is_used_where_there_is_one() {
        assert_eq!(devices(&job(&[4], &[MIG]), file), Ok(vec![SlurmDevice::Uuid(MIG.to_owned())]));
        let mixed = devices(&job(&[0, 4], &["0", MIG]), file).unwrap();
        assert_eq!(mixed, [SlurmDevice::Minor(2), SlurmDevice::Uuid(MIG.to_owned())]);
        assert_eq!(devices(&job(&[0, 4], &[MIG]), file), Err(NotMapped::Differ { indexes: 2, visible: 1 }));
        assert_eq!(devices(&job(&[], &["NoDevFiles"]), file), Ok(Vec::new()));
    }

    #[test]
    fn ownership_is_what_gpushd_said_last_or_the_config() {
        let owned = [SlurmGpu { uuid: "GPU-1".to_owned(), minor: 2, mig_devices: vec![MIG.to_owned()] }];
        let minor = |minor| vec![SlurmDevice::Minor(minor)];
        assert!(is_owned(&minor(2), Some(&owned), false) && !is_owned(&minor(3), Some(&owned), true));
        assert!(is_owned(&[SlurmDevice::Uuid(MIG.to_owned())], Some(&owned), false));
        assert!(is_owned(&minor(3), None, true) && !is_owned(&minor(3), None, false) && !is_owned(&[], None, true));
    }
}
