//! Recognizes MPS servers by parent process and cgroup. Does not ask the daemon, which may be
//! starting or hung.
//!
//! ```text
//! its parent runs as root, has the lock of a target as standard input,
//!   and is in the same gpushd-mps@ unit, if it is in one ───────────────► server of that target's daemon
//! its own standard input is that lock, its daemon has ended, it is not
//!   an MPS client, and it is in a gpushd-mps@ unit. If the daemons have
//!   no units: it runs the program of a server or control daemon, and
//!   its parent has ended or runs as root ───────────────────────────────► the same: leftovers
//! it runs the program of a server, is not an MPS client, and its
//! parent runs the program of a control daemon as root ────────────────► server of a daemon that is not gpushd's
//! ```
//!
//! The program alone proves nothing: any user can start the server's file with `LD_PRELOAD`. The lock has mode 0600,
//! and only a daemon passes the lock to other processes. But a user can copy the lock from a server of this user
//! (`pidfd_getfd`), so the lock alone proves nothing either. "Root" includes the user that gpushd runs as.

use std::{
    fs,
    path::{Path, PathBuf},
};

use gpush_api::ProcessKind;
use gpush_core::config;
use gpush_host::{
    cgroup,
    proc::{self, FileId},
};

use super::{Launcher, TargetDir};

/// File name of NVIDIA's server.
const SERVER: &str = "nvidia-cuda-mps-server";

/// Prefix of the units of gpushd's daemons.
const UNIT: &str = "gpushd-mps@";

/// The files that identify servers, as they were at the time of the reading.
#[derive(Debug)]
pub struct Servers {
    /// The lock of each target.
    locks: Vec<(FileId, ServedTarget)>,
    servers: Vec<FileId>,
    controls: Vec<FileId>,
    own_uid: u32,
    /// Whether each daemon of gpushd is a systemd unit.
    has_units: bool,
}

/// A target of MPS servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedTarget {
    /// Name in messages, such as `GPU 0`.
    pub label: String,
    /// Name in commands, such as `0` or `0:2g.20gb@2`.
    pub name: String,
}

/// A server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server<'a> {
    /// A server of the daemon of a target.
    Of(&'a ServedTarget),
    /// A server of a daemon that is not gpushd's.
    Foreign,
}

impl Server<'_> {
    /// Describes the server.
    #[must_use]
    pub fn describe(self) -> String {
        match self {
            Self::Of(target) => format!("MPS server of {}", target.label),
            Self::Foreign => "MPS server of a daemon that gpushd did not start".to_owned(),
        }
    }
}

impl Servers {
    /// Reads the files that identify servers: the locks and programs of the targets below `base`, and the config's
    /// `programs`. `target` returns the names for a target's short name. `own_uid` is the uid that gpushd runs as.
    #[must_use]
    pub fn of(base: &Path, target: impl Fn(&str) -> ServedTarget, programs: &config::Mps, own_uid: u32) -> Self {
        let places = TargetDir::all(base);
        let locks = places.iter().filter_map(|(place, spec)| Some((place.lock_file()?, target(&spec.target))));
        let servers = places.iter().map(|(_, spec)| spec.servers.join(SERVER));
        let controls = places.iter().map(|(_, spec)| spec.control.clone());
        Self {
            locks: locks.collect(),
            servers: files(servers.chain([programs.server.clone().into()])),
            controls: files(controls.chain([programs.control.clone().into()])),
            own_uid,
            has_units: Launcher::of(base).has_units(),
        }
    }

    /// Returns which server a process is; `None` if the process is not a server.
    #[must_use]
    pub fn of_process(&self, pid: u32, kind: ProcessKind) -> Option<Server<'_>> {
        let parent = proc::parent(pid).filter(|parent| *parent > 1);
        match parent.and_then(|parent| self.holds(parent).map(|target| (parent, target))) {
            Some((parent, target)) if self.is_trusted(parent) && is_in_unit_of(pid, parent) => {
                return Some(Server::Of(target));
            }
            // The parent is itself a server, so this process is not a server, even if it has inherited the lock.
            Some(_) => return None,
            None => {}
        }
        if kind == ProcessKind::MpsClient {
            return None;
        }
        if let Some(target) = self.holds(pid).filter(|_| self.is_leftover(pid, parent)) {
            return Some(Server::Of(target));
        }
        // Check the program of the process last: the program may be on a user's file system that hangs.
        let is_foreign = parent.is_some_and(|parent| self.is_trusted(parent) && runs(parent, &self.controls))
            && runs(pid, &self.servers);
        is_foreign.then_some(Server::Foreign)
    }

    /// Returns whether a process with the lock of a target can be a process of a daemon that has ended, or a daemon.
    fn is_leftover(&self, pid: u32, parent: Option<u32>) -> bool {
        if self.has_units {
            return unit_of(pid).is_some_and(|unit| unit.starts_with(UNIT));
        }
        let has_no_user = parent.is_none_or(|parent| self.is_trusted(parent));
        has_no_user && (runs(pid, &self.servers) || runs(pid, &self.controls))
    }

    /// Returns the target whose lock is the standard input of a process.
    fn holds(&self, pid: u32) -> Option<&ServedTarget> {
        // Check the name first, because it excludes nearly every process.
        if proc::open_file(pid, 0)?.file_name()? != "lock" {
            return None;
        }
        let input = proc::open_file_status(pid, 0)?.id;
        self.locks.iter().find(|(lock, _)| *lock == input).map(|(_, target)| target)
    }

    fn is_trusted(&self, pid: u32) -> bool {
        proc::owner(pid).is_some_and(|uid| uid == 0 || uid == self.own_uid)
    }
}

/// Returns whether a process is in the unit of its daemon. Returns true if the daemon is not in a
/// unit of gpushd.
fn is_in_unit_of(pid: u32, daemon: u32) -> bool {
    unit_of(daemon).filter(|unit| unit.starts_with(UNIT)).is_none_or(|its| unit_of(pid) == Some(its))
}

fn unit_of(pid: u32) -> Option<String> {
    cgroup::of(pid)?.unit
}

/// Returns whether a process executes one of these files.
fn runs(pid: u32, programs: &[FileId]) -> bool {
    proc::executable_id(pid).is_some_and(|id| programs.contains(&id))
}

fn files(paths: impl Iterator<Item = PathBuf>) -> Vec<FileId> {
    paths.filter_map(|path| fs::metadata(path).ok()).map(|meta| FileId::of(&meta)).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        os::unix::process::CommandExt,
        process::{Child, Command, Stdio},
    };

    use super::*;

    fn file_id(path: &str) -> FileId {
        FileId::of(&fs::metadata(path).unwrap())
    }

    /// Creates the lock of a target.
    fn lock_in(dir: &Path) -> (FileId, File) {
        let lock = File::create(dir.join("lock")).unwrap();
        (FileId::of(&lock.metadata().unwrap()), lock)
    }

    /// Starts a shell with `input` as standard input. The shell starts a child that runs `tail`
    /// with another standard input. Returns the shell and the child's pid.
    fn family(input: File) -> (Child, u32) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"ready\n").unwrap();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "tail -f \"$0\" < /dev/null & echo $!; wait"]).arg(file.path());
        let mut shell = shell.stdin(input).stdout(Stdio::piped()).process_group(0).spawn().unwrap();
        let lines = std::io::BufRead::lines(std::io::BufReader::new(shell.stdout.take().unwrap()));
        // Read two lines: the shell prints the pid of its child, and `tail` prints the content of its file. The line of
        // `tail` shows that the child no longer executes the shell's program.
        let lines: Vec<String> = lines.take(2).collect::<Result<_, _>>().unwrap();
        assert!(lines.contains(&"ready".to_owned()), "{lines:?}");
        let pid = lines.iter().find_map(|line| line.parse().ok());
        (shell, pid.expect("the shell prints the pid of its child"))
    }

    fn end(mut shell: Child) {
        let group = nix::unistd::Pid::from_raw(shell.id().cast_signed());
        nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL).unwrap();
        shell.wait().unwrap();
    }

    fn gpu_0() -> ServedTarget {
        ServedTarget { label: "GPU 0".to_owned(), name: "0".to_owned() }
    }

    fn servers(lock: FileId, own_uid: u32) -> Servers {
        let locks = vec![(lock, gpu_0())];
        Servers { locks, servers: Vec::new(), controls: Vec::new(), own_uid, has_units: false }
    }

    #[test]
    fn child_of_a_trusted_process_with_the_lock_is_a_server() {
        let scratch = tempfile::tempdir().unwrap();
        let own = nix::unistd::geteuid().as_raw();
        let (lock, input) = lock_in(scratch.path());
        let (daemon, server) = family(input);
        let servers = servers(lock, own);
        assert_eq!(servers.of_process(server, ProcessKind::Compute), Some(Server::Of(&gpu_0())));
        // The parent of the daemon is this test, which does not have the lock. So the daemon is
        // treated like a server whose parent has ended.
        let shell = proc::executable_id(daemon.id()).unwrap();
        let servers = Servers { controls: vec![shell], ..servers };
        assert_eq!(servers.of_process(daemon.id(), ProcessKind::Compute), Some(Server::Of(&gpu_0())));
        assert_eq!(servers.of_process(std::process::id(), ProcessKind::Compute), None);
        end(daemon);
    }

    /// Fault: a user copied the lock from a server, and started a program with the lock as standard input. gpushd treated
    /// this program as its MPS server, and did not report it as unleased.
    #[test]
    fn process_with_a_copied_lock_is_not_a_server() {
        let scratch = tempfile::tempdir().unwrap();
        let own = nix::unistd::geteuid().as_raw();
        let (lock, input) = lock_in(scratch.path());
        let mut copy = Command::new("sleep").arg("600").stdin(input).spawn().unwrap();
        let of_copy = |servers: &Servers, kind| servers.of_process(copy.id(), kind).map(Server::describe);
        let plain = servers(lock, own);
        assert_eq!(of_copy(&plain, ProcessKind::Compute), None, "it does not run the program of a server");
        let with_program = Servers { servers: vec![proc::executable_id(copy.id()).unwrap()], ..plain };
        assert_eq!(of_copy(&with_program, ProcessKind::Compute), Some("MPS server of GPU 0".to_owned()));
        assert_eq!(of_copy(&with_program, ProcessKind::MpsClient), None);
        if own != 0 {
            let below_a_user = Servers { own_uid: own + 1, ..with_program };
            assert_eq!(of_copy(&below_a_user, ProcessKind::Compute), None, "its parent is the process of a user");
        }
        // A user's process cannot enter the unit of a daemon.
        let with_units = Servers { has_units: true, servers: Vec::new(), ..servers(lock, own) };
        assert_eq!(of_copy(&with_units, ProcessKind::Compute), None);
        copy.kill().and_then(|()| copy.wait()).unwrap();
    }

    /// A server of a user also holds the lock. If the user makes this server start processes, these processes are not
    /// servers.
    #[test]
    fn child_of_a_users_server_is_not_a_server() {
        if !nix::unistd::geteuid().is_root() {
            return println!("SKIPPED children of servers: only root has processes of others");
        }
        let scratch = tempfile::tempdir().unwrap();
        let (lock, input) = lock_in(scratch.path());
        let mut server = Command::new("/bin/sh");
        server.args(["-c", "sleep 600 & echo $!; wait"]).stdin(input).stdout(Stdio::piped()).uid(65534);
        let mut server = server.process_group(0).spawn().unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(server.stdout.take().unwrap()), &mut line).unwrap();
        let servers = servers(lock, 0);
        let child: u32 = line.trim().parse().unwrap();
        assert_eq!(servers.of_process(child, ProcessKind::Compute), None);
        end(server);
    }

    #[test]
    fn server_program_without_a_control_daemon_is_no_server() {
        let scratch = tempfile::NamedTempFile::new().unwrap();
        let own = nix::unistd::geteuid().as_raw();
        let (parent, child) = family(File::open(scratch.path()).unwrap());
        let tail = proc::executable_id(child).unwrap();
        let lock = file_id("/dev/zero");
        let evaded = Servers { servers: vec![tail], ..servers(lock, own) };
        assert_eq!(evaded.of_process(child, ProcessKind::Compute), None);
        let shell = proc::executable_id(parent.id()).unwrap();
        let below_a_daemon = Servers { controls: vec![shell], ..evaded };
        assert_eq!(below_a_daemon.of_process(child, ProcessKind::Compute), Some(Server::Foreign));
        assert_eq!(below_a_daemon.of_process(child, ProcessKind::MpsClient), None);
        let of_a_user = Servers { own_uid: own + 1, ..below_a_daemon };
        assert_eq!(of_a_user.of_process(child, ProcessKind::Compute).is_some(), own == 0);
        end(parent);
    }
}
