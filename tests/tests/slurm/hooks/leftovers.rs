//! Processes that a job leaves on its GPU.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};

use gpush_api::{LeaseState, MpsState};
use gpush_tests::{
    host::Host,
    mps::{Client, lease_becomes, reaches},
};

use super::{Job, NOBODY, Node, WHOLE, failure};

/// A process of a job on a GPU; killed when dropped.
struct Left(Child);

impl Left {
    /// A process that ignores SIGTERM, in this cgroup.
    fn on(host: &Host, gpu: u32, cgroup: Option<&Cgroup>) -> Self {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "trap '' TERM; while :; do sleep 1; done"]).stdin(Stdio::null());
        let child = command.uid(NOBODY).gid(NOBODY).current_dir("/").spawn().expect("a program");
        if let Some(cgroup) = cgroup {
            cgroup.add(child.id());
        }
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

/// The cgroup of a job, as Slurm makes it with proctrack/cgroup on the first hierarchies.
struct Cgroup(PathBuf);

impl Cgroup {
    fn of(job: u32) -> Option<Self> {
        // A unique name, because a real Slurm may run on this host.
        let parent = format!("slurm_gpush-test-{}/uid_{NOBODY}/job_{job}", std::process::id());
        let hierarchies = ["freezer", "pids", "cpuacct"].map(|name| Path::new("/sys/fs/cgroup").join(name));
        let dir = hierarchies.into_iter().filter(|dir| dir.is_dir()).map(|dir| dir.join(&parent));
        dir.into_iter().find(|dir| fs::create_dir_all(dir).is_ok()).map(Self)
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

/// Runs Epilog, and waits for the end of a process meanwhile: this test is its parent.
fn epilog_while(node: &Node, job: &Job, mut has_ended: impl FnMut() -> bool) {
    thread::scope(|scope| {
        let epilog = scope.spawn(|| node.epilog(job));
        node.agent().until("the process is ended", || has_ended().then_some(()));
        epilog.join().expect("Epilog passes");
    });
}

/// Index of the driver of the first GPU of gres.conf.
fn first(node: &Node) -> u32 {
    node.agent().gpus().into_iter().max_by_key(|gpu| gpu.minor).expect("a GPU").index
}

#[test]
fn process_in_the_cgroup_of_the_job_is_ended() {
    if !is_root("leftovers of a job") {
        return;
    }
    let Some(cgroup) = Cgroup::of(21) else {
        println!("SKIPPED leftovers of a job in its cgroup: no cgroup of the first version can be created");
        return;
    };
    let node = Node::two_gpus(WHOLE);
    let job = Job::new(21).on("0");
    node.prolog(&job);
    let mut left = Left::on(&node.host, first(&node), Some(&cgroup));
    epilog_while(&node, &job, || !left.lives());
    assert!(node.lease(21).is_none());
}

/// Without proctrack/cgroup, gpushd cannot know whose process it is.
#[test]
fn process_outside_of_the_cgroup_fails_epilog_and_is_not_ended() {
    if !is_root("leftovers without a cgroup") {
        return;
    }
    let node = Node::two_gpus(WHOLE);
    let job = Job::new(22).on("0");
    node.prolog(&job);
    let id = node.granted(22).id;
    let mut left = Left::on(&node.host, first(&node), None);
    let mut command = node.command("epilog");
    let output = command.args(["--deadline", "3s"]).envs(job.0.clone()).output().expect("gpushctl can be started");
    let text = failure(&output);
    let pid = left.0.id().to_string();
    assert!(text.contains(&format!("GPU {}", first(&node))) && text.contains(&pid), "{text}");
    assert!(text.contains("cannot be attributed"), "{text}");
    assert!(left.lives());
    drop(left);
    lease_becomes(node.agent(), id, LeaseState::Ended);
    node.epilog(&job);
}

/// A daemonized program that copied the environment of the job and uses no GPU does not hold the node.
#[test]
fn process_that_only_names_the_lease_does_not_hold_epilog() {
    if !is_root("programs of jobs") {
        return;
    }
    let node = Node::two_gpus(WHOLE);
    let job = Job::new(23).on("0");
    node.prolog(&job);
    let lease = node.granted(23).id.to_string();
    let mut command = Command::new("/bin/sleep");
    let mut sleeper =
        command.arg("1000").env("GPUSH_LEASE", lease).uid(NOBODY).current_dir("/").spawn().expect("sleep");
    node.epilog(&job);
    assert!(node.lease(23).is_none());
    assert!(matches!(sleeper.try_wait(), Ok(None)));
    sleeper.kill().expect("it runs");
    sleeper.wait().expect("it ends");
}

#[test]
fn mps_client_in_the_cgroup_of_the_job_is_ended() {
    if !is_root("MPS clients of a job") {
        return;
    }
    let Some(cgroup) = Cgroup::of(24) else {
        println!("SKIPPED MPS clients of a job in its cgroup: no cgroup of the first version can be created");
        return;
    };
    let config = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nowner = \"slurm\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"l4\"\n", config);
    for (dir, mode) in [(node.host.dir().parent().expect("a directory"), 0o755), (&node.host.dir().join("proc"), 0o777)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).expect("its mode can be changed");
    }
    reaches(node.agent(), "0", MpsState::Ready);
    let job = Job::new(24).on("0").with("SLURM_JOB_COMMENT", "gpush:mps=25");
    node.prolog(&job);
    let text = node.task(&job).expect("the task runs");
    let environment: Vec<(String, String)> = text
        .lines()
        .filter_map(|line| line.strip_prefix("export ")?.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let mut client = Client::begin(&node.host, &environment, Some(NOBODY));
    cgroup.add(client.pid().cast_unsigned());
    assert!(client.says().starts_with("active"));
    epilog_while(&node, &job, || !client.lives());
    assert!(node.lease(24).is_none());
}
