//! Which part of a daemon's log gpushd shows to users.

use std::path::Path;

use gpush_api::{MpsLogs, MpsState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    mps::{self, Client, real_programs},
};
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const SHARED: &str = "[mps]\nhealth = \"1s\"\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

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
