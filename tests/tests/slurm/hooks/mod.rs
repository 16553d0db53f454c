//! The hooks `gpushctl slurm prolog | epilog | task-prolog`, called as Slurm calls them, on a
//! simulated host.
//!
//! The environment of a hook contains only the variables that Slurm sets, so it has no `PATH`.
//!
//! What gpushd decides, and what the hooks print and write, is tested in `agent/src/lifecycle/in_process/slurm` and in
//! `ctl/tests/cli/slurm`. These tests need both programs, other users, or cgroups.
//!
//! | file | subject |
//! |---|---|
//! | `life` | a job from Prolog to Epilog, after a crash of gpushd |
//! | `requeue` | which run of a requeued job an Epilog ends |
//! | `agent_down` | gpushd is stopped by SIGSTOP |
//! | `config_init` | the config that gpushctl writes for a node |
//! | `numbering` | the order in which slurmd numbers the devices |
//! | `leftovers` | processes that still run after their job has ended |

mod agent_down;
mod config_init;
mod leftovers;
mod life;
mod numbering;
mod requeue;

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use gpush_api::{Lease, LeaseBinding, LeaseState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::{Host, program},
};

/// The uid of `nobody`.
const NOBODY: u32 = 65534;

/// A config with two GPUs for jobs of Slurm.
const WHOLE: &str = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";

/// A simulated node of Slurm: a host with gpushd, and the files of the hooks.
struct Node {
    host: Host,
    agent: Option<Agent>,
    gres_conf: PathBuf,
    config: String,
    /// A program named slurmd that starts Prolog, and the plugin that this program has mapped. If a
    /// test sets them, Prolog runs as the child of this slurmd.
    slurmd: Option<(PathBuf, PathBuf)>,
}

/// Returns the uid of the user of the jobs. If the test runs as root, this is another user.
fn user() -> u32 {
    let own = nix::unistd::geteuid();
    if own.is_root() { NOBODY } else { own.as_raw() }
}

impl Node {
    /// Starts a host with this description and config. gres.conf lists the GPUs in reverse order of
    /// their minor numbers.
    fn start(description: &str, config: &str) -> Self {
        let host = Host::up(description);
        let agent = Agent::start(&host, config);
        agent.wait_for_layouts_at_start();
        // TaskProlog runs as the user of the job. So let this user enter the directory.
        let around = host.dir().parent().expect("a directory");
        fs::set_permissions(around, fs::Permissions::from_mode(0o755)).expect("its mode can be changed");
        let gres_conf = host.scratch("gres.conf");
        let mut minors: Vec<u32> = agent.gpus().iter().map(|gpu| gpu.minor).collect();
        minors.sort_unstable_by(|one, other| other.cmp(one));
        let lines = minors.iter().map(|minor| format!("Name=gpu File=/dev/nvidia{minor}\n"));
        fs::write(&gres_conf, lines.collect::<String>()).expect("gres.conf can be written");
        Self { host, agent: Some(agent), gres_conf, config: config.to_owned(), slurmd: None }
    }

    fn two_gpus(config: &str) -> Self {
        Self::start("[[gpu]]\nmodel = \"l4\"\ncount = 2\n", config)
    }

    fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("gpushd runs")
    }

    fn directory(&self) -> PathBuf {
        self.host.scratch("jobs")
    }

    /// After this call, Prolog runs as the child of a slurmd that has mapped a plugin with this
    /// name.
    fn with_plugin(&mut self, plugin: &str) {
        let (slurmd, mapped) = (self.host.scratch("slurmd"), self.host.scratch(plugin));
        fs::copy("/bin/sh", &slurmd).expect("a copy of the shell");
        fs::copy(program("libnvidia_ml.so"), &mapped).expect("a copy of a library");
        self.slurmd = Some((slurmd, mapped));
    }

    /// Kills gpushd. [`Self::start_again`] starts gpushd again.
    fn kill(&mut self) {
        self.agent.take().expect("gpushd runs").kill();
    }

    fn start_again(&mut self) {
        self.agent = Some(Setup::on(&self.host).config(&self.config).start());
    }

    fn command(&self, verb: &str) -> Command {
        self.command_at(verb, &self.host.scratch("gpushd.admin.sock"))
    }

    /// Returns a command that runs a hook with the gpushd at this socket.
    fn command_at(&self, verb: &str, socket: &Path) -> Command {
        let mut command = match &self.slurmd {
            Some((slurmd, mapped)) if verb == "prolog" => {
                let mut command = Command::new(slurmd);
                // A shell would replace itself with its last command. Here, another command follows
                // gpushctl, so the shell stays.
                command.env_clear().env("LD_PRELOAD", mapped);
                command.args(["-c", "unset LD_PRELOAD; \"$@\"; exit $?", "slurmd"]).arg(program("gpushctl"));
                command
            }
            Some(_) | None => {
                let mut command = Command::new(program("gpushctl"));
                command.env_clear();
                command
            }
        };
        command.stdin(Stdio::null()).args(["slurm", verb]);
        command.arg("--config").arg(self.host.scratch("gpushd.toml")).arg("--dir").arg(self.directory());
        if verb == "task-prolog" {
            if nix::unistd::geteuid().is_root() {
                command.uid(user()).gid(user()).current_dir("/");
            }
        } else {
            command.arg("--socket").arg(socket);
        }
        if verb == "prolog" {
            command.arg("--gres-conf").arg(&self.gres_conf);
        }
        command
    }

    fn run(&self, verb: &str, job: &Job) -> Output {
        self.command(verb).envs(job.0.clone()).output().expect("gpushctl can be started")
    }

    /// Runs Prolog, which must succeed without output.
    fn prolog(&self, job: &Job) {
        silent(&self.run("prolog", job));
    }

    /// Runs Epilog, which must succeed without output.
    fn epilog(&self, job: &Job) {
        silent(&self.run("epilog", job));
    }

    /// Returns the output of TaskProlog. If TaskProlog fails, returns the output as an error.
    fn task(&self, job: &Job) -> Result<String, String> {
        let output = self.run("task-prolog", job);
        assert!(output.stderr.is_empty(), "{output:?}");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        match output.status.code() {
            Some(0) => Ok(text),
            Some(1) => Err(text),
            other => panic!("{other:?}: {text}"),
        }
    }

    /// Runs Prolog for a job that gpush must refuse. Prolog succeeds, and prints one line for the
    /// administrator. Returns the reason that the tasks of the job print.
    fn refusal(&self, job: &Job) -> String {
        let line = refused_line(&self.run("prolog", job)).expect("one line about the refusal");
        let text = self.task(job).expect_err("the task fails");
        let reason = text.lines().next().unwrap_or_default().trim_start_matches("print gpush: ");
        let start = reason.split([';', ':']).next().unwrap_or_default();
        assert!(line.contains(start), "{line:?} {text}");
        assert!(text.lines().all(|line| line.starts_with("print gpush: ")) && text.ends_with('\n'), "{text}");
        text
    }

    /// Returns the lease of a job without its use, which changes with each sample, or `None` if the job has no lease.
    fn lease(&self, id: u32) -> Option<Lease> {
        let all: Vec<Lease> = serde_json::from_value(self.agent().get("/v1/leases").json()).expect("leases");
        all.into_iter()
            .find(|lease| matches!(lease.binding, LeaseBinding::Job { job, .. } if job == id))
            .map(|lease| Lease { usage: None, idle: None, over_limit: None, ..lease })
    }

    fn granted(&self, id: u32) -> Lease {
        let lease = self.lease(id).expect("the job has a lease");
        assert_eq!(lease.state, LeaseState::Active);
        lease
    }
}

/// Returns the index in the driver of the first GPU in gres.conf.
fn first(node: &Node) -> u32 {
    node.agent().gpus().into_iter().max_by_key(|gpu| gpu.minor).expect("a GPU").index.0
}

/// The environment variables of a job's hooks.
#[derive(Debug, Clone)]
struct Job(Vec<(&'static str, String)>);

impl Job {
    fn new(id: u32) -> Self {
        Self::known_by_id(id).with("SLURM_JOB_UID", user()).with("SLURM_JOB_RESTART_COUNT", 0)
    }

    /// Returns a job of which the hooks know only the id.
    fn known_by_id(id: u32) -> Self {
        Self(Vec::new()).with("SLURM_JOB_ID", id).with("SLURM_CLUSTER_NAME", "ci").with("SLURMD_NODENAME", "n1")
    }

    /// Sets the GPUs of the job, by their indexes in gres.conf.
    fn on(self, gpus: &str) -> Self {
        // Slurm sets both variables to indexes.
        self.with("SLURM_JOB_GPUS", gpus).with("CUDA_VISIBLE_DEVICES", gpus)
    }

    fn with(mut self, name: &'static str, value: impl std::fmt::Display) -> Self {
        self.0.retain(|(known, _)| *known != name);
        self.0.push((name, value.to_string()));
        self
    }
}

fn silent(output: &Output) {
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
}

/// If gpush refuses a job, Prolog succeeds and prints a line for the administrator. Returns this
/// line, or `None` if Prolog printed nothing.
fn refused_line(output: &Output) -> Option<String> {
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    assert!(text.lines().count() <= 1, "{text}");
    let line = text.lines().next()?;
    assert!(line.starts_with("gpushctl slurm prolog: job ") && line.contains(": refused: "), "{line}");
    Some(line.to_owned())
}

/// Returns the error line of a hook that must fail.
fn failure(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    assert!(text.starts_with("gpush: job ") && text.lines().count() == 1, "{text}");
    text
}
