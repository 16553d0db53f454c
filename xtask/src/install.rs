//! Installs what the tests need in addition to cargo, as far as possible, and reports what is
//! missing.
//!
//! This module installs the following:
//! - A private Python environment in `target/venv`, with the NVML clients and the API fuzzer of
//!   `tests/clients/requirements.txt`. The packages of `requirements-alone.txt` are installed
//!   without their dependencies. The system's Python is never changed.
//! - Programs from Debian.
//! - Slurm's NVML plugin, unpacked in `target/slurm-plugins`.
//! - Prometheus, unpacked in `target/prometheus`.
//!
//! xtask installs Debian packages with apt, and only as root. For packages in Debian's `contrib`
//! and `non-free`, it uses separate package lists, so that the sources of the machine do not
//! change.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::workspace;

/// Returns the path of the private Python environment of the client tests.
pub(crate) fn venv() -> PathBuf {
    workspace::target().join("venv")
}

/// Returns the directory for Slurm plugins that tests need, but that Debian's package `slurmd` does
/// not contain.
pub(crate) fn slurm_plugins() -> PathBuf {
    workspace::target().join("slurm-plugins")
}

/// Returns the directory for Prometheus and promtool.
pub(crate) fn prometheus() -> PathBuf {
    workspace::target().join("prometheus")
}

/// The programs of Prometheus, and their package. An installed package starts a service, so xtask unpacks the package and
/// does not install it.
const PROMETHEUS: ([&str; 2], &str) = (["prometheus", "promtool"], "prometheus");

/// The NVML plugin, and its package. The package depends on an exact version of Slurm, and lags
/// behind Slurm's security updates. So xtask unpacks the package and does not install it.
const SLURM_PLUGIN: (&str, &str) = ("gpu_nvml.so", "slurm-wlm-nvml-plugin");

/// Programs that tests run, with their Debian packages:
/// - a client of the driver;
/// - a tracer that kills processes at system calls;
/// - a clock for single programs;
/// - NVIDIA's control daemon;
/// - tools that create and boot machines with systemd;
/// - Slurm's daemons and commands, with their authentication;
/// - the tool that builds .rpm files.
const PROGRAMS: [(&str, &str); 11] = [
    ("nvtop", "nvtop"),
    ("strace", "strace"),
    ("faketime", "faketime"),
    ("nvidia-cuda-mps-control", "nvidia-cuda-mps"),
    ("mmdebstrap", "mmdebstrap"),
    ("systemd-nspawn", "systemd-container"),
    ("slurmd", "slurmd"),
    ("slurmctld", "slurmctld"),
    ("sbatch", "slurm-client"),
    ("munged", "munge"),
    ("rpmbuild", "rpm"),
];

/// Slurm's header for plugins, and the package that contains it.
const SPANK_HEADER: (&str, &str) = ("/usr/include/slurm/spank.h", "libslurm-dev");

/// Installs what is missing. Returns what could not be installed, each as `what: why`.
pub(crate) fn all() -> Vec<String> {
    let mut missing = Vec::new();
    for (program, package) in PROGRAMS {
        if !on_path(program)
            && let Err(error) = debian(&[package])
        {
            missing.push(format!("{program}: {error:#}"));
        }
    }
    if !Path::new(SPANK_HEADER.0).is_file()
        && let Err(error) = debian(&[SPANK_HEADER.1])
    {
        missing.push(format!("{}: {error:#}", SPANK_HEADER.0));
    }
    if let Err(error) = python() {
        missing.push(format!("Python clients: {error:#}"));
    }
    if let Err(error) = slurm_plugin() {
        missing.push(format!("Slurm's plugin for NVML: {error:#}"));
    }
    if let Err(error) = unpack_prometheus() {
        missing.push(format!("Prometheus: {error:#}"));
    }
    missing
}

/// Returns what is missing. Installs nothing.
pub(crate) fn absent() -> Vec<String> {
    let mut missing = Vec::new();
    for (program, _) in PROGRAMS.iter().filter(|(program, _)| !on_path(program)) {
        missing.push(format!("{program}: not installed, and --no-install was given"));
    }
    if !Path::new(SPANK_HEADER.0).is_file() {
        missing.push(format!("{}: not installed, and --no-install was given", SPANK_HEADER.0));
    }
    if !venv().join("bin/python").is_file() {
        missing.push("Python clients: no target/venv, and --no-install was given".to_owned());
    }
    if !slurm_plugins().join(SLURM_PLUGIN.0).is_file() {
        missing.push("Slurm's plugin for NVML: not unpacked, and --no-install was given".to_owned());
    }
    if !prometheus_is_unpacked() {
        missing.push("Prometheus: not unpacked, and --no-install was given".to_owned());
    }
    missing
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // The directory in which Debian installs daemons is not in the `PATH` of ordinary users.
    std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]).any(|dir| dir.join(program).is_file())
}

/// Downloads Slurm's plugin and unpacks it.
fn slurm_plugin() -> Result<()> {
    let (plugin, package) = SLURM_PLUGIN;
    let folder = slurm_plugins();
    if folder.join(plugin).is_file() {
        return Ok(());
    }
    let unpacked = unpack(package, &folder)?;
    let libraries = fs::read_dir(unpacked.join("usr/lib"))?.flatten();
    let found = libraries.map(|entry| entry.path().join("slurm-wlm").join(plugin)).find(|path| path.is_file());
    fs::copy(found.with_context(|| format!("the package has no {plugin}"))?, folder.join(plugin))?;
    Ok(())
}

fn prometheus_is_unpacked() -> bool {
    PROMETHEUS.0.iter().all(|program| prometheus().join(program).is_file())
}

/// Downloads Prometheus and unpacks it.
fn unpack_prometheus() -> Result<()> {
    let (programs, package) = PROMETHEUS;
    if prometheus_is_unpacked() {
        return Ok(());
    }
    let unpacked = unpack(package, &prometheus())?;
    for program in programs {
        let file = unpacked.join("usr/bin").join(program);
        fs::copy(&file, prometheus().join(program)).with_context(|| format!("the package has no {program}"))?;
    }
    Ok(())
}

/// Downloads a Debian package to a directory, and unpacks it there. Returns the directory of the unpacked files.
fn unpack(package: &str, folder: &Path) -> Result<PathBuf> {
    if !on_path("apt-get") || !is_root() {
        bail!("not unpacked, and only root on Debian can; see `apt-cache show {package}`");
    }
    let unpacked = folder.join("unpacked");
    fs::create_dir_all(&unpacked).with_context(|| format!("cannot make {}", unpacked.display()))?;
    let lists = Lists::with_all_components()?;
    lists.apt(&["update"])?;
    lists.apt_in(folder, &["download", package])?;
    let is_package = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "deb");
    let file = fs::read_dir(folder)?.flatten().map(|entry| entry.path()).find(is_package);
    let file = file.context("apt-get downloaded nothing")?;
    let output = Command::new("dpkg-deb").arg("-x").arg(&file).arg(&unpacked).output().context("dpkg-deb")?;
    if !output.status.success() {
        bail!("dpkg-deb cannot unpack it ({})", last_line(&output.stderr));
    }
    Ok(unpacked)
}

fn python() -> Result<()> {
    let clients = workspace::root().join("tests/clients");
    let wanted = clients.join("requirements.txt");
    if !wanted.is_file() {
        bail!("tests/clients/requirements.txt is not there");
    }
    // The tests do not need the dependencies of these packages.
    let alone = clients.join("requirements-alone.txt");
    let text = fs::read_to_string(&wanted)? + &fs::read_to_string(&alone)?;
    // Record in the environment what was installed. A second run then takes no time, and works
    // offline.
    let note = venv().join("installed-requirements.txt");
    if fs::read_to_string(&note).is_ok_and(|installed| installed == text) {
        return Ok(());
    }
    if !make_venv() {
        debian(&["python3", "python3-venv"]).context("this Python makes no virtual environment")?;
        if !make_venv() {
            bail!("`python3 -m venv` fails");
        }
    }
    pip(&["--requirement"], &wanted)?;
    pip(&["--no-deps", "--requirement"], &alone)?;
    fs::write(&note, text).with_context(|| format!("cannot write {}", note.display()))
}

/// Installs the packages of a requirements file into the private Python environment.
fn pip(options: &[&str], wanted: &Path) -> Result<()> {
    let pip = Command::new(venv().join("bin/python"))
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"])
        .args(options)
        .arg(wanted)
        .stdin(Stdio::null())
        .output()
        .context("pip cannot be started")?;
    if !pip.status.success() {
        bail!("pip could not install {} ({})", wanted.display(), last_line(&pip.stderr));
    }
    Ok(())
}

fn make_venv() -> bool {
    if venv().join("bin/pip").is_file() {
        return true;
    }
    let made = Command::new("python3")
        .args(["-m", "venv", "--clear"])
        .arg(venv())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    made.is_ok_and(|status| status.success())
}

/// Installs Debian packages, which only root can do.
fn debian(packages: &[&str]) -> Result<()> {
    let by_hand = format!("apt-get install {}", packages.join(" "));
    if !on_path("apt-get") {
        bail!("not installed, and this is no Debian; install it by this system's own means");
    }
    if !is_root() {
        bail!(
            "not installed, and only root may; type `sudo {by_hand}` (nvtop is in Debian's contrib, nvidia-cuda-mps in non-free)"
        );
    }
    println!("installing {} through apt", packages.join(" "));
    let lists = Lists::with_all_components()?;
    lists.apt(&["update"])?;
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(packages);
    lists.apt(&arguments)
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Separate package lists of apt for xtask: the sources of the machine, plus `contrib` and
/// `non-free`.
struct Lists {
    folder: PathBuf,
}

impl Lists {
    fn with_all_components() -> Result<Self> {
        let folder = workspace::scratch()?.join("apt");
        let parts = folder.join("parts");
        fs::create_dir_all(&parts).with_context(|| format!("cannot make {}", parts.display()))?;
        fs::create_dir_all(folder.join("lists/partial"))?;
        let mut sources = vec![PathBuf::from("/etc/apt/sources.list")];
        if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
            sources.extend(entries.flatten().map(|entry| entry.path()));
        }
        for source in sources {
            let known = source.extension().is_some_and(|extension| extension == "list" || extension == "sources");
            if let (true, Ok(text)) = (known, fs::read_to_string(&source)) {
                fs::write(parts.join(source.file_name().unwrap_or_default()), add_components(&text))?;
            }
        }
        Ok(Self { folder })
    }

    fn apt(&self, arguments: &[&str]) -> Result<()> {
        self.apt_in(Path::new("."), arguments)
    }

    /// Runs apt in a directory, because `apt-get download` writes to the current directory.
    fn apt_in(&self, directory: &Path, arguments: &[&str]) -> Result<()> {
        let output = Command::new("apt-get")
            .current_dir(directory)
            .args(["-q", "-o", "Dir::Etc::SourceList=/dev/null", "-o"])
            .arg(option("Dir::Etc::SourceParts", &self.folder.join("parts")))
            .arg("-o")
            .arg(option("Dir::State::Lists", &self.folder.join("lists")))
            .args(["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="])
            .args(["-o", "DPkg::Lock::Timeout=120"])
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null())
            .output()
            .context("apt-get cannot be started")?;
        if !output.status.success() {
            bail!("`apt-get {}` failed ({})", arguments.join(" "), last_line(&output.stderr));
        }
        Ok(())
    }
}

fn option(name: &str, path: &Path) -> String {
    format!("{name}={}", path.display())
}

/// Adds `contrib` and `non-free` to every source with `main`. Handles both formats of apt.
fn add_components(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let bare = line.trim_start();
        let has = |word: &str| line.split_whitespace().any(|part| part == word);
        let offers = bare.starts_with("Components:") || bare.starts_with("deb ");
        out.push_str(line);
        for component in ["contrib", "non-free"] {
            if offers && has("main") && !has(component) {
                out.push(' ');
                out.push_str(component);
            }
        }
        out.push('\n');
    }
    out
}

fn last_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it printed nothing").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::add_components;

    #[test]
    fn components_are_added_once_next_to_main() {
        assert_eq!(add_components("Components: main\n"), "Components: main contrib non-free\n");
        assert_eq!(add_components("Components: main contrib non-free\n"), "Components: main contrib non-free\n");
        assert_eq!(
            add_components("deb [trusted=yes] file:/srv stable main\n"),
            "deb [trusted=yes] file:/srv stable main contrib non-free\n"
        );
        assert_eq!(
            add_components("# deb file:/srv stable main\nSuites: main\n"),
            "# deb file:/srv stable main\nSuites: main\n"
        );
    }
}
