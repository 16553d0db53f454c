//! Compute modes that gpushd has set for MPS and cannot restore at once. gpushd reports the failure
//! and retries, also after a restart. Other tests check which part of a daemon's log gpushd shows
//! to users.

use std::path::Path;

use gpush_api::{Code, ComputeMode, Health, MpsLogs, MpsState, OperationState};
use gpush_tests::{
    agent::{Agent, Setup},
    driver::{hardware, uuids},
    host::Host,
    mps::{self, Client, real_programs},
};
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const SHARED: &str = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";
const TROUBLE: &str = "still has the compute mode that gpushd set for MPS";

/// Returns the compute mode of the GPU, read without gpushd: 0 is the default mode, 3 is exclusive
/// process.
fn mode(host: &Host) -> u64 {
    host.show()["gpus"][0]["state"]["compute_mode"].as_u64().expect("a mode")
}

fn shared(host: &Host) -> Agent {
    let agent = Agent::start(host, SHARED);
    mps::reaches(&agent, "0", MpsState::Ready);
    let _begun = agent.settle();
    assert_eq!(mode(host), 3);
    agent
}

fn is_reported(agent: &Agent) -> bool {
    let health: Health = serde_json::from_value(agent.get("/v1/health").json()).expect("health");
    health.errors.iter().any(|one| one.message.contains(TROUBLE) && one.code == Code::DriverError)
}

/// The rule is removed while the driver cannot set or read the mode. gpushd must retry, also after
/// a restart.
#[test]
fn failed_restore_of_a_compute_mode_is_reported_and_retried() {
    for fault in ["nvmlDeviceSetComputeMode --rc UNKNOWN", "nvmlDeviceGetComputeMode --rc UNKNOWN"] {
        let host = Host::up(HOST);
        let agent = shared(&host);
        host.fault(fault);
        agent.reload("");
        agent.await_that("the target is forgotten", || agent.get("/v1/mps").json() == json!([]));
        agent.await_that("the failure is reported", || is_reported(&agent));
        assert_eq!(mode(&host), 3, "{fault}");
        // After a restart, gpushd retries the restore.
        agent.stop();
        let agent = Agent::start(&host, "");
        agent.await_that("the failure is reported again", || is_reported(&agent));
        assert_eq!(mode(&host), 3, "{fault}");
        host.clear_faults();
        agent.await_that("the compute mode is restored", || mode(&host) == 0);
        agent.await_that("no failure is reported", || !is_reported(&agent));
        assert_eq!(agent.gpu(0).compute_mode, Some(ComputeMode::Default));
    }
}

#[test]
fn single_compute_mode_failure_is_retried() {
    for fault in ["nvmlDeviceSetComputeMode --rc UNKNOWN --times 1", "nvmlDeviceGetComputeMode --rc UNKNOWN --times 1"]
    {
        let host = Host::up(HOST);
        let agent = shared(&host);
        host.fault(fault);
        agent.reload("");
        agent.await_that("the compute mode is restored", || mode(&host) == 0);
    }
}

#[tokio::test]
async fn compute_mode_set_by_an_administrator_is_kept() {
    let host = Host::up(HOST);
    let agent = shared(&host);
    host.fault("nvmlDeviceSetComputeMode --rc UNKNOWN");
    agent.reload("");
    agent.await_that("the failure is reported", || is_reported(&agent));
    agent.stop();
    host.clear_faults();
    // An administrator sets another mode, without gpushd.
    let driver = hardware(&host);
    let uuid = uuids(&driver).await.remove(0);
    driver.set_compute_mode(&uuid, ComputeMode::Prohibited).await.expect("the compute mode can be set");
    drop(driver);
    let agent = Agent::start(&host, "");
    agent.await_that("the mode is read", || agent.gpu(0).compute_mode == Some(ComputeMode::Prohibited));
    // When the GPU has an MPS rule again, gpushd records the mode that the administrator has set.
    // When this rule is removed, gpushd restores that mode.
    agent.reload(SHARED);
    let operation = agent.begin_with(&json!({ "selectors": ["0"], "layout_source": "wanted" })).expect("an operation");
    assert_eq!(agent.follow(operation).state, OperationState::Done);
    assert_eq!(mode(&host), 3);
    agent.reload("");
    agent.await_that("the administrator's mode is restored", || {
        agent.gpu(0).compute_mode == Some(ComputeMode::Prohibited)
    });
    assert!(!is_reported(&agent));
}

/// gpushd must set compute mode exclusive process. Otherwise programs could bypass MPS.
#[tokio::test]
async fn failed_compute_mode_rolls_back_and_a_lost_one_is_reported() {
    let host = Host::up(HOST);
    host.fault("nvmlDeviceSetComputeMode --rc UNKNOWN");
    let agent = Agent::start(&host, "");
    agent.reload(SHARED);
    let wanted = json!({ "selectors": ["0"], "layout_source": "wanted" });
    let failed = agent.follow(agent.begin_with(&wanted).expect("the operation begins"));
    assert_eq!(failed.state, OperationState::RolledBack, "{failed:#?}");
    let error = failed.error.expect("an error");
    assert!(format!("{error:?}").contains("programs can bypass MPS on GPU 0"), "{error:?}");
    host.clear_faults();
    let done = agent.follow(agent.begin_with(&wanted).expect("the operation begins"));
    assert_eq!((done.state, mode(&host)), (OperationState::Done, 3));

    // An administrator changes the mode. The driver then refuses to change it back.
    let driver = hardware(&host);
    let uuid = uuids(&driver).await.remove(0);
    loop {
        driver.set_compute_mode(&uuid, ComputeMode::Default).await.expect("the compute mode can be set");
        host.fault("nvmlDeviceSetComputeMode --rc UNKNOWN");
        // Repeat this until the mode is 0: gpushd may have corrected the mode before the fault rule
        // was active.
        if mode(&host) == 0 {
            break;
        }
        host.clear_faults();
    }
    agent.reload(SHARED);
    let reported =
        || mps::daemon(&agent, "0").findings.iter().any(|one| one.contains("programs can bypass MPS on GPU 0"));
    agent.await_that("the failure is reported", reported);
    assert!(agent.get("/v1/health").json()["errors"].to_string().contains("programs can bypass MPS"));
    host.clear_faults();
    agent.reload(SHARED);
    agent.await_that("the mode is repaired", || mode(&host) == 3 && !reported());
}

#[test]
fn failed_daemon_start_leaves_the_compute_mode_unchanged() {
    let host = Host::up(HOST);
    let missing = format!(
        "[mps]\ncontrol = \"/nonexistent/nvidia-cuda-mps-control\"\n{}",
        &SHARED["[mps]\nhealth_s = 1\n".len()..]
    );
    // Start gpushd without a rule, so that it starts no operation.
    let agent = Agent::start(&host, "");
    agent.reload(&missing);
    let operation = agent.begin_with(&json!({ "selectors": ["0"], "layout_source": "wanted" })).expect("an operation");
    let operation = agent.follow(operation);
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:#?}");
    // gpushd restores the mode before the operation ends.
    assert_eq!(mode(&host), 0, "{}", agent.log());
    agent.settle_reads();
    assert_eq!(mode(&host), 0, "retries do not change the mode\n{}", agent.log());
    // The fault rule kills gpushd when it has set the mode, before it starts a daemon. The config
    // of the next gpushd has no rule for the GPU, so this gpushd restores the mode.
    host.fault("nvmlDeviceSetComputeMode --kill after --parent --times 1");
    let body = json!({ "selectors": ["0"], "layout_source": "wanted" }).to_string();
    let head = format!(
        "POST /v1/mig/apply HTTP/1.1\r\nhost: gpush\r\ncontent-type: application/json\r\ncontent-length: {}",
        body.len()
    );
    let _dies = agent.try_raw(format!("{head}\r\nconnection: close\r\n\r\n{body}").as_bytes());
    agent.await_that("the mode is set", || mode(&host) == 3);
    drop(agent);
    host.clear_faults();
    let agent = Agent::start(&host, "");
    agent.await_that("the compute mode is restored", || mode(&host) == 0);
}

/// Returns the lines of `control.log` that the API shows.
fn reported(agent: &Agent, query: &str) -> Vec<String> {
    let logs: MpsLogs = serde_json::from_value(agent.get(&format!("/v1/mps/0/logs{query}")).json()).expect("logs");
    logs.files[0].lines.clone()
}

fn show_events(host: &Host, programs: Option<&Path>) {
    let setup = Setup::on(host).config(SHARED);
    let agent = match programs {
        Some(dir) => setup.env("GPUSH_MPS_PROGRAMS", dir.display().to_string()).start(),
        None => setup.start(),
    };
    mps::reaches(&agent, "0", MpsState::Ready);
    let taken = mps::lease(&agent, "0", &json!({ "percentage": 25 })).expect("a lease");
    let client = Client::start(host, &taken.environment);
    // For each request, gpushd polls the daemon, which then writes lines to the log.
    let polls = |lines: &[String]| lines.iter().filter(|line| line.contains("Cmd:get_")).count();
    agent.await_that("a log with many polls", || {
        let _asked = mps::daemon(&agent, "0");
        polls(&reported(&agent, "?all=true&lines=2000")) > 60
    });
    let pid = client.pid().to_string();
    client.end();
    let set = agent.post("/v1/mps/0/settings", &json!({ "percentage": 30 }));
    assert_eq!(set.status, 200);
    let all = reported(&agent, "?all=true&lines=2000");
    // The second response may contain lines that the daemon wrote after the first response.
    let shown = reported(&agent, "?lines=2000");
    assert!(shown.len() * 4 < all.len(), "{} of {}: {shown:#?}", shown.len(), all.len());
    let has = |what: &str| shown.iter().any(|line| line.contains(what));
    assert!(has(&format!("NEW CLIENT {pid}")) && has("Cmd:set_default_active_thread_percentage 30"), "{shown:#?}");
    assert!(has("NEW SERVER") && has("Starting"), "{shown:#?}");
    // gpushd leaves out only these kinds of lines, which contain no information.
    let plain = |line: &String| {
        let printed = line.split_once("] ").map_or(line.as_str(), |(_, printed)| printed).trim();
        ["Accepting connection...", "NEW UI", "UI closed"].contains(&printed)
            || printed.starts_with("Cmd:get_")
            || printed.trim_end_matches('G').parse::<f64>().is_ok()
            || ["ACTIVE", "INITIALIZING", "No default pinned memory limit set for the device!"].contains(&printed)
            || printed == "Unknown command \"get_server_status\""
    };
    let left_out: Vec<&String> = all.iter().filter(|line| !shown.contains(line) && !plain(line)).collect();
    assert!(left_out.is_empty(), "{left_out:#?}");
    // The last forty lines show the last client.
    assert!(
        reported(&agent, "?lines=40").iter().any(|line| line.contains(&pid)),
        "{:#?}",
        reported(&agent, "?lines=40")
    );
}

#[test]
fn shown_log_omits_the_polls_of_gpushd() {
    let host = Host::up(HOST);
    show_events(&host, None);
    drop(host);
    let host = Host::up(HOST);
    if let Some(programs) = real_programs(&host, "the log of NVIDIA's own daemon") {
        show_events(&host, Some(&programs));
    }
}
