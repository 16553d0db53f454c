//! The typed error of driver calls.
//!
//! Every return code of NVML has a name here. Unknown codes keep their number, so no code becomes a general "unknown
//! error". Other kinds cover failures outside the driver: no library, no symbol, no answer in time, no worker. The
//! `Display` text names the object, the function and the meaning; [`DriverError::to_api`] adds a hint.

mod kind;

use gpush_api::{ApiError, Code};
use serde::{Deserialize, Serialize};

pub use kind::ErrorKind;

/// A failed driver call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverError {
    /// The kind of failure.
    pub kind: ErrorKind,
    /// The NVML function that failed; the name of the request if no function was called.
    pub function: String,
    /// The GPU: `GPU-<uuid>`, or `index N` before its UUID is known.
    pub gpu: Option<String>,
    /// Further details: the loader's message, an object's id, a signal.
    pub detail: Option<String>,
}

impl DriverError {
    /// Creates an error of `function`.
    pub fn new(kind: ErrorKind, function: impl Into<String>) -> Self {
        Self { kind, function: function.into(), gpu: None, detail: None }
    }

    /// Sets the GPU, unless one is set already.
    #[must_use]
    pub fn on(mut self, gpu: impl std::fmt::Display) -> Self {
        self.gpu.get_or_insert_with(|| gpu.to_string());
        self
    }

    /// Adds further details.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Returns whether the call may still change the hardware, now or later.
    #[must_use]
    pub fn may_land(&self) -> bool {
        matches!(self.kind, ErrorKind::Deadline { may_land: true })
    }

    /// Returns whether no call can succeed until an administrator repairs the driver.
    #[must_use]
    pub fn is_driver_unavailable(&self) -> bool {
        matches!(
            self.kind,
            ErrorKind::DriverNotLoaded
                | ErrorKind::LibRmVersionMismatch
                | ErrorKind::LibraryMissing
                | ErrorKind::NotNvml
                | ErrorKind::DeviceDenied
                | ErrorKind::LibraryNotFound
                | ErrorKind::FunctionNotFound
                | ErrorKind::Uninitialized
        )
    }

    /// Returns the error for the API, with a hint.
    #[must_use]
    pub fn to_api(&self) -> ApiError {
        let error = ApiError::new(self.api_code(), self.to_string());
        let error = match self.hint() {
            Some(hint) => error.hint(hint),
            None => error,
        };
        if self.is_retryable() { error.retryable() } else { error }
    }

    fn api_code(&self) -> Code {
        match self.kind {
            ErrorKind::NoPermission => Code::Denied,
            ErrorKind::NotSupported | ErrorKind::MissingSymbol => Code::Unsupported,
            ErrorKind::GpuIsLost => Code::GpuLost,
            ErrorKind::InUse => Code::Blocked,
            ErrorKind::GpuNotFound => Code::NotFound,
            ErrorKind::DriverNotLoaded
            | ErrorKind::LibRmVersionMismatch
            | ErrorKind::LibraryMissing
            | ErrorKind::NotNvml
            | ErrorKind::DeviceDenied
            | ErrorKind::LibraryNotFound
            | ErrorKind::FunctionNotFound
            | ErrorKind::Uninitialized
            | ErrorKind::WorkerUnavailable
            | ErrorKind::Stopped => Code::DriverUnavailable,
            ErrorKind::Deadline { .. } | ErrorKind::Unsettled => Code::DriverTimeout,
            ErrorKind::InvalidArgument
            | ErrorKind::AlreadyInitialized
            | ErrorKind::NotFound
            | ErrorKind::InsufficientSize
            | ErrorKind::InsufficientPower
            | ErrorKind::Timeout
            | ErrorKind::IrqIssue
            | ErrorKind::CorruptedInfoRom
            | ErrorKind::ResetRequired
            | ErrorKind::OperatingSystem
            | ErrorKind::Memory
            | ErrorKind::NoData
            | ErrorKind::VgpuEccNotSupported
            | ErrorKind::InsufficientResources
            | ErrorKind::FreqNotSupported
            | ErrorKind::ArgumentVersionMismatch
            | ErrorKind::Deprecated
            | ErrorKind::NotReady
            | ErrorKind::InvalidState
            | ErrorKind::ResetTypeNotSupported
            | ErrorKind::Unknown
            | ErrorKind::Code(_)
            | ErrorKind::Garbled
            | ErrorKind::NotReflected
            | ErrorKind::WorkerDied { .. } => Code::DriverError,
        }
    }

    fn is_retryable(&self) -> bool {
        matches!(
            self.kind,
            ErrorKind::Timeout
                | ErrorKind::NotReady
                | ErrorKind::InUse
                | ErrorKind::Deadline { .. }
                | ErrorKind::Unsettled
                | ErrorKind::WorkerDied { .. }
                | ErrorKind::WorkerUnavailable
                | ErrorKind::Stopped
        )
    }

    /// Returns the hint, if there is one.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let gpu = self.gpu.as_deref().unwrap_or("GPU");
        // A GPU whose UUID is not known has the label `index 3`.
        let gpu = gpu.strip_prefix("index ").unwrap_or(gpu);
        Some(match self.kind {
            ErrorKind::DriverNotLoaded => {
                "load the kernel module with `modprobe nvidia`, or install the NVIDIA driver if the host has no such \
                 module; gpushd continues as soon as the driver is loaded"
                    .to_owned()
            }
            ErrorKind::LibRmVersionMismatch => {
                "the driver was updated under a running kernel module: reboot, or reload the module \
                 (`rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia`)"
                    .to_owned()
            }
            ErrorKind::LibraryMissing => {
                "install the NVIDIA driver's libraries, or set `library` under [driver] in the config and restart gpushd"
                    .to_owned()
            }
            ErrorKind::NotNvml => "run `ldconfig -p | grep libnvidia-ml` to see which library the loader finds, or set \
                `library` under [driver] in the config and restart gpushd"
                .to_owned(),
            // NVML cannot open a denied device to see whether the driver is loaded. So the hint begins with loading the
            // driver.
            ErrorKind::DeviceDenied => "load the driver with `modprobe nvidia` if it is not loaded, then run `systemctl restart gpushd`: \
                systemd allows only the devices that existed when it started gpushd"
                .to_owned(),
            ErrorKind::LibraryNotFound | ErrorKind::FunctionNotFound => {
                "the driver's installation is incomplete: reinstall it".to_owned()
            }
            ErrorKind::NoPermission => {
                "gpushd must run as root, or with CAP_SYS_ADMIN and access to /proc/driver/nvidia/capabilities/mig/config"
                    .to_owned()
            }
            ErrorKind::GpuIsLost => gpush_api::LOST_GPU_HINT.to_owned(),
            ErrorKind::ResetRequired => {
                format!("reset the GPU when it is idle: `gpushctl gpu reset {gpu}` (administrator)")
            }
            // An open handle is enough to cause this error. But the driver's process lists do not contain the processes
            // that only hold a handle. So the hint also names `fuser`.
            ErrorKind::InUse => format!(
                "run `gpushctl gpu holders {gpu}` (administrator) to see which programs have the GPU open, often a \
                monitor (nv-hostengine, dcgm-exporter, nvidia-persistenced)"
            ),
            ErrorKind::NotSupported | ErrorKind::MissingSymbol => {
                format!("run `gpushctl gpu show {gpu}` to see what the GPU supports; a newer driver may support more")
            }
            ErrorKind::Deadline { may_land: true } | ErrorKind::Unsettled => {
                format!(
                    "check the GPU again with `gpushctl gpu show {gpu}`; its state is `unknown` until the call returns"
                )
            }
            ErrorKind::InsufficientResources => format!("run `gpushctl gpu show {gpu}` to see the state of the GPU"),
            ErrorKind::OperatingSystem => {
                "check whether the device cgroup of gpushd denies access to the GPU".to_owned()
            },
            ErrorKind::Uninitialized
            | ErrorKind::InvalidArgument
            | ErrorKind::AlreadyInitialized
            | ErrorKind::NotFound
            | ErrorKind::InsufficientSize
            | ErrorKind::InsufficientPower
            | ErrorKind::Timeout
            | ErrorKind::IrqIssue
            | ErrorKind::CorruptedInfoRom
            | ErrorKind::Memory
            | ErrorKind::NoData
            | ErrorKind::VgpuEccNotSupported
            | ErrorKind::FreqNotSupported
            | ErrorKind::ArgumentVersionMismatch
            | ErrorKind::Deprecated
            | ErrorKind::NotReady
            | ErrorKind::GpuNotFound
            | ErrorKind::InvalidState
            | ErrorKind::ResetTypeNotSupported
            | ErrorKind::Unknown
            | ErrorKind::Code(_)
            | ErrorKind::Garbled
            | ErrorKind::NotReflected
            | ErrorKind::Deadline { may_land: false }
            | ErrorKind::WorkerDied { .. }
            | ErrorKind::WorkerUnavailable
            | ErrorKind::Stopped => return None,
        })
    }
}

impl std::fmt::Display for DriverError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(gpu) = &self.gpu {
            write!(f, "{gpu}: ")?;
        }
        write!(f, "{}: {}", self.function, self.kind.meaning())?;
        if let Some(code) = self.kind.code() {
            write!(f, " (NVML {code})")?;
        }
        if let Some(detail) = &self.detail {
            write!(f, ": {detail}")?;
        }
        Ok(())
    }
}

impl std::error::Error for DriverError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_object_function_and_meaning() {
        let error = DriverError::new(ErrorKind::InUse, "nvmlGpuInstanceDestroy").on("GPU-1").detail("GPU instance 3");
        assert_eq!(error.to_string(), "GPU-1: nvmlGpuInstanceDestroy: in use (NVML 19): GPU instance 3");
        let error = DriverError::new(ErrorKind::Code(77), "nvmlInit_v2");
        assert!(error.to_string().contains("NVML 77"), "{error}");
        assert_eq!(error.clone().on("GPU-1").on("GPU-2").gpu.as_deref(), Some("GPU-1"), "the first to know names it");
    }

    #[test]
    fn driver_load_errors_have_commands() {
        let hint = |kind| DriverError::new(kind, "nvmlInit_v2").to_api();
        let missing = hint(ErrorKind::DriverNotLoaded);
        assert_eq!(missing.code, Code::DriverUnavailable);
        assert!(missing.hint.is_some_and(|h| h.contains("modprobe nvidia")));
        let differ = hint(ErrorKind::LibRmVersionMismatch);
        assert_eq!(differ.code, Code::DriverUnavailable);
        assert!(differ.hint.is_some_and(|h| h.contains("reboot") && h.contains("modprobe")));
    }

    #[test]
    fn in_use_without_a_process_hints_at_the_holder() {
        let hint = DriverError::new(ErrorKind::InUse, "nvmlGpuInstanceDestroy").on("GPU-1").hint().unwrap();
        for part in ["`gpushctl gpu holders GPU-1`", "nv-hostengine", "nvidia-persistenced"] {
            assert!(hint.contains(part), "{part}: {hint}");
        }
    }

    #[test]
    fn errors_are_serialized_unchanged() {
        let kinds = (1..=31).map(ErrorKind::from_code).chain([
            ErrorKind::Deadline { may_land: true },
            ErrorKind::WorkerDied { may_have_landed: false },
            ErrorKind::MissingSymbol,
        ]);
        for kind in kinds {
            let error = DriverError::new(kind, "f").on("GPU-1");
            let json = serde_json::to_string(&error).unwrap();
            assert_eq!(serde_json::from_str::<DriverError>(&json).unwrap(), error, "{json}");
        }
    }
}
