//! How slurmd numbers the devices of a node.

use std::fmt;

use gpush_api::Gpu;

use super::{AutoDetect, GpuPlugin, GresConf, GresDevice, node_gres};

/// The order in which slurmd numbers the GPUs and MIG devices of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Numbering {
    /// The order of gres.conf, and of the types in slurm.conf.
    Listed(GresConf),
    /// slurmd finds the devices itself through NVML (`AutoDetect=nvml`), and then ignores the order in gres.conf and
    /// slurm.conf. slurmd sorts whole GPUs by their position in the driver's list, and MIG devices by their position on
    /// their GPU. So the first MIG devices of all GPUs are next to the first whole GPU. This order was compared with
    /// slurmd 22.05.
    Nvml {
        /// Number of GPUs and MIG devices that slurm.conf gives the node.
        devices: u32,
        /// Minor number of the GPU of each device in gres.conf. Empty if gres.conf does not list
        /// all devices of the node. In that case, the numbering is known only if the node uses all
        /// devices of the host.
        minors: Vec<u32>,
    },
    /// Not known.
    Unknown(Unnumbered),
}

/// Why the order of the devices is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unnumbered {
    /// `AutoDetect=nvidia`: slurmd sorts the device files by their names. The sort order differs
    /// between versions.
    Nvidia,
    /// `AutoDetect=nvml`, and slurm.conf contains no number of GPUs for the node.
    NoGres,
    /// gres.conf has `AutoDetect=nvml`, and the plugin of slurmd is not known. So it is not known
    /// whether slurmd uses the order of NVML or the lines of gres.conf.
    NoPlugin,
    /// slurmd uses a plugin that finds GPUs, but gres.conf does not have the `AutoDetect` of this plugin. So gres.conf
    /// was changed, and its lines may differ from those that slurmd has read.
    NotRestarted,
    /// gres.conf has an `AutoDetect` that slurmd does not use, and lists too few devices.
    NotListed,
}

impl fmt::Display for Unnumbered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvidia => "gres.conf has AutoDetect=nvidia",
            Self::NoGres => "slurmd finds GPUs through NVML, but slurm.conf has no Gres= with GPUs for the node",
            Self::NoPlugin => {
                "gres.conf has AutoDetect=nvml, but the running slurmd does not show whether it uses NVML"
            }
            Self::NotRestarted => {
                "the value of AutoDetect in gres.conf differs from the value that the running slurmd uses: restart \
                slurmd"
            }
            Self::NotListed => {
                "slurmd uses no AutoDetect, and gres.conf does not list the GPU; if gres.conf was changed, restart \
                slurmd"
            }
        })
    }
}

impl Numbering {
    /// Returns how slurmd numbers the devices of a node. `conf` is the current gres.conf. `gres` is
    /// the `Gres=` of the node in slurm.conf, if known. `plugin` is the GPU plugin of the running
    /// slurmd, if known.
    ///
    /// | plugin | `AutoDetect=nvml` | `AutoDetect=nvidia` | other values, or none |
    /// |---|---|---|---|
    /// | NVML | order of NVML | [`Unnumbered::NotRestarted`] | [`Unnumbered::NotRestarted`] |
    /// | NVIDIA | [`Unnumbered::NotRestarted`] | [`Unnumbered::Nvidia`] | [`Unnumbered::NotRestarted`] |
    /// | other | lines of gres.conf | lines of gres.conf | lines of gres.conf |
    /// | not known | [`Unnumbered::NoPlugin`] | [`Unnumbered::Nvidia`] | lines of gres.conf |
    #[must_use]
    pub fn of(conf: GresConf, gres: Option<&str>, plugin: Option<GpuPlugin>) -> Self {
        match (plugin, &conf.auto_detect) {
            (Some(GpuPlugin::Nvml), Some(AutoDetect::Nvml)) => Self::nvml(&conf, gres),
            (Some(GpuPlugin::Nvidia) | None, Some(AutoDetect::Nvidia)) => Self::Unknown(Unnumbered::Nvidia),
            (Some(GpuPlugin::Nvml | GpuPlugin::Nvidia), _) => Self::Unknown(Unnumbered::NotRestarted),
            (None, Some(AutoDetect::Nvml)) => Self::Unknown(Unnumbered::NoPlugin),
            (Some(GpuPlugin::Other), _) | (None, None | Some(AutoDetect::Off | AutoDetect::Other(_))) => {
                Self::Listed(match gres {
                    Some(gres) => conf.ordered_by(gres),
                    None => conf,
                })
            }
        }
    }

    /// Returns the numbering of devices that slurmd finds through NVML.
    fn nvml(conf: &GresConf, gres: Option<&str>) -> Self {
        let gpus = node_gres(gres.unwrap_or_default()).filter(|gres| gres.name == "gpu");
        let devices = gpus.fold(0u64, |sum, gpus| sum.saturating_add(gpus.count));
        let devices = u32::try_from(devices).unwrap_or(u32::MAX);
        if devices == 0 {
            return Self::Unknown(Unnumbered::NoGres);
        }
        let minors: Vec<u32> = conf.gpus().iter().filter_map(GresDevice::minor).collect();
        // If gres.conf and slurm.conf have different numbers of devices, slurmd adds or drops devices. Then the lines
        // do not show the order of slurmd.
        let lists_all = conf.gpus().len() == devices as usize && minors.len() == conf.gpus().len();
        Self::Nvml { devices, minors: if lists_all { minors } else { Vec::new() } }
    }
}

/// Returns the whole GPU that has this index, if slurmd found the devices through NVML. Returns
/// `None` if slurmd does not use the current devices of the host, because the index can then mean
/// another GPU. `devices` and `minors` are the fields of [`Numbering::Nvml`].
///
/// At each position, slurmd has at most one whole GPU, and MIG devices before or after that GPU.
/// Slurm names MIG devices by their UUIDs, so each index of this position means the whole GPU.
#[must_use]
pub fn whole_gpu<'a>(gpus: &'a [Gpu], index: u32, devices: u32, minors: &[u32]) -> Option<&'a Gpu> {
    let used = used(gpus, devices, minors)?;
    let has_device_at = |gpu: &Gpu, position: u32| match is_whole(gpu) {
        true => gpu.index == position,
        false => (position as usize) < count(gpu),
    };
    let mut before = 0;
    for position in 0..=gpus.iter().map(|gpu| gpu.index.0).max()? {
        let here = used.iter().filter(|gpu| has_device_at(gpu, position)).count();
        if (before..before + here).contains(&(index as usize)) {
            return used.into_iter().find(|gpu| is_whole(gpu) && gpu.index == position);
        }
        before += here;
    }
    None
}

/// Returns the GPUs that slurmd uses, whole or through their MIG devices, if slurmd found the
/// devices through NVML. Returns `None` if slurmd does not use the current devices of the host.
/// `devices` and `minors` are the fields of [`Numbering::Nvml`].
#[must_use]
pub fn used<'a>(gpus: &'a [Gpu], devices: u32, minors: &[u32]) -> Option<Vec<&'a Gpu>> {
    let listed = |gpu: &Gpu| minors.iter().filter(|minor| **minor == gpu.minor).count();
    let used: Vec<&Gpu> = gpus.iter().filter(|gpu| minors.is_empty() || listed(gpu) > 0).collect();
    let is_complete = minors.is_empty() || used.iter().all(|gpu| listed(gpu) == count(gpu));
    (is_complete && used.iter().map(|gpu| count(gpu)).sum::<usize>() == devices as usize).then_some(used)
}

/// Returns whether a GPU is not divided by MIG.
#[must_use]
pub fn is_whole(gpu: &Gpu) -> bool {
    gpu.mig.as_ref().is_none_or(|mig| !mig.enabled)
}

/// Returns the number of devices that a GPU has for Slurm: 1, or the number of its MIG devices.
#[must_use]
pub fn count(gpu: &Gpu) -> usize {
    if is_whole(gpu) {
        return 1;
    }
    gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| instance.compute.len()).sum()
}

#[cfg(test)]
mod tests {
    use gpush_api::{ComputeInstance, GpuInstance, Placement};

    use super::*;
    use crate::preset;

    /// Returns four GPUs with these minor numbers and numbers of MIG devices.
    fn host(minors: [u32; 4], mig_devices: [u32; 4]) -> Vec<Gpu> {
        let mut gpus = preset::gpus("dgx-h100").expect("a preset");
        gpus.truncate(4);
        for ((gpu, minor), count) in gpus.iter_mut().zip(minors).zip(mig_devices) {
            gpu.minor = minor;
            let mig = gpu.mig.as_mut().expect("MIG");
            mig.enabled = count > 0;
            mig.instances = (0..count).map(instance).collect();
        }
        gpus
    }

    fn instance(id: u32) -> GpuInstance {
        let compute = ComputeInstance {
            id: 0,
            profile_id: 0,
            profile: "1g.10gb".to_owned(),
            placement: None,
            uuid: Some(format!("MIG-{id}").into()),
            processes: Vec::new(),
        };
        GpuInstance {
            id,
            profile_id: 0,
            profile: "1g.10gb".to_owned(),
            placement: Placement { start: 0, size: 1 },
            memory: None,
            compute: vec![compute],
            processes: Vec::new(),
        }
    }

    /// Returns the driver's index of the GPU at each of Slurm's indexes.
    fn found(gpus: &[Gpu], indexes: std::ops::Range<u32>, devices: u32, minors: &[u32]) -> Vec<Option<u32>> {
        indexes.map(|index| whole_gpu(gpus, index, devices, minors).map(|gpu| gpu.index.0)).collect()
    }

    #[test]
    fn whole_gpus_have_the_order_of_the_driver() {
        let mut gpus = host([2, 0, 3, 1], [0; 4]);
        gpus.reverse();
        assert_eq!(found(&gpus, 0..5, 4, &[]), [Some(0), Some(1), Some(2), Some(3), None]);
        // gres.conf lists the GPUs in another order.
        assert_eq!(found(&gpus, 0..3, 2, &[1, 0]), [Some(1), Some(3), None]);
    }

    /// The order that slurmd 22.05 printed for such hosts: MIG devices between whole GPUs.
    #[test]
    fn mig_devices_are_between_whole_gpus() {
        let gpus = host([2, 3, 1, 0], [2, 0, 0, 0]);
        // Slurm's positions: MIG 0 | MIG 1, GPU 1 | GPU 2 | GPU 3.
        assert_eq!(found(&gpus, 0..6, 5, &[]), [None, Some(1), Some(1), Some(2), Some(3), None]);
        assert_eq!(found(&gpus, 0..4, 4, &[1, 0, 2, 2]), [None, None, Some(2), Some(3)]);
        let gpus = host([0, 1, 2, 3], [0, 7, 0, 0]);
        // Slurm's positions: GPU 0, MIG 0 | MIG 1 | GPU 2, MIG 2 | GPU 3, MIG 3 | MIG 4, …
        let whole = [Some(0), Some(0), None, Some(2), Some(2), Some(3), Some(3), None];
        assert_eq!(found(&gpus, 0..8, 10, &[]), whole);
    }

    #[test]
    fn other_devices_than_those_of_slurmd_have_no_order() {
        let gpus = host([0, 1, 2, 3], [2, 0, 0, 0]);
        for (devices, minors) in [(4, &[][..]), (6, &[]), (2, &[1, 7]), (2, &[0, 1]), (3, &[0, 0, 0])] {
            assert_eq!(found(&gpus, 0..4, devices, minors), [None; 4], "{devices} {minors:?}");
        }
    }

    fn of(text: &str, gres: Option<&str>) -> Numbering {
        Numbering::of(GresConf::parse(text, "n1", |_| None).expect("a gres.conf"), gres, None)
    }

    fn nvml(devices: u32, minors: &[u32]) -> Numbering {
        Numbering::Nvml { devices, minors: minors.to_vec() }
    }

    #[test]
    fn lines_decide_unless_slurmd_detects_the_devices() {
        let text = "Name=gpu Type=b File=/dev/nvidia1\nName=gpu Type=a File=/dev/nvidia0";
        let minors = |numbering| match numbering {
            Numbering::Listed(conf) => conf.gpus().iter().filter_map(GresDevice::minor).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        assert_eq!(minors(of(text, Some("gpu:a:1,gpu:b:1"))), [0, 1]);
        assert_eq!(minors(of(&format!("AutoDetect=off\n{text}"), None)), [1, 0]);
        assert_eq!(minors(of(&format!("AutoDetect=rsmi\n{text}"), None)), [1, 0]);
    }

    /// Faults: slurmd did not find NVML's library and used the order of the types; slurmd was not restarted after a
    /// change of `AutoDetect`. In both cases, gpush used an order that was not slurmd's, and leased GPUs that the job
    /// did not have.
    #[test]
    fn plugin_of_slurmd_decides_which_order_applies() {
        let lines = "Name=gpu Type=b File=/dev/nvidia1\nName=gpu Type=a File=/dev/nvidia0";
        let conf = |auto: &str| GresConf::parse(&format!("{auto}\n{lines}"), "n1", |_| None).unwrap();
        let listed = |auto: &str| Numbering::Listed(conf(auto).ordered_by("gpu:a:1,gpu:b:1"));
        let unknown = Numbering::Unknown;
        let (detected, stale) = (nvml(2, &[1, 0]), unknown(Unnumbered::NotRestarted));
        let (nvidia, no_plugin) = (unknown(Unnumbered::Nvidia), unknown(Unnumbered::NoPlugin));
        for (auto, by_nvml, by_nvidia, by_none) in [
            ("AutoDetect=nvml", &detected, &stale, &no_plugin),
            ("AutoDetect=nvidia", &stale, &nvidia, &nvidia),
            ("AutoDetect=off", &stale, &stale, &listed("AutoDetect=off")),
            ("AutoDetect=rsmi", &stale, &stale, &listed("AutoDetect=rsmi")),
            ("", &stale, &stale, &listed("")),
        ] {
            let of = |plugin| Numbering::of(conf(auto), Some("gpu:a:1,gpu:b:1"), plugin);
            assert_eq!(of(Some(GpuPlugin::Nvml)), *by_nvml, "{auto}");
            assert_eq!(of(Some(GpuPlugin::Nvidia)), *by_nvidia, "{auto}");
            assert_eq!(of(Some(GpuPlugin::Other)), listed(auto), "{auto}");
            assert_eq!(of(None), *by_none, "{auto}");
        }
        assert_eq!(of("AutoDetect=nvml", Some("gpu:2")), no_plugin);
    }

    #[test]
    fn detected_devices_have_a_number_if_their_count_is_known() {
        let of = |text: &str, gres| {
            Numbering::of(GresConf::parse(text, "n1", |_| None).unwrap(), gres, Some(GpuPlugin::Nvml))
        };
        assert_eq!(of("AutoDetect=nvml", Some("gpu:l4:2,gpu:1g.10gb:3(S:0),mps:200")), nvml(5, &[]));
        let listed = "AutoDetect=nvml\nName=gpu File=/dev/nvidia[3,1]\nName=gpu MultipleFiles=/dev/nvidia0,/c1,/c2";
        assert_eq!(of(listed, Some("gpu:3")), nvml(3, &[3, 1, 0]));
        assert_eq!(of(listed, Some("gpu:2")), nvml(2, &[]));
        assert_eq!(of(listed, Some("gpu:8")), nvml(8, &[]));
        let unknown = Numbering::Unknown(Unnumbered::NoGres);
        assert_eq!((of(listed, None), of(listed, Some("mps:100"))), (unknown.clone(), unknown));
    }
}
