//! The kinds of failure: NVML's return codes by name, and failures outside the driver.

use serde::{Deserialize, Serialize};

/// The kind of failure. The first 31 kinds are NVML's, in the order of `nvmlReturn_t`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// 1: a call before the library was initialised.
    Uninitialized,
    /// 2: an argument is wrong. Also returned for a stale handle, or a profile index that the driver does not know.
    InvalidArgument,
    /// 3: the GPU, its mode or its profiles do not support the call.
    NotSupported,
    /// 4: the process lacks permission.
    NoPermission,
    /// 5: deprecated by NVML, which still defines the number.
    AlreadyInitialized,
    /// 6: no such object.
    NotFound,
    /// 7: a buffer was too small even after it grew.
    InsufficientSize,
    /// 8: the external power cables are not attached properly.
    InsufficientPower,
    /// 9: the kernel module is not loaded.
    DriverNotLoaded,
    /// 10: the driver's own timeout.
    Timeout,
    /// 11: the kernel detected an interrupt problem of the GPU.
    IrqIssue,
    /// 12: a library that NVML itself needs is missing.
    LibraryNotFound,
    /// 13: a function that NVML itself needs is missing.
    FunctionNotFound,
    /// 14: the infoROM is corrupted.
    CorruptedInfoRom,
    /// 15: the GPU has fallen off the bus.
    GpuIsLost,
    /// 16: the GPU needs a reset first.
    ResetRequired,
    /// 17: the operating system or its cgroups block the GPU.
    OperatingSystem,
    /// 18: the kernel module and the library have different versions.
    LibRmVersionMismatch,
    /// 19: the object is in use.
    InUse,
    /// 20: not enough memory.
    Memory,
    /// 21: there is no data.
    NoData,
    /// 22: this vGPU operation is not available with ECC enabled.
    VgpuEccNotSupported,
    /// 23: there is no capacity, or the placement is taken.
    InsufficientResources,
    /// 24: the requested frequency is not supported.
    FreqNotSupported,
    /// 25: the driver does not know this version of a struct.
    ArgumentVersionMismatch,
    /// 26: the call is deprecated.
    Deprecated,
    /// 27: not ready.
    NotReady,
    /// 28: no such GPU.
    GpuNotFound,
    /// 29: invalid state.
    InvalidState,
    /// 30: this kind of reset is not supported.
    ResetTypeNotSupported,
    /// 999: an unspecified error of the driver.
    Unknown,
    /// Any other return code of the driver.
    Code(u32),
    /// The library lacks the function, because the driver is too old.
    MissingSymbol,
    /// The library cannot be loaded.
    LibraryMissing,
    /// The library loads but is not NVML.
    NotNvml,
    /// The rules of gpushd's cgroup do not allow the driver's devices, so NVML cannot start.
    DeviceDenied,
    /// The driver's answer is invalid, for example text that is not UTF-8.
    Garbled,
    /// The driver reported success, but reading back does not show the change. [`crate::Hardware`]
    /// has already checked this in a fresh session.
    NotReflected,
    /// The call did not return in time. A mutation may still take effect. Do not assume or undo anything before
    /// [`crate::Hardware::settle`] returns.
    Deadline {
        /// Whether the call may still change the hardware.
        may_land: bool,
    },
    /// An earlier call to this GPU passed its deadline, and the outcome of that call is still
    /// unknown.
    Unsettled,
    /// The worker process ended during the call, and can no longer change the hardware. A reading
    /// shows what a mutation has changed.
    WorkerDied {
        /// Whether the call may have changed the hardware before the worker ended.
        may_have_landed: bool,
    },
    /// The worker process cannot be started, or ends repeatedly.
    WorkerUnavailable,
    /// Driver calls are suspended: see [`crate::Hardware::stop`].
    Stopped,
}

impl ErrorKind {
    /// Returns whether the driver refused a handle because its object no longer exists.
    #[must_use]
    pub fn is_stale_handle(&self) -> bool {
        matches!(self, Self::NotFound | Self::InvalidArgument)
    }

    /// Converts an `nvmlReturn_t` that is not success.
    #[must_use]
    pub fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Uninitialized,
            2 => Self::InvalidArgument,
            3 => Self::NotSupported,
            4 => Self::NoPermission,
            5 => Self::AlreadyInitialized,
            6 => Self::NotFound,
            7 => Self::InsufficientSize,
            8 => Self::InsufficientPower,
            9 => Self::DriverNotLoaded,
            10 => Self::Timeout,
            11 => Self::IrqIssue,
            12 => Self::LibraryNotFound,
            13 => Self::FunctionNotFound,
            14 => Self::CorruptedInfoRom,
            15 => Self::GpuIsLost,
            16 => Self::ResetRequired,
            17 => Self::OperatingSystem,
            18 => Self::LibRmVersionMismatch,
            19 => Self::InUse,
            20 => Self::Memory,
            21 => Self::NoData,
            22 => Self::VgpuEccNotSupported,
            23 => Self::InsufficientResources,
            24 => Self::FreqNotSupported,
            25 => Self::ArgumentVersionMismatch,
            26 => Self::Deprecated,
            27 => Self::NotReady,
            28 => Self::GpuNotFound,
            29 => Self::InvalidState,
            30 => Self::ResetTypeNotSupported,
            999 => Self::Unknown,
            other => Self::Code(other),
        }
    }

    /// Returns the `nvmlReturn_t`; `None` for a failure outside the driver.
    #[must_use]
    pub fn code(&self) -> Option<u32> {
        Some(match self {
            Self::Uninitialized => 1,
            Self::InvalidArgument => 2,
            Self::NotSupported => 3,
            Self::NoPermission => 4,
            Self::AlreadyInitialized => 5,
            Self::NotFound => 6,
            Self::InsufficientSize => 7,
            Self::InsufficientPower => 8,
            Self::DriverNotLoaded => 9,
            Self::Timeout => 10,
            Self::IrqIssue => 11,
            Self::LibraryNotFound => 12,
            Self::FunctionNotFound => 13,
            Self::CorruptedInfoRom => 14,
            Self::GpuIsLost => 15,
            Self::ResetRequired => 16,
            Self::OperatingSystem => 17,
            Self::LibRmVersionMismatch => 18,
            Self::InUse => 19,
            Self::Memory => 20,
            Self::NoData => 21,
            Self::VgpuEccNotSupported => 22,
            Self::InsufficientResources => 23,
            Self::FreqNotSupported => 24,
            Self::ArgumentVersionMismatch => 25,
            Self::Deprecated => 26,
            Self::NotReady => 27,
            Self::GpuNotFound => 28,
            Self::InvalidState => 29,
            Self::ResetTypeNotSupported => 30,
            Self::Unknown => 999,
            Self::Code(code) => *code,
            Self::MissingSymbol
            | Self::LibraryMissing
            | Self::NotNvml
            | Self::DeviceDenied
            | Self::Garbled
            | Self::NotReflected
            | Self::Deadline { .. }
            | Self::Unsettled
            | Self::WorkerDied { .. }
            | Self::WorkerUnavailable
            | Self::Stopped => return None,
        })
    }

    /// Returns the meaning in a few words.
    #[must_use]
    pub fn meaning(&self) -> &'static str {
        match self {
            Self::Uninitialized => "NVML is not initialised",
            Self::InvalidArgument => "invalid argument or stale driver handle",
            Self::NotSupported => "not supported by this GPU, its mode or its driver",
            Self::NoPermission => "no permission",
            Self::AlreadyInitialized => "already initialised",
            Self::NotFound => "not found",
            Self::InsufficientSize => "a buffer is too small",
            Self::InsufficientPower => "external power cables are not attached",
            Self::DriverNotLoaded => "the NVIDIA driver is not loaded",
            Self::Timeout => "the driver's own timeout passed",
            Self::IrqIssue => "the kernel has an interrupt problem with the GPU",
            Self::LibraryNotFound => "a library that NVML needs is missing",
            Self::FunctionNotFound => "a function that NVML needs is missing",
            Self::CorruptedInfoRom => "the infoROM is corrupted",
            Self::GpuIsLost => "the GPU has fallen off the bus",
            Self::ResetRequired => "the GPU needs a reset first",
            Self::OperatingSystem => "blocked by the operating system or its cgroups",
            Self::LibRmVersionMismatch => "kernel module and library are of different versions",
            Self::InUse => "in use",
            Self::Memory => "out of memory",
            Self::NoData => "no data",
            Self::VgpuEccNotSupported => "vGPU is not possible with ECC on",
            Self::InsufficientResources => "no capacity left, or the placement is taken",
            Self::FreqNotSupported => "the frequency is not supported",
            Self::ArgumentVersionMismatch => "the driver does not know this struct version",
            Self::Deprecated => "the call is deprecated",
            Self::NotReady => "not ready",
            Self::GpuNotFound => "no such GPU",
            Self::InvalidState => "invalid state",
            Self::ResetTypeNotSupported => "this kind of reset is not supported",
            Self::Unknown => "the driver gives no reason",
            Self::Code(_) => "a code that this version of gpush does not know",
            Self::MissingSymbol => "the driver's library has no such function",
            Self::LibraryMissing => "the library could not be loaded",
            Self::NotNvml => "the library is not NVML",
            Self::DeviceDenied => "systemd does not allow gpushd to open the driver's devices",
            Self::Garbled => "the driver's answer is not valid",
            Self::NotReflected => "the driver reported success, but the GPU does not show the change",
            Self::Deadline { may_land: true } => "no answer in time; the call may still take effect",
            Self::Deadline { may_land: false } => "no answer in time",
            Self::Unsettled => "an earlier call has not returned and its outcome is not known",
            Self::WorkerDied { may_have_landed: true } => {
                "gpushd's driver worker died during the call; the call may have taken effect"
            }
            Self::WorkerDied { may_have_landed: false } => "gpushd's driver worker died during the call",
            Self::WorkerUnavailable => "gpushd's driver worker does not run",
            Self::Stopped => "gpushd has suspended calls to the driver",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_keeps_its_number() {
        for code in (1..=1000).chain([u32::MAX]) {
            let kind = ErrorKind::from_code(code);
            assert_eq!(kind.code(), Some(code));
            let named = !matches!(kind, ErrorKind::Code(_));
            assert_eq!(named, (1..=30).contains(&code) || code == 999, "{code}");
            assert!(!kind.meaning().is_empty());
        }
    }
}
