//! The device nodes that the members of a lease need.

use std::collections::BTreeSet;

use gpush_api::{Gpu, GpuIndex, LeaseMember};

use super::{AllowedDevice, CONTROL_MINOR, Capability, CapabilityMinors, CharacterMajors, GPU_MAJOR, closed_devices};

/// Why gpushd cannot tell which nodes the members of a lease need.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoDeviceAccess {
    /// The GPU of a member is not known.
    #[error("the GPU {0} is not known")]
    UnknownGpu(String),
    /// The MIG device of a member does not exist.
    #[error("GPU {0} has no MIG device {1}")]
    UnknownDevice(GpuIndex, String),
    /// The driver does not report the number of a node.
    #[error("the driver does not report the capability node of MIG device {gi}/{ci} of GPU {gpu}")]
    NoCapability {
        /// Index of the GPU.
        gpu: GpuIndex,
        /// Id of the GPU instance.
        gi: u32,
        /// Id of the compute instance.
        ci: u32,
    },
}

/// The device nodes that a lease opens for its processes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nodes {
    /// Minor numbers of the GPUs.
    pub gpus: BTreeSet<u32>,
    /// Minor numbers of the MIG capabilities.
    pub capabilities: BTreeSet<u32>,
    /// Major number of the nodes of MIG capabilities, if the driver has such nodes.
    pub capability_major: Option<u32>,
    /// Major numbers of the other devices that the scope may open.
    pub majors: CharacterMajors,
}

impl Nodes {
    /// Returns the devices that the scope of the lease may open: its nodes, and all devices that are neither GPUs nor MIG
    /// capabilities.
    #[must_use]
    pub fn allowed(&self) -> Vec<AllowedDevice> {
        self.own().into_iter().chain(self.closed()).collect()
    }

    /// Returns the devices that the scope may open after the end of the lease.
    #[must_use]
    pub fn closed(&self) -> Vec<AllowedDevice> {
        closed_devices(self.capability_major, &self.majors)
    }

    /// Returns the nodes of the lease: those of its GPUs and MIG devices, and `nvidiactl`.
    #[must_use]
    pub fn own(&self) -> Vec<AllowedDevice> {
        let gpus = self.gpus.iter().map(|minor| AllowedDevice::Node(GPU_MAJOR, *minor));
        let capabilities = self
            .capability_major
            .into_iter()
            .flat_map(|major| self.capabilities.iter().map(move |minor| AllowedDevice::Node(major, *minor)));
        gpus.chain([AllowedDevice::Node(GPU_MAJOR, CONTROL_MINOR)]).chain(capabilities).collect()
    }
}

/// Returns the nodes that the members of a lease need. A member that is shared through MPS or time-slicing needs the node
/// of its GPU, like a whole GPU.
///
/// # Errors
/// If a GPU or MIG device of a member is not in `gpus`, or the driver does not report its capability nodes.
pub fn nodes<'a>(
    members: impl IntoIterator<Item = &'a LeaseMember>,
    gpus: &[&Gpu],
    capabilities: &CapabilityMinors,
    majors: CharacterMajors,
) -> Result<Nodes, NoDeviceAccess> {
    let mut nodes = Nodes { capability_major: capabilities.major, majors, ..Nodes::default() };
    for member in members {
        let gpu = gpus.iter().find(|gpu| gpu.uuid == member.gpu_uuid);
        let gpu = gpu.ok_or_else(|| NoDeviceAccess::UnknownGpu(member.gpu_uuid.to_string()))?;
        nodes.gpus.insert(gpu.minor);
        if member.target == member.gpu_uuid {
            continue;
        }
        let (gi, ci) = mig_device(gpu, member)
            .ok_or_else(|| NoDeviceAccess::UnknownDevice(gpu.index, member.target.to_string()))?;
        if capabilities.major.is_none() {
            continue;
        }
        for ci_of_node in [None, Some(ci)] {
            let key = Capability { gpu: gpu.minor, gi, ci: ci_of_node };
            let minor = capabilities.minors.get(&key);
            nodes.capabilities.insert(*minor.ok_or(NoDeviceAccess::NoCapability { gpu: gpu.index, gi, ci })?);
        }
    }
    Ok(nodes)
}

/// Returns the ids of the GPU instance and the compute instance of a MIG device.
fn mig_device(gpu: &Gpu, member: &LeaseMember) -> Option<(u32, u32)> {
    let instances = &gpu.mig.as_ref()?.instances;
    instances.iter().find_map(|gi| {
        let ci = gi.compute.iter().find(|ci| ci.uuid.as_ref() == Some(&member.target))?;
        Some((gi.id, ci.id))
    })
}
