//! A job from Prolog to Epilog.

use std::{fs, os::unix::fs::MetadataExt, process::Stdio};

use gpush_api::{LeaseKind, LeaseState};
use gpush_tests::mps::lease_now;

use super::{Job, Node, WHOLE, user};

/// The permissions of the job's file, and the tasks of a gpushd that was killed, need real users and real programs.
#[test]
fn job_has_the_gpu_of_its_device_file_until_epilog() {
    let mut node = Node::two_gpus(WHOLE);
    let job = Job::new(42).on("0");
    node.prolog(&job);
    let lease = node.granted(42);
    assert_eq!((lease.kind, lease.holder.uid), (LeaseKind::Whole, user()));
    // gres.conf lists the devices in reverse order of their minor numbers.
    let last = node.agent().gpus().into_iter().max_by_key(|gpu| gpu.minor).expect("a GPU");
    assert_eq!(lease.members[0].gpu_uuid, last.uuid, "index 0 of gres.conf is not index 0 of the driver");
    let file = fs::metadata(node.directory().join("ci-42@n1")).expect("the file of the job");
    let root = nix::unistd::geteuid().as_raw();
    let mode = if user() == root { 0o400 } else { 0o440 };
    assert_eq!((file.mode() & 0o777, file.uid()), (mode, root), "the user reads it by its access list");
    let text = node.task(&job).expect("the task runs");
    assert!(text.contains(&format!("export CUDA_VISIBLE_DEVICES={}\n", last.uuid)), "{text}");
    assert!(text.contains(&format!("export GPUSH_LEASE={}\n", lease.id)), "{text}");
    // TaskProlog does not need gpushd. So start 128 tasks at once without it.
    node.kill();
    let tasks: Vec<_> = (0..128)
        .map(|_| {
            let mut command = node.command("task-prolog");
            command.envs(job.0.clone()).stdout(Stdio::piped()).spawn().expect("gpushctl")
        })
        .collect();
    for task in tasks {
        let output = task.wait_with_output().expect("it ends");
        assert!(output.status.success());
        assert_eq!(String::from_utf8_lossy(&output.stdout), text);
    }
    node.start_again();
    // If Prolog runs again, the job keeps its lease.
    node.prolog(&job);
    assert_eq!(node.granted(42).id, lease.id);
    // Epilog needs nothing but the job id.
    node.epilog(&Job::known_by_id(42));
    assert_eq!(lease_now(node.agent(), lease.id).state, LeaseState::Ended);
    assert!(!node.directory().join("ci-42@n1").exists());
    assert_eq!(node.task(&job), Ok(String::new()));
}
