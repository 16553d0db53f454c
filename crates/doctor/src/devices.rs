//! Device nodes of the driver, and which users may open them.

use std::{fs, os::unix::fs::PermissionsExt};

use crate::{Area, Finding, Host, driver};

pub(crate) fn examine(host: &Host) -> Vec<Finding> {
    if driver::module_version(host).is_none() {
        return vec![Finding::ok(Area::Devices, "device nodes not examined: NVIDIA's kernel module is not loaded")];
    }
    let mut findings = Vec::new();
    let gpus = host.names("proc/driver/nvidia/gpus").len();
    let is_gpu = |name: &String| name.strip_prefix("nvidia").is_some_and(|minor| minor.parse::<u32>().is_ok());
    let mut nodes: Vec<String> = host.names("dev").into_iter().filter(is_gpu).collect();
    let create = "create the device nodes with `nvidia-modprobe -c 0 -u`, then run `systemctl restart gpushd`: gpushd \
        sees only device nodes that exist when it starts";
    if !host.has("dev/nvidiactl") {
        findings.push(Finding::problem(Area::Devices, "/dev/nvidiactl is missing", create));
    } else if nodes.len() < gpus {
        let message = format!("device nodes are missing: there are {} for {}", nodes.len(), count(gpus));
        findings.push(Finding::problem(Area::Devices, message, create));
    }
    if !host.has("dev/nvidia-uvm") {
        let message = "/dev/nvidia-uvm is missing, so CUDA programs cannot start";
        findings.push(Finding::warning(
            Area::Devices,
            message,
            "load the module nvidia-uvm with `nvidia-modprobe -u -c 0`",
        ));
    }
    if host.has("proc/driver/nvidia-caps/mig-minors") && !host.has("dev/nvidia-caps") {
        let message = "/dev/nvidia-caps is missing, so programs cannot open MIG devices";
        findings.push(Finding::warning(
            Area::Devices,
            message,
            "create it with `nvidia-modprobe -f \
            /proc/driver/nvidia/capabilities/mig/monitor`",
        ));
    }
    nodes.push("nvidiactl".to_owned());
    let closed: Vec<String> = nodes.iter().filter(|name| !is_open_to_all(host, name)).cloned().collect();
    if !closed.is_empty() {
        let message = "not every user may open the GPUs' device nodes";
        let hint = "to open them to all users, set NVreg_DeviceFileMode=0666 for the module nvidia in \
            /etc/modprobe.d";
        findings.push(Finding::warning(Area::Devices, message, hint).cause(format!(
            "closed to other users: \
            {}",
            closed.join(", ")
        )));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(Area::Devices, format!("all users may open the device nodes of {}", count(gpus))));
    }
    findings
}

fn count(gpus: usize) -> String {
    if gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") }
}

/// Returns whether all users may read and write a device node. Returns `true` for a missing node, because another check
/// reports missing nodes.
fn is_open_to_all(host: &Host, name: &str) -> bool {
    fs::metadata(host.path("dev").join(name)).map_or(true, |meta| meta.permissions().mode() & 0o006 == 0o006)
}
