//! Processes that have a GPU's device node open.
//!
//! The driver lists only processes that compute. But a monitor or another service that keeps the
//! device open also blocks a reset. This module never reads the memory of a process, so a process
//! cannot delay the search.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use gpush_api::Holder;
use gpush_core::holders::FABRIC_MANAGER;

use crate::{
    cgroup::Membership,
    proc::{Status, read},
};

/// Name of the fabric manager's process. The kernel cuts names after 15 characters.
const FABRIC_MANAGER_NAME: &str = "nv-fabricmanage";

/// Name of the kernel module that connects GPUs to displays.
const DRM: &str = "nvidia_drm";

/// Minor number of the first capability node of GPU instances, and the number of such nodes for
/// each GPU. The path of a node is `/dev/nvidia-caps/nvidia-cap<minor>`.
const CAPS: (u32, u32) = (3, 135);

/// Finds the processes that have one of the GPUs with these minor numbers open. Omits the pids in `except`. Does not
/// look up command and user name.
///
/// # Errors
/// `proc` cannot be listed.
pub fn holders(proc: &Path, minors: &[u32], except: &[u32]) -> io::Result<Vec<Holder>> {
    let mut found = BTreeMap::new();
    for (pid, dir) in processes(proc)? {
        // Skip the process: it has ended, or gpushd has no root privileges and the process belongs to another user.
        let Ok(open) = fs::read_dir(dir.join("fd")) else { continue };
        if except.contains(&pid) {
            continue;
        }
        let targets = open.filter_map(Result::ok).filter_map(|fd| fs::read_link(fd.path()).ok());
        let mut devices: Vec<String> =
            targets.filter(|target| is_of(target, minors)).map(|node| node.to_string_lossy().into_owned()).collect();
        devices.sort();
        devices.dedup();
        if !devices.is_empty() {
            found.insert(pid, holder(&dir, pid, devices));
        }
    }
    Ok(found.into_values().flatten().collect())
}

/// The node of the display part of the driver. A display server has it open.
pub const DISPLAY_NODE: &str = "/dev/nvidia-modeset";

/// Finds the processes that have a GPU, `nvidiactl` or the display part of the driver open, with these nodes. Omits the
/// processes that gpushd may not read.
///
/// # Errors
/// `proc` cannot be listed.
pub fn open_nodes(proc: &Path) -> io::Result<Vec<(u32, Vec<String>)>> {
    let is_node = |node: &String| {
        let name = node.strip_prefix("/dev/nvidia");
        node == DISPLAY_NODE || name.is_some_and(|name| name == "ctl" || name.parse::<u32>().is_ok())
    };
    let nodes_of = |dir: &Path| -> Vec<String> {
        let Ok(open) = fs::read_dir(dir.join("fd")) else { return Vec::new() };
        let targets = open.filter_map(Result::ok).filter_map(|fd| fs::read_link(fd.path()).ok());
        let mut nodes: Vec<String> = targets.map(|node| node.to_string_lossy().into_owned()).filter(is_node).collect();
        nodes.sort();
        nodes.dedup();
        nodes
    };
    let all = processes(proc)?.map(|(pid, dir)| (pid, nodes_of(&dir)));
    Ok(all.filter(|(_, nodes)| !nodes.is_empty()).collect())
}

/// Returns whether a fabric manager runs as root, or as the user that gpushd runs as.
///
/// # Errors
/// `proc` cannot be listed.
pub fn fabric_manager_runs(proc: &Path) -> io::Result<bool> {
    let own = nix::unistd::geteuid().as_raw();
    let is_one = |dir: &Path| {
        // Ignore the processes of other users, because they can have any name.
        uid(dir).is_some_and(|uid| uid == 0 || uid == own)
            && (text_of(dir, "comm").trim_end() == FABRIC_MANAGER_NAME
                || membership(dir).is_some_and(|one| one.service() == Some(FABRIC_MANAGER)))
    };
    Ok(processes(proc)?.any(|(_, dir)| is_one(&dir)))
}

fn processes(proc: &Path) -> io::Result<impl Iterator<Item = (u32, PathBuf)>> {
    let entries = fs::read_dir(proc)?.filter_map(Result::ok);
    Ok(entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path()))))
}

/// Returns whether a device node belongs to one of these GPUs, or to one of their GPU instances.
fn is_of(node: &Path, minors: &[u32]) -> bool {
    let Some(node) = node.to_str().and_then(|node| node.strip_prefix("/dev/")) else { return false };
    if let Some(cap) = node.strip_prefix("nvidia-caps/nvidia-cap").and_then(|cap| cap.parse::<u32>().ok()) {
        return cap.checked_sub(CAPS.0).is_some_and(|cap| minors.contains(&(cap / CAPS.1)));
    }
    node.strip_prefix("nvidia").and_then(|minor| minor.parse().ok()).is_some_and(|minor| minors.contains(&minor))
}

/// Describes a process; `None` if it has ended.
fn holder(dir: &Path, pid: u32, devices: Vec<String>) -> Option<Holder> {
    let unit = membership(dir).and_then(|one| one.unit);
    Some(Holder { pid: Some(pid), uid: Some(uid(dir)?), unit, devices, ..Holder::default() })
}

/// Returns the kernel modules that have the GPUs open. `nvidia_drm` with mode setting is the only such module: it has
/// the GPUs open while the module has users, such as the console or a display server. The driver does not say which GPUs
/// these are.
pub fn kernel_modules(proc: &Path) -> Vec<Holder> {
    let modules = String::from_utf8_lossy(&read(proc.join("modules")).unwrap_or_default()).into_owned();
    // Fields of a line: name, size, number of users.
    let is_used = |line: &str| {
        let mut words = line.split_whitespace();
        words.next() == Some(DRM) && words.nth(1).and_then(|users| users.parse::<u32>().ok()).is_some_and(|n| n > 0)
    };
    let is_found = modules.lines().any(is_used);
    is_found.then(|| Holder { module: Some(DRM.to_owned()), ..Holder::default() }).into_iter().collect()
}

/// Returns the effective user id. On a simulated host, which has no `status` files, returns the
/// owner of the directory instead.
fn uid(dir: &Path) -> Option<u32> {
    match read(dir.join("status")) {
        Ok(status) => Some(Status::parse(&String::from_utf8_lossy(&status))?.uid()),
        Err(_) => Some(fs::metadata(dir).ok()?.uid()),
    }
}

fn membership(dir: &Path) -> Option<Membership> {
    Membership::parse(&text_of(dir, "cgroup"))
}

fn text_of(dir: &Path, name: &str) -> String {
    String::from_utf8_lossy(&read(dir.join(name)).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn node_belongs_to_the_gpu_with_its_minor_number() {
        let of = |node: &str, minor: u32| is_of(Path::new(node), &[minor]);
        assert!(of("/dev/nvidia0", 0) && of("/dev/nvidia12", 12));
        assert!(!of("/dev/nvidia1", 0) && !of("/dev/nvidia12", 1) && !of("/dev/nvidiactl", 0));
        assert!(!of("/dev/nvidia-uvm", 0) && !of("/tmp/nvidia0", 0));
        // Minors 1 and 2 are the nodes for MIG configuration and monitoring. The nodes of GPU 1
        // begin at 3 + 135.
        assert!(of("/dev/nvidia-caps/nvidia-cap3", 0) && of("/dev/nvidia-caps/nvidia-cap137", 0));
        assert!(!of("/dev/nvidia-caps/nvidia-cap138", 0) && of("/dev/nvidia-caps/nvidia-cap138", 1));
        assert!(!of("/dev/nvidia-caps/nvidia-cap2", 0));
    }

    /// Creates a `/proc` with these processes: pid, open nodes, cgroup, `status`.
    fn proc_with(processes: &[(u32, &[&str], &str, Option<&str>)]) -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        for (pid, nodes, cgroup, status) in processes {
            let dir = proc.path().join(pid.to_string());
            fs::create_dir_all(dir.join("fd")).unwrap();
            for (fd, node) in nodes.iter().enumerate() {
                symlink(node, dir.join("fd").join(fd.to_string())).unwrap();
            }
            fs::write(dir.join("cgroup"), cgroup).unwrap();
            if let Some(status) = status {
                fs::write(dir.join("status"), status).unwrap();
            }
        }
        fs::write(proc.path().join("cpuinfo"), "").unwrap();
        proc
    }

    #[test]
    fn holders_are_found_by_their_open_files() {
        let dcgm = "0::/system.slice/nvidia-dcgm.service\n";
        let proc = proc_with(&[
            (10, &["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia0"], dcgm, Some("Uid:\t1\t7\t1\t1\nPid:\t")),
            (11, &["/dev/nvidia1", "socket:[7]"], "0::/\n", None),
            (12, &["/dev/nvidia-caps/nvidia-cap4"], "0::/\n", None),
            (13, &["/dev/nvidia0"], "0::/\n", None),
        ]);
        let found = holders(proc.path(), &[0], &[13]).unwrap();
        let found: Vec<_> = found.iter().map(|one| (one.pid.unwrap(), one.service(), one.devices.join(" "))).collect();
        let expected = [
            (10, Some("nvidia-dcgm"), "/dev/nvidia0".to_owned()),
            (12, None, "/dev/nvidia-caps/nvidia-cap4".to_owned()),
        ];
        assert_eq!(found, expected);
        assert_eq!(holders(proc.path(), &[0], &[]).unwrap()[0].uid, Some(7));
        assert!(holders(&proc.path().join("none"), &[0], &[]).is_err());
    }

    #[test]
    fn open_nodes_are_those_of_gpus_and_of_the_display() {
        let proc = proc_with(&[
            (10, &["/dev/nvidia-modeset", "/dev/nvidia1", "/dev/nvidia1"], "0::/\n", None),
            (11, &["/dev/nvidia-uvm", "/dev/nvidia-caps/nvidia-cap4", "/tmp/nvidia0"], "0::/\n", None),
            (12, &["/dev/nvidiactl"], "0::/\n", None),
        ]);
        let mut found = open_nodes(proc.path()).unwrap();
        found.sort();
        let nodes = |nodes: &[&str]| nodes.iter().map(|&node| node.to_owned()).collect::<Vec<_>>();
        assert_eq!(found, [(10, nodes(&[DISPLAY_NODE, "/dev/nvidia1"])), (12, nodes(&["/dev/nvidiactl"]))]);
    }

    #[test]
    fn display_module_is_a_holder_only_while_it_has_users() {
        let proc = proc_with(&[]);
        let found = |modules: &str| {
            fs::write(proc.path().join("modules"), modules).unwrap();
            kernel_modules(proc.path()).into_iter().filter_map(|holder| holder.module).collect::<Vec<_>>()
        };
        assert!(kernel_modules(&proc.path().join("none")).is_empty());
        let others = "nvidia 56000 9 nvidia_uvm,nvidia_drm, Live 0x0\nnvidia_uvm 1500 4 - Live 0x0\n";
        assert!(found(others).is_empty());
        assert!(found(&format!("{others}nvidia_drm 94208 0 - Live 0x0 (OE)\n")).is_empty());
        assert_eq!(found(&format!("{others}nvidia_drm 94208 2 - Live 0x0 (OE)\n")), ["nvidia_drm"]);
    }

    #[test]
    fn fabric_manager_counts_only_when_a_trusted_user_runs_it() {
        let service = "0::/system.slice/nvidia-fabricmanager.service\n";
        let own = nix::unistd::geteuid().as_raw();
        let status = |uid: u32| format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n");
        let runs = |uid: u32, cgroup: &str, comm: &str| {
            let proc = proc_with(&[(10, &[], cgroup, Some(&status(uid)))]);
            fs::write(proc.path().join("10/comm"), comm).unwrap();
            fabric_manager_runs(proc.path()).unwrap()
        };
        assert!(runs(0, service, "x\n") && runs(own, "0::/\n", "nv-fabricmanage\n"));
        assert!(!runs(own + 1, service, "nv-fabricmanage\n") && !runs(0, "0::/\n", "bash\n"));
    }
}
