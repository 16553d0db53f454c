//! Loads the library and opens a session. Each cause of failure has a distinct error.

use std::{
    ffi::{CStr, OsStr, c_void},
    fs::File,
    io,
    path::{Path, PathBuf},
};

use nvml_wrapper::{Nvml, error::NvmlError};

use super::{Driver, wrapped};
use crate::error::{DriverError, ErrorKind};

/// The name that the loader searches for if no path is given.
pub(crate) const SONAME: &str = "libnvidia-ml.so.1";

/// The control device of the driver, which NVML opens first.
const CONTROL_DEVICE: &str = "/dev/nvidiactl";

/// The symbol that identifies gpush's simulator.
const SIMULATOR: &[u8] = b"gpush_sim\0";

impl Driver {
    /// Loads a library and opens a session. For `None`, the loader searches for `libnvidia-ml.so.1`.
    ///
    /// # Errors
    /// `LibraryMissing` if the library cannot be loaded; `NotNvml` if the library does not contain
    /// `nvmlInit_v2`; `DeviceDenied` if the rules of this process's cgroup do not allow the driver's devices. Otherwise
    /// the error of the initialisation: `DriverNotLoaded`, `LibRmVersionMismatch`, `NoPermission` …
    pub fn load(library: Option<&Path>) -> Result<Self, DriverError> {
        let name: &OsStr = library.map_or(OsStr::new(SONAME), Path::as_os_str);
        let nvml = Nvml::builder().lib_path(name).init().map_err(|error| {
            let opened = || File::options().read(true).write(true).open(CONTROL_DEVICE);
            if_denied(explain(name, error), opened)
        })?;
        let library = loaded_path(&nvml).unwrap_or_else(|| PathBuf::from(name)).display().to_string();
        // SAFETY: this only checks whether the symbol exists, and never calls or reads it.
        let simulated = unsafe { nvml.lib().__library.get::<*const c_void>(SIMULATOR) }.is_ok();
        Ok(Self { nvml, library, simulated })
    }
}

fn explain(name: &OsStr, error: NvmlError) -> DriverError {
    let path = name.to_string_lossy();
    match error {
        NvmlError::FailedToLoadSymbol(text) => {
            DriverError::new(ErrorKind::NotNvml, "nvmlInit_v2").detail(format!("{path}: {text}"))
        }
        NvmlError::LibloadingError(error) => DriverError::new(ErrorKind::LibraryMissing, "loading NVML")
            .detail(loader_message(&path, &error.to_string())),
        other => wrapped("nvmlInit_v2")(other),
    }
}

/// Replaces NVML's error if the kernel denies this process the driver's control device. NVML has no distinct return code
/// for this case.
fn if_denied(error: DriverError, open: impl FnOnce() -> io::Result<File>) -> DriverError {
    let Some(code) = error.kind.code() else { return error };
    // The device rules of a cgroup cause EPERM. A missing permission on the file itself would cause EACCES.
    let is_denied = open().is_err_and(|error| error.raw_os_error() == Some(libc::EPERM));
    if !is_denied {
        return error;
    }
    DriverError::new(ErrorKind::DeviceDenied, error.function)
        .detail(format!("{CONTROL_DEVICE} (NVML {code}: {})", error.kind.meaning()))
}

/// Returns the loader's message. Adds the library if the message does not name it.
fn loader_message(path: &str, message: &str) -> String {
    if message.contains(path) { message.to_owned() } else { format!("{path}: {message}") }
}

/// Returns the path of the file that the loader found.
fn loaded_path(nvml: &Nvml) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let address = *nvml.lib().nvmlInit_v2.as_ref().ok()? as *const c_void;
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: `address` is a function of a loaded library, `info` is a local variable.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr returned a NUL-terminated name that lives as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denied_control_device_replaces_an_error_of_nvml() {
        let fails = |number| move || Err(io::Error::from_raw_os_error(number));
        let error = |kind| DriverError::new(kind, "nvmlInit_v2");
        let denied = if_denied(error(ErrorKind::Unknown), fails(libc::EPERM));
        assert_eq!(denied.kind, ErrorKind::DeviceDenied);
        assert!(denied.is_driver_unavailable());
        assert!(denied.hint().is_some_and(|hint| hint.contains("`systemctl restart gpushd`")));
        assert_eq!(
            denied.to_string(),
            "nvmlInit_v2: systemd does not allow gpushd to open the driver's devices: /dev/nvidiactl (NVML 999: the \
             driver gives no reason)"
        );
        for number in [libc::EACCES, libc::ENOENT] {
            let other = if_denied(error(ErrorKind::NoPermission), fails(number));
            assert_eq!(other.kind, ErrorKind::NoPermission, "errno {number}");
        }
        // Without NVML, the device is not opened.
        let missing = if_denied(error(ErrorKind::LibraryMissing), || unreachable!());
        assert_eq!(missing.kind, ErrorKind::LibraryMissing);
    }
}
