//! Decides which processes are MPS servers: the only place that does. Does not ask the daemon, which may be starting or
//! hung.
//!
//! ```text
//! it is on the target's GPU or MIG device, it is in the unit of the target's daemon where daemons are units, and
//!   it is the control daemon that gpushd watches, or a child of that daemon ──► server of that target's daemon
//!   gpushd recorded it while its parent was known (pid and start time) ───────► the same: a leftover, if the daemon ended
//!   the daemon has ended, and daemons are units: it is not an MPS client,
//!   and not the child of a process of the unit ───────────────────────────────► the same: a leftover
//! it runs the program of a server, is not an MPS client, and its parent runs
//! the program of a control daemon as root, and gpushd does not supervise it ──► server of a daemon that is not gpushd's
//! ```
//!
//! A user can imitate everything else:
//! - copy the daemon's lock from a server of this user (`pidfd_getfd`), and pass it to any process;
//! - start a setuid program, whose effective uid is 0, and start processes from this program;
//! - start NVIDIA's server program with `LD_PRELOAD`, and set the environment and the name of a process.
//!
//! "Root" includes the user that gpushd runs as. All four uids must be root's, so a setuid program is not root's.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use gpush_api::{GpuUuid, ProcessKind, TargetUuid};
use gpush_core::config;
use gpush_host::{
    cgroup,
    proc::{self, FileId, ProcessId},
};

use super::{Launcher, Report, TargetDir, launcher};

/// File name of NVIDIA's server.
const SERVER: &str = "nvidia-cuda-mps-server";

/// What identifies servers, as it was at the time of the reading.
#[derive(Debug)]
pub struct Servers {
    supervised: Vec<SupervisedTarget>,
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

/// A target whose daemon gpushd supervises.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SupervisedTarget {
    names: ServedTarget,
    /// UUID of the GPU or MIG device.
    uuid: TargetUuid,
    /// UUID of the GPU that is the target or contains it.
    gpu_uuid: GpuUuid,
    /// Unit of the daemon.
    unit: String,
    /// The control daemon; `None` if gpushd watches none.
    daemon: Option<ProcessId>,
    /// Processes that gpushd saw as children of a daemon of this target.
    recorded: BTreeSet<ProcessId>,
}

impl SupervisedTarget {
    /// Describes a target. `short` is its short name, `report` the last report about its daemon.
    #[must_use]
    pub fn of(names: ServedTarget, short: &str, uuid: &TargetUuid, gpu_uuid: &GpuUuid, report: &Report) -> Self {
        Self {
            names,
            uuid: uuid.clone(),
            gpu_uuid: gpu_uuid.clone(),
            unit: launcher::unit_of_target(short),
            daemon: report.process,
            recorded: report.recorded_servers.clone(),
        }
    }
}

/// Where a process was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<'a> {
    /// The driver lists the process.
    Device {
        /// UUID of the GPU.
        gpu: &'a GpuUuid,
        /// UUID of the MIG device; `None` if the driver lists the process on the whole GPU, or on a GPU instance
        /// without a compute instance.
        device: Option<&'a TargetUuid>,
    },
    /// The process has device files open. CUDA opens the files of all GPUs, so they do not show which GPU it uses.
    DeviceFiles,
}

impl Place<'_> {
    fn is_on(self, target: &SupervisedTarget) -> bool {
        match self {
            Self::Device { device: Some(device), .. } => *device == target.uuid,
            Self::Device { gpu, device: None } => *gpu == target.gpu_uuid,
            Self::DeviceFiles => true,
        }
    }
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
    /// Reads what identifies servers: the supervised targets, and the programs of the targets below `base` and of the
    /// config. `own_uid` is the uid that gpushd runs as.
    #[must_use]
    pub fn of(base: &Path, supervised: Vec<SupervisedTarget>, programs: &config::Mps, own_uid: u32) -> Self {
        let places = TargetDir::all(base);
        let servers = places.iter().map(|(_, spec)| spec.servers.join(SERVER));
        let controls = places.iter().map(|(_, spec)| spec.control.clone());
        Self {
            supervised,
            servers: files(servers.chain([programs.server().into()])),
            controls: files(controls.chain([programs.control.clone().into()])),
            own_uid,
            has_units: Launcher::of(base).has_units(),
        }
    }

    /// Returns which server a process is; `None` if the process is not a server.
    #[must_use]
    pub fn of_process(&self, pid: u32, kind: ProcessKind, place: Place<'_>) -> Option<Server<'_>> {
        let process = ProcessId::of(pid)?;
        let parent = ProcessId::parent_of(pid);
        let mut here = self.supervised.iter().filter(|target| place.is_on(target));
        if let Some(target) = here.find(|target| self.serves(target, process, parent, kind)) {
            return Some(Server::Of(&target.names));
        }
        let is_daemon = |process: ProcessId| self.supervised.iter().any(|target| target.daemon == Some(process));
        let parent = parent.filter(|parent| kind != ProcessKind::MpsClient && !is_daemon(*parent))?;
        // Check the program of the process last: the program may be on a user's file system that hangs.
        let is_foreign = self.is_of_root(parent) && runs(parent, &self.controls) && runs(process, &self.servers);
        is_foreign.then_some(Server::Foreign)
    }

    /// Returns whether a process is the daemon or a server of a target.
    fn serves(
        &self,
        target: &SupervisedTarget,
        process: ProcessId,
        parent: Option<ProcessId>,
        kind: ProcessKind,
    ) -> bool {
        let is_in_unit = |process: ProcessId| unit_of(process).as_ref() == Some(&target.unit);
        if self.has_units && !is_in_unit(process) {
            return false;
        }
        if target.recorded.contains(&process) {
            return true;
        }
        match target.daemon.filter(|daemon| daemon.is_alive()) {
            Some(daemon) => process == daemon || parent == Some(daemon),
            None => self.has_units && kind != ProcessKind::MpsClient && !parent.is_some_and(is_in_unit),
        }
    }

    fn is_of_root(&self, process: ProcessId) -> bool {
        proc::uids(process.pid).is_some_and(|uids| uids == [0; 4] || uids == [self.own_uid; 4])
    }
}

fn unit_of(process: ProcessId) -> Option<String> {
    cgroup::of(process.pid)?.unit
}

/// Returns whether a process executes one of these files.
fn runs(process: ProcessId, programs: &[FileId]) -> bool {
    proc::executable_id(process.pid).is_some_and(|id| programs.contains(&id))
}

fn files(paths: impl Iterator<Item = PathBuf>) -> Vec<FileId> {
    paths.filter_map(|path| fs::metadata(path).ok()).map(|meta| FileId::of(&meta)).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{BufRead, BufReader},
        os::unix::process::CommandExt,
        process::{Child, Command, Stdio},
        sync::LazyLock,
    };

    use super::*;

    static GPU_0: LazyLock<GpuUuid> = LazyLock::new(|| "GPU-0".into());
    static GPU_1: LazyLock<GpuUuid> = LazyLock::new(|| "GPU-1".into());

    fn whole(gpu: &GpuUuid) -> Place<'_> {
        Place::Device { gpu, device: None }
    }

    /// Starts a shell that starts `tail`. Returns the shell and the pid of its child.
    fn family(shell: &mut Command) -> (Child, u32) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"ready\n").unwrap();
        shell.args(["-c", "tail -f \"$0\" < /dev/null & echo $!; wait"]).arg(file.path());
        let mut shell = shell.stdout(Stdio::piped()).process_group(0).spawn().unwrap();
        // `tail` ends when the pipe is closed, so the pipe stays open.
        // Read two lines: the pid of the child, and the line of `tail`, which shows that the child no longer executes
        // the shell's program.
        let lines = BufReader::new(shell.stdout.as_mut().unwrap()).lines().take(2);
        let lines: Vec<String> = lines.collect::<Result<_, _>>().unwrap();
        let pid = lines.iter().find_map(|line| line.parse().ok());
        (shell, pid.expect("the shell prints the pid of its child"))
    }

    fn shell() -> Command {
        let mut shell = Command::new("/bin/sh");
        shell.stdin(Stdio::null());
        shell
    }

    fn end(mut shell: Child) {
        let group = nix::unistd::Pid::from_raw(shell.id().cast_signed());
        nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL).unwrap();
        shell.wait().unwrap();
    }

    fn own_uid() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn gpu_0() -> ServedTarget {
        ServedTarget { label: "GPU 0".to_owned(), name: "0".to_owned() }
    }

    /// Returns what identifies the servers of GPU 0, with this daemon.
    fn servers(daemon: Option<ProcessId>) -> Servers {
        let target = SupervisedTarget {
            names: gpu_0(),
            uuid: "GPU-0".into(),
            gpu_uuid: "GPU-0".into(),
            unit: launcher::unit_of_target("g0"),
            daemon,
            recorded: BTreeSet::new(),
        };
        Servers {
            supervised: vec![target],
            servers: Vec::new(),
            controls: Vec::new(),
            own_uid: own_uid(),
            has_units: false,
        }
    }

    #[test]
    fn child_of_the_supervised_daemon_is_a_server_on_its_gpu_only() {
        let (daemon, server) = family(&mut shell());
        let id = ProcessId::of(daemon.id()).unwrap();
        let at =
            |servers: &Servers, pid, place| servers.of_process(pid, ProcessKind::Compute, place).map(Server::describe);
        let expected = Some("MPS server of GPU 0".to_owned());
        let known = servers(Some(id));
        for (pid, what) in [(server, "server"), (daemon.id(), "daemon")] {
            assert_eq!(at(&known, pid, whole(&GPU_0)), expected, "{what}");
            assert_eq!(at(&known, pid, Place::DeviceFiles), expected, "{what}");
            assert_eq!(at(&known, pid, whole(&GPU_1)), None, "{what}");
        }
        assert_eq!(at(&known, std::process::id(), whole(&GPU_0)), None);
        // Another process had the pid of the daemon before.
        let reused = servers(Some(ProcessId { start: id.start.wrapping_sub(1), ..id }));
        assert_eq!(at(&reused, server, whole(&GPU_0)), None);
        // These processes are in no unit.
        let with_units = Servers { has_units: true, ..servers(Some(id)) };
        assert_eq!(at(&with_units, server, whole(&GPU_0)), None);
        end(daemon);
    }

    #[test]
    fn server_of_a_mig_device_is_not_a_server_on_another_device() {
        let (daemon, server) = family(&mut shell());
        let mut known = servers(ProcessId::of(daemon.id()));
        known.supervised[0].uuid = "MIG-a".into();
        let on =
            |device| known.of_process(server, ProcessKind::Compute, Place::Device { gpu: &GPU_0, device }).is_some();
        let (a, b) = (TargetUuid::from("MIG-a"), TargetUuid::from("MIG-b"));
        // The driver may list the process only on the GPU instance.
        assert!(on(Some(&a)) && on(None) && !on(Some(&b)));
        end(daemon);
    }

    /// Fault: a process counted as an MPS server if its parent had a copy of the daemon's lock and the effective uid 0,
    /// as a setuid program has. So gpushd did not report the process as unleased, and its lease ended while it ran.
    #[test]
    fn child_of_a_root_process_with_a_copied_lock_is_not_a_server() {
        let scratch = tempfile::tempdir().unwrap();
        let lock = File::create(scratch.path().join("lock")).unwrap();
        let mut setuid = Command::new("/bin/sh");
        let (setuid, child) = family(setuid.stdin(lock));
        let (daemon, _server) = family(&mut shell());
        let tail = proc::executable_id(child).unwrap();
        let known = Servers { servers: vec![tail], ..servers(ProcessId::of(daemon.id())) };
        for pid in [setuid.id(), child] {
            for place in [whole(&GPU_0), Place::DeviceFiles] {
                assert_eq!(known.of_process(pid, ProcessKind::Compute, place), None);
            }
        }
        end(setuid);
        end(daemon);
    }

    #[test]
    fn leftover_is_a_server_only_if_gpushd_recorded_it() {
        let (former, leftover) = family(&mut shell());
        let mut known = servers(None);
        assert_eq!(known.of_process(leftover, ProcessKind::Compute, whole(&GPU_0)), None);
        let id = ProcessId::of(leftover).unwrap();
        known.supervised[0].recorded = BTreeSet::from([ProcessId { start: id.start + 1, ..id }]);
        assert_eq!(
            known.of_process(leftover, ProcessKind::Compute, whole(&GPU_0)),
            None,
            "another process had the pid"
        );
        known.supervised[0].recorded = BTreeSet::from([id]);
        assert_eq!(known.of_process(leftover, ProcessKind::Compute, whole(&GPU_0)), Some(Server::Of(&gpu_0())));
        assert_eq!(known.of_process(leftover, ProcessKind::Compute, whole(&GPU_1)), None);
        end(former);
    }

    #[test]
    fn server_program_of_a_user_is_not_a_server() {
        let (parent, child) = family(&mut shell());
        let [tail, shell] = [child, parent.id()].map(|pid| proc::executable_id(pid).unwrap());
        let evaded = Servers { servers: vec![tail], ..servers(None) };
        assert_eq!(evaded.of_process(child, ProcessKind::Compute, whole(&GPU_0)), None);
        let below_a_daemon = Servers { controls: vec![shell], ..evaded };
        assert_eq!(below_a_daemon.of_process(child, ProcessKind::Compute, whole(&GPU_0)), Some(Server::Foreign));
        assert_eq!(below_a_daemon.of_process(child, ProcessKind::MpsClient, whole(&GPU_0)), None);
        // A server of gpushd's daemon on a GPU that is not its own.
        let of_gpushd = Servers { supervised: servers(ProcessId::of(parent.id())).supervised, ..below_a_daemon };
        assert_eq!(of_gpushd.of_process(child, ProcessKind::Compute, whole(&GPU_1)), None);
        let of_a_user = Servers { own_uid: own_uid() + 1, supervised: Vec::new(), ..of_gpushd };
        let found = of_a_user.of_process(child, ProcessKind::Compute, whole(&GPU_0));
        assert_eq!(found.is_some(), own_uid() == 0);
        end(parent);
    }
}
