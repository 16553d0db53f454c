//! A heterogeneous job: two components on two nodes, each with a separate job id.

use std::fs;

use gpush_api::LeaseBinding;
use gpush_tests::slurm::{ALICE, JobId, Setup};

use super::{
    WHOLE, completed,
    nodes::{Node, hooks},
};

/// On both nodes, tasks see the job id of the leader. Prolog and Epilog see the job id of the component.
#[test]
fn components_of_a_heterogeneous_job_have_leases_until_their_epilogs() {
    let Some(setup) = Setup::new() else { return };
    let nodes = [("n1", Node::start(WHOLE)), ("n2", Node::start(WHOLE))];
    let cluster = hooks(setup.nodes(2), &nodes.each_ref().map(|(name, node)| (*name, node))).start();
    let (go, out) = (cluster.dir().join("go"), cluster.dir().join("out"));
    let task = format!(
        "env > {0}/env-$SLURMD_NODENAME.new; mv {0}/env-$SLURMD_NODENAME.new {0}/env-$SLURMD_NODENAME; \
         while [ ! -e {1} ]; do sleep 0.1; done",
        out.display(),
        go.display()
    );
    let components = ["-N1", "--nodelist=n1", "--gres=gpu:1", ":", "-N1", "--nodelist=n2", "--gres=gpu:2"];
    let leader = cluster.sbatch(ALICE, &components, &format!("srun --het-group=0,1 sh -c '{task}'"));
    let component = JobId(leader.0 + 1);
    for ((name, node), (job, gpus)) in nodes.iter().zip([(leader, 1), (component, 2)]) {
        let file = out.join(format!("env-{name}"));
        cluster.until(&format!("task on {name}: {}", cluster.output_of(leader)), || file.exists().then_some(()));
        let text = fs::read_to_string(file).expect("the environment of the task");
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let leases = node.leases();
        let [lease] = &leases[..] else { panic!("{name}: {leases:?}") };
        let LeaseBinding::Job { job: id, node: of, leader: alias, .. } = &lease.binding else {
            panic!("{name}: {lease:?}")
        };
        let expected = (job != leader).then_some(leader.0);
        assert_eq!((*id, of.as_str(), *alias), (job.0, *name, expected), "{lease:?}");
        assert_eq!(value("SLURM_JOB_ID"), Some(leader.to_string().as_str()), "{name}: {text}");
        assert_eq!(value("GPUSH_LEASE"), Some(lease.id.to_string().as_str()), "{name}: {text}");
        let mut devices: Vec<&str> = value("CUDA_VISIBLE_DEVICES").unwrap_or_default().split(',').collect();
        devices.sort_unstable();
        let mut members: Vec<&str> = lease.members.iter().map(|member| member.target.as_str()).collect();
        members.sort_unstable();
        assert_eq!((devices.len(), devices), (gpus, members), "{name}: {text}");
    }
    fs::write(&go, "").expect("a file");
    completed(cluster.ended(leader));
    cluster.wait_for_state(component, "COMPLETED");
    cluster.wait_until_idle();
    for (name, node) in &nodes {
        assert_eq!(node.leases(), [], "{name}: {}", node.agent.log());
        let jobs = fs::read_dir(cluster.dir().join(name).join("jobs")).expect("the directory of the jobs");
        let mut left: Vec<_> = jobs.flatten().map(|entry| entry.file_name()).collect();
        left.retain(|name| !["owned", "places", "lock"].iter().any(|kept| name == kept));
        assert!(left.is_empty(), "{name}: {left:?}");
    }
    cluster.assert_never_drained();
}
