//! A cgroup for one machine, in each cgroup hierarchy that systemd uses.
//!
//! `systemd-nspawn --keep-unit` creates its cgroups below the cgroup in which it starts. So two
//! machines need two cgroups. The name of a cgroup contains the pid of the test program. If a test
//! program was killed, the next test program removes the cgroups of the killed program.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

/// Prefix of machine names. The pid of the test program follows.
pub(super) const PREFIX: &str = "gpush-test-";

/// Maximum time until the kernel releases a cgroup whose processes were killed.
const EMPTY: Duration = Duration::from_secs(10);

/// The cgroup's directory in each hierarchy. Dropping this value kills the processes of the cgroup
/// and removes the directories.
#[derive(Debug)]
pub(super) struct Cgroup(Vec<PathBuf>);

/// The cgroup hierarchies of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hierarchy {
    /// Only the unified hierarchy (cgroup v2).
    Unified,
    /// Controllers in cgroup v1. systemd tracks processes in `name=systemd` and in the unified
    /// hierarchy.
    Hybrid,
    /// Only cgroup v1: the controllers, and `name=systemd`, in which systemd tracks processes.
    Legacy,
}

impl Hierarchy {
    /// Checks whether this host can run a machine with these hierarchies.
    pub(super) fn check(self) -> Result<(), String> {
        if self == Self::Unified || Path::new("/sys/fs/cgroup/systemd/cgroup.procs").exists() {
            return Ok(());
        }
        Err(format!("systemd of this host does not use cgroup v1, so no machine can have {self:?} hierarchies"))
    }

    /// Sets the variable from which systemd-nspawn reads the hierarchies. Without the variable, a
    /// machine has the hierarchies of the host.
    pub(super) fn choose(self, nspawn: &mut Command) {
        const VARIABLE: &str = "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY";
        match self {
            Self::Unified => nspawn.env(VARIABLE, "1"),
            Self::Hybrid => nspawn.env_remove(VARIABLE),
            Self::Legacy => nspawn.env(VARIABLE, "0"),
        };
    }
}

/// Returns the hierarchies in which systemd tracks processes on this host: `name=systemd` and the
/// unified hierarchy, or only the unified hierarchy.
fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_owned()];
    }
    ["systemd", "unified"].iter().map(|name| root.join(name)).filter(|dir| dir.join("cgroup.procs").exists()).collect()
}

impl Cgroup {
    /// Creates the cgroup with this name. `controllers` are controllers of cgroup v1 that the
    /// machine itself mounts. If this host has such a controller, also creates the cgroup in the
    /// controller's hierarchy.
    pub(super) fn make(name: &str, controllers: &[&str]) -> Result<Self, String> {
        let mut hierarchies = hierarchies();
        if hierarchies.is_empty() {
            return Err("no cgroup hierarchy is mounted that systemd could use".to_owned());
        }
        let own = controllers.iter().map(|name| Path::new("/sys/fs/cgroup").join(name));
        hierarchies.extend(own.filter(|dir| dir.join("cgroup.clone_children").exists()));
        for hierarchy in &hierarchies {
            sweep(hierarchy);
        }
        let group = Self(hierarchies.iter().map(|hierarchy| hierarchy.join(name)).collect());
        for dir in &group.0 {
            fs::create_dir(dir).map_err(|error| format!("{} can't be made: {error}", dir.display()))?;
        }
        Ok(group)
    }

    /// Starts a program in the cgroup. When the calling thread ends, the program is killed.
    pub(super) fn spawn(&self, command: &Command, place: impl FnOnce(&mut Command)) -> io::Result<Child> {
        let join = r#"n=$1; shift; while [ $n -gt 0 ]; do echo $$ > "$1/cgroup.procs" || exit; shift; n=$((n - 1)); done
                      exec setpriv --pdeathsig TERM -- "$@""#;
        let mut shell = Command::new("sh");
        shell.args(["-c", join, "sh", &self.0.len().to_string()]).args(&self.0);
        shell.arg(command.get_program()).args(command.get_args());
        place(&mut shell);
        shell.spawn()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for dir in &self.0 {
            remove(dir);
        }
    }
}

/// Removes the cgroups of test programs that no longer run.
fn sweep(hierarchy: &Path) {
    for entry in fs::read_dir(hierarchy).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            remove(&entry.path());
        }
    }
}

/// Kills the processes in a cgroup, and removes the directories of the cgroup, the deepest
/// directories first.
fn remove(dir: &Path) {
    let until = Instant::now() + EMPTY;
    while dir.exists() && !remove_once(dir) && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
}

fn remove_once(dir: &Path) -> bool {
    for pid in fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default().lines() {
        // If a process is outside this pid namespace, cgroup.procs shows the pid 0. kill(2) with 0
        // would signal the process group of the caller.
        if let Ok(pid) = pid.parse::<i32>()
            && pid > 1
        {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_once(&entry.path());
        }
    }
    fs::remove_dir(dir).is_ok()
}
