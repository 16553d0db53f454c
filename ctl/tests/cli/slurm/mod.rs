//! Tests of `gpushctl slurm prolog`, `epilog`, `task-prolog` and `reconcile` with a program that answers instead of gpushd:
//! what the hooks request, which files they write, what they print, and whether they fail.
//!
//! The environment of a hook contains only the variables that Slurm sets, so it has no `PATH`.

mod epilog;
mod prolog;
mod reconcile;
mod task;
mod without_gpushd;

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use gpush_api::{
    ApiError, Lease, LeaseBinding, SlurmGpu, SlurmJobEnd, SlurmJobEnded, SlurmJobStart, SlurmJobStarted, SlurmOutcome,
};

use crate::{
    lease::{granted, lease, me},
    support::{Agent, Answer, GPUSHCTL, Host, Request},
};

/// A config in which only jobs use two whole GPUs.
const WHOLE: &str = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";

/// A config with one GPU for users and one GPU for Slurm.
const MIXED: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n\
                     [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";

const START: &str = "/v1/slurm/jobs";
const END: &str = "/v1/slurm/jobs/end";

const COMMENT: &str = "SLURM_JOB_COMMENT";
const CLUSTER: &str = "SLURM_CLUSTER_NAME";
const NODE: &str = "SLURMD_NODENAME";
const RESTARTS: &str = "SLURM_JOB_RESTART_COUNT";

/// A node of Slurm: the files of the hooks, and the path of the admin socket.
struct Node {
    host: Host,
    socket: PathBuf,
    /// The time limit of the hooks. Without gpushd, the hooks wait until this limit.
    deadline: &'static str,
}

impl Node {
    /// Creates a node with this config. gres.conf lists two GPUs in reverse order of their minor numbers.
    fn new(config: &str) -> Self {
        let host = Host::new();
        host.write("config.toml", config);
        host.write("gres.conf", "Name=gpu File=/dev/nvidia1\nName=gpu File=/dev/nvidia0\n");
        let socket = host.path("admin.sock");
        Self { host, socket, deadline: "1m" }
    }

    /// Creates a node with a gpushd that grants lease L17 to each job, and accepts the end of each job.
    fn granting(config: &str) -> (Self, Agent) {
        Self::answering(config, |_| grants())
    }

    /// Creates a node with a gpushd that gives these answers to Prolog, and ends each lease.
    fn answering(config: &str, start: impl Fn(SlurmJobStart) -> Answer + Send + Sync + 'static) -> (Self, Agent) {
        let node = Self::new(config);
        let agent = Agent::listen(&node.socket, move |request: &Request| match request.path.as_str() {
            START => start(serde_json::from_str(&request.body).unwrap()),
            END => Answer::ok(&SlurmJobEnded::default()),
            other => panic!("a request for {other}"),
        });
        (node, agent)
    }

    /// After this call, no process listens on the socket.
    fn stop_gpushd(&mut self) {
        self.socket = self.host.path("absent.sock");
        self.deadline = "1s";
    }

    fn jobs(&self) -> PathBuf {
        self.host.path("jobs")
    }

    /// Returns whether the directory of the jobs has this file.
    fn has(&self, name: &str) -> bool {
        self.jobs().join(name).exists()
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(GPUSHCTL);
        command.env_clear().stdin(Stdio::null()).args(["slurm", verb]);
        command.arg("--config").arg(self.host.path("config.toml")).arg("--dir").arg(self.jobs());
        if verb == "prolog" {
            command.arg("--gres-conf").arg(self.host.path("gres.conf"));
        }
        if verb != "task-prolog" {
            command.arg("--socket").arg(&self.socket).args(["--deadline", self.deadline]);
        }
        command
    }

    fn run(&self, verb: &str, job: &Job) -> Output {
        self.command(verb).envs(job.0.clone()).output().unwrap()
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
        let text = String::from_utf8(output.stdout).unwrap();
        match output.status.code() {
            Some(0) => Ok(text),
            Some(1) => Err(text),
            other => panic!("{other:?}: {text}"),
        }
    }

    /// Runs Prolog for a job that is refused. Prolog succeeds, and prints one line for the administrator. Returns the text
    /// that the tasks of the job print.
    fn refusal(&self, job: &Job) -> String {
        let output = self.run("prolog", job);
        assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
        let line = String::from_utf8(output.stderr).unwrap();
        assert!(line.lines().count() == 1 && line.starts_with("gpushctl slurm prolog: job "), "{line}");
        assert!(line.contains(": refused: "), "{line}");
        let text = self.task(job).expect_err("the task fails");
        assert!(text.lines().all(|line| line.starts_with("print gpush: ")) && text.ends_with('\n'), "{text}");
        text
    }
}

/// The environment variables of a job's hooks.
#[derive(Debug, Clone)]
struct Job(Vec<(&'static str, String)>);

impl Job {
    fn new(id: u32) -> Self {
        Self::known_by_id(id).with(CLUSTER, "ci").with(NODE, "n1").with("SLURM_JOB_UID", me()).with(RESTARTS, 0)
    }

    /// Returns a job of which the hooks know only the id.
    fn known_by_id(id: u32) -> Self {
        Self(Vec::new()).with("SLURM_JOB_ID", id)
    }

    /// Sets the GPUs of the job, by their indexes in gres.conf. Slurm sets both variables to indexes.
    fn on(self, gpus: &str) -> Self {
        self.with("SLURM_JOB_GPUS", gpus).with("CUDA_VISIBLE_DEVICES", gpus)
    }

    fn with(mut self, name: &'static str, value: impl std::fmt::Display) -> Self {
        self.0.retain(|(known, _)| *known != name);
        self.0.push((name, value.to_string()));
        self
    }

    fn without(mut self, names: &[&str]) -> Self {
        self.0.retain(|(name, _)| !names.contains(name));
        self
    }
}

fn silent(output: &Output) {
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
}

/// Returns the error line of a hook that must fail.
fn failure(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(text.starts_with("gpush: job ") && text.lines().count() == 1, "{text}");
    text
}

/// Returns an answer to Prolog. The GPU with minor number 1 belongs to Slurm.
fn started(outcome: SlurmOutcome) -> Answer {
    let owned = vec![SlurmGpu { uuid: "GPU-1".into(), minor: 1, mig_uuids: Vec::new() }];
    Answer::ok(&SlurmJobStarted { outcome, owned })
}

fn grants() -> Answer {
    started(SlurmOutcome::Granted { grant: Box::new(granted(17, me())) })
}

/// Returns the requests that gpushd has got from Prologs.
fn starts(agent: &Agent) -> Vec<SlurmJobStart> {
    agent.bodies(START).iter().map(|body| serde_json::from_str(body).unwrap()).collect()
}

/// Returns the requests that gpushd has got from Epilogs, as `CLUSTER JOB@NODE RESTARTS`.
fn ends(agent: &Agent) -> Vec<String> {
    let ends = agent.bodies(END).into_iter().map(|body| serde_json::from_str::<SlurmJobEnd>(&body).unwrap());
    ends.map(|end| format!("{} {}@{} {}", end.cluster, end.job, end.node, end.restart)).collect()
}

/// Returns a lease of a job.
fn lease_of(id: u64, cluster: &str, job: u32) -> Lease {
    let (cluster, node) = (cluster.to_owned(), "n1".to_owned());
    let binding =
        LeaseBinding::Job { cluster, job, node, restart: 0, leader: None, cgroup: None, name: None, account: None };
    Lease { binding, ..lease(id, me()) }
}

/// Writes a program that replaces squeue. Returns its path.
fn squeue(node: &Node, body: &str) -> PathBuf {
    let path = node.host.write("squeue", format!("#!/bin/sh\n{body}\n"));
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    path
}

/// Returns an error that means that the node cannot serve jobs.
fn broken() -> ApiError {
    ApiError::new(gpush_api::Code::Unavailable, "GPU 1 is cordoned").cause("a new fan")
}
