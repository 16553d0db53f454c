//! Time from a cause to its GPU event, while no client reads the state of a GPU.

use std::time::Instant;

use gpush_api::{EventPayload, GpuIndex, GpuState};
use gpush_tests::{
    agent::{Agent, Listener, Setup},
    host::Host,
};
use serde_json::json;

use crate::report::{Report, median, percentile};

/// Number of events of each cause.
const ROUNDS: usize = 50;

/// Measures the events of cordons, Xids and maintenance.
pub(crate) fn run() -> Report {
    let host = Host::up("dgx-a100");
    // Without the slow poll, only the cause itself can lead to the event.
    let agent = Setup::on(&host).config("[health]\npoll = \"0s\"\n").start();
    agent.settle_reads();
    let mut listener = agent.listen("?kinds=gpu", None);
    let post = |path: &str| assert_eq!(agent.post(path, &json!({ "reason": "a measurement" })).status, 200);
    let causes: [(&str, &dyn Fn(), u32, GpuState); 5] = [
        ("`gpushctl gpu cordon`", &|| post("/v1/gpus/2/cordon"), 2, GpuState::Cordoned),
        ("`gpushctl gpu uncordon`", &|| allow(&agent, 2), 2, GpuState::Ready),
        ("an Xid that cordons the GPU", &|| drop(host.sim("xid", &["79", "--gpu", "1"])), 1, GpuState::Cordoned),
        ("`gpushctl maintenance enter`", &|| post("/v1/maintenance/enter"), 0, GpuState::Maintenance),
        ("`gpushctl maintenance leave`", &|| post("/v1/maintenance/leave"), 0, GpuState::Ready),
    ];
    let mut times = vec![Vec::new(); causes.len()];
    for _ in 0..ROUNDS {
        for ((_, cause, gpu, state), times) in causes.iter().zip(&mut times) {
            let begun = Instant::now();
            cause();
            reaches(&mut listener, *gpu, *state);
            times.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        allow(&agent, 1);
        reaches(&mut listener, 1, GpuState::Ready);
    }
    let mut report = Report::new(
        "Events",
        &format!(
            "A client waits for events on a simulated host with 8 GPUs. No client reads the state of a GPU, and the \
             slow poll is off. For a command of gpushctl, the benchmark sends only the request that makes the change, \
             and the time begins with this request. For an Xid, the time begins with the command that makes the \
             simulated driver report the Xid. Each time ends when the client has the event. The table shows the \
             results of {ROUNDS} events of each cause."
        ),
        &["cause", "median ms", "p95 ms"],
    );
    for ((name, ..), times) in causes.iter().zip(&times) {
        let row = [median(times.clone()), percentile(times.clone(), 0.95)].map(|ms| format!("{ms:.1}"));
        report.rows.push([vec![(*name).to_owned()], row.to_vec()].concat());
    }
    let slowest = times.into_iter().map(|times| percentile(times, 0.95)).fold(0.0, f64::max);
    report.target("from a cause to its event", "p95 at most 100 ms", &format!("{slowest:.1} ms"), slowest <= 100.0);
    report
}

fn allow(agent: &Agent, gpu: u32) {
    assert_eq!(agent.post(&format!("/v1/gpus/{gpu}/uncordon"), &json!({})).status, 200);
}

/// Waits for the event that the GPU is in the state.
fn reaches(listener: &mut Listener, gpu: u32, state: GpuState) {
    listener.until(|event| match &event.what {
        EventPayload::Gpu(change) => (change.gpu, change.state) == (GpuIndex(gpu), state),
        _ => false,
    });
}
