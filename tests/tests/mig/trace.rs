//! Compares the driver calls of an apply with a snapshot, in order. All calls must succeed. The API must show the
//! instances that then exist.

use gpush_api::{GpuInstance, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::Host,
};

/// Returns the instances that the API shows, in the form of `real_layout`.
fn shown(agent: &Agent, gpu: u32) -> Vec<String> {
    let text = |instance: &GpuInstance| {
        let compute = instance.compute.iter();
        let compute = compute.map(|one| format!("{}@{}", one.profile, one.placement.expect("a placement").start));
        format!("{}@{}[{}]", instance.profile, instance.placement.start, compute.collect::<Vec<_>>().join(" "))
    };
    agent.gpu(gpu).mig.expect("a GPU with MIG").instances.iter().map(text).collect()
}

#[test]
fn apply_makes_only_the_calls_of_its_plan() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    host.start_trace();
    let mut log = String::new();
    let mut counts = Vec::new();
    for entries in [
        &["3g.40gb", "2g.20gb", "1g.10gb*2"][..],
        &["1c.3g.40gb*2", "4g.40gb"],
        &["1g.10gb*7"],
        &["1g.10gb@0", "3g.40gb@4"],
        &["none"],
    ] {
        let from = host.trace().len();
        let operation = agent.apply(&["2"], entries);
        assert_eq!(operation.state, OperationState::Done, "{operation:?}");
        let calls = host.trace().split_off(from);
        assert_eq!(calls.len(), operation.plans[0].steps.len(), "a call a step");
        log.push_str(&format!("{}\n", entries.join(", ")));
        for call in &calls {
            assert_eq!(call.rc, 0, "{call:?}");
            log.push_str(&format!("  {} {} {}\n", call.function, call.gpu.unwrap(), call.arguments));
        }
        assert_eq!(shown(&agent, 2), real_layout(&host, 2), "{entries:?}");
        let destroyed = operation.plans[0].instance_steps().filter(|step| step.destroys().is_some()).count();
        counts.push((calls.len() - destroyed, destroyed));
    }
    assert!(real_layout(&host, 1).is_empty(), "the request does not name GPU 1");
    println!("(creates, destroys) of each: {counts:?}; 0 failed calls");
    insta::assert_snapshot!(log);
}
