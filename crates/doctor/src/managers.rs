//! Other programs that manage the GPUs or hold them open.

use gpush_host::other_managers;

use crate::{Area, Finding, Host, host::Process};

/// Directory of the MPS daemons that gpushd supervises.
const OWN_MPS: &str = "/run/gpush-mps";

/// A program that matters only while it runs: process name, message and hint.
struct Known {
    name: &'static str,
    message: &'static str,
    hint: &'static str,
}

const KNOWN: [Known; 3] = [
    Known {
        name: "nv-hostengine",
        message: "DCGM has the GPUs open, which blocks changes of MIG mode",
        hint: "add DCGM's service to `services` in [mode_change] of the config: gpushd then stops the service before \
            it changes MIG mode, and starts it again afterwards",
    },
    Known {
        name: "nvidia-device-p",
        message: "the device plugin of Kubernetes assigns GPUs of this host",
        hint: "let either gpush or the device plugin manage a GPU: set `mode = \"unmanaged\"` in gpush's rule for the \
            GPU, or exclude the GPU from the plugin",
    },
    Known {
        name: "nvidia-mig-mana",
        message: "a pod of nvidia-mig-manager changes MIG layouts on this host",
        hint: "remove the label nvidia.com/mig.config from the Kubernetes node, or remove the rules with mode \"mig\" \
            from the config of gpushd",
    },
];

pub(crate) fn examine(host: &Host) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(manager) = other_managers::mig_manager(host.root()) {
        let error = manager.error("gpushd changes no MIG layout");
        let finding = Finding::problem(Area::Managers, error.message, error.hint.unwrap_or_default());
        findings.push(error.causes.into_iter().fold(finding, Finding::cause));
    }
    let processes = host.processes();
    for known in KNOWN {
        if let Some(process) = processes.iter().find(|process| process.name == known.name) {
            let finding = Finding::warning(Area::Managers, known.message, known.hint);
            findings.push(finding.cause(format!("pid {}: {}", process.pid, process.name)));
        }
    }
    findings.extend(foreign_mps(host, &processes));
    if findings.is_empty() {
        findings.push(Finding::ok(Area::Managers, "gpush is the only manager of the GPUs"));
    }
    findings
}

/// Reports MPS control daemons that gpushd did not start.
fn foreign_mps(host: &Host, processes: &[Process]) -> Vec<Finding> {
    let daemons = processes.iter().filter(|process| process.name == "nvidia-cuda-mps");
    let foreign = daemons.filter_map(|daemon| {
        let cgroup = host.read(format!("proc/{}/cgroup", daemon.pid)).unwrap_or_default();
        if cgroup.contains("/gpushd-mps@") {
            return None;
        }
        let directory = host.variable(daemon.pid, "CUDA_MPS_PIPE_DIRECTORY");
        if directory.as_ref().is_some_and(|directory| directory.starts_with(OWN_MPS)) {
            return None;
        }
        let directory = directory.unwrap_or_else(|| "/tmp/nvidia-mps".to_owned());
        let hint =
            format!("end this daemon with `echo quit | CUDA_MPS_PIPE_DIRECTORY={directory} nvidia-cuda-mps-control`");
        let message = "an MPS control daemon is running that gpushd did not start";
        Some(Finding::warning(Area::Managers, message, hint).cause(format!("pid {}, {directory}", daemon.pid)))
    });
    foreign.collect()
}
