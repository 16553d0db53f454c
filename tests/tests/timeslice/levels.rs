//! Time-sliced GPUs with the real programs. gpushd sets, corrects and restores the time-slice level
//! and the compute mode. In other tests, nvidia-smi does not support levels, fails, hangs or is
//! missing.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use std::time::{Duration, Instant};

use gpush_api::{ComputeMode, EventPayload, GpuAspect, Health, TimesliceLevel, TimesliceState, TimesliceView};
use gpush_tests::{
    agent::{Agent, Setup},
    around::Around,
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

/// A config without time-sliced GPUs.
const NOBODY: &str = "[[gpu]]\nmatch = [\"0\", \"2\"]\nmode = \"exclusive\"\n";

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
const NOT_SET: [(&str, u64); 3] = [("default", 0); 3];

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

#[test]
fn level_is_set_at_start_and_not_again_after_a_restart() {
    let host = Host::up(THREE);
    host.start_trace();
    let agent = Agent::start(&host, LONG);
    await_kept(&agent);
    assert!(are(&host, SET), "{:?}", real_layout(&host));
    let of = |gpu, value: &str| (Some(gpu), format!("value={value}"));
    assert_eq!(sets(&host), [of(0, "Long"), of(2, "Long")]);
    let view = turns(&agent, 0);
    assert_eq!((view.replicas, view.wanted, view.state), (1, TimesliceLevel::Long, TimesliceState::Known));
    assert!(view.since.is_some() && view.reason.is_none(), "{view:?}");
    assert_eq!(agent.gpu(0).compute_mode, Some(ComputeMode::ExclusiveProcess));
    assert_eq!(agent.gpu(1).timeslice, None);
    assert!(health(&agent).errors.is_empty());
    agent.wait_for_log("its time-slice level changed from `default` to `long`");
    agent.stop();
    let calls = host.trace().len();
    let agent = Agent::start(&host, LONG);
    await_kept(&agent);
    agent.stop();
    assert_eq!(host.trace().len(), calls, "nothing differs: {:?}", host.trace());
}

#[test]
fn forgotten_level_is_set_again() {
    let host = Host::up(THREE);
    let agent = Agent::start(&host, LONG);
    await_kept(&agent);
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    assert!(are(&host, NOT_SET));
    let agent = Agent::start(&host, LONG);
    await_kept(&agent);
    assert!(are(&host, SET), "after a reboot: {:?}", real_layout(&host));
    // Without persistence mode, the driver loses the settings when the last process closes the GPU.
    smi(&host, "-pm 0");
    let ask = |verb: &str| agent.post(&format!("/v1/maintenance/{verb}"), &serde_json::json!({})).status;
    assert_eq!(ask("enter") / 100, 2, "{}", agent.log());
    // The next process that opens the GPU finds the default settings.
    smi(&host, "-pm 0");
    assert!(are(&host, NOT_SET), "{:?}", real_layout(&host));
    assert_eq!(ask("leave") / 100, 2);
    agent.await_that("the levels, after the driver lost them", || are(&host, SET));
    await_kept(&agent);
}

#[tokio::test]
async fn foreign_level_is_drift_and_is_repaired() {
    let host = Host::up(THREE);
    let mut agent = Agent::start(&host, LONG);
    await_kept(&agent);
    let mut listener = agent.listen("?kinds=gpu", None);
    smi(&host, "compute-policy --set-timeslice 0 -i 0");
    let driver = hardware(&host);
    let uuid = uuids(&driver).await.remove(2);
    driver.set_compute_mode(&uuid, ComputeMode::Default).await.unwrap();
    // gpushd notices within a minute that another program has changed a level. After a reload,
    // gpushd notices the change immediately.
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
    let aspect = |wanted: GpuAspect| move |event: &gpush_api::Event| matches!(&event.what, EventPayload::Gpu(change) if change.changed.contains(&wanted));
    let events = listener.until(aspect(GpuAspect::Timeslice));
    let EventPayload::Gpu(change) = &events.last().unwrap().what else { panic!() };
    assert!(change.timeslice.is_some(), "{change:?}");
}

#[test]
fn level_is_polled_once_a_minute() {
    let host = Host::up(THREE);
    let around = Around::of(&host);
    let agent = Agent::start(&host, &(around.config(&[], "") + LONG));
    await_kept(&agent);
    assert_eq!(around.take_calls().len(), 4, "read, two set, read");
    let begun = Instant::now();
    smi(&host, "compute-policy --set-timeslice 0 -i 0");
    while !are(&host, SET) {
        assert!(begun.elapsed() < Duration::from_secs(100), "{}", agent.log());
        // gpushd does not run nvidia-smi to read GPUs.
        let _ = agent.gpus();
        std::thread::sleep(Duration::from_millis(500));
    }
    agent.await_that("the last read", || around.file("calls").exists());
    await_kept(&agent);
    let calls = around.take_calls();
    assert!(calls.len() <= 3, "read, set, read: {calls:?}");
}

#[test]
fn leaving_timeslice_restores_level_and_compute_mode() {
    let host = Host::up(THREE);
    let mut agent = Agent::start(&host, LONG);
    await_kept(&agent);
    reload(&mut agent, NOBODY);
    agent.await_that("both GPUs are restored", || are(&host, NOT_SET));
    agent.await_that("no GPU is time-sliced", || agent.gpus().iter().all(|gpu| gpu.timeslice.is_none()));
    agent.await_that("a log line", || {
        let log = agent.log();
        log.contains("restored its time-slice level `default`") && log.contains("restored its compute mode DEFAULT")
    });
    // The next gpushd must also restore the settings. It need not read them first, because the
    // record shows which settings were applied.
    reload(&mut agent, LONG);
    await_kept(&agent);
    agent.stop();
    assert!(are(&host, SET));
    let agent = Agent::start(&host, NOBODY);
    agent.await_that("the next gpushd restores both GPUs", || are(&host, NOT_SET));
    agent.stop();
    // If another program has set a level since then, gpushd keeps this level.
    smi(&host, "compute-policy --set-timeslice 1 -i 0");
    host.start_trace();
    let agent = Agent::start(&host, NOBODY);
    agent.settle_reads();
    agent.stop();
    assert!(sets(&host).is_empty());
}

#[test]
fn failed_change_still_restores_earlier_settings() {
    let host = Host::up(THREE);
    let mut agent = Agent::start(&host, LONG);
    agent.await_that("both are set", || are(&host, SET));
    await_kept(&agent);
    host.fault("compute-policy-set --rc UNKNOWN");
    host.fault("nvmlDeviceSetComputeMode --rc UNKNOWN");
    reload(&mut agent, &LONG.replace("long", "short").replace("exclusive_process", "prohibited"));
    agent.await_that("both changes have failed", || {
        let reported = troubles(&agent);
        reported.contains("time-slice level `short`") && reported.contains("compute mode")
    });
    // gpushd records which level it is going to set. So it restores the settings even after a kill.
    agent.kill();
    let mut agent = Agent::start(&host, NOBODY);
    agent.await_that("neither GPU is restored", || !troubles(&agent).is_empty());
    assert!(are(&host, SET), "{:?}", real_layout(&host));
    host.clear_faults();
    // At the next reload, gpushd retries immediately.
    reload(&mut agent, NOBODY);
    agent.await_that("both GPUs are restored", || are(&host, NOT_SET));
}

#[test]
fn gpu_in_mig_mode_is_drift_and_untouched() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\n");
    let around = Around::of(&host);
    let rule = "[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\n\
        timeslice = { level = \"long\", compute_mode = \"exclusive_process\" }\n";
    host.start_trace();
    // Only the first start after a boot turns MIG off.
    let mut agent = Agent::start(&host, &around.config(&[], ""));
    agent.wait_for_layouts_at_start();
    reload(&mut agent, &(around.config(&[], "") + rule));
    agent.settle_reads();
    let gpu = agent.gpu(0);
    assert_eq!(gpu.drift, ["MIG mode is on, but mode `timeslice` needs the whole GPU"]);
    let view = gpu.timeslice.unwrap();
    assert_eq!((view.state, view.level), (TimesliceState::Unknown, None));
    assert!(view.reason.unwrap().contains("MIG mode is on"));
    assert!(around.take_calls().is_empty());
    let touched = |function: &str| host.trace().iter().any(|call| call.function == function);
    assert!(!touched("compute-policy-set") && !touched("nvmlDeviceSetComputeMode"));
}

#[test]
fn gpu_without_levels_is_reported_and_polled_once() {
    let host = Host::up(THREE);
    let around = Around::of(&host);
    // The driver reports that the GPU has no levels, as for a Volta or a P4.
    host.fault("compute-policy-list --rc NOT_SUPPORTED");
    host.fault("compute-policy-set --rc NOT_SUPPORTED");
    let mut agent = Agent::start(&host, &(around.config(&[], "") + LONG));
    agent.await_that("the level is unsupported", || turns(&agent, 0).state == TimesliceState::Unsupported);
    let gpu = agent.gpu(0);
    assert_eq!(gpu.drift, ["the GPU has no time-slice levels, but the config has level `long`"]);
    assert!(gpu.timeslice.unwrap().reason.unwrap().contains("Turing"));
    assert_eq!(around.take_calls().len(), 1);
    assert!(health(&agent).errors.is_empty(), "it is no fault");
    agent.await_that("the compute mode is set", || real_layout(&host)[0].1 == 3);
    // For this GPU, the driver reports only at a change that the GPU has no levels.
    host.clear_faults();
    host.fault("compute-policy-set --gpu 0 --rc NOT_SUPPORTED");
    reload(&mut agent, &(around.config(&[], "") + LONG));
    agent.await_that("the level of the other GPU is set", || turns(&agent, 2).level == Some(TimesliceLevel::Long));
    assert_eq!(turns(&agent, 0).state, TimesliceState::Unsupported);
}

#[test]
fn nvidia_smi_failures_are_reported_until_fixed() {
    let host = Host::up(THREE);
    host.fault("compute-policy-set --gpu 0 --rc UNKNOWN");
    let mut agent = Agent::start(&host, LONG);
    agent.await_that("the level of the other GPU is set", || turns(&agent, 2).level == Some(TimesliceLevel::Long));
    let view = agent.until("why not", || Some(turns(&agent, 0)).filter(|view| view.reason.is_some()));
    assert_eq!((view.state, view.level), (TimesliceState::Known, Some(TimesliceLevel::Default)));
    assert!(view.reason.as_ref().unwrap().contains("Unknown Error"), "{view:?}");
    assert_eq!(agent.gpu(0).drift, ["the time-slice level is `default`, but the config says `long`"]);
    assert!(troubles(&agent).contains("does not have the time-slice level `long`"), "{}", troubles(&agent));
    // nvidia-smi reports success, but the level does not change.
    host.clear_faults();
    host.fault("compute-policy-set --gpu 0 --rc SUCCESS");
    reload(&mut agent, LONG);
    agent.await_that("the failed change is reported", || {
        troubles(&agent).contains("reported that the level `long` was set, but the level is `default`")
    });
    // nvidia-smi cannot read levels.
    host.clear_faults();
    host.fault("compute-policy-list --rc UNKNOWN");
    reload(&mut agent, LONG);
    agent.await_that("the level is unknown", || turns(&agent, 2).state == TimesliceState::Unknown);
    assert!(troubles(&agent).contains("Unknown Error"), "{}", troubles(&agent));
    // nvidia-smi is missing, or gpushd does not trust it.
    reload(&mut agent, &format!("[mode_change]\nnvidia_smi = \"/no/such/nvidia-smi\"\n{LONG}"));
    agent.await_that("the missing nvidia-smi is reported", || {
        troubles(&agent).contains("gpushd does not run /no/such/nvidia-smi")
    });
    assert!(turns(&agent, 0).reason.unwrap().contains("/no/such/nvidia-smi"));
    // nvidia-smi works again.
    host.clear_faults();
    reload(&mut agent, LONG);
    await_kept(&agent);
    assert!(are(&host, SET) && troubles(&agent).is_empty(), "{}", troubles(&agent));
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

#[test]
fn gpu_with_recorded_level_is_not_unsupported() {
    let host = Host::up(THREE);
    let mut agent = Agent::start(&host, LONG);
    await_kept(&agent);
    host.fault("compute-policy-list --rc NOT_SUPPORTED --times 3");
    reload(&mut agent, LONG);
    agent.await_that("the level is unknown", || turns(&agent, 0).state == TimesliceState::Unknown);
    assert!(turns(&agent, 0).reason.unwrap().contains("had one before"), "{:?}", turns(&agent, 0));
    assert!(troubles(&agent).contains("does not have the time-slice level `long`"), "{}", troubles(&agent));
    host.clear_faults();
    reload(&mut agent, LONG);
    await_kept(&agent);
    // gpushd has recorded the level that it applied. So even after a restart, gpushd knows that the
    // GPU has levels, although nvidia-smi reports NOT_SUPPORTED.
    agent.stop();
    host.fault("compute-policy-list --rc NOT_SUPPORTED");
    let mut agent = Agent::start(&host, NOBODY);
    agent.await_that("the failed restore is reported", || troubles(&agent).contains("time-slice level `default`"));
    assert_eq!(real_layout(&host)[0].0, "long");
    host.clear_faults();
    reload(&mut agent, NOBODY);
    agent.await_that("both GPUs are restored", || are(&host, NOT_SET));
    agent.await_that("no problem is reported", || troubles(&agent).is_empty());
}

#[test]
fn level_has_read_time_and_reread_sends_no_event() {
    let host = Host::up(THREE);
    let mut agent = Agent::start(&host, LONG);
    await_kept(&agent);
    let first = turns(&agent, 0);
    let read_at = first.read_at.unwrap();
    assert!(first.since.unwrap() <= read_at, "{first:?}");
    agent.settle_reads();
    assert_eq!(turns(&agent, 0).read_at, Some(read_at), "who looks at the GPU reads no level");
    let mut listener = agent.listen("?kinds=gpu,config", None);
    reload(&mut agent, LONG);
    agent.await_that("the level is read again", || turns(&agent, 0).read_at.unwrap() > read_at);
    assert_eq!(turns(&agent, 0).since, first.since);
    reload(&mut agent, LONG);
    let configs = std::cell::Cell::new(0);
    let events = listener.until(|event| {
        configs.set(configs.get() + i32::from(matches!(event.what, EventPayload::Config(_))));
        configs.get() == 2
    });
    assert!(!events.iter().any(|event| matches!(event.what, EventPayload::Gpu(_))), "{events:#?}");
}
