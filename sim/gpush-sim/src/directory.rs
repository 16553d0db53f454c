//! The directory of a simulated host: the state, the library directory, and the simulated programs.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use mps_sim::errln;
use silicon::host::PROC;
use silicon::machine::Pid;
use silicon::{Description, Host};

use crate::pids;

/// Names under which programs open the library. The dynamic linker uses the first name, and Slurm's
/// plugin uses the second name.
const LIBRARY_NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];
/// The simulated programs of a host, except the MPS programs.
const PROGRAMS: [&str; 1] = ["nvidia-smi"];
/// File name of the MPS control daemon. NVIDIA's daemon and the simulated daemon have the same
/// name.
const CONTROL: &str = "nvidia-cuda-mps-control";
/// Directory of a gpushd that runs on the simulated host, relative to the host's directory. gpushd
/// creates it.
const AGENT: &str = "gpushd";
/// Pid of a host's simulated fabric manager. It is higher than any pid on Linux, so no real process
/// has this pid.
const FABRIC_MANAGER: &str = "4194305";
/// Environment variable that names the simulated library.
const LIBRARY_VARIABLE: &str = "GPUSH_SIM_LIBRARY";

/// Finds the simulated libnvidia-ml.
fn library() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from) {
        if !path.is_file() {
            bail!("${LIBRARY_VARIABLE} names {}, which is no file", path.display());
        }
        return Ok(std::path::absolute(path)?);
    }
    let own = std::env::current_exe().context("cannot find my own executable")?;
    let file = own.with_file_name("libnvidia_ml.so");
    if !file.is_file() {
        bail!(
            "the simulated driver {} is not there; build it with `cargo build -p nvml-sim`, or name it in ${LIBRARY_VARIABLE}",
            file.display()
        );
    }
    Ok(file)
}

/// Creates a host with all files that programs need to run on it.
pub(crate) fn lay(dir: &Path, description: &Description, trace: bool) -> anyhow::Result<Host> {
    let library = library()?;
    let own = std::env::current_exe().context("cannot find my own executable")?;
    let host = Host::create(dir, description)?;
    let laid = || -> std::io::Result<()> {
        let (lib, bin) = (host.dir().join("lib"), host.dir().join("bin"));
        std::fs::create_dir_all(&lib)?;
        std::fs::create_dir_all(&bin)?;
        std::fs::create_dir_all(host.dir().join(PROC))?;
        // Programs of all users register here, each in a separate file. So the directory has the
        // mode of /tmp.
        let everybodys = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
        std::fs::set_permissions(host.dir().join(PROC), everybodys)?;
        let links = LIBRARY_NAMES.iter().map(|name| (lib.join(name), &library));
        let programs = PROGRAMS.iter().chain(&mps_sim::PROGRAMS).map(|name| (bin.join(name), &own));
        for (link, target) in links.chain(programs) {
            match std::fs::remove_file(&link) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => std::os::unix::fs::symlink(target, link)?,
            }
        }
        host.create_driver_files()?;
        if host.hardware().fabric_manager {
            fabric_manager(&host.dir().join(PROC).join(FABRIC_MANAGER))?;
        }
        if trace {
            std::fs::write(host.dir().join("trace"), "")?;
        }
        Ok(())
    };
    laid().with_context(|| format!("cannot lay out {}", host.dir().display()))?;
    Ok(host)
}

/// Adds a fabric manager, which manages NVSwitches, to the host's `proc`. Only its files exist, no
/// process.
fn fabric_manager(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir.join("fd"))?;
    // The kernel truncates process names to 15 characters.
    std::fs::write(dir.join("comm"), "nv-fabricmanage\n")?;
    std::fs::write(
        dir.join("cmdline"),
        "/usr/bin/nv-fabricmanager\0-c\0/usr/share/nvidia/nvswitch/fabricmanager.cfg\0",
    )?;
    std::fs::write(dir.join("cgroup"), "0::/system.slice/nvidia-fabricmanager.service\n")
}

/// The environment for programs on a host.
pub(crate) struct Environment {
    /// Variables that are set.
    pub(crate) set: [(&'static str, PathBuf); 8],
    /// For each variable that contains a list of directories: the directory to add at the start of
    /// the list.
    pub(crate) prepended: [(&'static str, PathBuf); 2],
}

impl Environment {
    pub(crate) fn of(dir: &Path) -> Self {
        Self {
            // With these variables, an agent and its clients find each other if they use the same
            // simulated host.
            set: [
                (silicon::host::STATE_VARIABLE, dir.to_owned()),
                ("GPUSH_BOOT_ID_FILE", dir.join("boot_id")),
                ("GPUSH_SOCKET", dir.join(AGENT).join("gpushd.sock")),
                ("GPUSH_STATE_DIR", dir.join(AGENT).join("state")),
                ("GPUSH_PROC", dir.join(PROC)),
                ("GPUSH_NVIDIA_SMI", dir.join("bin/nvidia-smi")),
                ("GPUSH_MPS_DIR", dir.join(AGENT).join("mps")),
                ("GPUSH_MPS_PROGRAMS", dir.join("bin")),
            ],
            prepended: [("LD_LIBRARY_PATH", dir.join("lib")), ("PATH", dir.join("bin"))],
        }
    }

    /// Adds the variables to a program's environment.
    pub(crate) fn extend(self, command: &mut Command) -> anyhow::Result<()> {
        command.envs(self.set);
        for (name, first) in self.prepended {
            let old = std::env::var_os(name).filter(|old| !old.is_empty());
            let paths = std::iter::once(first).chain(old.iter().flat_map(std::env::split_paths));
            command.env(name, std::env::join_paths(paths).with_context(|| format!("cannot extend ${name}"))?);
        }
        Ok(())
    }
}

/// Returns the environment as a script for a POSIX shell.
pub(crate) fn environment_script(dir: &Path) -> String {
    let quoted = |path: &Path| format!("'{}'", path.display().to_string().replace('\'', r"'\''"));
    let Environment { set, prepended } = Environment::of(dir);
    let mut script = String::new();
    for (name, value) in set {
        let _infallible = writeln!(script, "export {name}={}", quoted(&value));
    }
    for (name, value) in prepended {
        let _infallible = writeln!(script, "export {name}={}\"${{{name}:+:${name}}}\"", quoted(&value));
    }
    script
}

/// Returns descriptions of the programs that have the host's driver open, except this process.
pub(crate) fn clients(host: &Host) -> anyhow::Result<Vec<String>> {
    let own = Some(std::process::id());
    let machine = host.read()?;
    let alive = machine.clients(own).filter(|client| client.pid.is_alive());
    Ok(alive.map(|client| pids::describe(client.pid.pid)).collect())
}

/// Removes a host: ends its sleepers, and removes its directory.
pub(crate) fn remove(dir: &Path, force: bool) -> anyhow::Result<()> {
    match Host::open(dir) {
        Ok(host) => {
            let clients = clients(&host)?;
            if !clients.is_empty() && !force {
                bail!(
                    "the driver of {} is open in {}; end them first, or say --force",
                    dir.display(),
                    clients.join(", ")
                );
            }
        }
        // If the directory has no `state`, it was never a host, so do not remove it. A damaged host
        // can be removed.
        Err(silicon::HostError::NotAHost { .. }) if !dir.join("state").exists() => {
            bail!("{} is not a simulated host: nothing is removed", dir.display())
        }
        Err(error) if !force => return Err(anyhow::anyhow!("{error}; `down --force` removes it all the same")),
        Err(_) => {}
    }
    remove_files(dir)
}

/// Ends the sleepers and daemons of a host, and removes the files that [`lay`] and silicon have
/// created. If the directory is empty after that, removes the directory, too.
pub(crate) fn remove_files(dir: &Path) -> anyhow::Result<()> {
    for process in pids::sleepers(dir).into_iter().chain(daemons(dir)) {
        pids::end(process);
    }
    let files = ["state", "description.toml", "boot_id", "faults.toml", "trace", "sleepers", mps_sim::fault::FILE];
    let libraries = LIBRARY_NAMES.iter().map(|name| format!("lib/{name}"));
    let programs = PROGRAMS.iter().chain(&mps_sim::PROGRAMS).map(|name| format!("bin/{name}"));
    for name in files.iter().map(ToString::to_string).chain(libraries).chain(programs) {
        let path = dir.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            Ok(()) | Err(_) => {}
        }
    }
    for below in [AGENT, PROC].map(|name| dir.join(name)) {
        match std::fs::remove_dir_all(&below) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", below.display()));
            }
            Ok(()) | Err(_) => {}
        }
    }
    for path in [dir.join("lib"), dir.join("bin"), dir.to_owned()] {
        match std::fs::remove_dir(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
                errln!("gpush-sim: {} is kept, something else is in it", path.display());
            }
            Err(error) => return Err(error).with_context(|| format!("cannot remove {}", path.display())),
        }
    }
    Ok(())
}

/// Returns the pids of NVIDIA's own MPS control daemons whose pipe directory is below a host's
/// directory. Simulated daemons are not in the list, because they end with their host.
fn daemons(dir: &Path) -> Vec<Pid> {
    let (Ok(dir), Ok(own)) = (dir.canonicalize(), std::env::current_exe()) else { return Vec::new() };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_one = |proc: &Path| {
        let read = |file: &str| std::fs::read(proc.join(file)).unwrap_or_default();
        let word = |word: &[u8]| PathBuf::from(String::from_utf8_lossy(word).into_owned());
        let name = read("cmdline").split(|byte| *byte == 0).next().map(word).unwrap_or_default();
        let environment = read("environ");
        let mut variables = environment.split(|byte| *byte == 0);
        let pipe = variables.find_map(|one| one.strip_prefix(b"CUDA_MPS_PIPE_DIRECTORY=")).map(word);
        name.file_name().is_some_and(|name| name == CONTROL)
            && pipe.and_then(|pipe| pipe.canonicalize().ok()).is_some_and(|pipe| pipe.starts_with(&dir))
            && std::fs::read_link(proc.join("exe")).is_ok_and(|exe| exe != own)
    };
    let found = entries.map(|entry| entry.path()).filter(|proc| is_one(proc));
    found.filter_map(|proc| Pid::find(proc.file_name()?.to_str()?.parse().ok()?)).collect()
}
