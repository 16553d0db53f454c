//! Finds the devices that Slurm allocated to a job.
//!
//! `SLURM_JOB_GPUS` contains indexes of gres.conf, which are neither minor numbers nor indexes of
//! the driver. A device is found:
//!
//! 1. by its UUID, if `CUDA_VISIBLE_DEVICES` contains UUIDs, as it does for MIG devices;
//! 2. otherwise by its `UniqueId` or its device file `/dev/nvidia<minor>`, both in gres.conf. A MIG
//!    device has two more files, with the numbers of its capabilities;
//! 3. with `AutoDetect=nvml`, by its position in the driver's list of GPUs: [`Numbering`].

use std::fmt;

use gpush_api::{SlurmDevice, SlurmGpu};

use super::{
    AutoDetect, GresDevice, Job,
    gres_lines::CAPS,
    numbering::{Numbering, Unnumbered},
};
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
    /// The order in which slurmd numbers the devices is not known.
    Order {
        /// The index.
        index: u32,
        /// Why the order is not known.
        why: Unnumbered,
    },
}

impl NotMapped {
    /// Returns whether the only problem is that the numbering of the node's devices is unknown. In
    /// that case, the job is refused, and the node stays in use.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Order { .. } | Self::Differ { .. } => true,
            Self::NoFile { .. } | Self::NotAGpu { .. } | Self::NotAMigDevice { .. } => false,
        }
    }
}

impl fmt::Display for NotMapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoFile { index } => {
                write!(f, "gres.conf has no File for GPU {index} of the job; if gres.conf was changed, restart slurmd")
            }
            Self::NotAGpu { index, file } => {
                write!(
                    f,
                    "for GPU {index} of the job, gres.conf has {file}: this is not /dev/nvidia followed by a number"
                )
            }
            Self::NotAMigDevice { index, files } => {
                write!(
                    f,
                    "for device {index} of the job, gres.conf has {files}: these are not the files of a MIG device"
                )
            }
            Self::Differ { indexes, visible } => {
                write!(f, "SLURM_JOB_GPUS lists {indexes} devices, but CUDA_VISIBLE_DEVICES lists {visible}")
            }
            Self::Order { index, why } => write!(f, "cannot tell which GPU has Slurm's index {index}: {why}"),
        }
    }
}

impl std::error::Error for NotMapped {}

/// Returns whether some device of the job has only an index. If so, the caller must read how slurmd
/// numbers the devices.
#[must_use]
pub fn has_indexes(job: &Job) -> bool {
    job.gres.len() > job.visible.iter().filter(|entry| DeviceUuid::new(entry).is_ok()).count()
}

/// Returns the devices of a job, in Slurm's order. `numbering` says how slurmd numbers the
/// devices of the node.
///
/// # Errors
/// The first device that cannot be found.
pub fn devices(job: &Job, numbering: &Numbering) -> Result<Vec<SlurmDevice>, NotMapped> {
    let is_uuid = |entry: &String| DeviceUuid::new(entry).is_ok();
    let uuid = |entry: &String| SlurmDevice::Uuid(entry.clone());
    if job.gres.is_empty() {
        // Slurm sets both `SLURM_JOB_GPUS` and `CUDA_VISIBLE_DEVICES`, or neither. Here the first
        // is not set, so entries that are not UUIDs are not devices of the job.
        return Ok(job.visible.iter().filter(|entry| is_uuid(entry)).map(uuid).collect());
    }
    if job.visible.iter().any(is_uuid) {
        if job.visible.len() != job.gres.len() {
            return Err(NotMapped::Differ { indexes: job.gres.len(), visible: job.visible.len() });
        }
        let pairs = job.gres.iter().zip(&job.visible);
        return pairs
            .map(|(index, entry)| if is_uuid(entry) { Ok(uuid(entry)) } else { by_index(*index, numbering) })
            .collect();
    }
    job.gres.iter().map(|index| by_index(*index, numbering)).collect()
}

fn by_index(index: u32, numbering: &Numbering) -> Result<SlurmDevice, NotMapped> {
    match numbering {
        Numbering::Listed(conf) => match (conf.gpu(index), &conf.auto_detect) {
            (Some(gpu), _) => by_file(index, gpu),
            (None, None | Some(AutoDetect::Off | AutoDetect::Other(_))) => Err(NotMapped::NoFile { index }),
            (None, Some(AutoDetect::Nvml | AutoDetect::Nvidia)) => {
                Err(NotMapped::Order { index, why: Unnumbered::NotListed })
            }
        },
        Numbering::Nvml { devices, minors } => {
            Ok(SlurmDevice::Detected { index, devices: *devices, minors: minors.clone() })
        }
        Numbering::Unknown(why) => Err(NotMapped::Order { index, why: *why }),
    }
}

fn by_file(index: u32, gpu: &GresDevice) -> Result<SlurmDevice, NotMapped> {
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

/// Returns whether a job has GPUs with `owner = "slurm"`. Used while gpushd does not answer.
/// `cached` is the last list of such GPUs from gpushd. Without that list, all devices count as such
/// GPUs if a rule of the config has `owner = "slurm"`.
#[must_use]
pub fn is_owned(devices: &[SlurmDevice], cached: Option<&[SlurmGpu]>, has_rule: bool) -> bool {
    let Some(cached) = cached else { return has_rule && !devices.is_empty() };
    devices.iter().any(|device| {
        cached.iter().any(|gpu| match device {
            // Only gpushd knows the driver's order, so this device counts as a GPU with `owner = "slurm"`.
            SlurmDevice::Detected { .. } => true,
            SlurmDevice::Minor(minor) | SlurmDevice::Mig { minor, .. } => gpu.minor == *minor,
            SlurmDevice::Uuid(uuid) => {
                gpu.uuid == uuid.as_str() || gpu.mig_uuids.iter().any(|mig| *mig == uuid.as_str())
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::{
        super::{GpuPlugin, GresConf},
        *,
    };

    const MIG: &str = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd";

    fn job(gres: &[u32], visible: &[&str]) -> Job {
        Job {
            id: 1,
            gres: gres.to_vec(),
            visible: visible.iter().map(|one| (*one).to_owned()).collect(),
            ..Job::default()
        }
    }

    fn listed() -> Numbering {
        let text = "Name=gpu File=/dev/nvidia[2-3]\nName=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap21,\
                    /dev/nvidia-caps/nvidia-cap23\nName=gpu File=/dev/nvidiactl\n\
                    Name=gpu MultipleFiles=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap12,/dev/nvidia-caps/nvidia-cap13\n";
        Numbering::of(GresConf::parse(text, "n1", |_| None).unwrap(), None, None)
    }

    #[test]
    fn index_of_gres_conf_is_mapped_by_its_device_file() {
        // CUDA_VISIBLE_DEVICES may also contain indexes of Slurm. gpush never uses these indexes.
        assert_eq!(devices(&job(&[0], &["0"]), &listed()), Ok(vec![SlurmDevice::Minor(2)]));
        assert_eq!(
            devices(&job(&[1, 0], &["1", "0"]), &listed()).unwrap(),
            [SlurmDevice::Minor(3), SlurmDevice::Minor(2)]
        );
        // nvidia-cap21 and nvidia-cap23: GPU instance 2, compute instance 1.
        let mig = SlurmDevice::Mig { minor: 0, gpu_instance: 2, compute_instance: 1 };
        assert_eq!(devices(&job(&[2, 0], &["2", "0"]), &listed()), Ok(vec![mig, SlurmDevice::Minor(2)]));
        assert!(matches!(devices(&job(&[4], &[]), &listed()), Err(NotMapped::NotAMigDevice { index: 4, .. })));
        assert_eq!(devices(&job(&[9], &["9"]), &listed()), Err(NotMapped::NoFile { index: 9 }));
        assert!(matches!(devices(&job(&[3], &[]), &listed()), Err(NotMapped::NotAGpu { index: 3, .. })));
    }

    #[test]
    fn index_of_a_detected_gpu_is_left_to_gpushd() {
        let conf = |text: &str| GresConf::parse(text, "n1", |_| None).unwrap();
        let nvml = Numbering::of(conf("AutoDetect=nvml"), Some("gpu:l4:3,gpu:1g.10gb:1"), Some(GpuPlugin::Nvml));
        let mixed = devices(&job(&[2, 3], &["2", MIG]), &nvml).unwrap();
        let whole = SlurmDevice::Detected { index: 2, devices: 4, minors: Vec::new() };
        assert_eq!(mixed, [whole.clone(), SlurmDevice::Uuid(MIG.to_owned())]);
        let owned = [SlurmGpu { uuid: "GPU-1".into(), minor: 2, mig_uuids: Vec::new() }];
        assert!(is_owned(std::slice::from_ref(&whole), Some(&owned), false) && !is_owned(&[whole], Some(&[]), true));
        let unknown = Numbering::of(conf("AutoDetect=nvidia"), Some("gpu:4"), None);
        let error = devices(&job(&[2], &["2"]), &unknown).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains("index 2"), "{error}");
    }

    /// Fault: after a change to `AutoDetect=nvml` without a restart of slurmd, Prolog failed, and Slurm drained the
    /// node.
    #[test]
    fn index_that_a_changed_gres_conf_does_not_list_is_refused() {
        let mapped = |text: &str| {
            let conf = GresConf::parse(text, "n1", |_| None).unwrap();
            devices(&job(&[2], &["2"]), &Numbering::of(conf, Some("gpu:4"), Some(GpuPlugin::Other)))
        };
        let error = mapped("AutoDetect=nvml").unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains("restart slurmd"), "{error}");
        assert_eq!(mapped("AutoDetect=off"), Err(NotMapped::NoFile { index: 2 }));
        assert_eq!(mapped("AutoDetect=nvml\nName=gpu File=/dev/nvidia[0-3]"), Ok(vec![SlurmDevice::Minor(2)]));
    }

    #[test]
    fn uuid_is_used_where_there_is_one() {
        assert_eq!(devices(&job(&[4], &[MIG]), &listed()), Ok(vec![SlurmDevice::Uuid(MIG.to_owned())]));
        let mixed = devices(&job(&[0, 4], &["0", MIG]), &listed()).unwrap();
        assert_eq!(mixed, [SlurmDevice::Minor(2), SlurmDevice::Uuid(MIG.to_owned())]);
        assert_eq!(devices(&job(&[0, 4], &[MIG]), &listed()), Err(NotMapped::Differ { indexes: 2, visible: 1 }));
        assert_eq!(devices(&job(&[], &["NoDevFiles"]), &listed()), Ok(Vec::new()));
    }

    #[test]
    fn ownership_is_the_last_report_of_gpushd_or_the_config() {
        let owned = [SlurmGpu { uuid: "GPU-1".into(), minor: 2, mig_uuids: vec![MIG.into()] }];
        let minor = |minor| vec![SlurmDevice::Minor(minor)];
        assert!(is_owned(&minor(2), Some(&owned), false) && !is_owned(&minor(3), Some(&owned), true));
        assert!(is_owned(&[SlurmDevice::Uuid(MIG.to_owned())], Some(&owned), false));
        assert!(is_owned(&minor(3), None, true) && !is_owned(&minor(3), None, false) && !is_owned(&[], None, true));
    }
}
