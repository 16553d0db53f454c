//! A job from Prolog to Epilog.

use std::{fs, os::unix::fs::MetadataExt};

use gpush_api::{EndReason, LeaseBinding, LeaseKind, LeaseState};
use gpush_tests::mps::{lease_becomes, lease_now};

use super::{Job, Node, OTHER, WHOLE, failure, leftovers::is_root, silent, user};

#[test]
fn job_gets_the_gpu_of_its_device_file_until_epilog() {
    let node = Node::two_gpus(WHOLE);
    let job = Job::new(42).on("0");
    node.prolog(&job);
    let lease = node.granted(42);
    assert_eq!((lease.kind, lease.holder.uid), (LeaseKind::Whole, user()));
    assert_eq!(lease.asked_by.as_ref().map(|by| by.uid), Some(nix::unistd::geteuid().as_raw()));
    let LeaseBinding::Job { cluster, node: name, restart, .. } = &lease.binding else { panic!("{lease:?}") };
    assert_eq!((cluster.as_str(), name.as_str(), *restart), ("ci", "n1", 0));
    // gres.conf lists the devices in reverse order of their minor numbers.
    let last = node.agent().gpus().into_iter().max_by_key(|gpu| gpu.minor).expect("a GPU");
    assert_eq!(lease.members[0].gpu, last.uuid, "index 0 of gres.conf is not index 0 of the driver");
    let file = fs::metadata(node.directory().join("ci-42@n1")).expect("the file of the job");
    let root = nix::unistd::geteuid().as_raw();
    let mode = if user() == root { 0o400 } else { 0o440 };
    assert_eq!((file.mode() & 0o777, file.uid()), (mode, root), "the user reads it by its access list");
    let text = node.task(&job).expect("the task runs");
    assert!(text.contains(&format!("export CUDA_VISIBLE_DEVICES={}\n", last.uuid)), "{text}");
    assert!(text.contains(&format!("export GPUSH_LEASE={}\n", lease.id)), "{text}");
    // If Prolog runs again, the job keeps its lease.
    node.prolog(&job);
    assert_eq!(node.granted(42).id, lease.id);
    // Epilog needs nothing but the job id.
    let bare = Job::new(42);
    node.epilog(&bare);
    assert_eq!(lease_now(node.agent(), lease.id).state, LeaseState::Ended);
    assert!(!node.directory().join("ci-42@n1").exists());
    node.epilog(&bare);
    node.epilog(&job);
    node.epilog(&Job::new(4711).on("0"));
    assert_eq!(node.task(&job), Ok(String::new()));
}

#[test]
fn jobs_without_a_gpu_pass_without_gpushd() {
    let mut node = Node::two_gpus(WHOLE);
    node.kill();
    let job = Job::new(1).with("SLURM_JOB_COMMENT", "just a note");
    node.prolog(&job);
    node.epilog(&job);
    assert_eq!(node.task(&job), Ok(String::new()));
    assert!(!node.directory().exists());
}

#[test]
fn late_epilog_of_a_requeued_job_keeps_the_next_lease() {
    let node = Node::two_gpus(WHOLE);
    let first = Job::new(7).on("0");
    let second = Job::new(7).on("0").with("SLURM_JOB_RESTART_COUNT", 1);
    node.prolog(&first);
    let old = node.granted(7);
    node.prolog(&second);
    let new = node.granted(7);
    assert_ne!(old.id, new.id);
    assert_eq!(lease_now(node.agent(), old.id).state, LeaseState::Ended);
    node.epilog(&first);
    assert_eq!(node.granted(7).id, new.id);
    assert!(node.task(&second).is_ok(), "the file of the next run stays");
    node.epilog(&second);
    assert!(node.lease(7).is_none());
}

/// Slurm may give a job id again, for example after the counter of the ids has been reset.
#[test]
fn same_job_id_of_another_user_gets_a_lease_of_its_own() {
    if !is_root("the same job id of two users") {
        return;
    }
    let node = Node::two_gpus(WHOLE);
    let first = Job::new(7).on("0");
    node.prolog(&first);
    let old = node.granted(7);
    let second = first.with("SLURM_JOB_UID", OTHER);
    node.prolog(&second);
    let new = node.granted(7);
    assert_ne!(new.id, old.id);
    assert_eq!((old.holder.uid, new.holder.uid), (user(), OTHER));
    assert_eq!(lease_now(node.agent(), old.id).state, LeaseState::Ended);
    node.epilog(&second);
    assert!(node.lease(7).is_none());
}

#[test]
fn heterogeneous_task_finds_its_job_by_the_leader() {
    let node = Node::two_gpus(WHOLE);
    let component = Job::new(101).on("1").with("SLURM_HET_JOB_ID", 100);
    node.prolog(&component);
    let text = node.task(&Job::new(100)).expect("the task runs");
    assert!(text.contains(&format!("export GPUSH_LEASE={}\n", node.granted(101).id)), "{text}");
    node.epilog(&component);
    assert_eq!(node.task(&Job::new(100)), Ok(String::new()));
}

#[test]
fn lease_of_a_job_survives_a_crash_of_gpushd() {
    let mut node = Node::two_gpus(WHOLE);
    let job = Job::new(9).on("0,1");
    node.prolog(&job);
    let lease = node.granted(9);
    assert_eq!(lease.members.len(), 2);
    node.kill();
    // TaskProlog does not need gpushd. So start 128 tasks at once.
    let expected = node.task(&job).expect("the task runs");
    let tasks: Vec<_> = (0..128)
        .map(|_| {
            let mut command = node.command("task-prolog");
            command.envs(job.0.clone()).stdout(std::process::Stdio::piped()).spawn().expect("gpushctl")
        })
        .collect();
    for task in tasks {
        let output = task.wait_with_output().expect("it ends");
        assert!(output.status.success());
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    }
    node.start_again();
    assert_eq!(node.granted(9).id, lease.id);
    node.epilog(&job);
    lease_becomes(node.agent(), lease.id, LeaseState::Ended);
}

#[test]
fn unusable_gpu_fails_the_node_and_gres_conf_without_the_device_too() {
    let node = Node::two_gpus(WHOLE);
    let gres_conf = fs::read_to_string(&node.gres_conf).expect("gres.conf can be read");
    let cordoned = node.agent().gpus().into_iter().max_by_key(|gpu| gpu.minor).expect("a GPU").index;
    let answer = node.agent().post(&format!("/v1/gpus/{cordoned}/cordon"), &serde_json::json!({ "reason": "fan" }));
    assert_eq!(answer.status, 200);
    let text = failure(&node.run("prolog", &Job::new(5).on("0")));
    assert!(text.contains(&format!("GPU {cordoned} is cordoned")), "{text}");
    assert!(!node.directory().join("ci-5@n1").exists(), "everything is undone");
    node.prolog(&Job::new(6).on("1"));
    let text = failure(&node.run("prolog", &Job::new(8).on("5")));
    assert!(text.contains("gres.conf has no File for GPU 5"), "{text}");
    // Earlier fault: after the first answer of gpushd, Prolog let this job run without a lease or a message. The host
    // does not have the device, so the list of GPUs that are reserved for Slurm does not contain it.
    fs::write(&node.gres_conf, "Name=gpu File=/dev/nvidia99\n").expect("gres.conf can be written");
    let text = failure(&node.run("prolog", &Job::new(9).on("0")));
    assert!(text.contains("/dev/nvidia99, which is not a device of this host"), "{text}");
    fs::write(&node.gres_conf, gres_conf).expect("gres.conf can be written");
    // If a GPU does not belong to Slurm, a job without a request gets no lease on it.
    node.agent().reload(WHOLE.replace("owner = \"slurm\"\n", ""));
    silent(&node.run("prolog", &Job::new(10).on("0")));
}

/// Fault: an Epilog that got only the job id assumed the cluster `slurm` and no node, so it ended
/// no lease.
#[test]
fn epilog_with_only_the_job_id_ends_the_lease() {
    let node = Node::two_gpus(WHOLE);
    let only_id = |id: u32| Job(Vec::new()).with("SLURM_JOB_ID", id);
    node.prolog(&Job::new(7).on("0"));
    node.epilog(&only_id(7));
    assert!(node.lease(7).is_none());
    // gpush has no record of this job.
    node.epilog(&only_id(8));
    // The cluster's name has a space, so the file name contains it in another form.
    let named = Node::two_gpus(WHOLE);
    named.prolog(&Job::new(7).on("0").with("SLURM_CLUSTER_NAME", "my cluster"));
    named.epilog(&only_id(7));
    assert!(named.lease(7).is_none());
    let other = Job::new(9).on("1").with("SLURM_CLUSTER_NAME", "other");
    node.prolog(&Job::new(9).on("0"));
    node.prolog(&other);
    let text = failure(&node.run("epilog", &only_id(9)));
    assert!(text.contains("cluster ci and node n1; cluster other and node n1"), "{text}");
    node.epilog(&only_id(9).with("SLURM_CLUSTER_NAME", "other"));
    node.granted(9);
    // There is only one file with this job id, but the file may belong to another job than the job
    // that has ended. So Epilog fails.
    failure(&node.run("epilog", &only_id(9)));
    node.granted(9);
    node.epilog(&only_id(9).with("SLURM_CLUSTER_NAME", "ci"));
    assert!(node.lease(9).is_none());
}

/// Fault: the hooks of the leader of a heterogeneous job ended the leases of its other components.
#[test]
fn components_of_a_heterogeneous_job_keep_their_own_leases() {
    let node = Node::two_gpus(WHOLE);
    let (component, leader) =
        (Job::new(42).on("1").with("SLURM_HET_JOB_ID", 41), Job::new(41).on("0").with("SLURM_HET_JOB_ID", 41));
    node.prolog(&component);
    let first = node.granted(42);
    node.prolog(&leader);
    assert_ne!(node.granted(41).members, first.members);
    assert_eq!(node.granted(42).id, first.id);
    node.epilog(&leader);
    assert!(node.lease(41).is_none());
    assert_eq!(node.granted(42).id, first.id);
    node.epilog(&component);
    assert!(node.lease(42).is_none());
}

/// If `slurm.directory` is below `/run`, a reboot empties it. Otherwise, its files survive the
/// reboot.
#[test]
fn reboot_ends_the_lease_of_a_job() {
    for lasts in [false, true] {
        let mut node = Node::two_gpus(WHOLE);
        let job = Job::new(1).on("0");
        node.prolog(&job);
        let lease = node.granted(1);
        node.reboot();
        if !lasts {
            fs::remove_dir_all(node.directory()).expect("the files of jobs can be removed");
        }
        let ended = lease_now(node.agent(), lease.id);
        assert_eq!((ended.state, ended.reason), (LeaseState::Ended, Some(EndReason::Rebooted)));
        // After a reboot, Slurm may run the Epilog of a requeued job before the next Prolog, or it
        // may run only the next Prolog.
        if lasts {
            node.epilog(&job.with("SLURM_JOB_RESTART_COUNT", 1));
        }
        let next = Job::new(2).on("0");
        node.prolog(&next);
        assert_ne!(node.granted(2).id, lease.id);
        node.epilog(&next);
    }
}
