//! `gpushctl slurm reconcile`.

use std::{fs, process::Output};

use gpush_api::{SlurmJobEnd, SlurmJobEnded};

use super::{END, Job, Node, START, WHOLE, ends, grants, lease_of, squeue};
use crate::support::{Agent, Answer};

/// Returns a node whose gpushd has leases of jobs 3 and 4 of the cluster `ci`.
fn node() -> (Node, Agent) {
    let node = Node::new(WHOLE);
    let agent = Agent::listen(&node.socket, |request| match request.path.as_str() {
        START => grants(),
        END => Answer::ok(&SlurmJobEnded::default()),
        "/v1/leases" => Answer::ok(&[lease_of(17, "ci", 3), lease_of(18, "ci", 4)]),
        other => panic!("a request for {other}"),
    });
    node.prolog(&Job::new(3).on("0"));
    node.prolog(&Job::new(4).on("1"));
    (node, agent)
}

/// Runs the command with a program instead of squeue.
fn reconcile(node: &Node, body: &str) -> Output {
    let mut command = node.command("reconcile");
    command.arg("--squeue").arg(squeue(node, body)).env("SQUEUE_PARTITION", "x").env("SLURM_CLUSTERS", "y");
    // The command reads no slurm.conf of this machine.
    command.env("SLURM_CONF", node.host.path("slurm.conf")).output().unwrap()
}

#[test]
fn leases_of_jobs_that_slurm_does_not_know_are_ended() {
    let (node, agent) = node();
    let failed = reconcile(&node, "echo slurmctld is down >&2; exit 1");
    assert_eq!((failed.status.code(), ends(&agent).len()), (Some(6), 0), "without squeue, no lease ends");
    // Earlier fault: because of environment variables of the administrator, squeue left out jobs, and gpushd ended their
    // leases.
    let output = reconcile(
        &node,
        "echo \"$*\" > \"$0.arguments\"; [ -n \"$SQUEUE_PARTITION$SLURM_CLUSTERS\" ] || echo 4 SIGNALING; echo 3 COMPLETED",
    );
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "L17: ended, job 3 is not on this node any more\n");
    assert_eq!(ends(&agent), ["ci 3@n1 0"]);
    // Fault: the file of the ended job was not removed, so the tasks of a later job with this id could read its environment.
    assert!(!node.has("ci-3@n1") && !node.has("ci-3@n1+run") && node.has("ci-4@n1"));
    let arguments = fs::read_to_string(node.host.path("squeue.arguments")).unwrap();
    assert!(arguments.contains("--nodelist=n1") && arguments.contains("--states=all"), "{arguments}");
}

/// Fault: squeue does not list the jobs of another cluster, so gpushd ended the leases of these jobs.
#[test]
fn only_leases_of_the_cluster_of_slurm_conf_are_ended() {
    let (node, agent) = node();
    node.host.write("slurm.conf", "ClusterName=Other\n");
    assert!(reconcile(&node, "true").status.success());
    assert_eq!(ends(&agent), [""; 0]);
    node.host.write("slurm.conf", "ClusterName=CI\n");
    assert!(reconcile(&node, "true").status.success());
    let mut ended = ends(&agent);
    ended.sort();
    assert_eq!(ended, ["ci 3@n1 0", "ci 4@n1 0"]);
}

/// Fault: all leases together had one time limit. If one lease did not end, no time was left for the other leases.
#[test]
fn lease_that_does_not_end_leaves_the_time_of_the_others() {
    const JOBS: u32 = 20;
    let mut node = Node::new(WHOLE);
    node.deadline = "5s";
    let agent = Agent::listen(&node.socket, |request| match request.path.as_str() {
        "/v1/leases" => {
            let leases: Vec<_> = (1..=JOBS).map(|job| lease_of(job.into(), "ci", job)).collect();
            Answer::ok(&leases)
        }
        _ => match serde_json::from_str::<SlurmJobEnd>(&request.body).unwrap().job {
            1 => Answer::Silence,
            _ => Answer::ok(&SlurmJobEnded::default()),
        },
    });
    let mut command = node.command("reconcile");
    command.arg("--squeue").arg(squeue(&node, "true")).args(["--cluster", "ci"]);
    let output = command.output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("L1: cannot end this lease of job 1"), "{text}");
    assert_eq!(text.matches(": ended, ").count(), JOBS as usize - 1, "{text}");
    assert_eq!(ends(&agent).len(), JOBS as usize);
}
