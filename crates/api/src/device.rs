//! MIG devices: one record per compute instance, with its use and whether it is available.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    ids::{GpuIndex, GpuUuid, TargetUuid},
    process::Process,
};

/// Use of a MIG device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum DeviceUse {
    /// No lease includes the device, and no process runs on it.
    Free,
    /// A lease includes the device, and no process runs on it.
    Granted,
    /// Processes run on the device.
    InUse,
    /// No process runs on the device, but the device is not available: its GPU or its MPS daemon
    /// accepts no new work, or a queued operation or lease request needs the device.
    Reserved,
}

impl DeviceUse {
    /// Returns the name in JSON and in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Granted => "granted",
            Self::InUse => "in_use",
            Self::Reserved => "reserved",
        }
    }
}

/// A lease on a MIG device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DeviceGrant {
    /// Lease id, such as `L12`.
    pub id: String,
    /// User id of the holder.
    pub uid: u32,
    /// User name of the holder; absent if the uid has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Time of expiry; absent if the lease has no end time.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at: Option<Timestamp>,
}

/// A MIG device: a compute instance, or a GPU instance that has no compute instance yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MigDevice {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// GPU instance as profile and placement, such as `3g.40gb@4`.
    pub instance: String,
    /// Name of the device in commands, without the GPU: `3g.40gb@4`; for a part of a GPU instance, with the first compute
    /// slice of the part: `1c.3g.40gb@4/1`. Absent if there is no compute instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Profile of the compute instance, such as `1c.3g.40gb`. If the compute instance uses all
    /// compute slices, this is the profile of the GPU instance.
    pub profile: String,
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id; absent if the GPU instance has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
    /// UUID for programs, `MIG-<uuid>`; absent if there is no compute instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub uuid: Option<TargetUuid>,
    /// Memory of the GPU instance, in MiB; absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Use of the device.
    #[serde(rename = "use")]
    pub usage: DeviceUse,
    /// Whether a lease request of the caller can get the device now. False if `use` is not `free`. If `use` is `free`,
    /// and this is false, `reason` says why.
    pub available: bool,
    /// Leases on the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub grants: Vec<DeviceGrant>,
    /// Processes on the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
    /// Why `use` is `reserved`, or why a device whose `use` is `free` is not `available`. Absent for other devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
