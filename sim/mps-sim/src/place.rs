//! The environment of a program: the simulated host, if any, and the environment variables.

use std::path::{Path, PathBuf};

use nix::sys::stat::Mode;
use silicon::machine::{Load, Pid, Process, ProcessKind, WHOLE_PPM};
use silicon::{Host, HostError, Return};

use crate::fault::{self, FaultFile, Faults};

/// Environment variable with the pipe directory of the daemon and its clients.
const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Environment variable with the directory of the logs.
const LOG: &str = "CUDA_MPS_LOG_DIRECTORY";
/// Environment variable with the version of the programs, for use outside a host.
const VERSION: &str = "MPS_SIM_VERSION";

/// The driver versions between which the simulation distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Version {
    /// The daemon has no command `get_server_status`, writes no pid file, and lets every user
    /// change settings.
    V535,
    /// The daemon has the command `get_server_status`, and writes a pid file. Only root and the
    /// daemon's own user may change settings.
    V550,
    /// Like [`V550`](Self::V550), but the daemon accepts more than one option at once, rejects unknown options, and
    /// has the option `-multiuser-server`.
    V555,
}

impl Version {
    fn of(text: &str) -> Self {
        let branch = text.split('.').next().and_then(|branch| branch.parse::<u32>().ok());
        match branch {
            Some(0..550) => Self::V535,
            Some(550..555) | None => Self::V550,
            Some(555..) => Self::V555,
        }
    }
}

/// The environment of a program.
#[derive(Debug)]
pub(crate) struct Environment {
    host: Option<Host>,
    pub(crate) pipe: PathBuf,
    pub(crate) log: PathBuf,
    pub(crate) faults: Faults,
}

/// The reason why a process has no context on a device.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoContext {
    /// The compute mode of the GPU does not allow it. The text is that of CUDA error 46.
    #[error("CUDA-capable device(s) is/are busy or unavailable")]
    Unavailable,
    /// The simulated host failed.
    #[error(transparent)]
    Host(#[from] HostError),
}

/// A device in the output of `ps`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) mig: bool,
    pub(crate) uuid: [u8; 16],
}

impl Device {
    /// Parses `GPU-…` or `MIG-…`. Returns the default device for other texts.
    pub(crate) fn of_uuid(text: &str) -> Self {
        let digits: Vec<u8> = text.get(4..).unwrap_or_default().bytes().filter(u8::is_ascii_hexdigit).collect();
        let mut uuid = [0; 16];
        for (byte, pair) in uuid.iter_mut().zip(digits.chunks(2)) {
            *byte = std::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok()).unwrap_or(0);
        }
        Self { mig: text.starts_with("MIG-"), uuid }
    }
}

/// Returns the value of an environment variable, if the variable is set and not empty.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the pipe directory that the environment names.
pub(crate) fn pipe() -> PathBuf {
    variable(PIPE).unwrap_or_else(|| "/tmp/nvidia-mps".to_owned()).into()
}

impl Environment {
    /// Returns the environment of a program that was called by this path. If the path has no
    /// directory, the program is searched in `PATH`.
    pub(crate) fn of(called: &Path) -> Self {
        let found = || {
            let name = called.file_name()?;
            let paths = std::env::var_os("PATH")?;
            std::env::split_paths(&paths).map(|dir| dir.join(name)).find(|path| path.exists())
        };
        let program = if called.parent() == Some(Path::new("")) { found() } else { Some(called.to_owned()) };
        let around = program.as_deref().and_then(Path::parent).and_then(Path::parent);
        let host = around.filter(|dir| dir.join("state").exists()).and_then(|dir| Host::open(dir).ok());
        Self::on(host)
    }

    /// Returns the environment of a program on the host that `$NVML_SIM_STATE` names.
    pub(crate) fn of_environment() -> Self {
        Self::on(Host::from_environment().ok())
    }

    fn on(host: Option<Host>) -> Self {
        let file = match &host {
            Some(host) => Some(FaultFile::of_host(host.dir())),
            None => variable(fault::VARIABLE).map(|path| FaultFile::at(path.into())),
        };
        let pipe = pipe();
        let target = format!("{}\n{}", pipe.display(), variable("CUDA_VISIBLE_DEVICES").unwrap_or_default());
        let log = variable(LOG).unwrap_or_else(|| "/var/log/nvidia-mps".to_owned()).into();
        Self { host, pipe, log, faults: Faults::of(file, target) }
    }

    pub(crate) fn version(&self) -> Version {
        match (&self.host, variable(VERSION)) {
            (_, Some(text)) => Version::of(&text),
            (Some(host), None) => Version::of(&host.hardware().driver.to_string()),
            (None, None) => Version::V550,
        }
    }

    /// Returns whether the daemon gives this user root's permissions: the user is root, or the
    /// daemon's own user.
    pub(crate) fn is_root(uid: u32) -> bool {
        uid == 0 || uid == nix::unistd::geteuid().as_raw()
    }

    /// Returns whether the program's host was removed. A program ends when its host is removed.
    pub(crate) fn is_gone(&self) -> bool {
        self.host.as_ref().is_some_and(|host| !host.dir().join("state").exists())
    }

    /// Returns whether a server must end although no daemon asks it to end. On a simulated host,
    /// the server ends if the host was removed. If only the pipe directory was removed, it
    /// continues, as NVIDIA's server does. Outside a simulated host, the server ends if the pipe
    /// directory was removed.
    pub(crate) fn is_abandoned(&self) -> bool {
        if self.host.is_some() { self.is_gone() } else { !self.pipe.exists() }
    }

    /// Returns the visible device: the first device that the environment names by index, by UUID or
    /// by a part of a UUID.
    pub(crate) fn device_name(&self) -> String {
        let visible = variable("CUDA_VISIBLE_DEVICES").unwrap_or_else(|| "0".to_owned());
        let first = visible.split(',').next().unwrap_or_default().trim().to_owned();
        let by_index =
            || Some(self.host.as_ref()?.hardware().slots.get(first.parse::<usize>().ok()?)?.identity.uuid.clone());
        by_index().unwrap_or(first)
    }

    /// Registers this process on a device, so that NVML lists it there until it ends. Outside a
    /// simulated host, does nothing.
    ///
    /// # Errors
    /// The compute mode of the GPU does not allow the context, or the simulated host fails.
    pub(crate) fn occupy(&self, device: &str, kind: ProcessKind, memory_mib: u64) -> Result<(), NoContext> {
        let Some(host) = &self.host else { return Ok(()) };
        let slots = host.hardware().slots.iter().zip(0..);
        let whole = slots.filter(|(slot, _)| !device.is_empty() && slot.identity.uuid.starts_with(device));
        let at = match whole.map(|(_, index)| (index, None, None)).next() {
            Some(found) => found,
            None => match host.read()?.mig_device_by_uuid(device) {
                Ok(found) => (found.gpu, Some(found.gpu_instance), Some(found.id)),
                Err(_) => {
                    errln!("mps-sim: the host has no device `{device}`: this process is on none");
                    return Ok(());
                }
            },
        };
        let (gpu, gpu_instance, compute_instance) = at;
        let process = Process { pid: Pid::own(), kind, memory_mib, gpu_instance, compute_instance };
        let put = host.update(|machine| Ok::<_, HostError>(machine.attach(gpu, process)))?;
        match put {
            Ok(()) => Ok(host.show_open(gpu, std::process::id())?),
            Err(Return::InUse) => Err(NoContext::Unavailable),
            Err(rc) => {
                errln!("mps-sim: this process is not on GPU {gpu}: {rc}");
                Ok(())
            }
        }
    }

    /// Sets the load of this process to 0 on all GPUs. An MPS server only schedules the work of its clients.
    pub(crate) fn stay_idle(&self) -> Result<(), HostError> {
        self.set_load(Some(Load::IDLE))
    }

    /// Sets the load of this process: the part of the time in which its kernels run. While they run, they use the whole
    /// device. `None` is the usual load.
    pub(crate) fn work_for(&self, part: Option<f64>) -> Result<(), HostError> {
        self.set_load(part.map(|part| Load::of_sm((part.clamp(0.0, 1.0) * f64::from(WHOLE_PPM)).round() as u32)))
    }

    /// Sets the load of this process on all GPUs; `None` is the usual one.
    fn set_load(&self, load: Option<Load>) -> Result<(), HostError> {
        let Some(host) = &self.host else { return Ok(()) };
        host.update(|machine| {
            for gpu in 0..host.hardware().slots.len() as u32 {
                let _not_there = machine.set_load(gpu, std::process::id(), load);
            }
            Ok(())
        })
    }

    /// Returns the number of processes that compute on a whole device, including MPS servers.
    /// Outside a simulated host, returns 0.
    pub(crate) fn computing(&self, device: &str) -> usize {
        let Some(host) = &self.host else { return 0 };
        let index = host.hardware().slots.iter().position(|slot| slot.identity.uuid == device);
        let machine = host.read().ok();
        let gpu = index.zip(machine.as_ref()).and_then(|(index, machine)| machine.gpus().get(index));
        gpu.map_or(0, |gpu| gpu.listed(ProcessKind::Compute).count())
    }
}

/// Calls `make` with a umask of 0, so that new files get exactly the given modes.
pub(crate) fn without_umask<T>(make: impl FnOnce() -> T) -> T {
    let before = nix::sys::stat::umask(Mode::empty());
    let made = make();
    nix::sys::stat::umask(before);
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_follow_their_branch() {
        for (text, version) in [
            ("535", Version::V535),
            ("535.309.01", Version::V535),
            ("550.163.01", Version::V550),
            ("555.58.02", Version::V555),
            ("580.65", Version::V555),
        ] {
            assert_eq!(Version::of(text), version, "{text}");
        }
    }

    #[test]
    fn device_is_parsed_from_its_uuid() {
        let device = Device::of_uuid("MIG-01020304-0506-0708-090a-0b0c0d0e0f10");
        assert_eq!((device.mig, device.uuid[0], device.uuid[15]), (true, 1, 16));
        assert_eq!(Device::of_uuid("0"), Device::default());
    }
}
