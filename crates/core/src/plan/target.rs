//! The target of a GPU: a layout that was resolved for the geometry of this GPU.
//!
//! A layout is text, for any number of GPUs. A target is for one GPU: it contains GPU instances
//! with the profile ids of the driver, and their compute instances. A rollback makes a target from
//! existing instances, with their placements ([`Target::of_instances`]).

use std::fmt;

use gpush_api::{GpuInstance, Placement};

use crate::geometry::Geometry;

/// The exact set of instances for one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// GPU instances, in the order of the layout.
    pub instances: Vec<RequestedInstance>,
}

/// A requested GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedInstance {
    /// Profile id, as the driver reports it.
    pub profile_id: u32,
    /// Fixed placement; `None` if any placement is allowed.
    pub at: Option<Placement>,
    /// The exact set of compute instances, which may be empty.
    pub compute: Vec<RequestedCompute>,
    /// Profile name.
    pub profile: String,
}

/// A requested compute instance. The type does not say whether its MIG device is shared, because a
/// change of sharing does not need a new instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedCompute {
    /// Profile id that the driver reports within the GPU instance profile.
    pub profile_id: u32,
    /// Fixed placement in compute slots; `None` if any placement is allowed.
    pub at: Option<Placement>,
    /// Profile name.
    pub profile: String,
}

impl Target {
    /// Returns the target that describes the existing instances, with all placements.
    ///
    /// The target includes instances whose profile is not in the geometry: the profile id and the
    /// placement suffice to create such instances again.
    #[must_use]
    pub fn of_instances(geometry: &Geometry, instances: &[GpuInstance]) -> Self {
        let wanted = |instance: &GpuInstance| RequestedInstance {
            profile_id: instance.profile_id,
            at: Some(instance.placement),
            compute: instance
                .compute
                .iter()
                .map(|c| RequestedCompute { profile_id: c.profile_id, at: c.placement, profile: c.profile.clone() })
                .collect(),
            profile: geometry
                .profile(instance.profile_id)
                .map_or_else(|| instance.profile.clone(), |p| p.profile.name.clone()),
        };
        Self { instances: instances.iter().map(wanted).collect() }
    }
}

impl fmt::Display for RequestedInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.profile)?;
        match self.at {
            Some(at) => write!(f, "@{}", at.start),
            None => Ok(()),
        }
    }
}
