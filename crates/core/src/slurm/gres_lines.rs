//! Writes the lines of gres.conf and slurm.conf that describe the current GPUs and MIG devices of a
//! node.
//!
//! Whole GPUs come first, then MIG devices, because Slurm numbers them in this order. A MIG device
//! has the device file of its GPU and two files of its capabilities. Slurm learns the UUID of a MIG
//! device only through NVML, so the gres.conf of a node with MIG devices contains
//! `AutoDetect=nvml`. slurmd then compares the lines with the devices that it finds.

use std::fmt::{self, Write as _};

use gpush_api::{Gpu, GpuIndex, GpuInstance, GpuState, Mode};

/// The lines about GPUs for the gres.conf and slurm.conf of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GresLines {
    node: String,
    has_mig: bool,
    /// Lines of gres.conf that follow `AutoDetect`.
    records: Vec<String>,
    /// Count of each type, in the order of Slurm.
    types: Vec<(String, u32)>,
    /// Comments about GPUs, for the administrator.
    notes: Vec<String>,
}

/// Numbers of capability files in NVIDIA's driver: the number of the first file, the number of
/// files for each GPU, and the number of files for each GPU instance.
/// `/proc/driver/nvidia-caps/mig-minors` contains the same numbers.
pub(super) const CAPS: (u32, u32, u32) = (3, 135, 9);

/// Returns the lines for the GPUs of a node.
#[must_use]
pub fn gres_lines(node: &str, gpus: &[Gpu]) -> GresLines {
    let mut lines =
        GresLines { node: node.to_owned(), has_mig: false, records: Vec::new(), types: Vec::new(), notes: Vec::new() };
    let is_mig = |gpu: &&Gpu| gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
    // Consecutive GPUs of one type and mode, in the order of the driver, share one record.
    let mut whole: Vec<(String, Mode, Vec<u32>)> = Vec::new();
    for gpu in gpus.iter().filter(|gpu| !is_mig(gpu)) {
        let gres_type = type_of(&gpu.name);
        lines.count(&gres_type);
        match whole.last_mut() {
            Some((last, mode, minors)) if *last == gres_type && *mode == gpu.mode => minors.push(gpu.minor),
            Some(_) | None => whole.push((gres_type, gpu.mode, vec![gpu.minor])),
        }
        if matches!(gpu.mode, Mode::Mps | Mode::Timeslice) {
            let mode = gpu.mode.name();
            lines.notes.push(format!(
                "GPU {} is in mode {mode}: jobs on this GPU need a gpush request, such as --comment=gpush:{mode}",
                gpu.index
            ));
        }
    }
    let lost = gpus.iter().filter(|gpu| gpu.state == GpuState::Lost);
    lines.notes.extend(lost.map(|gpu| format!("GPU {} is lost: jobs cannot use it until the host reboots", gpu.index)));
    let differ = whole.iter().any(|(_, mode, _)| *mode != whole[0].1);
    for (gres_type, mode, minors) in whole {
        let mode = if differ { format!("  # mode {}", mode.name()) } else { String::new() };
        lines.records.push(format!("Name=gpu Type={gres_type} File=/dev/nvidia{}{mode}", range(&minors)));
    }
    for gpu in gpus.iter().filter(is_mig) {
        lines.has_mig = true;
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        let before = lines.records.len();
        for instance in instances {
            lines.devices_of(gpu, instance);
        }
        if lines.records.len() == before {
            lines
                .notes
                .push(format!("GPU {} has MIG enabled, but no MIG device: Slurm cannot use this GPU", gpu.index));
        }
    }
    lines
}

impl GresLines {
    fn count(&mut self, gres_type: &str) {
        match self.types.iter_mut().find(|(name, _)| name == gres_type) {
            Some((_, count)) => *count += 1,
            None => self.types.push((gres_type.to_owned(), 1)),
        }
    }

    fn devices_of(&mut self, gpu: &Gpu, instance: &GpuInstance) {
        let (first, per_gpu, per_instance) = CAPS;
        let access = first + per_gpu * gpu.minor + per_instance * instance.id;
        for device in &instance.compute {
            let gres_type = device.profile.clone();
            self.count(&gres_type);
            let caps = [access, access + 1 + device.id].map(|cap| format!("/dev/nvidia-caps/nvidia-cap{cap}"));
            let uuid = device.uuid.as_ref().map(|uuid| format!("  # {uuid}")).unwrap_or_default();
            self.records.push(format!(
                "Name=gpu Type={gres_type} MultipleFiles=/dev/nvidia{},{}{uuid}",
                gpu.minor,
                caps.join(",")
            ));
        }
    }

    /// Adds a comment with these GPU indexes. The comment says that users can also lease these
    /// GPUs.
    #[must_use]
    pub fn leased_by_users(mut self, gpus: &[GpuIndex]) -> Self {
        if !gpus.is_empty() {
            let noun = if gpus.len() == 1 { "GPU" } else { "GPUs" };
            let gpus = range(&gpus.iter().map(|index| index.0).collect::<Vec<_>>());
            let gpus = gpus.trim_matches(['[', ']']);
            let note = format!(
                "users can also lease {noun} {gpus}: set owner = \"slurm\" in the config, or remove the GPU from gres.conf"
            );
            self.notes.push(note);
        }
        self
    }

    /// Returns the text of gres.conf.
    #[must_use]
    pub fn gres_conf(&self) -> String {
        let mut text = format!("# gres.conf of {}, by `gpushctl slurm gres-conf`\n", self.node);
        for note in &self.notes {
            let _ = writeln!(text, "# {note}");
        }
        let detect = if self.has_mig { "nvml" } else { "off" };
        let _ = writeln!(text, "NodeName={} AutoDetect={detect}", self.node);
        for record in &self.records {
            let _ = writeln!(text, "NodeName={} {record}", self.node);
        }
        text
    }

    /// Returns the value of `Gres=` for slurm.conf, such as `gpu:h100:2,gpu:1g.10gb:7`; `None` if
    /// the node has no device.
    #[must_use]
    pub fn node_gres(&self) -> Option<String> {
        let types: Vec<String> = self.types.iter().map(|(name, count)| format!("gpu:{name}:{count}")).collect();
        (!types.is_empty()).then(|| types.join(","))
    }
}

impl fmt::Display for GresLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.gres_conf())?;
        match self.node_gres() {
            Some(gres) => {
                writeln!(
                    f,
                    "\n# slurm.conf: GresTypes=gpu, and in the line of the node:\n# NodeName={} Gres={gres}",
                    self.node
                )
            }
            None => writeln!(f, "\n# slurm.conf: the node has no Gres"),
        }
    }
}

/// Formats numbers as ranges in the given order: `[0-2,5]`, or `0` for a single number.
fn range(minors: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for minor in minors {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *minor => *last = *minor,
            Some(_) | None => runs.push((*minor, *minor)),
        }
    }
    let texts: Vec<String> = runs
        .iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    if minors.len() == 1 { texts.concat() } else { format!("[{}]", texts.join(",")) }
}

/// Returns the type of a GPU, derived from its product name: `h100` from `NVIDIA H100 80GB HBM3`.
/// With `AutoDetect=nvml`, the type must be a part of the name that slurmd finds, which is the
/// product name in lower case.
fn type_of(product: &str) -> String {
    let name = product.trim().to_ascii_lowercase();
    let name = name.strip_prefix("nvidia ").unwrap_or(&name);
    let name = ["geforce ", "tesla ", "quadro "].iter().find_map(|brand| name.strip_prefix(brand)).unwrap_or(name);
    let word = name.split([' ', '-']).find(|word| word.bytes().any(|byte| byte.is_ascii_digit()));
    let word: String = word.unwrap_or("gpu").chars().filter(char::is_ascii_alphanumeric).collect();
    if word.is_empty() { "gpu".to_owned() } else { word }
}

#[cfg(test)]
mod tests {
    use gpush_api::{ComputeInstance, Placement};

    use super::*;
    use crate::preset;

    fn instance(id: u32, profile: &str, devices: &[(u32, &str)]) -> GpuInstance {
        let device = |(id, profile): &(u32, &str)| ComputeInstance {
            id: *id,
            profile_id: 0,
            profile: (*profile).to_owned(),
            placement: None,
            uuid: Some(format!("MIG-{id}").into()),
            processes: Vec::new(),
        };
        GpuInstance {
            id,
            profile_id: 0,
            profile: profile.to_owned(),
            placement: Placement { start: 0, size: 1 },
            memory: None,
            compute: devices.iter().map(device).collect(),
            processes: Vec::new(),
        }
    }

    fn host() -> Vec<Gpu> {
        let mut gpus = preset::gpus("dgx-h100").expect("a preset");
        gpus.truncate(4);
        for (gpu, minor) in gpus.iter_mut().zip([2, 0, 3, 1]) {
            gpu.minor = minor;
            gpu.mig = gpu.mig.take().filter(|_| minor == 0);
        }
        gpus
    }

    #[test]
    fn whole_gpus_need_no_detection() {
        let mut gpus = host();
        gpus[1].mig = None;
        gpus.iter_mut().for_each(|gpu| gpu.mode = Mode::Exclusive);
        gpus[3].mode = Mode::Mps;
        insta::assert_snapshot!(gres_lines("n1", &gpus), @r"
        # gres.conf of n1, by `gpushctl slurm gres-conf`
        # GPU 3 is in mode mps: jobs on this GPU need a gpush request, such as --comment=gpush:mps
        NodeName=n1 AutoDetect=off
        NodeName=n1 Name=gpu Type=h100 File=/dev/nvidia[2,0,3]  # mode exclusive
        NodeName=n1 Name=gpu Type=h100 File=/dev/nvidia1  # mode mps

        # slurm.conf: GresTypes=gpu, and in the line of the node:
        # NodeName=n1 Gres=gpu:h100:4
        ");
    }

    /// Fault: the line of a lost GPU looked like the line of a usable GPU.
    #[test]
    fn lost_gpu_has_a_comment() {
        let mut gpus = host();
        gpus[2].state = GpuState::Lost;
        let text = gres_lines("n1", &gpus).gres_conf();
        assert!(text.contains("\n# GPU 2 is lost: jobs cannot use it until the host reboots\n"), "{text}");
    }

    /// Fault: the output did not say that a job and a lease of a user can get the same GPU.
    #[test]
    fn gpus_that_users_can_lease_are_named() {
        let note = |gpus: &[u32]| {
            gres_lines("n1", &host())
                .leased_by_users(&gpus.iter().copied().map(GpuIndex).collect::<Vec<_>>())
                .gres_conf()
        };
        assert!(
            note(&[0, 2, 3]).contains("# users can also lease GPUs 0,2-3: set owner = \"slurm\""),
            "{}",
            note(&[0, 2, 3])
        );
        assert!(note(&[2]).contains("# users can also lease GPU 2: set"), "{}", note(&[2]));
        assert!(!note(&[]).contains("users can"));
    }

    /// NVIDIA's driver numbers the capability files: a GPU instance has the number
    /// 3 + 135 * minor + 9 * id, and the numbers of its compute instances follow.
    #[test]
    fn mig_devices_follow_whole_gpus_with_their_capability_files() {
        let mut gpus = host();
        let mig = gpus[1].mig.as_mut().expect("MIG");
        mig.instances = vec![
            instance(1, "3g.40gb", &[(0, "1c.3g.40gb"), (1, "2c.3g.40gb")]),
            instance(9, "1g.10gb", &[(0, "1g.10gb")]),
        ];
        insta::assert_snapshot!(gres_lines("n1", &gpus), @r"
        # gres.conf of n1, by `gpushctl slurm gres-conf`
        NodeName=n1 AutoDetect=nvml
        NodeName=n1 Name=gpu Type=h100 File=/dev/nvidia[2-3,1]
        NodeName=n1 Name=gpu Type=1c.3g.40gb MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap12,/dev/nvidia-caps/nvidia-cap13  # MIG-0
        NodeName=n1 Name=gpu Type=2c.3g.40gb MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap12,/dev/nvidia-caps/nvidia-cap14  # MIG-1
        NodeName=n1 Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap84,/dev/nvidia-caps/nvidia-cap85  # MIG-0

        # slurm.conf: GresTypes=gpu, and in the line of the node:
        # NodeName=n1 Gres=gpu:h100:3,gpu:1c.3g.40gb:1,gpu:2c.3g.40gb:1,gpu:1g.10gb:1
        ");
    }

    #[test]
    fn lines_are_read_back_in_the_same_order() {
        let mut gpus = host();
        gpus[1].mig.as_mut().expect("MIG").instances = vec![instance(9, "1g.10gb", &[(0, "1g.10gb")])];
        let lines = gres_lines("n1", &gpus);
        let conf = super::super::GresConf::parse(&lines.gres_conf(), "n1", |_| None).expect("a gres.conf");
        let conf = conf.ordered_by(&lines.node_gres().expect("GPUs"));
        let minors: Vec<_> = conf.gpus().iter().filter_map(super::super::GresDevice::minor).collect();
        assert_eq!(minors, [2, 3, 1, 0]);
        assert_eq!(conf.gpus()[3].files.len(), 3);
    }

    #[test]
    fn type_is_the_model_in_the_product_name() {
        for (product, gres_type) in [
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA A100-SXM4-80GB", "a100"),
            ("NVIDIA L4", "l4"),
            ("NVIDIA GeForce RTX 4090", "4090"),
            ("Tesla V100-SXM2-32GB", "v100"),
            ("", "gpu"),
        ] {
            assert_eq!(type_of(product), gres_type, "{product}");
        }
    }

    #[test]
    fn range_keeps_the_order() {
        assert_eq!(range(&[3]), "3");
        assert_eq!(range(&[0, 1, 2, 5]), "[0-2,5]");
        assert_eq!(range(&[2, 0, 3, 1]), "[2,0,3,1]");
    }
}
