//! Time-sliced GPUs with the real programs. gpushd sets, corrects and restores the time-slice level
//! and the compute mode. In other tests, nvidia-smi does not support levels, fails, hangs or is
//! missing.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use std::time::{Duration, Instant};

use gpush_api::{ComputeMode, Event, EventPayload, GpuAspect, Health, TimesliceLevel, TimesliceState, TimesliceView};
use gpush_tests::{
    agent::{Agent, Setup},
    driver::{hardware, uuids},
    host::Host,
};
use nix::sys::signal::Signal;

/// Three GPUs: two with MIG mode off, and one without MIG.
const THREE: &str = "[[gpu]]\nmodel = \"a100-80\"\nmig = false\ncount = 2\n[[gpu]]\nmodel = \"t4\"\n";

/// A config in which the first and the last GPU have long time slices and permit one process at a
/// time.
const LONG: &str = "[[gpu]]\nmatch = [\"0\", \"2\"]\nmode = \"timeslice\"\n\
    timeslice = { replicas = 1, level = \"long\", compute_mode = \"exclusive_process\" }\n";

/// Returns the level and the compute mode of each GPU, read without gpushd.
fn real_layout(host: &Host) -> Vec<(String, u64)> {
    let show = host.show();
    let gpus = show["gpus"].as_array().unwrap().iter();
    gpus.map(|gpu| {
        (gpu["state"]["timeslice"].as_str().unwrap().to_owned(), gpu["state"]["compute_mode"].as_u64().unwrap())
    })
    .collect()
}

fn are(host: &Host, expected: [(&str, u64); 3]) -> bool {
    real_layout(host).iter().zip(expected).all(|((level, mode), wanted)| (level.as_str(), *mode) == wanted)
}

const SET: [(&str, u64); 3] = [("long", 3), ("default", 0), ("long", 3)];

/// Returns the levels that gpushd has set, with the indexes of their GPUs.
fn sets(host: &Host) -> Vec<(Option<u32>, String)> {
    let calls = host.trace().into_iter().filter(|call| call.function == "compute-policy-set");
    calls.map(|call| (call.gpu, call.arguments)).collect()
}

fn turns(agent: &Agent, gpu: u32) -> TimesliceView {
    agent.gpu(gpu).timeslice.unwrap_or_else(|| panic!("GPU {gpu} is not time-sliced:\n{}", agent.log()))
}

/// Waits until the API shows that the time-sliced GPUs have their desired settings.
fn await_kept(agent: &Agent) {
    agent.await_that("the desired level on each GPU", || {
        agent.gpus().iter().all(|gpu| {
            gpu.drift.is_empty() && gpu.timeslice.as_ref().is_none_or(|turns| turns.level == Some(TimesliceLevel::Long))
        })
    });
}

fn smi(host: &Host, arguments: &str) {
    let mut command = host.command(host.dir().join("bin/nvidia-smi"));
    let output = command.args(arguments.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

fn reload(agent: &mut Agent, config: &str) {
    agent.write_config(config);
    agent.signal(Signal::SIGHUP);
    agent.wait_for("STATUS=the config was reloaded");
}

fn health(agent: &Agent) -> Health {
    serde_json::from_value(agent.get("/v1/health").json()).unwrap()
}

/// Returns what health reports about nvidia-smi and time-slice levels, as one text.
fn troubles(agent: &Agent) -> String {
    let causes = health(agent).errors.into_iter();
    causes.map(|one| format!("{}: {}; ", one.message, one.causes.join("; "))).collect()
}

#[tokio::test]
async fn level_is_set_repaired_and_not_set_again_after_a_restart() {
    let host = Host::up(THREE);
    host.start_trace();
    let mut agent = Agent::start(&host, LONG);
    await_kept(&agent);
    assert!(are(&host, SET), "{:?}", real_layout(&host));
    let of = |gpu, value: &str| (Some(gpu), format!("value={value}"));
    assert_eq!(sets(&host), [of(0, "Long"), of(2, "Long")]);
    agent.wait_for_log("its time-slice level changed from `default` to `long`");

    // Another program changes a level and a compute mode. After a reload, gpushd notices this
    // immediately.
    let mut listener = agent.listen("?kinds=gpu", None);
    smi(&host, "compute-policy --set-timeslice 0 -i 0");
    let driver = hardware(&host);
    let uuid = uuids(&driver).await.remove(2);
    driver.set_compute_mode(&uuid, ComputeMode::Default).await.unwrap();
    reload(&mut agent, LONG);
    agent.await_that("both levels are repaired", || are(&host, SET));
    await_kept(&agent);
    for printed in [
        "its time-slice level was `default`, because another program changed it",
        "its compute mode was DEFAULT, because another program changed it",
    ] {
        let log = agent.wait_for_log(printed);
        assert_eq!(log.matches(printed).count(), 1, "{printed}:\n{log}");
    }
    let is_level = |event: &Event| matches!(&event.what, EventPayload::Gpu(change) if change.changed.contains(&GpuAspect::Timeslice));
    let events = listener.until(is_level);
    let EventPayload::Gpu(change) = &events.last().unwrap().what else { panic!() };
    assert!(change.timeslice.is_some(), "{change:?}");

    driver.stop().await.unwrap();
    agent.stop();
    let calls = host.trace().len();
    let agent = Agent::start(&host, LONG);
    await_kept(&agent);
    agent.stop();
    assert_eq!(host.trace().len(), calls, "nothing differs: {:?}", host.trace());
}

#[test]
fn hung_nvidia_smi_is_ended_and_delays_nothing() {
    let host = Host::up(THREE);
    host.fault("compute-policy-list --hang");
    let mut agent = Agent::start(&host, LONG);
    agent.await_that("the compute mode is set despite the failure", || real_layout(&host)[0].1 == 3);
    let begun = Instant::now();
    assert_eq!(agent.gpus().len(), 3);
    assert!(begun.elapsed() < Duration::from_secs(5));
    agent.await_that("the timeout is reported", || troubles(&agent).contains("did not end in time"));
    assert_eq!(turns(&agent, 0).state, TimesliceState::Unknown);
    // gpushd can stop even while nvidia-smi hangs.
    reload(&mut agent, LONG);
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    agent.stop();
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    host.clear_faults();
    let agent = Setup::on(&host).config(LONG).start();
    await_kept(&agent);
    assert!(are(&host, SET));
}
