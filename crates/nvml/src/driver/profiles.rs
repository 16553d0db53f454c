//! GPU instance profiles of a GPU, with their placements and their remaining capacity.
//!
//! NVML returns a profile for an enum index, and drivers differ in the indexes that they support.
//! So gpush queries all indexes below [`INDEXES`], and skips those that the driver refuses. The
//! query has three versions; gpush uses the newest version that the library contains. The first
//! version does not return a name, so [`super::names`] computes the name.

use gpush_api::{Engines, GpuProfile, Placement};
use nvml_wrapper_sys::bindings as sys;

use super::{Gpu, names, narrow, text};
use crate::error::{DriverError, ErrorKind};

/// Number of enum indexes to query. NVML 13 has 18. The remaining indexes are for newer drivers.
pub(super) const INDEXES: u32 = 32;

/// Length of the buffers, which suffices for all of NVML's lists about one GPU.
const ENTRIES: usize = 64;

/// Returns the version word of an NVML struct: its size, with the version in the top byte.
pub(super) fn version<T>(version: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or_default() | version << 24
}

/// Returns whether to try an older version of the query. If an older driver does not know a
/// version, it returns one of several errors, such as "invalid argument".
pub(super) fn ask_older(error: &DriverError) -> bool {
    matches!(
        error.kind,
        ErrorKind::MissingSymbol
            | ErrorKind::FunctionNotFound
            | ErrorKind::ArgumentVersionMismatch
            | ErrorKind::InvalidArgument
            | ErrorKind::NotSupported
    )
}

/// Returns whether the driver has no profile at this index.
pub(super) fn no_such_profile(error: &DriverError) -> bool {
    matches!(error.kind, ErrorKind::InvalidArgument | ErrorKind::NotSupported | ErrorKind::NotFound)
}

/// Properties of a profile, from any version of the query.
struct Figures {
    id: u32,
    slices: u32,
    max: u32,
    sm: u32,
    copy: u32,
    decoder: u32,
    encoder: u32,
    jpeg: u32,
    ofa: u32,
    memory_mib: u64,
    name: Option<String>,
    gfx: Option<bool>,
}

impl Gpu<'_> {
    /// Returns all profiles of this GPU, smallest first, without remaining capacity and compute instance
    /// profiles. `board_mib` is the memory of the whole GPU.
    ///
    /// # Errors
    /// Errors of the calls, except "no such profile".
    pub fn gpu_profiles(&self, board_mib: u64) -> Result<Vec<GpuProfile>, DriverError> {
        let mut profiles = Vec::new();
        for index in 0..INDEXES {
            match self.figures(index) {
                Ok(figures) => profiles.push(self.profile(index, figures, board_mib)?),
                Err(error) if no_such_profile(&error) => {}
                Err(error) => return Err(error.on(&self.uuid).detail(format!("GPU instance profile index {index}"))),
            }
        }
        profiles.sort_by_key(|p| (p.slices, p.memory_mib, p.index));
        Ok(profiles)
    }

    fn profile(&self, index: u32, figures: Figures, board_mib: u64) -> Result<GpuProfile, DriverError> {
        let slices = narrow(figures.slices, u8::MAX);
        let name = figures.name.unwrap_or_else(|| names::gpu_profile(slices, figures.memory_mib, board_mib, index));
        let placements = self.placements(figures.id).map_err(|e| e.on(&self.uuid).detail(format!("profile {name}")))?;
        Ok(GpuProfile {
            gfx: figures.gfx.unwrap_or_else(|| name.ends_with("+gfx")),
            name,
            id: figures.id,
            index,
            slices,
            max: narrow(figures.max, u8::MAX),
            remaining: None,
            memory_mib: figures.memory_mib,
            sm: figures.sm,
            engines: Engines {
                copy: narrow(figures.copy, u8::MAX),
                decoder: narrow(figures.decoder, u8::MAX),
                encoder: narrow(figures.encoder, u8::MAX),
                jpeg: narrow(figures.jpeg, u8::MAX),
                ofa: narrow(figures.ofa, u8::MAX),
            },
            placements,
            compute: Vec::new(),
        })
    }

    fn figures(&self, index: u32) -> Result<Figures, DriverError> {
        match self.figures_v3(index) {
            Err(error) if ask_older(&error) => match self.figures_v2(index) {
                Err(error) if ask_older(&error) => self.figures_v1(index),
                other => other,
            },
            other => other,
        }
    }

    fn figures_v3(&self, index: u32) -> Result<Figures, DriverError> {
        // SAFETY: a struct of integers, for which all zeroes are a valid value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v3_t = unsafe { std::mem::zeroed() };
        info.version = version::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3);
        let pointer = (&raw mut info).cast::<sys::nvmlGpuInstanceProfileInfo_v2_t>();
        // SAFETY: the version word tells the driver which struct the pointer refers to.
        unsafe { nvml!(self.driver, nvmlDeviceGetGpuInstanceProfileInfoV(self.handle, index, pointer)) }?;
        Ok(Figures {
            id: info.id,
            slices: info.sliceCount,
            max: info.instanceCount,
            sm: info.multiprocessorCount,
            copy: info.copyEngineCount,
            decoder: info.decoderCount,
            encoder: info.encoderCount,
            jpeg: info.jpegCount,
            ofa: info.ofaCount,
            memory_mib: info.memorySizeMB,
            name: parse_name(&info.name),
            gfx: Some(info.capabilities & sys::NVML_GPU_INSTANCE_PROFILE_CAPS_GFX != 0),
        })
    }

    fn figures_v2(&self, index: u32) -> Result<Figures, DriverError> {
        // SAFETY: a struct of integers, for which all zeroes are a valid value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        info.version = version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
        // SAFETY: the version word tells the driver which struct the pointer refers to.
        unsafe { nvml!(self.driver, nvmlDeviceGetGpuInstanceProfileInfoV(self.handle, index, &raw mut info)) }?;
        Ok(Figures {
            id: info.id,
            slices: info.sliceCount,
            max: info.instanceCount,
            sm: info.multiprocessorCount,
            copy: info.copyEngineCount,
            decoder: info.decoderCount,
            encoder: info.encoderCount,
            jpeg: info.jpegCount,
            ofa: info.ofaCount,
            memory_mib: info.memorySizeMB,
            name: parse_name(&info.name),
            gfx: None,
        })
    }

    fn figures_v1(&self, index: u32) -> Result<Figures, DriverError> {
        // SAFETY: a struct of integers, for which all zeroes are a valid value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: this call fills this struct.
        unsafe { nvml!(self.driver, nvmlDeviceGetGpuInstanceProfileInfo(self.handle, index, &raw mut info)) }?;
        Ok(Figures {
            id: info.id,
            slices: info.sliceCount,
            max: info.instanceCount,
            sm: info.multiprocessorCount,
            copy: info.copyEngineCount,
            decoder: info.decoderCount,
            encoder: info.encoderCount,
            jpeg: info.jpegCount,
            ofa: info.ofaCount,
            memory_mib: info.memorySizeMB,
            name: None,
            gfx: None,
        })
    }

    /// Returns the possible placements of a profile in the driver's order. The older version of the call fills the same
    /// struct, but supports fewer profiles.
    fn placements(&self, profile_id: u32) -> Result<Vec<Placement>, DriverError> {
        let mut list = [sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 }; ENTRIES];
        let mut count = 0;
        let counted = list.as_mut_ptr();
        // SAFETY: with a null list, the call only returns the number of entries.
        let how_many = unsafe {
            nvml!(
                self.driver,
                nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                    self.handle,
                    profile_id,
                    std::ptr::null_mut(),
                    &raw mut count
                )
            )
        };
        match how_many {
            Ok(()) => {
                fits(count, "nvmlDeviceGetGpuInstancePossiblePlacements_v2")?;
                // SAFETY: the list has room for `count` entries, as checked.
                unsafe {
                    nvml!(
                        self.driver,
                        nvmlDeviceGetGpuInstancePossiblePlacements_v2(self.handle, profile_id, counted, &raw mut count)
                    )
                }?;
            }
            Err(error) if error.kind == ErrorKind::MissingSymbol => {
                // SAFETY: the first version writes at most one entry per slice, so the list has enough room.
                unsafe {
                    nvml!(
                        self.driver,
                        nvmlDeviceGetGpuInstancePossiblePlacements(self.handle, profile_id, counted, &raw mut count)
                    )
                }?;
            }
            Err(error) => return Err(error),
        }
        Ok(list.iter().take(count as usize).map(|p| placement(p.start, p.size)).collect())
    }

    /// Returns how many more instances of a profile the driver can create; `None` if the driver
    /// does not report this number. With MIG off, the driver never reports this number.
    ///
    /// # Errors
    /// Errors of the call, except `NotSupported`.
    pub fn remaining(&self, profile_id: u32) -> Result<Option<u8>, DriverError> {
        let mut count = 0;
        // SAFETY: the call writes one integer.
        let result = unsafe {
            nvml!(self.driver, nvmlDeviceGetGpuInstanceRemainingCapacity(self.handle, profile_id, &raw mut count))
        };
        match result {
            Ok(()) => Ok(Some(narrow(count, u8::MAX))),
            Err(error) if matches!(error.kind, ErrorKind::NotSupported | ErrorKind::MissingSymbol) => Ok(None),
            Err(error) => Err(error.on(&self.uuid)),
        }
    }
}

/// Returns a name from the driver without its prefix; `None` if it is empty.
pub(super) fn parse_name(buffer: &[std::os::raw::c_char]) -> Option<String> {
    text(buffer).map(|name| names::plain(&name)).filter(|name| !name.is_empty())
}

/// Converts a placement to the API's integer types.
pub(super) fn placement(start: u32, size: u32) -> Placement {
    Placement { start: narrow(start, u8::MAX), size: narrow(size, u8::MAX) }
}

/// Checks that the driver's list fits into the buffer, because the next call writes `count` entries.
pub(super) fn fits(count: u32, function: &str) -> Result<(), DriverError> {
    if count as usize <= ENTRIES {
        return Ok(());
    }
    Err(DriverError::new(ErrorKind::Garbled, function).detail(format!("a list of {count} entries")))
}
