//! Compares the driver calls of an apply with a snapshot, in order. All calls must succeed.

use gpush_api::OperationState;
use gpush_tests::{agent::Agent, host::Host};

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
        let destroyed = operation.plans[0].instance_steps().filter(|step| step.destroys().is_some()).count();
        counts.push((calls.len() - destroyed, destroyed));
    }
    println!("(creates, destroys) of each: {counts:?}; 0 failed calls");
    insta::assert_snapshot!(log);
}
