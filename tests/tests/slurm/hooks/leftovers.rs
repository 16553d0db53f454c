//! Processes that still run on the GPU of a job after the job has ended.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};

use gpush_api::{LeaseState, MpsState};
use gpush_tests::{
    host::Host,
    mps::{Client, lease_becomes, lease_now, reaches},
};

use super::{Job, NOBODY, Node, WHOLE, failure, first};

const MPS: &str = "[mps]\nhealth = \"1s\"\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nowner = \"slurm\"\n";

const NODE: &str = "SLURMD_NODENAME";

/// A process of a job on a GPU. Dropping this value kills the process.
struct Left(Child);

impl Left {
    /// Starts a process that ignores SIGTERM, in the given cgroup.
    fn on(host: &Host, gpu: u32, cgroup: &Cgroup) -> Self {
        Self::of("trap '' TERM; while :; do sleep 1; done", host, gpu, cgroup)
    }

    /// Starts a shell that executes a script on a GPU, in the given cgroup.
    fn of(script: &str, host: &Host, gpu: u32, cgroup: &Cgroup) -> Self {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).stdin(Stdio::null());
        let child = command.uid(NOBODY).gid(NOBODY).current_dir("/").spawn().expect("a program");
        cgroup.add(child.id());
        host.sim("process", &["add", "--gpu", &gpu.to_string(), "--kind", "compute", "--pid", &child.id().to_string()]);
        Self(child)
    }

    fn lives(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _waited = self.0.wait();
    }
}

/// The cgroup of a job, as Slurm creates it with proctrack/cgroup in cgroup v1.
struct Cgroup(PathBuf);

/// Returns a node name that no real Slurm on this host uses. Each test has a different suffix.
fn node_name(suffix: &str) -> String {
    format!("gpush-test-{}{suffix}", std::process::id())
}

impl Cgroup {
    /// Creates the cgroup of a job on a node. If this is not possible, prints that the test is
    /// skipped.
    fn of(node: &str, job: u32) -> Option<Self> {
        let parent = format!("slurm_{node}/uid_{NOBODY}/job_{job}");
        let hierarchies = ["freezer", "pids", "cpuacct"].map(|name| Path::new("/sys/fs/cgroup").join(name));
        let dir = hierarchies.into_iter().filter(|dir| dir.is_dir()).map(|dir| dir.join(&parent));
        let created = dir.into_iter().find(|dir| fs::create_dir_all(dir).is_ok()).map(Self);
        if created.is_none() {
            println!("SKIPPED leftovers in the cgroup of a job: no cgroup of the first version can be created");
        }
        created
    }

    fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("a process can be moved");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for dir in self.0.ancestors().take(3) {
            let _in_use = fs::remove_dir(dir);
        }
    }
}

fn is_root(what: &str) -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        println!("SKIPPED {what}: only root has processes of others");
    }
    is_root
}

/// Runs Epilog, and waits until a process has ended. This test is the parent of the process, so it
/// must reap the process while Epilog runs.
fn epilog_while(node: &Node, job: &Job, mut has_ended: impl FnMut() -> bool) {
    thread::scope(|scope| {
        let epilog = scope.spawn(|| node.epilog(job));
        node.agent().until("the process is ended", || has_ended().then_some(()));
        epilog.join().expect("Epilog passes");
    });
}

/// While gpushd did not run, one run of a job ended, and the next run started without a lease.
/// Fault: the hook of another job then reported the end of the first run, and gpushd ended the
/// processes of the present run.
#[test]
fn late_end_of_an_earlier_run_ends_no_process() {
    if !is_root("a late end of a job") {
        return;
    }
    let name = node_name("-l");
    let Some(cgroup) = Cgroup::of(&name, 41) else { return };
    let mut node = Node::two_gpus(&format!("[slurm]\nagent_down = \"pass\"\n{WHOLE}"));
    let job = Job::new(41).on("0").with(NODE, &name);
    node.prolog(&job);
    let id = node.granted(41).id;
    node.kill();
    node.epilog(&job);
    let again = job.with("SLURM_JOB_RESTART_COUNT", 1);
    node.prolog(&again);
    node.start_again();
    let mut process = Left::of("while :; do sleep 1; done", &node.host, first(&node), &cgroup);
    let other = Job::new(42).on("1");
    node.prolog(&other);
    let pid = process.0.id().to_string();
    node.agent().await_that("the lease waits for the process", || {
        lease_now(node.agent(), id).waits_for.iter().any(|what| what.contains(&pid))
    });
    // If gpushd ended the process, it would send SIGTERM before it answers this request. So check
    // the process after the answer.
    node.epilog(&other);
    assert!(process.lives());
    epilog_while(&node, &again, || !process.lives());
    assert!(node.lease(41).is_none());
}

/// If a client is killed while it computes, its MPS server may end, and other clients of the server with it. So gpushd
/// first ends the work of the client through the daemon.
#[test]
fn mps_client_in_the_cgroup_of_the_job_is_ended_through_its_daemon() {
    if !is_root("MPS clients of a job") {
        return;
    }
    let Some(cgroup) = Cgroup::of(&node_name("-d"), 24) else { return };
    let node = Node::start("[[gpu]]\nmodel = \"l4\"\n", MPS);
    fs::set_permissions(node.host.dir().join("proc"), fs::Permissions::from_mode(0o777))
        .expect("its mode can be changed");
    let daemon = reaches(node.agent(), "0", MpsState::Ready);
    let job = Job::new(24).on("0").with(NODE, node_name("-d")).with("SLURM_JOB_COMMENT", "gpush:mps=25");
    node.prolog(&job);
    let text = node.task(&job).expect("the task runs");
    let environment: Vec<(String, String)> = text
        .lines()
        .filter_map(|line| line.strip_prefix("export ")?.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    // The client must ignore SIGTERM: gpushd asks the daemon to end a client only before SIGKILL.
    let mut client = Client::begin_ignoring_sigterm(&node.host, &environment, Some(NOBODY));
    cgroup.add(client.pid().cast_unsigned());
    client.first = client.says();
    assert!(client.first.starts_with("active"), "{}", client.first);
    let (pid, server) = (client.pid(), client.word("server").parse::<u32>().expect("a pid"));
    epilog_while(&node, &job, || !client.lives());
    assert!(node.lease(24).is_none());
    let logs = node.agent().get("/v1/mps/0/logs").json().to_string();
    assert!(logs.contains(&format!("Cmd:terminate_client {server} {pid}")), "{logs}");
    let now = reaches(node.agent(), "0", MpsState::Ready);
    assert_eq!(now.pid, daemon.pid);
    assert!(now.servers.iter().any(|one| one.pid == Some(server)), "the server {server} runs: {now:?}");
}

/// Runs an Epilog that must fail because of this process of the job, and checks the reason.
fn epilog_names(node: &Node, job: &Job, pid: u32) {
    let text = failure(&node.run("epilog", job));
    let gpu = format!("GPU {} is not free after the job, because lease ", first(node));
    assert!(text.contains(&gpu) && text.contains(&format!("process {pid} (sh) runs")), "{text}");
}

/// A frozen cgroup. Dropping this value thaws the cgroup.
struct Frozen(PathBuf);

impl Frozen {
    fn new(state: PathBuf) -> Self {
        fs::write(&state, "FROZEN").expect("the cgroup can be frozen");
        Self(state)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _thawed = fs::write(&self.0, "THAWED");
    }
}

#[test]
fn only_processes_of_the_ended_job_are_ended() {
    if !is_root("leftovers of two jobs") {
        return;
    }
    let node = Node::two_gpus(WHOLE);
    job_of_another_node_with_the_same_id_keeps_its_processes(&node);
    process_that_may_belong_to_two_clusters_is_not_ended(&node);
}

/// If two nodes run on one host, the cgroups of their jobs have different paths. Fault: the Epilog of a job on one node
/// ended the processes of the job with the same id on the other node.
fn job_of_another_node_with_the_same_id_keeps_its_processes(node: &Node) {
    let (here, there) = (node_name("-a"), node_name("-b"));
    let Some(cgroup) = Cgroup::of(&here, 31) else { return };
    let (job, other) = (Job::new(31).on("0").with(NODE, &here), Job::new(31).on("1").with(NODE, &there));
    node.prolog(&job);
    node.prolog(&other);
    let mut left = Left::on(&node.host, first(node), &cgroup);
    node.epilog(&other);
    assert!(left.lives());
    epilog_while(node, &job, || !left.lives());
    assert!(node.lease(31).is_none());
}

/// If two clusters on one node have jobs with the same id, these jobs share a cgroup. While both jobs have a lease, gpushd
/// does not know to which job a process belongs.
fn process_that_may_belong_to_two_clusters_is_not_ended(node: &Node) {
    let name = node_name("-e");
    let Some(cgroup) = Cgroup::of(&name, 32) else { return };
    let job = Job::new(32).on("0").with(NODE, &name);
    let other = Job::new(32).on("1").with(NODE, &name).with("SLURM_CLUSTER_NAME", "other");
    node.prolog(&job);
    let id = node.granted(32).id;
    node.prolog(&other);
    let mut left = Left::on(&node.host, first(node), &cgroup);
    node.epilog(&job);
    assert!(left.lives());
    assert_eq!(lease_now(node.agent(), id).state, LeaseState::Releasing);
    // When the other job has ended, the cgroup can only belong to the first job.
    node.epilog(&other);
    node.agent().until("the process is ended", || (!left.lives()).then_some(()));
    lease_becomes(node.agent(), id, LeaseState::Ended);
}

#[test]
fn process_of_the_job_that_is_not_ended_fails_epilog() {
    if !is_root("processes that gpushd does not end") {
        return;
    }
    let node = Node::two_gpus(&format!("[slurm]\ndeadline = \"5s\"\n{WHOLE}"));
    frozen_process_is_ended_after_the_deadline(&node);
    node.agent().reload(format!("[slurm]\ndeadline = \"3s\"\nleftovers = \"report\"\n{WHOLE}"));
    reported_process_keeps_running(&node);
}

/// A frozen process of the job does not end, like a process that hangs in the driver.
fn frozen_process_is_ended_after_the_deadline(node: &Node) {
    let name = node_name("-f");
    let Some(cgroup) = Cgroup::of(&name, 52) else { return };
    let freezer = cgroup.0.join("freezer.state");
    if !freezer.exists() {
        return println!("SKIPPED a process that does not end: no freezer of cgroup v1");
    }
    let job = Job::new(52).on("0").with(NODE, &name);
    node.prolog(&job);
    let id = node.granted(52).id;
    let mut left = Left::on(&node.host, first(node), &cgroup);
    let frozen = Frozen::new(freezer);
    epilog_names(node, &job, left.0.id());
    drop(frozen);
    node.agent().until("the process is ended", || (!left.lives()).then_some(()));
    lease_becomes(node.agent(), id, LeaseState::Ended);
    node.epilog(&job);
}

fn reported_process_keeps_running(node: &Node) {
    let name = node_name("-r");
    let Some(cgroup) = Cgroup::of(&name, 51) else { return };
    let job = Job::new(51).on("0").with(NODE, &name);
    node.prolog(&job);
    let id = node.granted(51).id;
    let mut left = Left::of("while :; do sleep 1; done", &node.host, first(node), &cgroup);
    epilog_names(node, &job, left.0.id());
    assert!(left.lives(), "gpushd sends no signal");
    assert_eq!(lease_now(node.agent(), id).state, LeaseState::Releasing);
    drop(left);
    lease_becomes(node.agent(), id, LeaseState::Ended);
    node.epilog(&job);
}
