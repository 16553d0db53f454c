//! slurmd: whether it runs, and whether it has read the current gres.conf.

use std::{fs, time::UNIX_EPOCH};

use crate::{Area, Finding, Host, host::Process};

/// Clock ticks in a second, as the kernel reports times of processes.
const TICKS: u64 = 100;

/// Checks the running slurmd. `path` is gres.conf.
pub(super) fn examine(host: &Host, path: &str, has_owner: bool) -> Option<Finding> {
    let is_slurmd = |process: &Process| process.name == "slurmd" && host.owner(process.pid) == Some(0);
    let Some(slurmd) = host.processes().into_iter().find(is_slurmd) else {
        let found = if has_owner { Finding::problem } else { Finding::warning };
        let hint = "start it with `systemctl start slurmd`; if it ends, `journalctl -u slurmd` shows why";
        return Some(found(Area::Slurm, "slurmd does not run, so this node gets no jobs".to_owned(), hint.to_owned()));
    };
    let started = started(host, slurmd.pid)?;
    let modified = fs::metadata(host.path(path)).ok()?.modified().ok()?;
    let modified = modified.duration_since(UNIX_EPOCH).ok()?.as_secs();
    if modified <= started {
        return None;
    }
    let message = format!("{path} was changed after slurmd had started, so slurmd may use the older file");
    let hint = "with Slurm 22.05, run `systemctl restart slurmctld` on the controller and `systemctl restart slurmd` here; \
                with 24.11, run `scontrol reconfigure`";
    Some(Finding::warning(Area::Slurm, message, hint))
}

/// Returns when a process started, in seconds since the Unix epoch.
fn started(host: &Host, pid: u32) -> Option<u64> {
    let stat = host.read(format!("proc/{pid}/stat"))?;
    // The name of the process is in parentheses, and may contain spaces.
    let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let boot = host.read("proc/stat")?;
    let boot: u64 = boot.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(boot + ticks / TICKS)
}
