//! Finds the devices that Slurm allocated to a job.
//!
//! `SLURM_JOB_GPUS` contains indexes of gres.conf, which are neither minor numbers nor indexes of
//! the driver. A device is found:
//!
//! 1. by its UUID, if `CUDA_VISIBLE_DEVICES` contains UUIDs, as it does for MIG devices;
//! 2. otherwise by its `UniqueId` or its device file in gres.conf, `/dev/nvidia<minor>`. A MIG
//!    device has two more device files, with the numbers of its capabilities.

use std::fmt;

use gpush_api::{SlurmDevice, SlurmGpu};

use super::{GresDevice, HostList, Job, gres_lines::CAPS, lines};
use crate::{lease::environment::DeviceUuid, quote::Quoted};

/// Why a device cannot be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotMapped {
    /// gres.conf has no device file for an index.
    NoFile {
        /// Index of the device.
        index: u32,
    },
    /// A device file in gres.conf does not belong to a GPU.
    NotAGpu {
        /// Index of the device.
        index: u32,
        /// The device file, quoted.
        file: String,
    },
    /// The device files in gres.conf do not have the capability numbers of a MIG device.
    NotAMigDevice {
        /// Index of the device.
        index: u32,
        /// The device files, quoted.
        files: String,
    },
    /// `SLURM_JOB_GPUS` and `CUDA_VISIBLE_DEVICES` have different lengths, and
    /// `CUDA_VISIBLE_DEVICES` contains UUIDs.
    Differ {
        /// Number of indexes in `SLURM_JOB_GPUS`.
        indexes: usize,
        /// Number of entries in `CUDA_VISIBLE_DEVICES`.
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
            Self::NotAMigDevice { index, files } => {
                write!(
                    f,
                    "gres.conf has {files} for device {index} of the job: these are not the files of a MIG device"
                )
            }
            Self::Differ { indexes, visible } => {
                write!(f, "SLURM_JOB_GPUS has {indexes} devices, and CUDA_VISIBLE_DEVICES has {visible}")
            }
        }
    }
}

impl std::error::Error for NotMapped {}

/// Returns the devices of a job, in Slurm's order. `gpu` returns the device of gres.conf that has a
/// given index.
///
/// # Errors
/// The first device that cannot be found.
pub fn devices(job: &Job, gpu: impl Fn(u32) -> Option<GresDevice>) -> Result<Vec<SlurmDevice>, NotMapped> {
    let is_uuid = |entry: &String| DeviceUuid::new(entry).is_ok();
    let uuid = |entry: &String| SlurmDevice::Uuid(entry.clone());
    if job.gres.is_empty() {
        // Other entries are not devices of the job, because Slurm sets both variables or neither.
        return Ok(job.visible.iter().filter(|entry| is_uuid(entry)).map(uuid).collect());
    }
    if job.visible.iter().any(is_uuid) {
        if job.visible.len() != job.gres.len() {
            return Err(NotMapped::Differ { indexes: job.gres.len(), visible: job.visible.len() });
        }
        let pairs = job.gres.iter().zip(&job.visible);
        return pairs
            .map(|(index, entry)| if is_uuid(entry) { Ok(uuid(entry)) } else { by_file(*index, &gpu) })
            .collect();
    }
    job.gres.iter().map(|index| by_file(*index, &gpu)).collect()
}

fn by_file(index: u32, gpu: impl Fn(u32) -> Option<GresDevice>) -> Result<SlurmDevice, NotMapped> {
    let gpu = gpu(index).ok_or(NotMapped::NoFile { index })?;
    if let Some(uuid) = gpu.unique_id.as_ref().filter(|uuid| DeviceUuid::new(uuid).is_ok()) {
        return Ok(SlurmDevice::Uuid(uuid.clone()));
    }
    let minor = gpu.minor().ok_or_else(|| NotMapped::NotAGpu { index, file: Quoted(&gpu.file).to_string() })?;
    if gpu.files.len() == 1 {
        return Ok(SlurmDevice::Minor(minor));
    }
    mig_device(minor, &gpu.files[1..])
        .ok_or_else(|| NotMapped::NotAMigDevice { index, files: Quoted(&gpu.files.join(",")).to_string() })
}

/// Returns the MIG device that has these files: one `nvidia-cap<number>` for its GPU instance and
/// one for its compute instance.
fn mig_device(minor: u32, files: &[String]) -> Option<SlurmDevice> {
    let (first, per_gpu, per_instance) = CAPS;
    let number = |file: &String| file.rsplit('/').next()?.strip_prefix("nvidia-cap")?.parse::<u32>().ok();
    let mut numbers: Vec<u32> = files.iter().map(number).collect::<Option<_>>()?;
    numbers.sort_unstable();
    let [of_gpu_instance, of_compute_instance] = numbers[..] else { return None };
    let of_gpu = of_gpu_instance.checked_sub(first + per_gpu.checked_mul(minor)?).filter(|number| *number < per_gpu)?;
    let compute_instance = (of_compute_instance - of_gpu_instance).checked_sub(1)?;
    let is_its = of_gpu.is_multiple_of(per_instance) && compute_instance < per_instance - 1;
    is_its.then_some(SlurmDevice::Mig { minor, gpu_instance: of_gpu / per_instance, compute_instance })
}

/// Returns the value of `Gres=` for a node in the text of slurm.conf. It determines the order of
/// GPUs that have types.
#[must_use]
pub fn node_gres(slurm_conf: &str, node: &str) -> Option<String> {
    lines(slurm_conf).iter().find_map(|line| {
        let pairs = line.pairs().ok()?;
        let value = |key: &str| pairs.iter().find(|pair| pair.is(key)).map(|pair| pair.value.as_str());
        let nodes = HostList::parse(value("NodeName")?).ok()?;
        nodes.contains(node).then(|| value("Gres").map(str::to_owned)).flatten()
    })
}

/// Returns whether a job has GPUs with `owner = "slurm"`, while gpushd does not answer. `cached` is
/// the last list of these GPUs from gpushd. If there is no list, every device counts as such a GPU
/// if a rule of the config has `owner = "slurm"`.
#[must_use]
pub fn is_owned(devices: &[SlurmDevice], cached: Option<&[SlurmGpu]>, has_rule: bool) -> bool {
    let Some(cached) = cached else { return has_rule && !devices.is_empty() };
    devices.iter().any(|device| {
        cached.iter().any(|gpu| match device {
            SlurmDevice::Minor(minor) | SlurmDevice::Mig { minor, .. } => gpu.minor == *minor,
            SlurmDevice::Uuid(uuid) => gpu.uuid == *uuid || gpu.mig_devices.contains(uuid),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::{super::GresConf, *};

    const MIG: &str = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd";

    fn job(gres: &[u32], visible: &[&str]) -> Job {
        Job {
            id: 1,
            gres: gres.to_vec(),
            visible: visible.iter().map(|one| (*one).to_owned()).collect(),
            ..Job::default()
        }
    }

    fn file(index: u32) -> Option<GresDevice> {
        let text = "Name=gpu File=/dev/nvidia[2-3]\nName=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap21,\
                    /dev/nvidia-caps/nvidia-cap23\nName=gpu File=/dev/nvidiactl\n\
                    Name=gpu MultipleFiles=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap12,/dev/nvidia-caps/nvidia-cap13\n";
        GresConf::parse(text, "n1", |_| None).unwrap().gpu(index).cloned()
    }

    #[test]
    fn gres_of_the_node_is_found_in_slurm_conf() {
        let text = "ClusterName=ci\nNodeName=n[1-2] Gres=gpu:a:2,gpu:b:2\nNodeName=n3 CPUs=1\n";
        assert_eq!(node_gres(text, "n2").as_deref(), Some("gpu:a:2,gpu:b:2"));
        assert_eq!((node_gres(text, "n3"), node_gres(text, "n4")), (None, None));
    }

    #[test]
    fn index_of_gres_conf_is_mapped_by_its_device_file() {
        // CUDA_VISIBLE_DEVICES also contains indexes of Slurm here. They are never used.
        assert_eq!(devices(&job(&[0], &["0"]), file), Ok(vec![SlurmDevice::Minor(2)]));
        assert_eq!(devices(&job(&[1, 0], &["1", "0"]), file).unwrap(), [SlurmDevice::Minor(3), SlurmDevice::Minor(2)]);
        // nvidia-cap21 and nvidia-cap23: GPU instance 2, compute instance 1.
        let mig = SlurmDevice::Mig { minor: 0, gpu_instance: 2, compute_instance: 1 };
        assert_eq!(devices(&job(&[2, 0], &["2", "0"]), file), Ok(vec![mig, SlurmDevice::Minor(2)]));
        assert!(matches!(devices(&job(&[4], &[]), file), Err(NotMapped::NotAMigDevice { index: 4, .. })));
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
