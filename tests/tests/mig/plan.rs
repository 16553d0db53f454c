//! Plans. A plan describes the current state of the host, or of an offline preset.

use gpush_api::{Code, GpuPlan, GpuState, Operation, OperationState, Plans};
use gpush_tests::{
    agent::{Agent, Setup, gi_at},
    host::{Host, program},
};
use serde_json::json;

fn plans(agent: &Agent, gpus: &[&str], entries: &[&str]) -> Vec<GpuPlan> {
    let body = json!({ "selectors": gpus, "layout_source": { "entries": entries } });
    let answer = agent.post("/v1/mig/plan", &body);
    serde_json::from_value::<Plans>(answer.json()).expect("an answer with plans").plans
}

/// A process that has just started must block a plan at once. So gpushd must not plan with a
/// reading from before the start of the process.
#[test]
fn plan_includes_process_started_a_moment_ago() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["2g.12gb@0"]).state, OperationState::Done);
    for round in 0..5 {
        assert!(plans(&agent, &["0"], &["4g.24gb"])[0].error.is_none(), "round {round}: it is idle");
        let pid = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 0)));
        let refused = plans(&agent, &["0"], &["4g.24gb"]).remove(0);
        let error = refused.error.unwrap_or_else(|| panic!("round {round}: pid {pid} is in the way"));
        assert_eq!((error.code, refused.steps.len()), (Code::Blocked, 0), "round {round}");
        host.end_process(pid);
    }
}

/// If the reading of a GPU hangs, the plan of this GPU has an error instead of steps. The plans of
/// the other GPUs are complete.
#[test]
fn unreadable_gpu_has_no_plan_and_others_do() {
    let host = Host::up("a30x4");
    let agent = Setup::on(&host).config("[driver]\nread_ms = 300\n").start();
    agent.settle_reads();
    host.fault("nvmlDeviceGetGpuInstances --gpu 2 --hang");
    let plans = plans(&agent, &["1", "2", "3"], &["2g.12gb*2"]);
    assert_eq!(plans.iter().map(|plan| plan.gpu).collect::<Vec<_>>(), [1, 2, 3]);
    for plan in &plans {
        match plan.gpu {
            2 => {
                let error = plan.error.as_ref().expect("its reading hangs");
                assert!(plan.steps.is_empty() && error.message.contains("GPU 2 ("), "{plan:?}");
            }
            _ => assert!(plan.error.is_none() && plan.steps.len() == 4, "{plan:?}"),
        }
    }
    host.clear_faults();
}

/// While an operation changes a GPU, a plan for this GPU does not wait. The plan names the
/// operation, and does not show the previous instances as present. The error of an apply also names
/// the operation.
#[test]
fn plan_during_change_names_operation_and_hides_old_layout() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["2g.12gb*2"]).state, OperationState::Done);
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --delay-ms 4000 --times 1");
    let mut operation = agent.begin(&["0"], &["1g.6gb"]).unwrap();
    while operation.progress[0].done < 4 {
        let path = format!("/v1/operations/{}?after={}&wait_ms=10000", operation.id, operation.revision);
        operation = serde_json::from_value(agent.get(&path).json()).unwrap();
    }
    // gpushd has destroyed both instances. The creation of the first new instance takes long.
    let (gpu, plan) = (agent.gpu(0), plans(&agent, &["0"], &["none"]).remove(0));
    let refused = agent.begin(&["0"], &["none"]).unwrap_err();
    let now: Operation = serde_json::from_value(agent.get(&format!("/v1/operations/{}", operation.id)).json()).unwrap();
    assert_eq!((now.state, now.progress[0].done), (OperationState::Running, 4), "all of it was asked within one step");
    assert!(gpu.stale || gpu.mig.as_ref().unwrap().instances.is_empty(), "{gpu:?}");
    assert_eq!(gpu.state, GpuState::Changing);
    let total = operation.progress[0].total;
    assert_eq!(gpu.reasons, [format!("operation {} is changing the GPU: 4 of {total} steps are done", operation.id)]);
    assert_eq!((plan.error.as_ref(), plan.steps.len()), (Some(&refused), 0));
    assert_eq!((refused.code, refused.retryable), (Code::Conflict, true));
    assert!(refused.hint.unwrap().contains(&format!("`gpushctl operation wait {}`", operation.id)));
    assert_eq!(agent.follow(operation).state, OperationState::Done);
    assert!(plans(&agent, &["0"], &["1g.6gb"])[0].steps.is_empty());
}

/// A preset describes the same GPUs as the simulated host with the same name. `config check` uses
/// the preset offline.
#[test]
fn offline_preset_matches_simulated_host() {
    let mut compared = 0;
    for preset in gpush_geometry::PRESETS {
        let host = Host::up(preset.name);
        let agent = Agent::start(&host, "");
        let real = agent.gpus();
        let saved = host.scratch("config.toml");
        for gpu in &real {
            std::fs::write(
                &saved,
                format!(
                    "[[gpu]]\nmatch = [\"{}\"]\nmode = \"unmanaged\"\n[[gpu]]\nmatch = [\"{}\"]\nmode = \"unmanaged\"\n",
                    gpu.pci, gpu.name
                ),
            )
            .unwrap();
            let check = host
                .command(program("gpushctl"))
                .args(["config", "check", "--offline", preset.name])
                .arg(&saved)
                .output()
                .unwrap();
            let printed = String::from_utf8_lossy(&check.stdout).into_owned() + &String::from_utf8_lossy(&check.stderr);
            assert!(!printed.contains("no GPU of this host"), "{} {} {}: {printed}", preset.name, gpu.pci, gpu.name);
            compared += 1;
        }
    }
    println!("compared {compared} GPUs of {} presets", gpush_geometry::PRESETS.len());
}
