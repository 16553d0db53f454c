//! Hooks while no gpushd answers.

use std::fs;

use gpush_api::SlurmOutcome;

use super::{COMMENT, Job, MIXED, Node, RESTARTS, START, WHOLE, ends, failure, grants, started};

/// Returns a node whose gpushd has answered once, and does not run any more. The GPU with index 0 in gres.conf belongs to
/// Slurm.
fn stopped(config: &str) -> Node {
    let (mut node, _agent) = Node::answering(config, |_| started(SlurmOutcome::NotConcerned));
    node.prolog(&Job::new(1).on("0"));
    node.epilog(&Job::new(1).on("0"));
    node.stop_gpushd();
    node
}

#[test]
fn jobs_without_a_gpu_pass_and_leave_no_files() {
    let mut node = Node::new(WHOLE);
    node.stop_gpushd();
    let job = Job::new(1).with(COMMENT, "just a note");
    node.prolog(&job);
    node.epilog(&job);
    assert_eq!(node.task(&job), Ok(String::new()));
    assert!(!node.jobs().exists());
}

#[test]
fn agent_down_policy_applies_only_to_jobs_of_gpush() {
    let node = stopped(MIXED);
    let text = failure(&node.run("prolog", &Job::new(2).on("0")));
    assert!(text.contains("agent_down"), "{text}");
    node.prolog(&Job::new(3).on("1"));
    node.epilog(&Job::new(3).on("1"));
    failure(&node.run("prolog", &Job::new(4).on("1").with(COMMENT, "gpush:whole")));
    // The hook itself refuses an invalid request.
    node.refusal(&Job::new(5).on("0").with(COMMENT, "gpush:mps=0"));
    node.host.write("config.toml", format!("[slurm]\nagent_down = \"pass\"\n{MIXED}"));
    let job = Job::new(6).on("0");
    node.prolog(&job);
    let text = node.task(&job).unwrap();
    assert!(text.contains("without a lease") && !text.contains("export"), "{text}");
    node.epilog(&job);
    // The hooks sent no request. So there is no lease whose end a later hook must report.
    assert!(!node.has("ci-6@n1+ended") && !node.has("ci-2@n1+ended"));
}

/// Fault: on a node without gpushd, any user could drain the node with `--comment=mps`.
#[test]
fn request_of_a_job_without_a_gpu_fails_only_its_tasks() {
    let node = stopped(MIXED);
    for (id, comment) in [(2, "mps"), (3, "gpush:whole")] {
        let job = Job::new(id).with(COMMENT, comment);
        let refused = node.refusal(&job);
        assert!(refused.contains("gpushd"), "{refused}");
        node.epilog(&job);
        assert!(!node.has(&format!("ci-{id}@n1")));
    }
}

/// If a node never had a gpushd, a request is a mistake of the user, even if the job has GPUs.
#[test]
fn request_on_a_node_that_never_had_gpushd_fails_only_its_tasks() {
    let mut node = Node::new(MIXED);
    node.stop_gpushd();
    fs::remove_file(node.host.path("config.toml")).unwrap();
    let job = Job::new(1).on("0").with(COMMENT, "mps");
    let refused = node.refusal(&job);
    assert!(refused.contains("gpushd"), "{refused}");
    node.epilog(&job);
}

/// Fault: if a job was refused without gpushd, Epilog still asked gpushd to end the lease of the job.
#[test]
fn epilog_after_a_refused_request_passes() {
    let (mut node, _agent) = Node::answering(WHOLE, |start| match start.request {
        Some(_) => started(SlurmOutcome::Refused { reasons: vec!["GPU 1 is not shared".to_owned()], hint: None }),
        None => grants(),
    });
    let by_gpushd = Job::new(1).on("0").with(COMMENT, "gpush:mps=25");
    node.refusal(&by_gpushd);
    let by_the_hook = Job::new(2).on("1").with(COMMENT, "gpush:mps=0");
    let text = node.refusal(&by_the_hook);
    assert!(text.contains("--comment") && text.contains("`mps`"), "{text}");
    // The lease of the first run of this job may still exist, so Epilog must report the end.
    let run = |restart| Job::new(3).on("1").with(RESTARTS, restart);
    node.prolog(&run(0));
    node.refusal(&run(1).with(COMMENT, "gpush:mps=0"));
    node.stop_gpushd();
    for job in [by_gpushd, by_the_hook] {
        node.epilog(&job);
    }
    failure(&node.run("epilog", &run(1)));
    assert!(node.has("ci-3@n1+ended"));
}

/// Fault: if Prolog could not write the line about the refusal, it failed. So a user could drain the node.
#[test]
fn refusal_that_cannot_be_printed_does_not_fail_prolog() {
    let node = Node::new(WHOLE);
    let job = Job::new(1).on("0").with(COMMENT, "gpush:mps=0");
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let status = node.command("prolog").envs(job.0.clone()).stderr(full).status().unwrap();
    assert!(status.success(), "{status}");
    assert!(node.task(&job).expect_err("the task fails").contains("`mps`"));
}

/// If the hooks know only the id of a job, the job may have no lease. So its Epilog does not fail.
#[test]
fn epilog_with_the_job_id_alone_passes() {
    let node = stopped(WHOLE);
    node.epilog(&Job::known_by_id(11));
}

/// A gpushd that is suspended may have received the request, and may grant it later.
#[test]
fn unanswered_request_without_a_gpu_is_ended_by_the_next_hook() {
    let mut node = Node::new(MIXED);
    node.deadline = "1s";
    let agent = crate::support::Agent::listen(&node.socket, |request| match request.path.as_str() {
        START if request.body.contains("\"job\":2") => crate::support::Answer::Silence,
        START => grants(),
        _ => crate::support::Answer::ok(&gpush_api::SlurmJobEnded::default()),
    });
    let job = Job::new(2).with(COMMENT, "gpush:whole");
    let output = node.run("prolog", &job);
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && line.contains(": refused: ") && line.contains(" did not answer "), "{line}");
    node.task(&job).expect_err("the tasks fail");
    node.epilog(&job);
    assert!(node.has("ci-2@n1+ended") && !node.has("ci-2@n1"));
    node.deadline = "1m";
    node.prolog(&Job::new(3).on("0"));
    assert_eq!(ends(&agent), ["ci 2@n1 0"]);
    assert!(!node.has("ci-2@n1+ended"));
}
