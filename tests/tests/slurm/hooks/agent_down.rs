//! The hooks while gpushd does not run, or is stopped by SIGSTOP.

use std::{
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use gpush_api::LeaseState;
use gpush_tests::{agent::PATIENCE, mps::lease_now};
use nix::sys::signal::Signal;

use super::{Job, Node, WHOLE, failure, refused_line, silent};

/// A config with one GPU for users and one GPU for Slurm.
const MIXED: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n[[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";

/// Returns the index in gres.conf of the GPU that has this index in the driver.
fn gres(node: &Node, index: u32) -> String {
    let gpus = node.agent().gpus();
    let minor = gpus.iter().find(|gpu| gpu.index == index).expect("a GPU").minor;
    gpus.iter().filter(|gpu| gpu.minor > minor).count().to_string()
}

#[test]
fn agent_down_policy_applies_only_to_jobs_of_gpush() {
    let mut node = Node::two_gpus(MIXED);
    let (users, slurms) = (gres(&node, 0), gres(&node, 1));
    // The hooks of this job record what gpushd reports about the GPUs.
    node.prolog(&Job::new(1).on(&slurms));
    node.epilog(&Job::new(1).on(&slurms));
    node.kill();
    let text = failure(&node.run("prolog", &Job::new(2).on(&slurms)));
    assert!(text.contains("agent_down"), "{text}");
    node.prolog(&Job::new(3).on(&users));
    node.epilog(&Job::new(3).on(&users));
    let request = Job::new(4).on(&users).with("SLURM_JOB_COMMENT", "gpush:whole");
    failure(&node.run("prolog", &request));
    // Without gpushd, the hook still refuses an invalid request.
    node.refusal(&Job::new(5).on(&slurms).with("SLURM_JOB_COMMENT", "gpush:mps=0"));

    std::fs::write(node.host.scratch("gpushd.toml"), format!("[slurm]\nagent_down = \"pass\"\n{MIXED}")).unwrap();
    let job = Job::new(6).on(&slurms);
    node.prolog(&job);
    let text = node.task(&job).expect("the task runs");
    assert!(text.contains("without a lease") && !text.contains("export"), "{text}");
    node.epilog(&job);
    // The hook sent no request. So there is no lease whose end a later hook must report.
    assert!(!node.directory().join("ci-6@n1+ended").exists() && !node.directory().join("ci-2@n1+ended").exists());
    node.start_again();
    let job = Job::new(7).on(&slurms);
    node.prolog(&job);
    node.granted(7);
}

#[test]
fn stopped_gpushd_does_not_block_prolog_or_grant_later() {
    let node = Node::two_gpus(WHOLE);
    node.agent().signal(Signal::SIGSTOP);
    let begun = Instant::now();
    let job = Job::new(1).on("0");
    let mut command = node.command("prolog");
    let output = command.args(["--deadline", "2s"]).envs(job.0.clone()).output().expect("gpushctl can be started");
    // Without a deadline, the hook would wait for gpushd forever.
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    failure(&output);
    assert!(!node.directory().join("ci-1@n1").exists(), "everything is undone");
    node.agent().signal(Signal::SIGCONT);
    // gpushd now first reads the request of the earlier hook, and then answers the new request.
    node.prolog(&Job::new(2).on("1"));
    node.granted(2);
    node.agent().await_that("no lease of the first job", || node.lease(1).is_none());
    node.prolog(&job);
    node.granted(1);
}

/// Passes each connection on to another socket. Calls `before` before it passes on the first byte of an answer.
fn pass_on(from: &Path, to: &Path, before: impl Fn() + Send + 'static) {
    let listener = UnixListener::bind(from).expect("the socket can be created");
    let to = to.to_owned();
    thread::spawn(move || {
        for mut hook in listener.incoming().flatten() {
            let mut gpushd = UnixStream::connect(&to).expect("gpushd listens");
            let (mut requests, mut server) =
                (hook.try_clone().expect("a socket"), gpushd.try_clone().expect("a socket"));
            thread::spawn(move || io::copy(&mut requests, &mut server));
            let mut answer = [0; 65_536];
            let length = gpushd.read(&mut answer).unwrap_or(0);
            before();
            // Ignore an error: the hook may have given up.
            let _passed = hook.write_all(&answer[..length]).and_then(|()| io::copy(&mut gpushd, &mut hook).map(drop));
        }
    });
}

/// gpushd has recorded the grant, and assumes that Prolog has received the answer.
#[test]
fn gpushd_suspended_between_grant_and_answer_leaves_no_lease() {
    for policy in ["fail", "pass"] {
        let node = Node::two_gpus(WHOLE);
        std::fs::write(node.host.scratch("gpushd.toml"), format!("[slurm]\nagent_down = \"{policy}\"\n{WHOLE}"))
            .unwrap();
        let (proxy, pid) = (node.host.scratch("proxy.sock"), node.agent().pid());
        // The hook never gets the answer: this thread suspends gpushd, and then sleeps before it passes on the answer.
        pass_on(&proxy, &node.host.scratch("gpushd.admin.sock"), move || {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), Signal::SIGSTOP)
                .expect("gpushd runs");
            thread::park();
        });
        let job = Job::new(1).on("0");
        let output = node.command_at("prolog", &proxy).args(["--deadline", "2s"]).envs(job.0.clone()).output();
        let output = output.expect("gpushctl can be started");
        match policy {
            "fail" => assert!(failure(&output).contains("agent_down")),
            _ => {
                silent(&output);
                assert!(node.task(&job).expect("the task runs").contains("without a lease"));
            }
        }
        // Epilog does not need gpushd, because Prolog has already recorded in a file that the job ended.
        assert!(node.directory().join("ci-1@n1+ended").exists(), "{policy}");
        if policy == "pass" {
            node.epilog(&job);
        }
        node.agent().signal(Signal::SIGCONT);
        let lease = node.granted(1).id;
        node.prolog(&Job::new(2).on("1"));
        assert_eq!(lease_now(node.agent(), lease).state, LeaseState::Ended, "{policy}");
        assert!(!node.directory().join("ci-1@n1+ended").exists(), "{policy}");
    }
}

/// At first, no process listens on the socket, and Epilog waits. gpushd starts after the first attempt of Epilog to
/// connect.
#[test]
fn epilog_waits_for_a_gpushd_that_restarts() {
    if !gpush_tests::strace::works("Epilog while gpushd restarts") {
        return;
    }
    let mut node = Node::two_gpus(WHOLE);
    let job = Job::new(1).on("0");
    node.prolog(&job);
    let lease = node.granted(1);
    node.kill();
    let (trace, hook) = (node.host.scratch("trace"), node.command("epilog"));
    let mut epilog = Command::new("strace");
    epilog.arg("-qq").arg("-o").arg(&trace).args(["-e", "trace=connect"]).arg(hook.get_program()).args(hook.get_args());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut epilog = epilog.env_clear().env("PATH", path).envs(job.0.clone()).spawn().expect("strace can be started");
    let has_tried = || std::fs::read_to_string(&trace).is_ok_and(|text| text.contains("ECONNREFUSED"));
    let until = Instant::now() + PATIENCE;
    while !has_tried() {
        assert!(
            Instant::now() < until && epilog.try_wait().expect("a child").is_none(),
            "Epilog does not try to connect"
        );
        thread::sleep(Duration::from_millis(5));
    }
    node.start_again();
    assert!(epilog.wait().expect("it ends").success());
    assert!(node.lease(1).is_none() && !node.directory().join("ci-1@n1+ended").exists());
    assert_eq!(lease_now(node.agent(), lease.id).state, LeaseState::Ended);
}

/// In Slurm 22.05, the Epilog of a requeued run has the restart count of the next run. Fault: if another hook reported
/// the end of the requeued run late, gpushd ended the lease of the next run.
#[test]
fn late_end_of_a_requeued_run_keeps_the_next_lease() {
    let mut node = Node::two_gpus(WHOLE);
    node.prolog(&Job::new(7).on("0"));
    node.kill();
    let second = Job::new(7).on("0").with("SLURM_JOB_RESTART_COUNT", 1);
    failure(&node.run("epilog", &second));
    let path = node.directory().join("ci-7@n1+ended");
    let end = std::fs::read(&path).expect("the end is noted");
    node.start_again();
    node.prolog(&second);
    let lease = node.granted(7);
    assert!(!path.exists(), "the end was delivered");
    // Restore the file. This simulates a hook of another job that had read the file before the file was removed.
    std::fs::write(&path, end).expect("a file");
    node.prolog(&Job::new(8).on("1"));
    assert!(!path.exists(), "the end was delivered");
    assert_eq!(node.granted(7).id, lease.id);
}

/// In Slurm 22.05, a late Epilog of one run has the restart count of the next run. Fault: this Epilog removed the file
/// of the next run. If gpush refused the next run, its tasks started nevertheless, because the file was missing.
#[test]
fn late_epilog_of_an_earlier_run_keeps_the_next_file() {
    let node = Node::two_gpus(WHOLE);
    let job = Job::new(9).on("0");
    node.prolog(&job);
    node.agent().signal(Signal::SIGSTOP);
    let next = job.with("SLURM_JOB_RESTART_COUNT", 1);
    let mut epilog = node.command("epilog");
    epilog.envs(next.0.clone()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let epilog = epilog.spawn().expect("gpushctl can be started");
    // When Epilog connects to gpushd, it has already read to which run the file belongs.
    let fds = format!("/proc/{}/fd", epilog.id());
    node.agent().await_that("Epilog connects", || {
        let links = std::fs::read_dir(&fds).into_iter().flatten().flatten();
        links.filter_map(|fd| fd.path().read_link().ok()).any(|target| target.to_string_lossy().starts_with("socket:"))
    });
    // Prolog refuses an invalid request itself, without gpushd.
    let refused = node.run("prolog", &next.clone().with("SLURM_JOB_COMMENT", "gpush:mps=0"));
    assert!(refused_line(&refused).is_some_and(|line| line.contains("job 9")), "{refused:?}");
    node.agent().signal(Signal::SIGCONT);
    silent(&epilog.wait_with_output().expect("it ends"));
    assert!(node.lease(9).is_none());
    node.task(&next).expect_err("the tasks of the refused run fail");
}

/// Fault: if the last reading of the job's GPU was old, gpushd refused the job.
#[test]
fn prolog_waits_for_a_late_reading_of_its_gpu() {
    let node = Node::two_gpus(&format!("[driver]\nread_ms = 10000\n{WHOLE}"));
    let (quick, slow) = (gres(&node, 0), gres(&node, 1));
    node.host.fault("nvmlDeviceGetMemoryInfo* --gpu 1 --hang");
    node.agent().until("a reading that hangs", || node.agent().gpu(1).stale.then_some(()));
    let mut prolog = node.command("prolog");
    prolog.envs(Job::new(1).on(&slow).0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut prolog = prolog.spawn().expect("gpushctl can be started");
    // A job on the other GPU does not wait for the slow reading.
    node.prolog(&Job::new(2).on(&quick));
    node.granted(2);
    assert_eq!(prolog.try_wait().expect("a child"), None);
    node.host.clear_faults();
    silent(&prolog.wait_with_output().expect("it ends"));
    node.granted(1);
}

const COMMENT: &str = "SLURM_JOB_COMMENT";

/// Fault: on a node without gpushd, any user could drain the node with `--comment=mps`.
#[test]
fn request_of_a_job_without_a_gpu_drains_no_node() {
    let mut node = Node::two_gpus(MIXED);
    // The hooks have recorded which GPUs belong to Slurm.
    node.prolog(&Job::new(1).on(&gres(&node, 1)));
    node.epilog(&Job::new(1).on("0"));
    node.kill();
    for (id, comment) in [(2, "mps"), (3, "gpush:whole")] {
        let job = Job::new(id).with(COMMENT, comment);
        let refused = node.refusal(&job);
        assert!(refused.contains("gpushd"), "{refused}");
        node.epilog(&job);
        assert!(!node.directory().join(format!("ci-{id}@n1")).exists());
    }
}

/// A gpushd that is stopped by SIGSTOP may have received the request. It may then grant the request later.
#[test]
fn request_without_a_gpu_that_is_not_answered_leaves_no_lease() {
    let node = Node::two_gpus(MIXED);
    node.prolog(&Job::new(1).on(&gres(&node, 1)));
    node.epilog(&Job::new(1).on("0"));
    let job = Job::new(2).with(COMMENT, "gpush:whole");
    node.agent().signal(Signal::SIGSTOP);
    let mut command = node.command("prolog");
    let output = command.args(["--deadline", "2s"]).envs(job.0.clone()).output().expect("gpushctl can be started");
    let line = refused_line(&output).expect("the administrator sees the refusal");
    assert!(line.ends_with(" in 2s"), "{line}");
    node.task(&job).expect_err("the tasks fail");
    node.epilog(&job);
    let noted = node.directory().join("ci-2@n1+ended");
    assert!(noted.exists() && !node.directory().join("ci-2@n1").exists());
    node.agent().signal(Signal::SIGCONT);
    node.prolog(&Job::new(3).on("0"));
    assert!(!noted.exists(), "the next hook delivers the end");
    assert!(node.lease(2).is_none());
}

/// If a node never had a gpushd, a request is a mistake of the user, even if the job has GPUs.
#[test]
fn request_on_a_node_that_never_had_gpushd_drains_no_node() {
    let mut node = Node::two_gpus(MIXED);
    node.kill();
    std::fs::remove_file(node.host.scratch("gpushd.toml")).expect("the config exists");
    let job = Job::new(1).on("0").with(COMMENT, "mps");
    let refused = node.refusal(&job);
    assert!(refused.contains("gpushd"), "{refused}");
    node.epilog(&job);
}

/// Fault: if a job was refused without gpushd, Epilog still asked gpushd to end the lease of the job.
#[test]
fn epilog_after_a_refused_request_needs_no_gpushd() {
    let mut node = Node::two_gpus(WHOLE);
    let by_gpushd = Job::new(1).on("0").with(COMMENT, "gpush:mps=25");
    node.refusal(&by_gpushd);
    let by_the_hook = Job::new(2).on("1").with(COMMENT, "gpush:mps=0");
    node.refusal(&by_the_hook);
    // If gpushd granted the request of one run, and the request of the next run is invalid, the lease of the first run
    // may still exist. So Epilog must report to gpushd.
    let run = |restart| Job::new(3).on("1").with("SLURM_JOB_RESTART_COUNT", restart);
    node.prolog(&run(0));
    node.refusal(&run(1).with(COMMENT, "gpush:mps=0"));
    node.kill();
    for job in [by_gpushd, by_the_hook] {
        node.epilog(&job);
    }
    failure(&node.run("epilog", &run(1)));
    assert!(node.directory().join("ci-3@n1+ended").exists());
}
