//! NVML in this process: a safe and complete layer for MIG.
//!
//! nvml-wrapper loads the library, keeps the session and identifies GPUs. It does not support instances, and its
//! `possible_placements` is always empty. So all MIG calls use the raw functions that nvml-wrapper exposes. If the
//! library lacks a function, only calls of that function fail ([`ErrorKind::MissingSymbol`]). Profile indexes that the
//! driver does not know are skipped.
//!
//! Each file has one subject: `load` (the library), `system` (versions), `lookup` (of GPUs), `reading` (of a whole
//! GPU), `profiles` and `compute_profiles`, `gpu_instance`, `compute_instance`, `mode` (MIG mode), `compute_mode`,
//! `processes`, `events`, `nvlink`, `sensors`, `sampling` (of use), and `names` (profile names for old drivers).
#![allow(unsafe_code)] // NVML is a C library: every call into it is unsafe.

use gpush_api::{GpuIndex, GpuUuid};
use nvml_wrapper::{Nvml, error::NvmlError};
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t};

use crate::error::{DriverError, ErrorKind};

/// Calls an NVML function. Returns an error if the loaded library does not contain this function.
macro_rules! nvml {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $driver.lib().$function.as_ref() {
            Ok(function) => $crate::driver::returned(stringify!($function), function($($argument),*)),
            Err(error) => Err($crate::driver::absent(stringify!($function), error)),
        }
    };
}

mod compute_instance;
mod compute_mode;
mod compute_profiles;
mod events;
mod gpu_instance;
mod load;
mod lookup;
mod memory_limits;
mod mode;
mod names;
mod nvlink;
mod processes;
mod profiles;
mod reading;
mod sampling;
mod sensors;
mod system;

pub use events::EventSet;
pub use reading::ProfileCache;
pub use sampling::Sampling;

/// A loaded library with an open session, which is closed on drop.
#[derive(Debug)]
pub struct Driver {
    nvml: Nvml,
    library: String,
    simulated: bool,
}

impl Driver {
    fn lib(&self) -> &NvmlLib {
        self.nvml.lib()
    }

    /// Returns whether the library is gpush's simulator.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.simulated
    }
}

/// A GPU of an open session, by handle.
#[derive(Debug, Clone)]
pub struct Gpu<'d> {
    driver: &'d Driver,
    handle: nvmlDevice_t,
    index: GpuIndex,
    uuid: GpuUuid,
}

impl Gpu<'_> {
    /// Returns `GPU-<uuid>`.
    #[must_use]
    pub fn uuid(&self) -> &GpuUuid {
        &self.uuid
    }
}

fn returned(function: &str, code: u32) -> Result<(), DriverError> {
    if code == 0 { Ok(()) } else { Err(DriverError::new(ErrorKind::from_code(code), function)) }
}

fn absent(function: &str, error: &impl std::fmt::Display) -> DriverError {
    DriverError::new(ErrorKind::MissingSymbol, function).detail(error.to_string())
}

/// Converts an error of nvml-wrapper.
fn wrapped(function: &'static str) -> impl FnOnce(NvmlError) -> DriverError {
    move |error| match error {
        NvmlError::FailedToLoadSymbol(text) => DriverError::new(ErrorKind::MissingSymbol, function).detail(text),
        NvmlError::LibloadingError(error) => {
            DriverError::new(ErrorKind::LibraryMissing, function).detail(error.to_string())
        }
        NvmlError::Utf8Error(_) | NvmlError::NulError(_) | NvmlError::StringTooLong { .. } => {
            DriverError::new(ErrorKind::Garbled, function).detail(error.to_string())
        }
        other => {
            let detail = other.to_string();
            let kind = ErrorKind::from_code(other.into());
            if kind == ErrorKind::Unknown {
                DriverError::new(kind, function).detail(detail)
            } else {
                DriverError::new(kind, function)
            }
        }
    }
}

/// Converts a number of the driver to a narrower type. A number that does not fit becomes
/// `largest`. No rule about capacity treats `largest` as free capacity.
fn narrow<T: TryFrom<u32>>(value: u32, largest: T) -> T {
    T::try_from(value).unwrap_or(largest)
}

/// Returns the text in a fixed C buffer, up to its first NUL.
fn text(buffer: &[std::os::raw::c_char]) -> Option<String> {
    let bytes: Vec<u8> = buffer.iter().take_while(|c| **c != 0).map(|c| c.to_ne_bytes()[0]).collect();
    String::from_utf8(bytes).ok()
}
