//! Holders of a GPU: what has the GPU open. The driver refuses some changes and every reset while a
//! GPU has holders.

use serde::{Deserialize, Serialize};

use crate::ids::{GpuIndex, GpuUuid};

/// A process or a kernel module that has a GPU open.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Holder {
    /// Process id. Absent for a kernel module, and for callers who may not see the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// User id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// User name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// systemd unit of the process, such as `nvidia-dcgm.service` or `session-3.scope`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// If the process is an MPS server: `MPS server of GPU 0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<String>,
    /// If the process is an MPS server of gpushd: the target of its daemon in commands, such as `0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_target: Option<String>,
    /// If the holder is a kernel module: its name, such as `nvidia_drm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// Device nodes that the process has open.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
}

impl Holder {
    /// Returns the name of the process's systemd service without `.service`; `None` if its unit is
    /// not a service, or is the service manager of a user.
    #[must_use]
    pub fn service(&self) -> Option<&str> {
        self.unit.as_deref()?.strip_suffix(".service").filter(|name| !name.starts_with("user@"))
    }
}

/// Body of `GET /v1/gpus/{gpu}/holders`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuHolders {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// The holders. gpushd's own processes are left out.
    pub holders: Vec<Holder>,
}
