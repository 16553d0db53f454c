//! NVML's return codes, with the numbers of `nvml.h` (driver 550, `nvmlReturn_t`).
//!
//! The state machine returns these codes, because clients depend on the exact code for each
//! condition.

use std::fmt;
use std::str::FromStr;

macro_rules! returns {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $upper:literal;)*) => {
        /// A return code of an NVML call.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Return { $($(#[$doc])* $name = $code,)* }

        impl Return {
            /// All codes, in order.
            pub const ALL: &'static [Return] = &[$(Return::$name,)*];

            /// Returns the name without the `NVML_` and `NVML_ERROR_` prefixes, such as `IN_USE`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Return::$name => $upper,)* }
            }
        }
    };
}

returns! {
    /// The call succeeded.
    Success = 0, "SUCCESS";
    /// `nvmlInit` was not called, or the driver session has ended.
    Uninitialized = 1, "UNINITIALIZED";
    /// An argument is invalid, or a handle refers to an object that no longer exists.
    InvalidArgument = 2, "INVALID_ARGUMENT";
    /// The device, or its current mode, does not support the call.
    NotSupported = 3, "NOT_SUPPORTED";
    /// The caller does not have permission.
    NoPermission = 4, "NO_PERMISSION";
    /// The library was initialised twice. Deprecated.
    AlreadyInitialized = 5, "ALREADY_INITIALIZED";
    /// An object with this name or id does not exist.
    NotFound = 6, "NOT_FOUND";
    /// The caller's array is too small.
    InsufficientSize = 7, "INSUFFICIENT_SIZE";
    /// External power is not attached.
    InsufficientPower = 8, "INSUFFICIENT_POWER";
    /// The kernel driver is not loaded.
    DriverNotLoaded = 9, "DRIVER_NOT_LOADED";
    /// The call timed out.
    Timeout = 10, "TIMEOUT";
    /// Interrupts do not arrive.
    IrqIssue = 11, "IRQ_ISSUE";
    /// The library could not be loaded.
    LibraryNotFound = 12, "LIBRARY_NOT_FOUND";
    /// This library does not have the function.
    FunctionNotFound = 13, "FUNCTION_NOT_FOUND";
    /// The infoROM is corrupt.
    CorruptedInforom = 14, "CORRUPTED_INFOROM";
    /// The GPU fell off the bus.
    GpuIsLost = 15, "GPU_IS_LOST";
    /// The GPU needs a reset first.
    ResetRequired = 16, "RESET_REQUIRED";
    /// The operating system blocks the GPU.
    OperatingSystem = 17, "OPERATING_SYSTEM";
    /// Driver and library do not match.
    LibRmVersionMismatch = 18, "LIB_RM_VERSION_MISMATCH";
    /// The object is in use.
    InUse = 19, "IN_USE";
    /// Memory is not sufficient.
    Memory = 20, "MEMORY";
    /// Data is not available.
    NoData = 21, "NO_DATA";
    /// The call is not supported on a vGPU with ECC.
    VgpuEccNotSupported = 22, "VGPU_ECC_NOT_SUPPORTED";
    /// Capacity is missing, or the requested placement is occupied.
    InsufficientResources = 23, "INSUFFICIENT_RESOURCES";
    /// The frequency is not supported.
    FreqNotSupported = 24, "FREQ_NOT_SUPPORTED";
    /// The version word of a struct is unknown.
    ArgumentVersionMismatch = 25, "ARGUMENT_VERSION_MISMATCH";
    /// The function is deprecated.
    Deprecated = 26, "DEPRECATED";
    /// The object is not ready.
    NotReady = 27, "NOT_READY";
    /// The GPU does not exist.
    GpuNotFound = 28, "GPU_NOT_FOUND";
    /// The call is not possible in the present state.
    InvalidState = 29, "INVALID_STATE";
    /// This kind of reset is not supported.
    ResetTypeNotSupported = 30, "RESET_TYPE_NOT_SUPPORTED";
    /// Internal error.
    Unknown = 999, "UNKNOWN";
}

impl Return {
    /// Returns the number in `nvml.h`.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Returns the code with this number.
    #[must_use]
    pub fn of_code(code: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|known| known.code() == code)
    }
}

impl fmt::Display for Return {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.code())
    }
}

impl std::error::Error for Return {}

/// The error for a text that is not the name of a return code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no NVML return code; give a number or a name such as IN_USE")]
pub struct UnknownReturn(pub String);

impl FromStr for Return {
    type Err = UnknownReturn;

    /// Parses `19`, `IN_USE`, `in_use` or `NVML_ERROR_IN_USE`.
    fn from_str(text: &str) -> Result<Self, UnknownReturn> {
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("NVML_ERROR_").or_else(|| upper.strip_prefix("NVML_")).unwrap_or(&upper);
        let found = match name.parse::<u32>() {
            Ok(code) => Self::of_code(code),
            Err(_) => Self::ALL.iter().copied().find(|known| known.name() == name),
        };
        found.ok_or_else(|| UnknownReturn(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_read_back() {
        for &known in Return::ALL {
            assert_eq!(Return::of_code(known.code()), Some(known));
            assert_eq!(known.name().parse(), Ok(known));
            assert_eq!(format!("NVML_ERROR_{}", known.name()).to_lowercase().parse(), Ok(known));
            assert_eq!(known.code().to_string().parse(), Ok(known));
        }
        assert!("31".parse::<Return>().is_err());
        assert!("BUSY".parse::<Return>().is_err());
    }
}
