//! The NVIDIA driver: its kernel module and its library, which must have the same version.

use std::path::PathBuf;

use gpush_core::config::Config;

use crate::{Area, Finding, Host};

/// Directories in which distributions and NVIDIA's installer put the library.
const LIBRARY_DIRECTORIES: [&str; 5] =
    ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib"];

pub(crate) fn examine(host: &Host, config: &Config) -> Vec<Finding> {
    let (module, library) = (module_version(host), library(host, &config.driver.library));
    let mut findings = vec![module_finding(host, module.as_deref())];
    match &library {
        None => {
            let message = format!("{} is not installed", config.driver.library);
            let hint = "install the NVIDIA driver's libraries (Debian: libnvidia-ml1, RHEL: nvidia-driver-libs), \
                        or set `library` of [driver] in the config";
            findings.push(Finding::problem(Area::Driver, message, hint));
        }
        Some(library) => {
            let version = library_version(library);
            let shown = format!("/{}", library.strip_prefix(host.root()).unwrap_or(library).display());
            match (&module, version) {
                (Some(module), Some(version)) if *module != version => {
                    let message = format!(
                        "the driver library has version {version}, but the loaded kernel module has version {module}"
                    );
                    let hint = "to load the new kernel module, reboot, or run `gpushctl maintenance enter` and then \
                                `modprobe -r nvidia`";
                    findings.push(Finding::problem(Area::Driver, message, hint).cause(shown));
                }
                (_, Some(version)) => findings.push(Finding::ok(Area::Driver, format!("library {version}, {shown}"))),
                (_, None) => {
                    findings.push(Finding::ok(Area::Driver, format!("library {shown}: its version is unknown")));
                }
            }
        }
    }
    findings
}

fn module_finding(host: &Host, version: Option<&str>) -> Finding {
    if let Some(version) = version {
        return Finding::ok(Area::Driver, format!("kernel module {version}"));
    }
    if host.has("sys/module/nouveau") {
        let message = "the kernel uses nouveau for NVIDIA GPUs instead of NVIDIA's driver";
        let hint = "block nouveau with `echo blacklist nouveau > /etc/modprobe.d/nouveau.conf`, then install NVIDIA's \
                    driver and reboot";
        return Finding::problem(Area::Driver, message, hint);
    }
    let hint = "load it with `modprobe nvidia`, or install NVIDIA's driver if the host has no such module; if the module \
                cannot be loaded, `dmesg | grep -i nvrm` shows why";
    Finding::problem(Area::Driver, "NVIDIA's kernel module is not loaded", hint)
}

/// Returns the version of the loaded kernel module.
pub(crate) fn module_version(host: &Host) -> Option<String> {
    if let Some(version) = host.read("sys/module/nvidia/version") {
        return Some(version);
    }
    let text = host.read("proc/driver/nvidia/version")?;
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(is_version).map(str::to_owned)
}

fn library(host: &Host, name: &str) -> Option<PathBuf> {
    let candidates: Vec<PathBuf> = if name.contains('/') {
        vec![host.path(name)]
    } else {
        LIBRARY_DIRECTORIES.iter().map(|directory| host.path(directory).join(name)).collect()
    };
    candidates.into_iter().find(|path| path.exists())
}

/// Returns the version at the end of the library's file name: `libnvidia-ml.so.550.163.01`.
fn library_version(path: &std::path::Path) -> Option<String> {
    let file = path.canonicalize().ok()?;
    let version = file.file_name()?.to_str()?.split(".so.").nth(1)?.to_owned();
    version.contains('.').then_some(version)
}
