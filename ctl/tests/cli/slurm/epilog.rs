//! Epilog: which run it ends, and when it fails.

use std::fs;

use gpush_api::{GpuIndex, LeaseId, SlurmJobEnded, SlurmLeftover};

use super::{CLUSTER, END, Job, NODE, Node, RESTARTS, WHOLE, ends, failure, grants};
use crate::support::{Agent, Answer};

/// Fault: an Epilog that got only the job id assumed the cluster `slurm` and no node, so it ended no lease.
#[test]
fn epilog_with_only_the_job_id_finds_cluster_and_node() {
    let (node, agent) = Node::granting(WHOLE);
    node.prolog(&Job::new(7).on("0"));
    node.epilog(&Job::known_by_id(7));
    assert_eq!(ends(&agent).last().map(String::as_str), Some("ci 7@n1 0"));
    // The other job is unknown. Its Epilog uses the only known place.
    node.epilog(&Job::known_by_id(8));
    assert_eq!(ends(&agent).last().map(String::as_str), Some(&*format!("ci 8@n1 {}", u32::MAX)));
    let (named, agent) = Node::granting(WHOLE);
    named.prolog(&Job::new(7).on("0").with(CLUSTER, "my cluster"));
    named.epilog(&Job::known_by_id(7));
    assert_eq!(ends(&agent), ["my cluster 7@n1 0"], "the file name contains the name in another form");
}

#[test]
fn epilog_fails_if_its_job_id_has_several_clusters() {
    let (node, agent) = Node::granting(WHOLE);
    node.prolog(&Job::new(9).on("0"));
    node.prolog(&Job::new(9).on("1").with(CLUSTER, "other"));
    let text = failure(&node.run("epilog", &Job::known_by_id(9)));
    assert!(text.contains("cluster ci and node n1; cluster other and node n1"), "{text}");
    node.epilog(&Job::known_by_id(9).with(CLUSTER, "other"));
    // There is only one file with this job id, but the file may belong to another job than the job that has ended.
    failure(&node.run("epilog", &Job::known_by_id(9)));
    node.epilog(&Job::known_by_id(9).with(CLUSTER, "ci"));
    assert_eq!(ends(&agent), ["other 9@n1 0", "ci 9@n1 0"]);
}

/// Fault: if the file of the job was missing, and Epilog knew only the job id, Epilog could end only the lease of the
/// first run.
#[test]
fn epilog_without_the_file_of_the_job_ends_each_run() {
    let (node, agent) = Node::granting(WHOLE);
    for restart in [0, 3] {
        node.prolog(&Job::new(10).on("0").with(RESTARTS, restart));
        fs::remove_dir_all(node.jobs()).unwrap();
        node.epilog(&Job::known_by_id(10).with(CLUSTER, "ci").with(NODE, "n1"));
        assert_eq!(ends(&agent).last().map(String::as_str), Some(&*format!("ci 10@n1 {}", u32::MAX)));
    }
}

/// In Slurm 22.05, the Epilog of a requeued run has the restart count of the next run.
#[test]
fn epilog_ends_the_run_in_the_file_of_the_job() {
    let (node, agent) = Node::granting(WHOLE);
    for (run, count) in [(0, 1), (1, 1), (2, 3)] {
        node.prolog(&Job::new(8).on("0").with(RESTARTS, run));
        node.epilog(&Job::new(8).on("0").with(RESTARTS, count));
        assert_eq!(ends(&agent).last(), Some(&format!("ci 8@n1 {run}")));
        assert!(!node.has("ci-8@n1"));
    }
}

/// Runs a job whose lease is not free at the end. Returns the result of Epilog.
fn with_leftover(config: &str, unattributed: bool) -> std::process::Output {
    let node = Node::new(config);
    let _agent = Agent::listen(&node.socket, move |request| match request.path.as_str() {
        END => {
            let waits_for = vec!["process 42 (sh) runs".to_owned()];
            let left = vec![SlurmLeftover {
                lease: LeaseId(17),
                gpus: vec![GpuIndex(0), GpuIndex(1)],
                waits_for,
                unattributed,
            }];
            Answer::ok(&SlurmJobEnded { left, ..SlurmJobEnded::default() })
        }
        _ => grants(),
    });
    node.prolog(&Job::new(22).on("0"));
    let output = node.run("epilog", &Job::new(22).on("0"));
    assert!(!node.has("ci-22@n1") && !node.has("ci-22@n1+ended"), "gpushd knows the end");
    output
}

#[test]
fn job_process_fails_epilog_and_unattributed_one_by_policy() {
    let why = "GPUs 0, 1 are not free after the job, because lease L17 waits: process 42 (sh) runs";
    assert!(failure(&with_leftover(WHOLE, false)).contains(why));
    super::silent(&with_leftover(WHOLE, true));
    let drain = format!("[slurm]\nunattributed = \"drain\"\n{WHOLE}");
    assert!(failure(&with_leftover(&drain, true)).contains(why));
}
