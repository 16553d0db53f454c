//! What the checks need, and the comparison of settings before and after the checks. This module
//! changes nothing.

use std::path::{Path, PathBuf};

use gpush_api::{ComputeMode, GpuIndex};
use gpush_nvml::{
    Reading,
    driver::{Driver, ProfileCache},
};
use serde::Serialize;

/// Names of NVIDIA's programs.
const CONTROL: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";

/// Socket of the gpushd that manages this host.
const HOSTS_OWN: &str = "/run/gpush/gpushd.sock";

/// The reason why the checks do not run.
#[derive(Debug)]
pub enum Stop {
    /// The host lacks something that the checks need. The checks are skipped, which is not a
    /// failure.
    Skipped(String),
    /// The host has everything that the checks need, but something does not work.
    Failed(String),
}

impl From<String> for Stop {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// NVIDIA's programs for MPS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MpsPrograms {
    /// The control daemon.
    pub control: PathBuf,
    /// The MPS server.
    pub server: PathBuf,
}

impl MpsPrograms {
    /// Searches the programs.
    ///
    /// # Errors
    /// Why gpushd cannot share this GPU through MPS on this host.
    pub fn find(gpu: &Ground) -> Result<Self, Stop> {
        let skipped = |why: &str| Err(Stop::Skipped(why.to_owned()));
        if !gpu.simulated && !nix::unistd::geteuid().is_root() {
            return skipped("not root: gpushd shares GPUs as root");
        }
        let Some(control) = on_path(CONTROL) else {
            return skipped("nvidia-cuda-mps-control is not on PATH; it comes with the driver, in a separate package");
        };
        let server = control.with_file_name(SERVER);
        if !server.exists() {
            return skipped("nvidia-cuda-mps-server is not in the directory of nvidia-cuda-mps-control");
        }
        Ok(Self { control, server })
    }
}

/// The GPU under test, which is the first GPU of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ground {
    /// Product name.
    pub name: String,
    /// `GPU-<uuid>`.
    pub uuid: String,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Driver version.
    pub driver: String,
    /// CUDA version of the driver.
    pub cuda: String,
    /// Whether the GPU is simulated by gpush. The measurements then have no meaning.
    pub simulated: bool,
    #[serde(skip)]
    settings: Settings,
    /// NVIDIA's programs for MPS, if the checks use them.
    #[serde(flatten)]
    pub mps: Option<MpsPrograms>,
}

/// Settings that the checks must not change.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Settings {
    compute_mode: Option<ComputeMode>,
    /// MIG mode: the current mode, and the mode after the next reset.
    mig: Option<(bool, bool)>,
}

impl Settings {
    fn of(reading: &Reading) -> Self {
        let mig = reading.mig.as_ref().map(|mig| (mig.enabled, mig.pending_mode()));
        Self { compute_mode: reading.compute_mode, mig }
    }
}

impl Ground {
    /// Examines the first GPU. `simulated` means that the CUDA client of the test can
    /// run on a simulated driver. PyTorch cannot: on a simulated host, it would compute on a real
    /// GPU that was not examined.
    ///
    /// # Errors
    /// If a prerequisite is missing, or something prevents the checks.
    pub fn look(simulated: bool) -> Result<Self, Stop> {
        let skipped = |why: &str| Err(Stop::Skipped(why.to_owned()));
        let (driver, info, reading) = read()?;
        if driver.is_simulated() && !simulated {
            return skipped("the driver found is gpush's simulator; leave its environment first");
        }
        if !driver.is_simulated() && std::os::unix::net::UnixStream::connect(HOSTS_OWN).is_ok() {
            return skipped(
                "this host's own gpushd runs, and the GPUs are its own: `systemctl stop gpushd.socket gpushd`",
            );
        }
        if let Some(why) = in_the_way(&reading) {
            return Err(Stop::Skipped(format!("GPU 0, {}: {why}", reading.identity.uuid)));
        }
        Ok(Self {
            name: reading.identity.name.clone(),
            uuid: reading.identity.uuid.to_string(),
            memory_mib: reading.memory.total_mib,
            driver: info.version,
            cuda: info.cuda,
            simulated: driver.is_simulated(),
            settings: Settings::of(&reading),
            mps: None,
        })
    }

    /// Reads the GPU again, and compares its settings with those before the checks.
    ///
    /// # Errors
    /// If a setting differs. The text contains both values.
    pub fn unchanged(&self) -> Result<(), String> {
        let (_, _, reading) = match read() {
            Ok(read) => read,
            Err(Stop::Skipped(why) | Stop::Failed(why)) => return Err(why),
        };
        let now = Settings::of(&reading);
        if now == self.settings {
            return Ok(());
        }
        Err(format!("GPU 0, {}: its settings were {:?} and are {now:?}", self.uuid, self.settings))
    }
}

/// Opens the driver and reads the first GPU.
fn read() -> Result<(Driver, gpush_api::Driver, Reading), Stop> {
    let driver = match Driver::load(None) {
        Ok(driver) => driver,
        Err(error) if error.is_driver_unavailable() => return Err(Stop::Skipped(format!("no driver: {error}"))),
        Err(error) => return Err(Stop::Failed(error.to_string())),
    };
    let printed = |error: gpush_nvml::DriverError| Stop::Failed(error.to_string());
    let info = driver.info().map_err(printed)?;
    if driver.count().map_err(printed)? == 0 {
        return Err(Stop::Skipped("the driver shows no GPU".to_owned()));
    }
    let reading =
        driver.gpu_by_index(GpuIndex(0)).and_then(|gpu| gpu.read(&mut ProfileCache::default())).map_err(printed)?;
    Ok((driver, info, reading))
}

/// Returns why the checks must not run on this GPU: they would have to change a setting, or the GPU
/// is in use. Returns `None` if they may run.
fn in_the_way(reading: &Reading) -> Option<String> {
    let Settings { compute_mode, mig } = Settings::of(reading);
    if mig.is_some_and(|(enabled, pending)| enabled || pending) {
        return Some("its MIG mode is on, and is not switched off for this".to_owned());
    }
    match compute_mode {
        Some(ComputeMode::Default) => {}
        Some(mode) => return Some(format!("its compute mode is {mode}, and is not changed for this")),
        None => return Some("the driver does not tell its compute mode".to_owned()),
    }
    if !reading.processes_known {
        return Some("the driver does not tell who uses it".to_owned());
    }
    let pids: Vec<String> = reading.processes.iter().filter_map(|one| Some(one.pid?.to_string())).collect();
    (!reading.processes.is_empty()).then(|| format!("it is in use, by pid {}", pids.join(", ")))
}

/// Returns the path of a program in `PATH` or in `/usr/bin`, where NVIDIA's packages install their
/// programs.
fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain([PathBuf::from("/usr/bin")]);
    places.map(|dir| dir.join(name)).find(|file| Path::is_file(file) && file.is_absolute())
}
