//! Prolog with a gpushd that answers.

use std::{fs, os::unix::fs::MetadataExt};

use gpush_api::{ApiError, Code, LeaseShare, SlurmDevice, SlurmOutcome};

use super::{COMMENT, END, Job, Node, RESTARTS, START, WHOLE, broken, ends, failure, grants, silent, started, starts};
use crate::{lease::me, support::Answer};

#[test]
fn tasks_get_the_environment_of_the_lease_until_epilog() {
    let (node, agent) = Node::granting(WHOLE);
    let job = Job::new(42).on("0").with(COMMENT, "project 7, gpush:whole please");
    node.prolog(&job);
    let requests = starts(&agent);
    let [start] = &requests[..] else { panic!("{requests:?}") };
    let of_job = (start.cluster.as_str(), start.job, start.node.as_str(), start.uid, start.restart);
    assert_eq!(of_job, ("ci", 42, "n1", me(), 0));
    assert_eq!(start.devices, [SlurmDevice::Minor(1)], "gres.conf lists /dev/nvidia1 first");
    assert_eq!(start.request.as_ref().map(|request| &request.share), Some(&LeaseShare::Whole {}));
    assert_eq!(fs::metadata(node.jobs().join("ci-42@n1")).unwrap().mode() & 0o777, 0o400);
    let text = node.task(&job).unwrap();
    assert!(text.contains("export GPUSH_LEASE=L17\n") && text.contains("export CUDA_VISIBLE_DEVICES="), "{text}");
    node.epilog(&job);
    assert_eq!(ends(&agent), ["ci 42@n1 0"]);
    assert!(!node.has("ci-42@n1") && !node.has("ci-42@n1+run"));
    assert_eq!(node.task(&job), Ok(String::new()));
}

#[test]
fn refused_job_fails_its_tasks_and_not_the_node() {
    let (node, agent) = Node::answering(WHOLE, |_| {
        let reasons = vec!["no whole GPU is free".to_owned(), "lease L3 holds GPU 1".to_owned()];
        started(SlurmOutcome::Refused { reasons, hint: Some("submit the job again later".to_owned()) })
    });
    let job = Job::new(2).on("0");
    assert_eq!(
        node.refusal(&job),
        "print gpush: no whole GPU is free; lease L3 holds GPU 1\nprint gpush: hint: submit the job again later\n"
    );
    // gpushd has granted nothing, so Epilog asks nothing.
    node.epilog(&job);
    assert_eq!(agent.asked(), [format!("POST {START}")]);
    assert_eq!(node.task(&job), Ok(String::new()));
}

#[test]
fn job_that_gpushd_does_not_know_runs_without_files() {
    let (node, _agent) = Node::answering(WHOLE, |_| started(SlurmOutcome::NotConcerned));
    node.prolog(&Job::new(3).on("1"));
    assert!(!node.has("ci-3@n1"));
    assert_eq!(node.task(&Job::new(3)), Ok(String::new()));
}

#[test]
fn node_that_cannot_serve_fails_prolog_and_keeps_no_file() {
    let (node, agent) = Node::answering(WHOLE, |_| Answer::error(&broken()));
    let text = failure(&node.run("prolog", &Job::new(5).on("0")));
    assert!(text.contains("job 5: GPU 1 is cordoned: a new fan"), "{text}");
    assert!(!node.has("ci-5@n1"), "everything is undone");
    // gpushd may have granted a lease to an earlier attempt of this Prolog, so the next hook reports the end.
    assert!(node.has("ci-5@n1+ended"));
    failure(&node.run("prolog", &Job::new(6).on("0")));
    assert_eq!((ends(&agent), node.has("ci-5@n1+ended")), (vec!["ci 5@n1 0".to_owned()], false));
    // An error of a wrong gres.conf fails the node, although gpushd has never said that a GPU of the job is Slurm's.
    let (node, _agent) = Node::answering("", |_| {
        Answer::error(&ApiError::new(Code::ConfigInvalid, "/dev/nvidia1 is not a device of this host"))
    });
    failure(&node.run("prolog", &Job::new(7).on("0")));
}

#[test]
fn unlisted_index_fails_only_nodes_with_gpus_of_slurm() {
    let (node, agent) = Node::granting(WHOLE);
    let text = failure(&node.run("prolog", &Job::new(8).on("5")));
    assert!(text.contains("gres.conf has no File for GPU 5"), "{text}");
    let node = Node::new("");
    silent(&node.run("prolog", &Job::new(8).on("5")));
    assert_eq!(agent.asked(), [""; 0]);
}

/// Fault: gpushd was still stopping when the deadline of Prolog passed, and the node was drained, even with
/// `agent_down = "pass"`.
#[test]
fn gpushd_that_does_not_stop_in_time_is_judged_by_the_policy() {
    let stopping = |_| Answer::error(&ApiError::new(Code::Stopping, "gpushd is stopping").retryable());
    let (mut node, _agent) = Node::answering(WHOLE, stopping);
    node.deadline = "1s";
    let prolog = |job: &Job| node.run("prolog", job);
    let text = failure(&prolog(&Job::new(2).on("0")));
    assert!(text.contains("gpushd is stopping") && text.contains("agent_down"), "{text}");
    node.host.write("config.toml", format!("[slurm]\nagent_down = \"pass\"\n{WHOLE}"));
    let job = Job::new(3).on("0");
    silent(&prolog(&job));
    assert!(node.task(&job).unwrap().contains("without a lease"));
}

/// Fault: if gpushd refused the report that a job had ended, every later hook sent only this report again.
#[test]
fn end_that_cannot_be_delivered_holds_up_no_other() {
    let node = Node::new(WHOLE);
    fs::create_dir(node.jobs()).unwrap();
    let note = |job: u32, cluster: &str| {
        let end =
            gpush_api::SlurmJobEnd { cluster: cluster.to_owned(), job, node: "n1".to_owned(), restart: 0, until_ms: 0 };
        let name = format!("{cluster}-{job}@n1+ended");
        fs::write(node.jobs().join(&name), serde_json::to_vec(&end).unwrap()).unwrap();
        name
    };
    let never: Vec<String> = (0..8).map(|job| note(job, "")).collect();
    let (failing, one) = (note(1, "busy"), note(1, "ci"));
    let agent = crate::support::Agent::listen(&node.socket, |request| match request.path.as_str() {
        START => grants(),
        END if request.body.contains("\"cluster\":\"\"") => {
            Answer::error(&ApiError::new(Code::BadRequest, "the cluster of the job is not valid"))
        }
        END if request.body.contains("\"cluster\":\"busy\"") => Answer::error(&broken()),
        _ => Answer::ok(&gpush_api::SlurmJobEnded::default()),
    });
    node.prolog(&Job::new(2).on("1"));
    assert!(!node.has(&one) && never.iter().all(|name| !node.has(name)), "{:?}", agent.asked());
    assert!(node.has(&failing), "the next hook tries again");
}

/// In Slurm 22.05, the Epilog of a requeued run has the restart count of the next run. The next Prolog reports the end of
/// the earlier run.
#[test]
fn next_prolog_reports_the_earlier_end_with_its_own_count() {
    let (mut node, agent) = Node::granting(WHOLE);
    node.prolog(&Job::new(7).on("0"));
    let socket = node.socket.clone();
    node.stop_gpushd();
    let second = Job::new(7).on("0").with(RESTARTS, 1);
    failure(&node.run("epilog", &second));
    assert!(node.has("ci-7@n1+ended") && !node.has("ci-7@n1"));
    (node.socket, node.deadline) = (socket, "1m");
    node.prolog(&second);
    assert_eq!(ends(&agent), ["ci 7@n1 0"], "the lease of the next run stays");
    assert!(!node.has("ci-7@n1+ended"));
}

/// Fault: the hooks ignored `api.admin_socket`, or used the socket for all users.
#[test]
fn hooks_use_the_admin_socket_of_the_config() {
    let (node, agent) = Node::granting("");
    node.host.write("config.toml", format!("[api]\nadmin_socket = {:?}\n{WHOLE}", node.socket));
    for (verb, job) in [("prolog", Job::new(1).on("0")), ("epilog", Job::new(1).on("0"))] {
        let mut command = std::process::Command::new(crate::support::GPUSHCTL);
        command.env_clear().envs(job.0).env("GPUSH_SOCKET", "/nonexistent/gpushd.sock").args(["slurm", verb]);
        command.arg("--config").arg(node.host.path("config.toml")).arg("--dir").arg(node.jobs());
        if verb == "prolog" {
            command.arg("--gres-conf").arg(node.host.path("gres.conf"));
        }
        silent(&command.output().unwrap());
    }
    assert_eq!(agent.asked(), [format!("POST {START}"), format!("POST {END}")]);
}
