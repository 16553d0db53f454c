//! Plans tell the truth of the moment they are asked for, on the host and offline.

use gpush_api::{Code, GpuPlan, Plans};
use gpush_tests::{
    agent::{Agent, Setup, gi_at},
    host::{Host, program},
};
use serde_json::json;

fn plans(agent: &Agent, gpus: &[&str], entries: &[&str]) -> Vec<GpuPlan> {
    let body = json!({ "gpus": gpus, "layout": { "entries": entries } });
    let answer = agent.post("/v1/mig/plan", &body);
    serde_json::from_value::<Plans>(answer.json()).expect("an answer with plans").plans
}

/// A process that came a moment ago is in the way at once, not when a cached reading has aged.
#[test]
fn a_plan_knows_a_process_that_came_a_moment_ago() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["2g.12gb@0"]).state, gpush_api::OperationState::Done);
    for round in 0..5 {
        assert!(plans(&agent, &["0"], &["4g.24gb"])[0].error.is_none(), "round {round}: it is idle");
        let pid = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 0)));
        let refused = plans(&agent, &["0"], &["4g.24gb"]).remove(0);
        let error = refused.error.unwrap_or_else(|| panic!("round {round}: pid {pid} is in the way"));
        assert_eq!((error.code, refused.steps.len()), (Code::Blocked, 0), "round {round}");
        host.end_process(pid);
    }
}

/// A GPU whose reading hangs has an error in place of steps; the others have their plans.
#[test]
fn a_gpu_that_cannot_be_read_has_no_plan_and_costs_the_others_nothing() {
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

/// A config checked against a preset means the GPUs that the same host has when it is simulated.
#[test]
fn an_offline_preset_is_the_host_that_is_simulated() {
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
            let said = String::from_utf8_lossy(&check.stdout).into_owned() + &String::from_utf8_lossy(&check.stderr);
            assert!(!said.contains("no GPU of this host"), "{} {} {}: {said}", preset.name, gpu.pci, gpu.name);
            compared += 1;
        }
    }
    println!("compared {compared} GPUs of {} presets", gpush_geometry::PRESETS.len());
}
