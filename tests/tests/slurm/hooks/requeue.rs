//! Which run of a requeued job an Epilog ends.

use std::{
    fs,
    process::{Child, Command, Stdio},
};

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

/// Slurm 22.05 gives the Epilog of a requeued run the restart count of the next run. Fault: if this Epilog continued after
/// the next Prolog, it ended the lease of the next run. Slurm also uses a job id again after years, and the Epilog of the
/// earlier job with this id must not end the lease of the later job.
#[test]
fn epilog_that_slurm_started_before_a_prolog_spares_its_run() {
    let node = Node::two_gpus(WHOLE);
    let first = Job::new(7).on("0").with(RESTARTS, 0);
    let of_earlier_job = delayed_epilog(&node, &first);
    await_later_ticks(&node, of_earlier_job.id());
    node.prolog(&first);
    let lease = node.granted(7);
    go_on(of_earlier_job);
    assert_eq!(node.granted(7), lease, "the lease of the later job stays");
    let second = Job::new(7).on("0").with(RESTARTS, 1);
    let of_first_run = delayed_epilog(&node, &second);
    await_later_ticks(&node, of_first_run.id());
    node.prolog(&second);
    let next = node.granted(7);
    assert_ne!(next.id, lease.id);
    go_on(of_first_run);
    assert_eq!(node.granted(7), next, "the lease of the next run stays");
    assert!(node.task(&second).is_ok(), "the file of the next run stays");
    // An Epilog ends the lease of its own run, even if it has the restart count of the next run, and even if its script
    // waits for long.
    go_on(delayed_epilog(&node, &second.with(RESTARTS, 2)));
    assert!(node.lease(7).is_none() && !node.directory().join("ci-7@n1").exists());
}
