//! The hooks while gpushd is not running or is stopped by SIGSTOP.

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use gpush_tests::agent::PATIENCE;
use nix::sys::signal::Signal;

use super::{Job, Node, WHOLE, failure, silent};

/// A config with one GPU for Slurm, and one GPU for users.
const MIXED: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n[[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";

/// Returns the index in gres.conf of the GPU with this driver index.
fn gres(node: &Node, index: u32) -> String {
    let gpus = node.agent().gpus();
    let minor = gpus.iter().find(|gpu| gpu.index == index).expect("a GPU").minor;
    gpus.iter().filter(|gpu| gpu.minor > minor).count().to_string()
}

#[test]
fn agent_down_policy_applies_only_to_jobs_of_gpush() {
    let mut node = Node::two_gpus(MIXED);
    let (users, slurms) = (gres(&node, 0), gres(&node, 1));
    // The hooks of this job store what gpushd reports about the GPUs.
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
    // The next hook reports the ends of jobs that gpushd has missed.
    assert!(node.directory().join("ci-6@n1+ended").exists());
    node.start_again();
    let job = Job::new(7).on(&slurms);
    node.prolog(&job);
    node.granted(7);
    assert!(!node.directory().join("ci-6@n1+ended").exists() && !node.directory().join("ci-2@n1+ended").exists());
}

#[test]
fn stopped_gpushd_does_not_block_prolog_or_grant_later() {
    let node = Node::two_gpus(WHOLE);
    node.agent().signal(Signal::SIGSTOP);
    let begun = Instant::now();
    let job = Job::new(1).on("0");
    let mut command = node.command("prolog");
    let output = command.args(["--deadline", "2s"]).envs(job.0.clone()).output().expect("gpushctl can be started");
    // Without its deadline, the hook would wait for gpushd forever.
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    failure(&output);
    assert!(!node.directory().join("ci-1@n1").exists(), "everything is undone");
    node.agent().signal(Signal::SIGCONT);
    // gpushd now reads the old request first, and then answers the new one.
    node.prolog(&Job::new(2).on("1"));
    node.granted(2);
    node.agent().await_that("no lease of the first job", || node.lease(1).is_none());
    node.prolog(&job);
    node.granted(1);
}

#[test]
fn hooks_wait_for_a_gpushd_that_restarts() {
    let mut node = Node::two_gpus(WHOLE);
    let job = Job::new(1).on("0");
    node.prolog(&job);
    node.kill();
    let epilog = node.command("epilog").envs(job.0.clone()).spawn().expect("gpushctl can be started");
    // This pause is shorter than the time that a hook waits for a restart of gpushd.
    std::thread::sleep(Duration::from_millis(200));
    node.start_again();
    let output = epilog.wait_with_output().expect("it ends");
    // On a busy machine, gpushd may need longer to start than the hook waits. The hook then stores
    // the end of the job.
    if output.status.success() {
        assert!(node.lease(1).is_none());
    } else {
        assert!(node.directory().join("ci-1@n1+ended").exists());
    }
}

/// Slurm 22.05 gives the Epilog of a requeued run the restart count of the next run. Earlier, if
/// another hook reported this end late, the lease of the next run ended.
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
    // Restore the file, as if the hook of another job had read it before it was removed.
    std::fs::write(&path, end).expect("a file");
    node.prolog(&Job::new(8).on("1"));
    assert!(!path.exists(), "the end was delivered");
    assert_eq!(node.granted(7).id, lease.id);
}

/// Slurm 22.05 gives a late Epilog of a run the restart count of the next run. Earlier, that Epilog
/// removed the file of the next run. If the next run was refused, its tasks then started.
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
    // When Epilog connects, it has already read which run the file belongs to.
    let fds = format!("/proc/{}/fd", epilog.id());
    node.agent().await_that("Epilog connects", || {
        let links = std::fs::read_dir(&fds).into_iter().flatten().flatten();
        links.filter_map(|fd| fd.path().read_link().ok()).any(|target| target.to_string_lossy().starts_with("socket:"))
    });
    // Prolog refuses an invalid request without asking gpushd.
    node.prolog(&next.clone().with("SLURM_JOB_COMMENT", "gpush:mps=0"));
    node.agent().signal(Signal::SIGCONT);
    silent(&epilog.wait_with_output().expect("it ends"));
    assert!(node.lease(9).is_none());
    node.task(&next).expect_err("the tasks of the refused run fail");
}

/// Earlier, gpushd refused a job because the last reading of the job's GPU was old.
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
