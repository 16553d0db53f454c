//! Two nodes with a separate gpushd each. A job on both nodes has a lease on each node.

use std::fs;

use gpush_api::{Lease, LeaseBinding, LeaseState, MpsState};
use gpush_tests::{
    agent::Agent,
    host::Host,
    mps::{base, reaches},
    slurm::{ALICE, Setup, script},
};

use super::{HOST, MPS, completed};

/// A node: its simulated host and its gpushd.
pub(super) struct Node {
    pub(super) agent: Agent,
    host: Host,
}

impl Node {
    pub(super) fn start(config: &str) -> Self {
        let host = Host::up(HOST);
        let agent = Agent::start(&host, config);
        Self { agent, host }
    }

    pub(super) fn leases(&self) -> Vec<Lease> {
        let leases: Vec<Lease> = serde_json::from_value(self.agent.get("/v1/leases").json()).expect("leases");
        leases.into_iter().filter(|lease| lease.state != LeaseState::Ended).collect()
    }
}

/// Adds hooks that call the gpushd of the node on which they run.
pub(super) fn hooks(mut setup: Setup, nodes: &[(&str, &Node)]) -> Setup {
    for (key, verb) in [("Prolog", "prolog"), ("Epilog", "epilog"), ("TaskProlog", "task-prolog")] {
        let case = |(name, node): &(&str, &Node)| {
            let dir = setup.dir().join(name);
            fs::create_dir_all(&dir).expect("a directory");
            format!("{name})\n{};;\n", script(&node.host, &dir, verb))
        };
        let cases: String = nodes.iter().map(case).collect();
        setup = setup.hook(key, &format!("case $SLURMD_NODENAME in\n{cases}*) exit 3;;\nesac\n"));
    }
    setup
}

#[test]
fn job_on_two_nodes_has_a_lease_with_the_agent_of_each() {
    let Some(setup) = Setup::new() else { return };
    let nodes = [("n1", Node::start(MPS)), ("n2", Node::start(MPS))];
    for (_, node) in &nodes {
        (0..4).for_each(|gpu| drop(reaches(&node.agent, &gpu.to_string(), MpsState::Ready)));
    }
    let cluster = hooks(setup.nodes(2), &nodes.each_ref().map(|(name, node)| (*name, node))).start();
    let (go, out) = (cluster.dir().join("go"), cluster.dir().join("out"));
    let task = format!(
        "env > {0}/env-$SLURMD_NODENAME.new; mv {0}/env-$SLURMD_NODENAME.new {0}/env-$SLURMD_NODENAME; \
         while [ ! -e {1} ]; do sleep 0.1; done",
        out.display(),
        go.display()
    );
    let arguments = ["-N2", "--ntasks-per-node=1", "--gres=gpu:1", "--comment=gpush:mps=25"];
    let job = cluster.sbatch(ALICE, &arguments, &format!("srun sh -c '{task}'"));
    for (name, node) in &nodes {
        let file = out.join(format!("env-{name}"));
        cluster.until(&format!("task on {name}: {}", cluster.output_of(job)), || file.exists().then_some(()));
        let text = fs::read_to_string(file).expect("the environment of the task");
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let leases = node.leases();
        let [lease] = &leases[..] else { panic!("{name}: {leases:?}") };
        let LeaseBinding::Job { job: id, node: of, .. } = &lease.binding else { panic!("{name}: {lease:?}") };
        assert_eq!((*id, of.as_str(), lease.holder.uid), (job.0, *name, ALICE.uid));
        assert_eq!(value("GPUSH_LEASE"), Some(lease.id.to_string().as_str()), "{name}: {text}");
        assert_eq!(value("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), Some("25"), "{name}: {text}");
        // Slurm starts all tasks of the job with the environment of the first node. But each task
        // needs the pipe directory of its own node.
        let pipe = value("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_default();
        assert!(pipe.starts_with(&base(&node.host).display().to_string()), "{name}: {pipe}");
    }
    fs::write(&go, "").expect("a file");
    completed(cluster.ended(job));
    for (name, node) in &nodes {
        assert_eq!(node.leases(), [], "{name}: {}", node.agent.log());
    }
    cluster.assert_never_drained();
}
