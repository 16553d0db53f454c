//! The minor numbers of the nodes of MIG capabilities, as the driver reports them.

use std::collections::BTreeMap;

/// A MIG instance, for whose use a program opens a node in `/dev/nvidia-caps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    /// Minor number of the GPU.
    pub gpu: u32,
    /// Id of the GPU instance.
    pub gi: u32,
    /// Id of the compute instance; `None` for the GPU instance itself.
    pub ci: Option<u32>,
}

/// The minor numbers of the nodes of all MIG instances.
///
/// gpushd reads them from the driver, and never computes them: the formula that the present drivers use is no promise.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CapabilityMinors {
    /// Major number of the nodes; `None` if the driver has no such nodes.
    pub major: Option<u32>,
    /// Minor numbers of the instances that exist.
    pub minors: BTreeMap<Capability, u32>,
}

impl CapabilityMinors {
    /// Reads the minor number from a file `access` in `/proc/driver/nvidia/capabilities`.
    #[must_use]
    pub fn minor_in(access: &str) -> Option<u32> {
        access.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:")?.trim().parse().ok())
    }
}
