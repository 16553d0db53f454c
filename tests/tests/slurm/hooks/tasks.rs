//! How a task finds the file of its job. A user can change the environment of a task, except the
//! job id.

use super::{Job, Node, WHOLE};

const CLUSTER: &str = "SLURM_CLUSTER_NAME";
const NODE: &str = "SLURMD_NODENAME";

/// Fault: gpush refused a job, but a task that set another `SLURM_CLUSTER_NAME` ran.
#[test]
fn environment_of_a_task_does_not_skip_the_refusal() {
    let node = Node::two_gpus(WHOLE);
    let granted = Job::new(1).on("0");
    let refused = Job::new(2).on("1").with("SLURM_JOB_COMMENT", "gpush:mps=0");
    let expected = node.granted_task(&granted);
    node.refusal(&refused);
    let without = |job: &Job, names: &[&str]| {
        let mut job = job.clone();
        job.0.retain(|(name, _)| !names.contains(name));
        job
    };
    for change in [
        |job: &Job| job.clone().with(CLUSTER, "nonsense"),
        |job: &Job| job.clone().with(CLUSTER, ""),
        |job: &Job| job.clone().with(CLUSTER, "../../etc"),
        |job: &Job| job.clone().with(NODE, "nonsense"),
        |job: &Job| job.clone().with(CLUSTER, "nonsense").with(NODE, "nonsense"),
    ] {
        assert_eq!(node.task(&change(&granted)), Ok(expected.clone()), "{:?}", change(&granted));
        assert!(node.task(&change(&refused)).is_err(), "{:?}", change(&refused));
    }
    for names in [&[CLUSTER][..], &[NODE], &[CLUSTER, NODE]] {
        assert_eq!(node.task(&without(&granted, names)), Ok(expected.clone()), "{names:?}");
        assert!(node.task(&without(&refused, names)).is_err(), "{names:?}");
    }
}

#[test]
fn jobs_of_two_clusters_and_nodes_get_their_own_leases() {
    let node = Node::two_gpus(WHOLE);
    let (first, second) = (Job::new(5).on("0"), Job::new(5).on("1").with(CLUSTER, "other").with(NODE, "n2"));
    let one = node.granted_task(&first);
    let two = node.granted_task(&second);
    assert_ne!(one, two);
    assert_eq!((node.task(&first), node.task(&second)), (Ok(one.clone()), Ok(two)));
    // The environment names a cluster and a node that do not exist.
    let unclear = node.task(&Job::new(5).with(CLUSTER, "nonsense").with(NODE, "nonsense")).expect_err("the task fails");
    assert!(unclear.contains("SLURM_CLUSTER_NAME"), "{unclear}");
    // After its Epilog, the job of the other cluster has no lease. Its task must not get the lease
    // of the job with the same id in this cluster.
    node.epilog(&second);
    assert_eq!(node.task(&second), Ok(String::new()));
    assert_eq!(node.task(&first), Ok(one));
    // A task of a refused job must not run if it names the other cluster.
    node.refusal(&Job::new(6).on("1").with("SLURM_JOB_COMMENT", "gpush:mps=0"));
    assert!(node.task(&Job::new(6).with(CLUSTER, "other").with(NODE, "n2")).is_err());
}

/// Fault: the file of the leader replaced the link to the file of the component. The leader's file
/// was then removed.
#[test]
fn leader_without_a_lease_leaves_the_file_of_its_component() {
    let config = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\n";
    let node = Node::two_gpus(config);
    let component = Job::new(101).on("1").with("SLURM_HET_JOB_ID", 100).with("SLURM_JOB_COMMENT", "gpush:whole");
    let expected = node.granted_task(&component);
    let leader = Job::new(100).on("0").with("SLURM_HET_JOB_ID", 100);
    // The GPU of the leader does not belong to Slurm. So gpushd grants the leader no lease.
    node.prolog(&leader);
    assert!(node.lease(100).is_none());
    assert_eq!(node.task(&Job::new(100)), Ok(expected));
    node.epilog(&leader);
    node.epilog(&component);
    assert_eq!(node.task(&Job::new(100)), Ok(String::new()));
}
