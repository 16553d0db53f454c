//! Checks that the memory use of gpushd does not grow with the number of requests.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

use gpush_api::MpsState;
use gpush_tests::{
    agent::Agent,
    host::Host,
    mps::{Served, daemon, reaches},
};
use serde_json::json;

/// Numbers of requests before and after the first measurement. The first requests fill caches and
/// pools. `cargo xtask soak` raises the second number with `GPUSH_TEST_REQUESTS`.
const WARM_UP: usize = 300;
const REQUESTS: usize = 1000;

/// Number of concurrent clients.
const CLIENTS: usize = 8;

/// Returns the resident memory of gpushd in KiB.
pub(super) fn resident(agent: &Agent) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", agent.pid())).expect("the agent's status");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

fn request(agent: &Agent, number: usize) {
    let answer = match number % 100 {
        0 => agent.get("/v1/mps/0/logs?lines=2000"),
        1 => agent.get("/v1/mps/0/logs?lines=2000&all=true"),
        2 => agent.post(
            "/v1/mig/plan",
            &json!({ "selectors": ["1"], "layout_source": { "entries": ["3g.40gb", "2g.20gb"] } }),
        ),
        3 => agent.get("/v1/gpus?profiles=true"),
        n if n % 6 == 0 => agent.get("/v1/gpus"),
        n if n % 6 == 1 => agent.get("/v1/health"),
        n if n % 6 == 2 => agent.get("/v1/mps"),
        n if n % 6 == 3 => agent.get("/v1/audit?limit=100"),
        n if n % 6 == 4 => agent.get("/v1/processes"),
        _ => agent.get("/v1/operations"),
    };
    assert_eq!(answer.status, 200, "{number}: {}", String::from_utf8_lossy(&answer.body));
}

fn requests(agent: &Agent, count: usize) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        break;
                    }
                    request(agent, number);
                }
            });
        }
    });
}

/// Writes a log as large as the log of a control daemon after a day of polls. gpushd must read only
/// a part of this log.
fn fill_log(agent: &Agent) {
    let directory = daemon(agent, "0").log_directory.expect("a log directory");
    let mut text = String::new();
    while text.len() < 5 << 20 {
        for printed in ["Accepting connection...", "NEW UI", "Cmd:get_server_list", "4711", "UI closed"] {
            let _ = writeln!(text, "[2026-11-22 08:57:50.000 Control 7] {printed}");
        }
    }
    let mut log = fs::OpenOptions::new().append(true).open(Path::new(&directory).join("control.log")).expect("a log");
    log.write_all(text.as_bytes()).expect("the log can be written");
}

#[test]
fn resident_memory_is_stable_after_many_requests() {
    let served = Served::of(Host::up("dgx-a100"), "0", Served::CONFIG, None);
    let agent = &served.agent;
    let count = std::env::var("GPUSH_TEST_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(REQUESTS);
    reaches(agent, "0", MpsState::Ready);
    fill_log(agent);
    let idle = resident(agent);
    requests(agent, WARM_UP);
    let before = resident(agent);
    requests(agent, count);
    let after = resident(agent);
    println!("resident: {idle} KiB idle, {before} KiB after {WARM_UP} requests, {after} KiB after {count} more");
    assert!(after * 10 <= before * 13, "{before} KiB before, {after} KiB after");
    assert!(before < 3 * idle, "{idle} KiB idle, {before} KiB after {WARM_UP} requests");
}
