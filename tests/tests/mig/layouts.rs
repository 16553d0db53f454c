//! Layouts on each kind of host. The tests request them from a real agent, and read them back from
//! the simulated hardware.

use gpush_api::{GpuPlan, InstanceStep, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::Host,
};
use serde_json::json;

/// Applies layouts to a GPU one after the other. Compares each layout with the instances that then
/// exist.
fn walk(host: &Host, agent: &Agent, gpu: usize, layouts: &[(&[&str], &[&str])]) {
    for (entries, expected) in layouts {
        let operation = agent.apply(&[&gpu.to_string()], entries);
        assert_eq!(operation.state, OperationState::Done, "{operation:?}");
        assert_eq!(real_layout(host, gpu), *expected, "{entries:?}");
        let shown = agent.gpu(u32::try_from(gpu).expect("an index"));
        let shown: Vec<String> = shown
            .mig
            .expect("a GPU with MIG")
            .instances
            .iter()
            .map(|i| {
                let compute =
                    i.compute.iter().map(|c| format!("{}@{}", c.profile, c.placement.expect("a placement").start));
                format!("{}@{}[{}]", i.profile, i.placement.start, compute.collect::<Vec<_>>().join(" "))
            })
            .collect();
        assert_eq!(shown, *expected, "what the API shows after {entries:?}");
    }
    println!("GPU {gpu}: {} layouts", layouts.len());
}

#[test]
fn a100_gets_mixed_layouts_with_placements_and_cis() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    walk(
        &host,
        &agent,
        0,
        &[
            (&["7g.80gb"], &["7g.80gb@0[7g.80gb@0]"]),
            (
                &["3g.40gb", "2g.20gb", "1g.10gb*2"],
                &["2g.20gb@0[2g.20gb@0]", "1g.10gb@2[1g.10gb@0]", "1g.10gb@3[1g.10gb@0]", "3g.40gb@4[3g.40gb@0]"],
            ),
            (&["1g.10gb@6", "3g.40gb@0"], &["3g.40gb@0[3g.40gb@0]", "1g.10gb@6[1g.10gb@0]"]),
            (&["1c.3g.40gb*3"], &["3g.40gb@0[1c.3g.40gb@0 1c.3g.40gb@1 1c.3g.40gb@2]"]),
            (&["none"], &[]),
            (&["none"], &[]),
        ],
    );
    for gpu in 1..8 {
        assert!(real_layout(&host, gpu).is_empty(), "GPU {gpu} was not asked for");
    }
}

#[test]
fn unchanged_layout_is_an_operation_without_steps() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    walk(
        &host,
        &agent,
        1,
        &[
            (&["2g.12gb", "1g.6gb*2"], &["2g.12gb@0[2g.12gb@0]", "1g.6gb@2[1g.6gb@0]", "1g.6gb@3[1g.6gb@0]"]),
            (&["4g.24gb"], &["4g.24gb@0[4g.24gb@0]"]),
        ],
    );
    host.start_trace();
    let again = agent.apply(&["1"], &["4g.24gb"]);
    assert_eq!((again.state, again.plans[0].steps.len(), again.plans[0].keeps.len()), (OperationState::Done, 0, 1));
    assert_eq!(host.trace(), [], "no driver call");
}

#[test]
fn hopper_layout_enables_mig() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 2\nmig = false\n");
    let agent = Agent::start(&host, "");
    assert_eq!(real_layout(&host, 0), ["MIG off"]);
    let operation = agent.apply(&["0"], &["4g.40gb", "1g.20gb", "1g.10gb"]);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    assert!(operation.plans[0].mig_mode() == Some(true) && operation.plans[0].reset().is_none());
    assert_eq!(operation.progress[0].done, operation.progress[0].total);
    assert_eq!(operation.progress[0].total as usize, operation.plans[0].steps.len());
    assert_eq!(operation.plans[0].instance_steps().count() + 1, operation.plans[0].steps.len(), "the mode is a step");
    assert_eq!(real_layout(&host, 0).len(), 3, "{:?}", real_layout(&host, 0));
    assert_eq!(real_layout(&host, 1), ["MIG off"], "the other GPU's mode is its own");
}

#[test]
fn blackwell_with_twelve_memory_slices_gets_its_layouts() {
    let host = Host::up("rtx-pro-6000x2");
    let agent = Agent::start(&host, "");
    let operation = agent.apply(&["all"], &["2g.48gb", "1g.24gb*2"]);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    for gpu in 0..2 {
        let starts: Vec<String> =
            real_layout(&host, gpu).iter().map(|i| i.split('[').next().unwrap().to_owned()).collect();
        assert_eq!(starts.len(), 3, "{starts:?}");
        assert!(starts.iter().any(|i| i.starts_with("2g.48gb@")), "{starts:?}");
    }
}

#[test]
fn mixed_host_gets_the_layouts_of_its_rules() {
    let config = r#"
[layouts]
small = ["1g.10gb*7"]

[[gpu]]
match = ["*A100*"]
mode = "mig"
layout = "small"

[[gpu]]
match = ["*A30*"]
mode = "mig"
layout = ["2g.12gb*2"]

[[gpu]]
match = ["*H100*"]
mode = "mig"
layout = ["3g.40gb", "4g.40gb"]
"#;
    let host = Host::up("mixed");
    let agent = Agent::start(&host, "");
    let mut tries = 0;
    // Until `complete` is true, gpushd applies the layouts that it read at its start, even if the
    // config has changed since then.
    while agent.get("/v1/health").json()["layouts_at_start"]["complete"] != json!(true) {
        tries += 1;
        assert!(tries < 100_000, "{}", agent.log());
    }
    agent.write_config(config);
    agent.signal(nix::sys::signal::Signal::SIGHUP);
    while agent.get("/v1/config").json()["rules"].as_array().unwrap().is_empty() {
        tries += 1;
        assert!(tries < 100_000, "{}", agent.log());
    }
    // A reload alone changes no layout.
    assert!(real_layout(&host, 0).is_empty());
    let operation = agent.follow(agent.begin_with(&json!({})).unwrap());
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    assert_eq!(operation.plans.iter().map(|p| p.gpu).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(real_layout(&host, 0).len(), 7);
    assert_eq!(real_layout(&host, 1), ["2g.12gb@0[2g.12gb@0]", "2g.12gb@2[2g.12gb@0]"]);
    assert_eq!(real_layout(&host, 2), ["4g.40gb@0[4g.40gb@0]", "3g.40gb@4[3g.40gb@0]"]);
    let gpus = agent.gpus();
    assert!(gpus[..3].iter().all(|gpu| gpu.drift.is_empty() && gpu.rule.is_some()), "{gpus:?}");
    assert!(gpus[4].mig.is_none() && gpus[5].mig.is_none(), "L4 and T4 have no MIG");
}

#[test]
fn one_operation_changes_all_eight_gpus() {
    let host = Host::up("dgx-h200");
    let agent = Agent::start(&host, "");
    let operation = agent.apply(&["all"], &["3g.71gb", "2g.35gb", "1g.18gb*2"]);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    for gpu in 0..8 {
        assert_eq!(real_layout(&host, gpu).len(), 4, "GPU {gpu}");
    }
    let creates = |step: &&InstanceStep| matches!(step, InstanceStep::CreateGpuInstance { .. });
    assert_eq!(operation.plans.iter().flat_map(GpuPlan::instance_steps).filter(creates).count(), 32);
}
