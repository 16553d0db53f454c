//! TaskProlog: how a task finds the file of its job. A user can change the environment of a task, except the job id.

use gpush_api::SlurmOutcome;

use super::{CLUSTER, COMMENT, Job, NODE, Node, WHOLE, grants, started};

/// Fault: gpush refused a job, but a task that set another `SLURM_CLUSTER_NAME` ran.
#[test]
fn environment_of_a_task_does_not_skip_the_refusal() {
    let (node, _agent) = Node::granting(WHOLE);
    let (granted, refused) = (Job::new(1).on("0"), Job::new(2).on("1").with(COMMENT, "gpush:mps=0"));
    node.prolog(&granted);
    let expected = node.task(&granted).unwrap();
    assert!(expected.contains("export GPUSH_LEASE=L17\n"), "{expected}");
    node.refusal(&refused);
    let changes: [fn(Job) -> Job; 8] = [
        |job| job.with(CLUSTER, "nonsense"),
        |job| job.with(CLUSTER, ""),
        |job| job.with(CLUSTER, "../../etc"),
        |job| job.with(NODE, "nonsense"),
        |job| job.with(CLUSTER, "nonsense").with(NODE, "nonsense"),
        |job| job.without(&[CLUSTER]),
        |job| job.without(&[NODE]),
        |job| job.without(&[CLUSTER, NODE]),
    ];
    for change in changes {
        assert_eq!(node.task(&change(granted.clone())), Ok(expected.clone()), "{:?}", change(granted.clone()));
        assert!(node.task(&change(refused.clone())).is_err(), "{:?}", change(refused.clone()));
    }
}

#[test]
fn task_gets_no_lease_of_another_cluster_or_node() {
    let (node, _agent) = Node::granting(WHOLE);
    let (first, second) = (Job::new(5).on("0"), Job::new(5).on("1").with(CLUSTER, "other").with(NODE, "n2"));
    node.prolog(&first);
    node.prolog(&second);
    let expected = node.task(&first).unwrap();
    // The environment names a cluster and a node that do not exist.
    let unclear = node.task(&Job::new(5).with(CLUSTER, "nonsense").with(NODE, "nonsense")).expect_err("the task fails");
    assert!(unclear.contains("SLURM_CLUSTER_NAME"), "{unclear}");
    node.epilog(&second);
    assert_eq!((node.task(&second), node.task(&first)), (Ok(String::new()), Ok(expected)));
    // A task of a refused job must not run if it names the other cluster.
    node.refusal(&Job::new(6).on("1").with(COMMENT, "gpush:mps=0"));
    assert!(node.task(&Job::new(6).with(CLUSTER, "other").with(NODE, "n2")).is_err());
}

/// Fault: a step with `--gres=none` got the GPU of its job. Slurm sets no `CUDA_VISIBLE_DEVICES` for such a step.
#[test]
fn step_without_gpus_gets_none_of_the_lease() {
    let (node, _agent) = Node::granting(WHOLE);
    let job = Job::new(9).on("0");
    node.prolog(&job);
    let of_lease = node.task(&job).unwrap();
    let step = job.with("SLURM_STEP_ID", 0);
    assert_eq!(node.task(&step).unwrap(), of_lease);
    let without = step.without(&["CUDA_VISIBLE_DEVICES"]);
    let text = node.task(&without).unwrap();
    assert!(text.contains("export GPUSH_LEASE=L17\nexport CUDA_VISIBLE_DEVICES=\n"), "{text}");
    assert!(!text.contains("GPU-"), "{text}");
    // The batch script has a special step id.
    let batch = without.with("SLURM_STEP_ID", 0xffff_fffbu32);
    assert_eq!(node.task(&batch).unwrap(), of_lease);
}

/// Fault: the file of the leader replaced the link to the file of the component. The leader's file was then removed.
#[test]
fn task_of_a_heterogeneous_job_finds_its_component() {
    let (node, _agent) = Node::answering(WHOLE, |start| match start.job {
        101 => grants(),
        _ => started(SlurmOutcome::NotConcerned),
    });
    let component = Job::new(101).on("1").with("SLURM_HET_JOB_ID", 100);
    let leader = Job::new(100).on("0").with("SLURM_HET_JOB_ID", 100);
    node.prolog(&component);
    let expected = node.task(&component).unwrap();
    node.prolog(&leader);
    // On each node, tasks see the job id of the leader.
    assert_eq!(node.task(&Job::new(100)), Ok(expected));
    node.epilog(&leader);
    node.epilog(&component);
    assert_eq!(node.task(&Job::new(100)), Ok(String::new()));
}
