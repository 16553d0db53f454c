//! The devices that the processes of a lease may open, and those that login sessions may not open.
//!
//! The kernel decides by cgroup: every ancestor of a cgroup must allow a device. systemd has no list of denied devices,
//! so a denial is a list of all other devices:
//!
//! ```text
//! user.slice                     all devices, but not major 195              session_devices
//! gpulease.slice/…/L1.scope      devices with drivers, GPU nodes of lease L1 Nodes::allowed
//!   after the end of lease L1    devices with drivers, no GPU node           closed_devices
//! slurmstepd.scope               all devices, but not the GPUs that need a   job_devices
//!                                lease and do not belong to Slurm
//! ```
//!
//! Without a node of major 195, the nodes of `nvidia-uvm` and of MIG capabilities are of no use, so sessions may open
//! them. The scope of a lease has one GPU node, with which the capability node of any MIG device of the GPU would be of
//! use. So the scope may open the capability nodes of its own MIG devices only.
//!
//! The list of a slice or service has all major numbers, so it does not depend on the modules that are loaded. The list of
//! a scope has those of [`CharacterMajors::of`], because systemd needs long for a long list.
//!
//! Rules name devices by number: a node may be created after the rule, or be missing.

mod capabilities;
mod host_plan;
mod majors;
mod nodes;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

pub use capabilities::{Capability, CapabilityMinors};
pub use host_plan::{CONTAINERS, HostFacts, SESSIONS, SLURMD, SessionProcess, host_plan, named};
pub use majors::CharacterMajors;
pub use nodes::{NoDeviceAccess, Nodes, nodes};

/// The major number of the nodes of all GPUs, of `nvidiactl` and of `nvidia-modeset`. NVIDIA's driver has this number in
/// the kernel's list of assigned numbers.
pub const GPU_MAJOR: u32 = 195;

/// The minor number of `/dev/nvidiactl`.
pub const CONTROL_MINOR: u32 = 255;

/// Devices that a unit may open: a line of `DeviceAllow=`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AllowedDevice {
    /// The character device with this major and this minor number.
    Node(u32, u32),
    /// All character devices with this major number.
    Major(u32),
    /// All block devices.
    Blocks,
}

impl AllowedDevice {
    /// Returns the device in the notation of systemd.
    #[must_use]
    pub fn pattern(self) -> String {
        match self {
            // systemd takes the numbers from this path, also if the path does not exist.
            Self::Node(major, minor) => format!("/dev/char/{major}:{minor}"),
            Self::Major(major) => format!("char-{major}"),
            Self::Blocks => "block-*".to_owned(),
        }
    }

    /// Returns what a unit may do: read, write, and create the node. A program may call nvidia-modprobe, which creates
    /// the nodes of a GPU.
    #[must_use]
    pub fn permissions(self) -> &'static str {
        "rwm"
    }

    /// Returns whether the line allows this character device.
    #[must_use]
    pub fn allows(self, major: u32, minor: u32) -> bool {
        match self {
            Self::Node(own, node) => (own, node) == (major, minor),
            Self::Major(own) => own == major,
            Self::Blocks => false,
        }
    }
}

/// Returns the devices of login sessions: all devices except the GPUs.
#[must_use]
pub fn session_devices() -> Vec<AllowedDevice> {
    all_except(&[GPU_MAJOR], &CharacterMajors::default())
}

/// Returns the devices of the scope of a lease that has ended: no GPU, and no MIG capability. `capabilities` is the major
/// number of the nodes of MIG capabilities, if the driver has such nodes. The list has no other numbers than `majors`.
#[must_use]
pub fn closed_devices(capabilities: Option<u32>, majors: &CharacterMajors) -> Vec<AllowedDevice> {
    let excluded: Vec<u32> = [GPU_MAJOR].into_iter().chain(capabilities).collect();
    all_except(&excluded, majors)
}

/// Returns the devices of Slurm jobs: all devices except the GPUs with these minor numbers.
#[must_use]
pub fn job_devices(denied_gpus: &BTreeSet<u32>) -> Vec<AllowedDevice> {
    let gpus = (0..=CONTROL_MINOR).filter(|minor| !denied_gpus.contains(minor));
    gpus.map(|minor| AllowedDevice::Node(GPU_MAJOR, minor)).chain(session_devices()).collect()
}

fn all_except(excluded: &[u32], majors: &CharacterMajors) -> Vec<AllowedDevice> {
    let majors = majors.all().filter(|major| !excluded.contains(major)).map(AllowedDevice::Major);
    majors.chain([AllowedDevice::Blocks]).collect()
}

/// Returns whether a unit with these properties may open no GPU. `policy` is `DevicePolicy` of the unit, and `allowed` are
/// the patterns of `DeviceAllow`, as systemd shows them.
#[must_use]
pub fn denies_gpus<'a>(policy: &str, allowed: impl IntoIterator<Item = &'a str>) -> bool {
    is_limited(policy, allowed, |pattern| allowed_gpus(pattern) == AllowedGpus::None)
}

/// Returns whether a unit with these properties may open none of the GPUs with these minor numbers.
#[must_use]
pub fn denies_minors<'a>(policy: &str, allowed: impl IntoIterator<Item = &'a str>, minors: &BTreeSet<u32>) -> bool {
    is_limited(policy, allowed, |pattern| match allowed_gpus(pattern) {
        AllowedGpus::None => true,
        AllowedGpus::One(minor) => !minors.contains(&minor),
        AllowedGpus::PerhapsAll => minors.is_empty(),
    })
}

/// Returns whether a unit has a list of devices, and each pattern of the list is harmless.
fn is_limited<'a>(
    policy: &str,
    allowed: impl IntoIterator<Item = &'a str>,
    is_harmless: impl FnMut(&'a str) -> bool,
) -> bool {
    let mut allowed = allowed.into_iter().peekable();
    // With the policy `auto`, a list has the effect of `closed`.
    let is_limited = policy != "auto" || allowed.peek().is_some();
    is_limited && allowed.all(is_harmless)
}

/// The nodes of major number 195 that a pattern of `DeviceAllow` allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AllowedGpus {
    None,
    /// The node with this minor number.
    One(u32),
    PerhapsAll,
}

fn allowed_gpus(pattern: &str) -> AllowedGpus {
    let one = |minor: &str| minor.parse().map_or(AllowedGpus::PerhapsAll, AllowedGpus::One);
    if let Some(name) = pattern.strip_prefix("char-") {
        return match name.parse::<u32>() {
            Ok(GPU_MAJOR) => AllowedGpus::PerhapsAll,
            Ok(_) => AllowedGpus::None,
            Err(_) if name.contains(['*', '?', '[']) || name.starts_with("nvidia") => AllowedGpus::PerhapsAll,
            Err(_) => AllowedGpus::None,
        };
    }
    if let Some(numbers) = pattern.strip_prefix("/dev/char/") {
        return match numbers.split_once(':') {
            Some(("195", minor)) => one(minor),
            _ => AllowedGpus::None,
        };
    }
    match pattern.strip_prefix("/dev/nvidia") {
        None => AllowedGpus::None,
        Some("ctl") => AllowedGpus::One(CONTROL_MINOR),
        Some(name) if name.starts_with("-uvm") || name.starts_with("-caps") => AllowedGpus::None,
        Some(minor) => one(minor),
    }
}
