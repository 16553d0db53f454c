//! NVML's return codes, as the library returns them.
//!
//! A newtype and constants rather than an enum: fault rules may name any number, also one that
//! this driver version does not know, and clients must see just that number.

/// An NVML return code other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ret(pub(crate) u32);

/// What the body of an entry gives back.
pub(crate) type Outcome<T = ()> = Result<T, Ret>;

/// Everything went well.
pub(crate) const SUCCESS: u32 = 0;

impl Ret {
    pub(crate) const UNINITIALIZED: Ret = Ret(1);
    pub(crate) const INVALID_ARGUMENT: Ret = Ret(2);
    pub(crate) const NOT_SUPPORTED: Ret = Ret(3);
    pub(crate) const NO_PERMISSION: Ret = Ret(4);
    pub(crate) const NOT_FOUND: Ret = Ret(6);
    pub(crate) const INSUFFICIENT_SIZE: Ret = Ret(7);
    pub(crate) const DRIVER_NOT_LOADED: Ret = Ret(9);
    pub(crate) const TIMEOUT: Ret = Ret(10);
    pub(crate) const GPU_IS_LOST: Ret = Ret(15);
    pub(crate) const LIB_RM_VERSION_MISMATCH: Ret = Ret(18);
    pub(crate) const IN_USE: Ret = Ret(19);
    pub(crate) const INSUFFICIENT_RESOURCES: Ret = Ret(23);
    pub(crate) const ARGUMENT_VERSION_MISMATCH: Ret = Ret(25);
    pub(crate) const UNKNOWN: Ret = Ret(999);
}

/// Text of a code, in the words of the 550 driver.
pub(crate) fn text(code: u32) -> &'static std::ffi::CStr {
    match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"GPU access blocked by the operating system",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        22 => c"vGPU ECC not supported",
        23 => c"Insufficient Resources",
        24 => c"Invalid Frequency",
        25 => c"Argument version mismatch",
        26 => c"Requested functionality has been deprecated",
        27 => c"System is not in ready state",
        28 => c"No supported GPUs were found",
        29 => c"Invalid state",
        _ => c"Unknown Error",
    }
}
