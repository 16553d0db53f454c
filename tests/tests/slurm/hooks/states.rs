//! A node that cannot serve jobs. Also a node that can serve jobs although a part of it does not
//! work.

use std::fs;

use gpush_api::{GpuState, MpsState, OperationState};
use gpush_tests::{
    agent::Setup,
    mps::{act, reaches},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use super::{Job, NOBODY, Node, OTHER, WHOLE, failure, first, leftovers::is_root, refused_line};

/// Checks that the Prolog of a job fails with this reason and leaves no files, and that its Epilog
/// succeeds.
fn fails(node: &Node, job: &Job, id: u32, why: &str) {
    let text = failure(&node.run("prolog", job));
    assert!(text.contains(why), "{text}");
    assert!(!node.directory().join(format!("ci-{id}@n1")).exists(), "everything is undone");
    node.epilog(job);
}

#[test]
fn lost_gpu_fails_the_jobs_on_it_alone() {
    let node = Node::two_gpus(WHOLE);
    let gpu = first(&node);
    node.host.fault(&format!("nvmlDeviceGetMemoryInfo* --gpu {gpu} --mutate lose --times 1"));
    node.agent().await_that("lost GPU", || node.agent().gpu(gpu).state == GpuState::Lost);
    fails(&node, &Job::new(1).on("0"), 1, &format!("GPU {gpu} is lost"));
    node.prolog(&Job::new(2).on("1"));
    node.granted(2);
}

#[test]
fn degraded_gpu_fails_prolog() {
    let config =
        "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb@0\", \"2g.20gb@4\"]\nowner = \"slurm\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"h100-80-sxm\"\n", config);
    let instances = node.agent().gpu(0).mig.expect("MIG").instances;
    let kept = instances.iter().find(|one| one.profile == "3g.40gb").expect("an instance");
    let uuid = kept.compute[0].uuid.clone().expect("a UUID");
    let job = |id| Job::new(id).with("SLURM_JOB_GPUS", "0").with("CUDA_VISIBLE_DEVICES", &uuid);
    node.prolog(&job(1));
    node.granted(1);
    node.epilog(&job(1));
    // Every creation fails, also in the rollback. The device of the first job stays.
    node.host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --rc UNKNOWN");
    let operation = node.agent().apply(&["0"], &["3g.40gb@0", "1g.10gb@4"]);
    assert_eq!(operation.state, OperationState::Failed, "{operation:?}");
    assert_eq!(node.agent().gpu(0).state, GpuState::Degraded);
    fails(&node, &job(2), 2, "GPU 0 is degraded");
}

#[test]
fn lost_database_holds_the_node_until_recover() {
    let mut node = Node::two_gpus(WHOLE);
    let database = Setup::on(&node.host).state_dir().join("gpush.db");
    fs::remove_file(&database).expect("the database exists");
    fails(&node, &Job::new(1).on("0"), 1, "gpush.db was deleted or replaced");
    node.kill();
    node.start_again();
    let gpu = first(&node);
    node.agent().await_that("held GPU", || node.agent().gpu(gpu).state == GpuState::Held);
    fails(&node, &Job::new(2).on("0"), 2, &format!("GPU {gpu} is held"));
    let answer = node.agent().post("/v1/recover", &json!({ "reason": "no process uses a GPU" }));
    assert_eq!(answer.status, 200, "{}", answer.json());
    node.prolog(&Job::new(3).on("0"));
    node.granted(3);
}

/// A user can make the daemon of a target end, for example with clients that crash its server. So
/// if a daemon does not serve, the hook must refuse the job, but must not make Slurm drain the
/// node.
#[test]
fn mps_daemon_that_does_not_serve_refuses_the_job() {
    let config = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nowner = \"slurm\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"l4\"\n", config);
    reaches(node.agent(), "0", MpsState::Ready);
    let answer = act(node.agent(), "0", "stop", &json!({}));
    assert_eq!(answer.status, 200, "{}", answer.json());
    let job = Job::new(1).on("0").with("SLURM_JOB_COMMENT", "gpush:mps=25");
    let refused = node.refusal(&job);
    assert!(refused.contains("MPS daemon"), "{refused}");
    node.epilog(&job);
}

/// Before an MPS daemon changes to the next user, gpushd asks the daemon for its clients. A user can make the daemon
/// slow. Fault: at the deadline of the hook, gpushd interrupted the grant, and the capacity stayed reserved until
/// gpushd restarted.
#[test]
fn mps_daemon_that_changes_its_user_too_slowly_refuses_the_job() {
    if !is_root("MPS daemons of two users") {
        return;
    }
    let config = "[slurm]\ndeadline_s = 2\n[mps]\nhealth_s = 3600\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nowner = \"slurm\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"l4\"\n", config);
    let ready = reaches(node.agent(), "0", MpsState::Ready);
    let job =
        |id: u32, uid: u32| Job::new(id).on("0").with("SLURM_JOB_UID", uid).with("SLURM_JOB_COMMENT", "gpush:mps=100");
    node.prolog(&job(1, NOBODY));
    node.epilog(&job(1, NOBODY));
    assert!(node.lease(1).is_none());
    let daemon = Pid::from_raw(ready.pid.expect("a daemon").cast_signed());
    kill(daemon, Signal::SIGSTOP).expect("the daemon runs");
    let refused = refused_line(&node.run("prolog", &job(2, OTHER)));
    kill(daemon, Signal::SIGCONT).expect("the daemon runs");
    assert!(refused.is_some());
    node.epilog(&job(2, OTHER));
    // The refused job keeps no part of the target.
    node.agent().until("a lease of the whole target", || {
        let line = refused_line(&node.run("prolog", &job(3, OTHER)));
        line.is_none().then_some(())
    });
    node.granted(3);
}
