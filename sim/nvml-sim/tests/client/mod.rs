//! A client of the built library. It loads the library as any program does, and has a separate
//! simulated host.

#![allow(unsafe_code)] // calls C functions of the library under test
#![allow(dead_code)] // each test program uses a part of this
#![allow(clippy::unwrap_used)] // tests only

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::MutexGuard;

use gpush_locked::Locked;
use nvml_wrapper_sys::bindings::*;
use silicon::Description;

/// A lock that allows one client at a time, because the library and `$NVML_SIM_STATE` belong to the
/// whole process.
static ONE: Locked<()> = Locked::new(());

/// Returns the path of the built `libnvidia_ml.so`.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().join("libnvidia_ml.so")
}

/// A client on a simulated host. A client from [`Client::fresh`] has not called `nvmlInit`. A
/// client from [`Client::of`] or [`Client::one`] has called `nvmlInit`.
pub(crate) struct Client {
    pub(crate) lib: NvmlLib,
    pub(crate) host: silicon::Host,
    scratch: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// Calls a function of the library with the given arguments and returns its return code.
macro_rules! rc {
    ($client:expr, $function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the arguments have the types that the bindings name, and outlive the call.
        unsafe { $client.lib.$function($($argument),*) }
    };
}

/// Calls a function as `rc!` does. Panics if the call fails.
macro_rules! ok {
    ($client:expr, $function:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(rc!($client, $function($($argument),*)), 0, stringify!($function))
    };
}

impl Client {
    /// Creates a host from TOML, and a client that has not called `nvmlInit` yet.
    pub(crate) fn fresh(description: &str) -> Self {
        let turn = ONE.lock();
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("host");
        let host = silicon::Host::create(&dir, &Description::parse(description).unwrap()).unwrap();
        // SAFETY: the clients of a process run one at a time, and the library reads the variable
        // only in nvmlInit.
        unsafe { std::env::set_var("NVML_SIM_STATE", &dir) };
        // SAFETY: the library's initialisers do nothing.
        let lib = unsafe { NvmlLib::new(library()) }.unwrap();
        Self { lib, host, scratch, _turn: turn }
    }

    pub(crate) fn of(description: &str) -> Self {
        let client = Self::fresh(description);
        ok!(client, nvmlInit_v2());
        client
    }

    /// Creates a host with one GPU of a model. MIG mode is on if the GPU supports it.
    pub(crate) fn one(model: &str) -> Self {
        Self::of(&format!("[[gpu]]\nmodel = \"{model}\"\n"))
    }

    pub(crate) fn gpu(&self, index: u32) -> nvmlDevice_t {
        let mut device = null_mut();
        ok!(self, nvmlDeviceGetHandleByIndex_v2(index, &mut device));
        device
    }

    /// Returns a function of the library by name, for functions that the bindings do not contain.
    pub(crate) fn symbol(&self, name: &CStr) -> *mut std::ffi::c_void {
        let path = c(library().to_str().unwrap());
        // SAFETY: both texts are zero-terminated. The library is already loaded and is never
        // unloaded.
        let found = unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        found
    }

    /// Returns the id of a profile by its name. The name has no prefix `MIG `.
    pub(crate) fn profile(&self, device: nvmlDevice_t, name: &str) -> u32 {
        for index in 0..NVML_GPU_INSTANCE_PROFILE_COUNT {
            // SAFETY: all zeros are a valid value of this plain struct.
            let mut info: nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
            info.version = 0x0200_0098;
            if rc!(self, nvmlDeviceGetGpuInstanceProfileInfoV(device, index, &mut info)) == 0
                && text(&info.name) == format!("MIG {name}")
            {
                return info.id;
            }
        }
        panic!("no profile {name}");
    }

    pub(crate) fn create(
        &self,
        device: nvmlDevice_t,
        profile: u32,
        start: u32,
        size: u32,
    ) -> Result<nvmlGpuInstance_t, u32> {
        let (at, mut made) = (nvmlGpuInstancePlacement_t { start, size }, null_mut());
        match rc!(self, nvmlDeviceCreateGpuInstanceWithPlacement(device, profile, &at, &mut made)) {
            0 => Ok(made),
            code => Err(code),
        }
    }

    pub(crate) fn create_compute(&self, gi: nvmlGpuInstance_t, profile: u32) -> Result<nvmlComputeInstance_t, u32> {
        let mut made = null_mut();
        match rc!(self, nvmlGpuInstanceCreateComputeInstance(gi, profile, &mut made)) {
            0 => Ok(made),
            code => Err(code),
        }
    }

    pub(crate) fn mig_device(&self, device: nvmlDevice_t, index: u32) -> Result<nvmlDevice_t, u32> {
        let mut mig = null_mut();
        match rc!(self, nvmlDeviceGetMigDeviceHandleByIndex(device, index, &mut mig)) {
            0 => Ok(mig),
            code => Err(code),
        }
    }

    pub(crate) fn uuid(&self, device: nvmlDevice_t) -> Result<String, u32> {
        let mut buffer = [0; 96];
        match rc!(self, nvmlDeviceGetUUID(device, buffer.as_mut_ptr(), 96)) {
            0 => Ok(text(&buffer)),
            code => Err(code),
        }
    }

    /// Adds a fault rule to the host. `rule` is TOML without the line `[[fault]]`.
    pub(crate) fn fault(&self, rule: &str) {
        let path = self.host.dir().join("faults.toml");
        let mut rules = std::fs::read_to_string(&path).unwrap_or_default();
        rules.push_str(&format!("[[fault]]\n{rule}\n"));
        std::fs::write(path, rules).unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // End all sessions. Otherwise, if this client called nvmlShutdown too rarely, the next
        // client of this process would start with an open session.
        while {
            let mut count = 0;
            rc!(self, nvmlDeviceGetCount_v2(&mut count)) != 1
        } {
            rc!(self, nvmlShutdown());
        }
    }
}

pub(crate) fn text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|c| c.to_ne_bytes()[0]).take_while(|b| *b != 0).collect();
    String::from_utf8(bytes).unwrap()
}

pub(crate) fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

pub(crate) fn string(pointer: *const c_char) -> String {
    // SAFETY: the library returns zero-terminated constants.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap().to_owned()
}
