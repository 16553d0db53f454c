//! A cgroup of a machine's own, in every hierarchy that systemd looks at.
//!
//! `systemd-nspawn --keep-unit` works below the cgroup that it is started in; two machines in one
//! would collide. A name holds the pid of the test program, so what one that was killed left behind
//! is found and removed by the next.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

/// How names of machines begin; the pid of their test program follows.
pub(super) const PREFIX: &str = "gpush-test-";

/// How long the kernel may take to let go of a cgroup whose processes were killed.
const EMPTY: Duration = Duration::from_secs(10);

/// The same directory in each hierarchy; gone, with the processes in it, when dropped.
#[derive(Debug)]
pub(super) struct Cgroup(Vec<PathBuf>);

/// Hierarchies that systemd uses here: its own and the unified one, or the unified one alone.
fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_owned()];
    }
    ["systemd", "unified"].iter().map(|name| root.join(name)).filter(|dir| dir.join("cgroup.procs").exists()).collect()
}

impl Cgroup {
    /// Makes one of this name.
    pub(super) fn make(name: &str) -> Result<Self, String> {
        let hierarchies = hierarchies();
        if hierarchies.is_empty() {
            return Err("no cgroup hierarchy is mounted that systemd could use".to_owned());
        }
        for hierarchy in &hierarchies {
            sweep(hierarchy);
        }
        let group = Self(hierarchies.iter().map(|hierarchy| hierarchy.join(name)).collect());
        for dir in &group.0 {
            fs::create_dir(dir).map_err(|error| format!("{} can't be made: {error}", dir.display()))?;
        }
        Ok(group)
    }

    /// Starts a program in it, which ends when the thread that calls this does.
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

/// Removes what test programs left that are gone.
fn sweep(hierarchy: &Path) {
    for entry in fs::read_dir(hierarchy).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            remove(&entry.path());
        }
    }
}

/// Kills what is in a cgroup and removes it, the deepest first.
fn remove(dir: &Path) {
    let until = Instant::now() + EMPTY;
    while dir.exists() && !remove_once(dir) && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
}

fn remove_once(dir: &Path) -> bool {
    for pid in fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default().lines() {
        // 0 is a process of a namespace above ours, and to kill(2) it is our own group.
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
