//! Which run of a requeued job an Epilog ends.

use std::{
    fs,
    process::{Child, Command, Stdio},
};

use gpush_tests::mps::lease_now;
use nix::sys::signal::Signal;

use super::{Job, Node, WHOLE, silent};

const RESTARTS: &str = "SLURM_JOB_RESTART_COUNT";

/// Starts the Epilog script of a site, as slurmd does. The script waits for [`go_on`], and then
/// runs `gpushctl slurm epilog`.
fn delayed_epilog(node: &Node, job: &Job) -> Child {
    let epilog = node.command("epilog");
    let mut script = Command::new("/bin/sh");
    script.args(["-c", "read go; \"$@\"; exit $?", "sh"]).arg(epilog.get_program()).args(epilog.get_args());
    script.env_clear().envs(job.0.clone());
    script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("sh can be started")
}

/// The kernel counts start times in ticks of 10 ms. Waits until a process that starts now has a
/// later start time than process `pid`.
fn await_later_ticks(node: &Node, pid: u32) {
    let start = |pid: u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
        let fields = stat.rsplit(')').next().expect("fields after the name").split_whitespace();
        fields.map(str::to_owned).nth(19).expect("a start").parse::<u64>().expect("ticks")
    };
    let first = start(pid);
    node.agent().await_that("a later tick", || {
        let mut probe = Command::new("/bin/sh").args(["-c", "read end"]).stdin(Stdio::piped()).spawn().expect("sh");
        let is_later = start(probe.id()) > first;
        probe.kill().and_then(|()| probe.wait()).expect("it ends");
        is_later
    });
}

fn go_on(mut epilog: Child) {
    drop(epilog.stdin.take());
    silent(&epilog.wait_with_output().expect("it ends"));
}

/// Slurm 22.05 gives the Epilog of a requeued run the restart count of the next run. Fault: if this
/// Epilog continued after the next Prolog, it ended the lease of the next run.
#[test]
fn epilog_that_slurm_started_before_a_prolog_spares_its_run() {
    let node = Node::two_gpus(WHOLE);
    node.prolog(&Job::new(7).on("0"));
    let first = node.granted(7);
    let second = Job::new(7).on("0").with(RESTARTS, 1);
    let late = delayed_epilog(&node, &second);
    await_later_ticks(&node, late.id());
    node.prolog(&second);
    let lease = node.granted(7);
    assert_ne!(lease.id, first.id);
    go_on(late);
    assert_eq!(node.granted(7), lease);
    assert!(node.task(&second).is_ok(), "the file of the next run stays");
    // The Epilog of the next run ends the lease of the next run.
    node.epilog(&second);
    assert!(node.lease(7).is_none() && !node.directory().join("ci-7@n1").exists());
}

/// An Epilog ends the lease of its own run, even if the Epilog has the restart count of the next
/// run, and even if its script waits for long.
#[test]
fn delayed_epilog_ends_its_own_run() {
    let node = Node::two_gpus(WHOLE);
    for (run, count) in [(0, 1), (1, 1), (2, 3)] {
        node.prolog(&Job::new(8).on("0").with(RESTARTS, run));
        let lease = node.granted(8);
        go_on(delayed_epilog(&node, &Job::new(8).on("0").with(RESTARTS, count)));
        assert!(node.lease(8).is_none(), "{run}: {:?}", lease_now(node.agent(), lease.id));
        assert!(!node.directory().join("ci-8@n1").exists());
    }
}

/// Slurm uses a job id again after years. The Epilog of the earlier job with this id must not end
/// the lease of the later job.
#[test]
fn epilog_of_an_earlier_job_with_the_same_id_spares_the_later_job() {
    let node = Node::two_gpus(WHOLE);
    let job = Job::new(9).on("0").with(RESTARTS, 0);
    let late = delayed_epilog(&node, &job);
    await_later_ticks(&node, late.id());
    node.prolog(&job);
    let lease = node.granted(9);
    go_on(late);
    assert_eq!(node.granted(9), lease);
    assert!(node.task(&job).is_ok());
}

/// Fault: if the file of the job was missing, and Epilog knew only the job id, Epilog could end
/// only the lease of the first run.
#[test]
fn epilog_needs_only_the_job_id_also_without_the_file_of_the_job() {
    let node = Node::two_gpus(WHOLE);
    for restart in [0, 3] {
        node.prolog(&Job::new(10).on("0").with(RESTARTS, restart));
        node.granted(10);
        fs::remove_dir_all(node.directory()).expect("the files of jobs can be removed");
        node.epilog(&Job::known_by_id(10));
        assert!(node.lease(10).is_none(), "run {restart}");
    }
}

/// If the hooks know only the id of a job, the job may have no lease. So its Epilog does not fail
/// while gpushd does not answer.
#[test]
fn epilog_with_the_job_id_alone_passes_without_gpushd() {
    let mut node = Node::two_gpus(WHOLE);
    node.agent().signal(Signal::SIGSTOP);
    node.epilog(&Job::known_by_id(11));
    node.kill();
    node.epilog(&Job::known_by_id(11));
}
