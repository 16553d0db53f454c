//! A running Slurm cluster.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{User, munge::Munge};
use crate::agent::PATIENCE;

/// A running Slurm cluster. Dropping this value cancels all jobs and ends every process of the
/// cluster.
#[derive(Debug)]
pub struct Cluster {
    controller: Child,
    nodes: Vec<Child>,
    /// A program, with its arguments, that starts each slurmd.
    through: Vec<String>,
    _munge: Munge,
    dir: tempfile::TempDir,
}

impl Cluster {
    pub(super) fn start(dir: tempfile::TempDir, nodes: u16, through: Vec<String>) -> Self {
        let munge = Munge::start(&dir.path().join("munge"));
        let controller = daemon(dir.path(), &[], "slurmctld", &["-D", "-c"]);
        let mut cluster = Self { controller, nodes: Vec::new(), through, _munge: munge, dir };
        for number in 1..=nodes {
            let node = cluster.slurmd(&format!("n{number}"));
            cluster.nodes.push(node);
        }
        cluster.wait_until_idle();
        cluster
    }

    /// Waits until every node is idle.
    ///
    /// # Panics
    /// If a node is not idle in time. The panic shows the logs.
    pub fn wait_until_idle(&self) {
        self.until("idle nodes", || {
            let states = self.node_states();
            (!states.is_empty() && states.iter().all(|state| state == "idle")).then_some(())
        });
    }

    /// Returns the directory of the cluster, which users can read.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of slurm.conf.
    #[must_use]
    pub fn slurm_conf(&self) -> PathBuf {
        self.dir().join("slurm.conf")
    }

    /// Returns a command that uses this cluster, as root.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        command(self.dir(), program)
    }

    /// Returns a command that uses this cluster, as a user.
    #[must_use]
    pub fn command_of(&self, user: User, program: &str) -> Command {
        let mut command = self.command(program);
        command.uid(user.uid).gid(user.gid).current_dir(self.dir().join("out"));
        command
    }

    /// Runs a command as root and returns its standard output.
    ///
    /// # Panics
    /// If the command fails.
    pub fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.command(program).args(arguments).output().expect("a program of Slurm can be started");
        assert!(output.status.success(), "{program} {arguments:?}: {}", describe(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Returns the state of each node, as sinfo prints it: `idle`, `mixed`, `drained`.
    #[must_use]
    pub fn node_states(&self) -> Vec<String> {
        let output = self.command("sinfo").args(["-h", "-N", "-o", "%T"]).output().expect("sinfo can be started");
        String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_owned).collect()
    }

    /// Returns the reason of each drained or failed node, as sinfo prints it.
    #[must_use]
    pub fn drain_reasons(&self) -> Vec<String> {
        self.run("sinfo", &["-h", "-R", "-o", "%E"]).lines().map(str::to_owned).collect()
    }

    /// Checks that no node was drained since the start of the cluster.
    ///
    /// # Panics
    /// If a node is drained, or was drained earlier.
    pub fn assert_never_drained(&self) {
        let states = self.node_states();
        let reasons = self.drain_reasons();
        let bad =
            states.iter().any(|state| state.contains("drain") || state.contains("down") || state.contains("inval"));
        assert!(!bad && reasons.is_empty(), "{states:?} {reasons:?}\n{}", self.logs());
        let log = self.log("slurmctld");
        let drained = log.lines().find(|line| line.contains("to DRAIN") || line.contains("draining node"));
        assert_eq!(drained, None, "{}", self.logs());
    }

    /// Returns a drained node to service.
    pub fn resume(&self, node: &str) {
        self.run("scontrol", &["update", &format!("nodename={node}"), "state=resume"]);
    }

    /// Returns the log of `slurmctld` or of a node, such as `slurmd-n1`.
    #[must_use]
    pub fn log(&self, name: &str) -> String {
        fs::read(self.dir().join("log").join(name))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Sends a signal to the slurmd of a node. `node` counts from 0.
    ///
    /// # Panics
    /// If that slurmd has ended.
    pub fn signal_node(&mut self, node: usize, signal: Signal) {
        kill(Pid::from_raw(self.nodes[node].id().cast_signed()), signal).expect("slurmd can be signalled");
        if signal == Signal::SIGKILL {
            self.nodes[node].wait().expect("slurmd ends");
        }
    }

    /// Starts the slurmd of a node again after that slurmd has ended.
    pub fn restart_node(&mut self, node: usize) {
        self.nodes[node] = self.slurmd(&format!("n{}", node + 1));
    }

    /// Ends slurmctld, and starts it again with its saved state.
    ///
    /// # Panics
    /// If slurmctld does not end.
    pub fn restart_controller(&mut self) {
        kill(Pid::from_raw(self.controller.id().cast_signed()), Signal::SIGTERM).expect("slurmctld can be signalled");
        self.controller.wait().expect("slurmctld ends");
        self.controller = daemon(self.dir(), &[], "slurmctld", &["-D"]);
    }

    fn slurmd(&self, name: &str) -> Child {
        daemon(self.dir(), &self.through, "slurmd", &["-D", "-N", name])
    }

    /// Polls until `look` returns a value.
    ///
    /// # Panics
    /// If `look` returns no value within [`PATIENCE`]. The panic shows the logs.
    pub fn until<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < until, "no {what} within {PATIENCE:?}\n{}", self.logs());
            // Pause, because each poll starts a program of Slurm.
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Returns the last lines of all logs.
    #[must_use]
    pub fn logs(&self) -> String {
        let names = fs::read_dir(self.dir().join("log")).into_iter().flatten().flatten();
        let mut names: Vec<_> = names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        let end = |name: &String| {
            let log = self.log(name);
            let lines: Vec<_> = log.lines().collect();
            format!("--- {name}\n{}\n", lines[lines.len().saturating_sub(60)..].join("\n"))
        };
        names.iter().map(end).collect()
    }

    /// Returns the processes whose environment names the slurm.conf of this cluster: daemons,
    /// slurmstepds and jobs.
    fn processes(&self) -> Vec<Pid> {
        let wanted = format!("SLURM_CONF={}", self.slurm_conf().display());
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        pids.filter(|pid| {
            fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|bytes| bytes.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes()))
        })
        .map(Pid::from_raw)
        .collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Use SIGKILL, because no other signal ends a slurmd that was stopped with SIGSTOP.
        for pid in self.processes() {
            let _ = kill(pid, Signal::SIGKILL);
        }
        for daemon in self.nodes.iter_mut().chain([&mut self.controller]) {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        // Also kill the processes that a daemon has started since the first loop.
        for pid in self.processes() {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

/// Returns the exit status and the output of a program, for a message.
pub(super) fn describe(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    format!("{}: {} {}", output.status, text(&output.stdout), text(&output.stderr))
}

fn command(dir: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    // Clear the environment: sbatch would pass the environment of the test to the job.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/").env("LC_ALL", "C.UTF-8");
    command.env("SLURM_CONF", dir.join("slurm.conf")).stdin(Stdio::null());
    command
}

fn daemon(dir: &Path, through: &[String], program: &str, arguments: &[&str]) -> Child {
    let path = dir.join("log").join(format!("{program}.output"));
    let output = fs::OpenOptions::new().create(true).append(true).open(path).expect("a log");
    let mut command = match through.split_first() {
        Some((first, rest)) => {
            let mut command = command(dir, first);
            command.args(rest).arg(program);
            command
        }
        None => command(dir, program),
    };
    command.args(arguments).current_dir("/").stdout(Stdio::null()).stderr(output);
    command.spawn().expect("a daemon of Slurm can be started")
}
