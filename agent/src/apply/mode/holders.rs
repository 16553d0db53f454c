//! Who has a GPU open: the open files of all processes, looked through for its device nodes.
//!
//! The driver itself tells only who computes on a GPU. A monitor, or a service that merely keeps
//! the device open, is in no list of its, and is in the way of a reset all the same.

use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt, path::Path, time::Duration};

use gpush_api::{ApiError, Code, Holder, text};
use gpush_core::holders::{FABRIC_MANAGER, service};

use crate::agent::Shared;

/// How long a look through all processes may take. One that hangs in the kernel can hang its reader.
const LOOK: Duration = Duration::from_secs(10);

/// Characters of a command line that are kept.
const COMMAND: usize = 256;

/// Name of a fabric manager's process, as the kernel cuts it.
const FABRIC_MANAGER_COMM: &str = "nv-fabricmanage";

/// First capability node of GPU instances, and how many a GPU has: `nvidia-cap<minor>`.
const CAPS: (u32, u32) = (3, 135);

/// Processes that have one of the GPUs with these minor numbers open; our own are not among them.
///
/// # Errors
/// When that can't be told.
pub(super) async fn scan(agent: &Shared, minors: &[u32]) -> Result<Vec<Holder>, ApiError> {
    let status = agent.hardware.status();
    let own = [Some(std::process::id()), status.worker];
    let own: Vec<u32> = own.into_iter().chain(status.abandoned.iter().map(|worker| worker.pid)).flatten().collect();
    let (proc, minors) = (agent.outside.proc.clone(), minors.to_vec());
    let looked = tokio::task::spawn_blocking(move || look(&proc, &minors, &own));
    let mut found = match tokio::time::timeout(LOOK, looked).await {
        Ok(Ok(Ok(found))) => found,
        Ok(Ok(Err(error))) => return Err(blind(&error.to_string())),
        Ok(Err(error)) => return Err(blind(&error.to_string())),
        Err(_) => return Err(blind("a process hangs in the kernel, and so does who looks at it")),
    };
    for holder in &mut found {
        if let Some(uid) = holder.uid {
            holder.user = agent.users.user(uid).await;
        }
    }
    Ok(found)
}

/// Whether root runs a fabric manager. What can't be told is taken for none: then more GPUs must be
/// free for a reset, not fewer.
pub(in crate::apply) async fn fabric_manager_runs(agent: &Shared) -> bool {
    let proc = agent.outside.proc.clone();
    let looked = tokio::task::spawn_blocking(move || find_fabric_manager(&proc));
    matches!(tokio::time::timeout(LOOK, looked).await, Ok(Ok(Ok(true))))
}

fn find_fabric_manager(proc: &Path) -> std::io::Result<bool> {
    let own = nix::unistd::geteuid().as_raw();
    let is_one = |dir: &Path| {
        // A user's process may call itself what it likes.
        let trusted = fs::metadata(dir).is_ok_and(|of| of.uid() == 0 || of.uid() == own);
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
        trusted
            && (read("comm").trim_end() == FABRIC_MANAGER_COMM
                || service(&read("cgroup")).as_deref() == Some(FABRIC_MANAGER))
    };
    let processes = fs::read_dir(proc)?.filter_map(Result::ok);
    Ok(processes
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok()))
        .any(|entry| is_one(&entry.path())))
}

fn blind(why: &str) -> ApiError {
    ApiError::new(Code::DriverError, "who has the GPU open can't be told, so it is not reset")
        .cause(why.to_owned())
        .hint("see for yourself with `fuser -v /dev/nvidia*`, then ask again")
        .retryable()
}

/// A holder as everybody may see it.
pub(super) fn blank(holder: Holder) -> Holder {
    Holder { pid: None, uid: None, user: None, command: None, ..holder }
}

fn look(proc: &Path, minors: &[u32], own: &[u32]) -> std::io::Result<Vec<Holder>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(proc)?.filter_map(Result::ok) {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // Gone meanwhile, or not ours to look into: as root there is none of the latter.
        let Ok(open) = fs::read_dir(entry.path().join("fd")) else { continue };
        if own.contains(&pid) {
            continue;
        }
        let targets = open.filter_map(Result::ok).filter_map(|fd| fs::read_link(fd.path()).ok());
        let mut devices: Vec<String> =
            targets.filter(|target| is_of(target, minors)).map(|node| node.to_string_lossy().into_owned()).collect();
        devices.sort();
        devices.dedup();
        if !devices.is_empty() {
            found.insert(pid, holder(&entry.path(), pid, devices));
        }
    }
    Ok(found.into_values().flatten().collect())
}

/// Whether a node is that of one of these GPUs, or of a GPU instance of theirs.
fn is_of(node: &Path, minors: &[u32]) -> bool {
    let Some(node) = node.to_str().and_then(|node| node.strip_prefix("/dev/")) else { return false };
    if let Some(cap) = node.strip_prefix("nvidia-caps/nvidia-cap").and_then(|cap| cap.parse::<u32>().ok()) {
        return cap.checked_sub(CAPS.0).is_some_and(|cap| minors.contains(&(cap / CAPS.1)));
    }
    node.strip_prefix("nvidia").and_then(|minor| minor.parse().ok()).is_some_and(|minor| minors.contains(&minor))
}

/// What is known of a process; `None` when it is gone by now.
fn holder(dir: &Path, pid: u32, devices: Vec<String>) -> Option<Holder> {
    let uid = fs::metadata(dir).ok()?.uid();
    let words = fs::read(dir.join("cmdline")).or_else(|_| fs::read(dir.join("comm"))).ok()?;
    let words = String::from_utf8_lossy(&words).replace('\0', " ");
    let command: String = words.trim_end().chars().map(text::plain_char).take(COMMAND).collect();
    let cgroups = fs::read_to_string(dir.join("cgroup")).unwrap_or_default();
    Some(Holder {
        pid: Some(pid),
        uid: Some(uid),
        user: None,
        command: (!command.is_empty()).then_some(command),
        service: service(&cgroups).map(|name| text::plain(&name)),
        devices,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nodes_of_a_gpu_are_its_own_and_those_of_its_instances() {
        let of = |node: &str, minor: u32| is_of(Path::new(node), &[minor]);
        assert!(of("/dev/nvidia0", 0) && of("/dev/nvidia12", 12));
        assert!(!of("/dev/nvidia1", 0) && !of("/dev/nvidia12", 1) && !of("/dev/nvidiactl", 0));
        assert!(!of("/dev/nvidia-uvm", 0) && !of("/tmp/nvidia0", 0));
        // Minors 1 and 2 are MIG's config and monitor; GPU 1 begins at 3 + 135.
        assert!(of("/dev/nvidia-caps/nvidia-cap3", 0) && of("/dev/nvidia-caps/nvidia-cap137", 0));
        assert!(!of("/dev/nvidia-caps/nvidia-cap138", 0) && of("/dev/nvidia-caps/nvidia-cap138", 1));
        assert!(!of("/dev/nvidia-caps/nvidia-cap2", 0));
    }

    #[test]
    fn holders_are_found_in_open_files_and_told_with_their_service() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: u32, nodes: &[&str], cgroup: &str| {
            let dir = proc.path().join(pid.to_string());
            fs::create_dir_all(dir.join("fd")).unwrap();
            for (fd, node) in nodes.iter().enumerate() {
                symlink(node, dir.join("fd").join(fd.to_string())).unwrap();
            }
            fs::write(dir.join("cmdline"), "nv-hostengine\0-n\0").unwrap();
            fs::write(dir.join("cgroup"), cgroup).unwrap();
        };
        process(10, &["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia0"], "0::/system.slice/nvidia-dcgm.service\n");
        process(11, &["/dev/nvidia1", "socket:[7]"], "0::/\n");
        process(12, &["/dev/nvidia-caps/nvidia-cap4"], "0::/\n");
        process(13, &["/dev/nvidia0"], "0::/\n");
        fs::write(proc.path().join("cpuinfo"), "").unwrap();
        let found = look(proc.path(), &[0], &[13]).unwrap();
        let told: Vec<_> = found.iter().map(|h| (h.pid.unwrap(), h.service.as_deref(), h.devices.join(" "))).collect();
        assert_eq!(
            told,
            [
                (10, Some("nvidia-dcgm"), "/dev/nvidia0".to_owned()),
                (12, None, "/dev/nvidia-caps/nvidia-cap4".to_owned())
            ]
        );
        assert_eq!(found[0].command.as_deref(), Some("nv-hostengine -n"));
        assert!(look(&proc.path().join("none"), &[0], &[]).is_err());
    }
}
