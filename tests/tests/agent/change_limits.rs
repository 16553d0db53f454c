//! The limit of changing requests, and what gpushd logs about refused requests.

use std::{os::unix::process::CommandExt, process::Command};

use gpush_tests::{agent::Agent, host::Host};
use nix::{sys::signal::Signal, unistd::geteuid};

/// Uid of `nobody`.
const NOBODY: u32 = 65_534;

/// Fault: the number of refused requests was logged only with the next refusal, so never if the user stopped. The log
/// entry did not name the user.
#[test]
fn number_of_refused_requests_is_logged_without_a_further_request() {
    if !geteuid().is_root() {
        return println!("SKIPPED refused requests in the log: only root can have other uids");
    }
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 1\n");
    let mut agent = Agent::start_public(&host, "[limits]\nchanges_burst = 1\nchanges_per_second = 1\n");
    let mut curl = Command::new("curl");
    curl.uid(NOBODY).gid(NOBODY).current_dir("/").env("HOME", "/");
    curl.args(["--silent", "--output", "/dev/null", "--write-out", "%{http_code}\n", "--json", "{}", "--unix-socket"]);
    curl.arg(agent.socket()).arg("http://gpush/v1/leases/L[1-60]/release");
    let output = curl.output().expect("curl can be started");
    let refused = String::from_utf8_lossy(&output.stdout).lines().filter(|status| *status == "503").count();
    assert!(refused > 2, "{output:?}");
    agent.signal(Signal::SIGTERM);
    assert!(agent.wait().success());
    let log = agent.log();
    let name = "user nobody (uid 65534) sen";
    let entries: Vec<&str> = log.lines().filter(|line| line.contains(name) && line.contains("too fast")).collect();
    let more = format!("refused {} more since", refused - 1);
    assert!(entries.len() == 2 && entries[1].contains(&more), "{refused} refused: {entries:#?}");
}
