//! Other programs that manage the GPUs or hold them open.

use std::{os::unix::fs::MetadataExt, path::Path};

use gpush_core::lint::Lint;
use gpush_host::{cgroup::Membership, other_managers};
use gpush_mps::{SYSTEM_DIRECTORY, daemon::SPEC};

use crate::{Area, Finding, Host, host::Process};

/// Name of the processes of MPS. The kernel cuts names after 15 characters, so control daemons and servers have one
/// name.
const MPS: &str = "nvidia-cuda-mps";

/// Prefix of the units of gpushd's daemons. A user can give a cgroup this name, but not a unit of the system manager.
const UNIT: &str = "gpushd-mps@";

/// A program that matters only while it runs.
struct Known {
    name: &'static str,
    /// Whether the program changes the driver or decides who uses the GPUs, as gpushd does.
    manages: bool,
    message: &'static str,
    hint: &'static str,
}

const KNOWN: [Known; 5] = [
    Known {
        name: "nv-hostengine",
        manages: false,
        message: "DCGM has the GPUs open, which blocks changes of MIG mode",
        hint: "add DCGM's service to `services` in [mode_change] of the config: gpushd then stops the service before \
            it changes MIG mode, and starts it again afterwards",
    },
    Known {
        name: "nvidia-device-p",
        manages: true,
        message: "the device plugin of Kubernetes assigns GPUs of this host",
        hint: "let either gpush or the device plugin manage a GPU: set `mode = \"unmanaged\"` in gpush's rule for the \
            GPU, or exclude the GPU from the plugin",
    },
    Known {
        name: "nvidia-mig-mana",
        manages: true,
        message: "a pod of nvidia-mig-manager changes MIG layouts on this host",
        hint: "remove the label nvidia.com/mig.config from the Kubernetes node, or remove the rules with mode \"mig\" \
            from the config of gpushd",
    },
    Known {
        name: "nvidia-driver",
        manages: true,
        message: "the driver container of the GPU Operator manages the driver of this host",
        hint: "let the operator leave the driver alone: set `driver.enabled=false` in its Helm values and install the \
            driver on the host, or give the GPUs of this node `mode = \"unmanaged\"` in the config of gpushd",
    },
    Known {
        name: "gpu-operator",
        manages: true,
        message: "the GPU Operator of Kubernetes runs on this host",
        hint: "check that the operator manages neither the driver nor MIG of this node: the label \
            nvidia.com/gpu.deploy.operands=false excludes the node",
    },
];

/// Path that the GPU Operator creates on each node that it manages: the results of its validator.
const VALIDATIONS: &str = "run/nvidia/validations";

pub(crate) fn examine(host: &Host) -> Vec<Finding> {
    let processes = host.processes();
    let mut findings = manager_findings(host, &processes);
    findings.extend(foreign_mps(host, &processes));
    if findings.is_empty() {
        findings.push(Finding::ok(Area::Managers, "gpush is the only manager of the GPUs"));
    }
    findings
}

/// Returns the findings about programs that, like gpushd, manage the driver, the layouts or the users of the GPUs.
pub(crate) fn other_managers(host: &Host) -> Vec<Finding> {
    let found = manager_findings(host, &host.processes()).into_iter();
    found.filter(|finding| finding.lint == Some(Lint::OtherManager)).collect()
}

fn manager_findings(host: &Host, processes: &[Process]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(manager) = other_managers::mig_manager(host.root()) {
        let error = manager.error("gpushd changes no MIG layout");
        let finding = Finding::problem(Area::Managers, error.message, error.hint.unwrap_or_default());
        findings.push(error.causes.into_iter().fold(finding, Finding::cause).lint(Lint::OtherManager));
    }
    for known in KNOWN {
        if let Some(process) = processes.iter().find(|process| process.name == known.name) {
            let finding = Finding::warning(Area::Managers, known.message, known.hint);
            let finding = finding.cause(format!("pid {}: {}", process.pid, process.name));
            findings.push(if known.manages { finding.lint(Lint::OtherManager) } else { finding });
        }
    }
    let is_known = findings.iter().any(|finding| finding.lint.is_some());
    if !is_known && host.path(VALIDATIONS).is_dir() {
        let message = "the GPU Operator of Kubernetes has configured this host";
        let hint = "check that it manages neither the driver nor MIG of this node, or remove /run/nvidia/validations \
            if the operator is gone";
        let finding = Finding::warning(Area::Managers, message, hint).cause(format!("/{VALIDATIONS} exists"));
        findings.push(finding.lint(Lint::OtherManager));
    }
    findings
}

/// Reports MPS control daemons that gpushd did not start. Without root, the environment of other users' daemons cannot
/// be read, so such a daemon is not reported.
fn foreign_mps(host: &Host, processes: &[Process]) -> Vec<Finding> {
    let daemons = processes.iter().filter(|process| process.name == MPS && !is_server(host, process.pid));
    let foreign = daemons.filter_map(|daemon| {
        let cgroup = host.read(format!("proc/{}/cgroup", daemon.pid)).unwrap_or_default();
        if Membership::parse(&cgroup).and_then(|found| found.unit).is_some_and(|unit| unit.starts_with(UNIT)) {
            return None;
        }
        host.read(format!("proc/{}/environ", daemon.pid))?;
        let directory = host.variable(daemon.pid, "CUDA_MPS_PIPE_DIRECTORY");
        // A user's process can have any environment.
        let is_trusted = host.owner(daemon.pid).is_some_and(is_trusted);
        if directory.as_ref().is_some_and(|directory| is_trusted && is_own(host, directory)) {
            return None;
        }
        let directory = directory.unwrap_or_else(|| "/tmp/nvidia-mps".to_owned());
        // A user can name a process like the daemon, and set its pipe directory to that of gpushd's daemon. So the hint
        // names the process, and not the directory: a command with the directory could end gpushd's daemon.
        let hint = format!("end this daemon with `kill {}`", daemon.pid);
        let message = "an MPS control daemon is running that gpushd did not start";
        Some(Finding::warning(Area::Managers, message, hint).cause(format!("pid {}, {directory}", daemon.pid)))
    });
    foreign.collect()
}

/// Returns whether a process with the name [`MPS`] is a server, and not a control daemon.
fn is_server(host: &Host, pid: u32) -> bool {
    let line = host.read(format!("proc/{pid}/cmdline")).unwrap_or_default();
    let program = line.split('\0').next().unwrap_or_default();
    Path::new(program).file_name().is_some_and(|name| name == "nvidia-cuda-mps-server")
}

/// Returns whether gpushd has created a pipe directory: it is below the directory of the system service, or gpushd's
/// start settings are next to it. Ignores settings of other users, because any user can create such a file.
fn is_own(host: &Host, pipe_directory: &str) -> bool {
    let pipe_directory = Path::new(pipe_directory);
    let settings = pipe_directory.parent().map(|dir| host.path(dir.join(SPEC)));
    pipe_directory.starts_with(SYSTEM_DIRECTORY)
        || settings.and_then(|file| file.symlink_metadata().ok()).is_some_and(|file| is_trusted(file.uid()))
}

fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == nix::unistd::geteuid().as_raw()
}
