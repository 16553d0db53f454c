//! Leases with bad requests, floods, races, crashes, full disks and lost GPUs.

use std::{
    collections::BTreeMap,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use gpush_api::{Code, EndReason, LeaseGrant, LeaseId, LeaseState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    mps::{lease_becomes, release},
    strace,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};
use serde_json::json;

use crate::{
    disk::Disk,
    leases::{WHOLE, leases, request, two_gpus},
};

const TIMESLICED: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 16 }\n";

/// Uid of a user who sends 10,000 requests.
const GREEDY: u32 = 64_003;

const FLOOD: &str = r#"
import http.client, json, socket, sys
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(sys.argv[1])
to, body, counts = Unix("x"), json.dumps({"share": {"kind": "timeslice"}}), {}
for n in range(10000):
    to.request("POST", "/v1/leases", body, {"content-type": "application/json"})
    answer = to.getresponse()
    answer.read()
    counts[answer.status] = counts.get(answer.status, 0) + 1
    if n == 20:
        print("begun", flush=True)
print(json.dumps(counts), flush=True)
"#;

#[test]
fn ten_thousand_requests_of_one_user_delay_no_other_user() {
    if !geteuid().is_root() {
        return println!("SKIPPED 10,000 requests of one user: only root can be several users");
    }
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 2\n");
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 64 }\n\
                  [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\n";
    let agent = Agent::start_public(&host, config);
    agent.wait_for_layouts_at_start();
    let mut flood = Command::new("python3");
    flood.args(["-c", FLOOD]).arg(agent.socket()).uid(GREEDY).gid(GREEDY).current_dir("/").stdout(Stdio::piped());
    let Ok(mut flood) = flood.spawn() else { return println!("SKIPPED 10,000 requests of one user: no python3") };
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(flood.stdout.take().expect("a pipe")));
    assert_eq!(lines.next().expect("a line").expect("text"), "begun");
    let mut granted = 0;
    while flood.try_wait().expect("a state").is_none() && granted < 200 {
        let lease = request(&agent, &json!({ "share": { "kind": "whole" } })).expect("another user's lease").lease;
        release(&agent, lease.id);
        lease_becomes(&agent, lease.id, LeaseState::Ended);
        granted += 1;
    }
    let counts: BTreeMap<String, u32> = serde_json::from_str(&lines.next().expect("a line").expect("text")).unwrap();
    println!("10,000 requests: {counts:?}; meanwhile {granted} leases of another user");
    assert_eq!(counts.values().sum::<u32>(), 10_000);
    assert!(counts["503"] > 5_000, "the limit for changing requests: {counts:?}");
    assert!(granted > 10, "{granted}");
    let held = leases(&agent).iter().filter(|lease| lease.holder.uid == GREEDY).count();
    assert!(held > 0 && held <= 32, "the standard quota: {held}");
    assert!(!counts.contains_key("500"), "{counts:?}");
}

#[test]
fn repeated_request_after_a_crash_gets_the_same_lease() {
    let (host, mut agent) = two_gpus(WHOLE);
    let body = json!({ "share": { "kind": "whole" }, "duration_s": 3600 }).to_string();
    let mut rng = fastrand::Rng::with_seed(7);
    let (mut before, mut after) = (0, 0);
    for round in 0..30 {
        let headers = format!("content-type: application/json\r\nidempotency-key: round-{round}\r\n");
        let text = format!(
            "POST /v1/leases HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        // Kill gpushd at a random moment after the request: before, during or after the commit.
        let pid = nix::unistd::Pid::from_raw(agent.pid().cast_signed());
        let pause = Duration::from_micros(u64::try_from(rng.usize(..6000)).expect("small"));
        thread::scope(|scope| {
            scope.spawn(move || {
                thread::sleep(pause);
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            });
            let _may_be_answered = agent.try_raw(text.as_bytes());
        });
        agent.wait();
        agent = Agent::start(&host, WHOLE);
        let known = leases(&agent);
        let answer = agent.request("POST", "/v1/leases", &headers, body.as_bytes());
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        let granted: LeaseGrant = serde_json::from_value(answer.json()).expect("a lease");
        match known.as_slice() {
            [] => before += 1,
            [one] => {
                assert_eq!(one.id, granted.lease.id, "the first request was committed");
                after += 1;
            }
            more => panic!("{more:?}"),
        }
        assert_eq!(leases(&agent).len(), 1, "one key gets one lease");
        release(&agent, granted.lease.id);
        lease_becomes(&agent, granted.lease.id, LeaseState::Ended);
    }
    println!("killed 30 times: {before} before the commit, {after} after it");
}

#[test]
fn full_disk_refuses_a_grant_and_allows_a_release() {
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 2\n");
    let Some(disk) = Disk::mount(Setup::on(&host).state_dir()) else { return };
    let agent = Agent::start(&host, WHOLE);
    agent.wait_for_layouts_at_start();
    let body = json!({ "share": { "kind": "whole" } });
    let first = request(&agent, &body).expect("a lease");
    disk.fill();
    let mut more = Vec::new();
    let refused = agent.until("refusal", || match request(&agent, &body) {
        // When gpushd has used up the free space of its database, it refuses grants.
        Ok(granted) => {
            release(&agent, granted.lease.id);
            more.push(granted.lease.id);
            None
        }
        Err(error) if error.code == Code::Blocked => None,
        Err(error) => Some(error),
    });
    assert!(refused.to_string().contains("no space left"), "{refused:?}");
    release(&agent, first.lease.id);
    lease_becomes(&agent, first.lease.id, LeaseState::Ended);
    disk.free();
    agent.until("a lease", || request(&agent, &body).ok());
    agent.stop();
}

/// Returns the warnings and errors about leases in a log.
fn failures(log: &str) -> Vec<&str> {
    let is_failure = |line: &&str| (line.contains("ERROR") || line.contains("WARN")) && line.contains("lease");
    log.lines().filter(is_failure).collect()
}

#[test]
fn full_disk_expires_leases_without_repeated_log_lines() {
    const LEASES: usize = 16;
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\n");
    let Some(disk) = Disk::mount(Setup::on(&host).state_dir()) else { return };
    let agent = Agent::start(&host, TIMESLICED);
    agent.wait_for_layouts_at_start();
    let body = json!({ "share": { "kind": "timeslice" }, "duration_s": 4 });
    let granted: Vec<_> = (0..LEASES).map(|_| request(&agent, &body).expect("a lease").lease.id).collect();
    disk.fill();
    let before = failures(&agent.log()).len();
    for id in &granted {
        assert_eq!(lease_becomes(&agent, *id, LeaseState::Ended).reason, Some(EndReason::Expired));
    }
    let log = agent.log();
    let lines = &failures(&log)[before..];
    println!("{LEASES} leases have expired on a full disk: {} lines", lines.len());
    assert!(lines.len() <= LEASES, "the reserve covers their ends; one line for a lease at most: {lines:#?}");
    disk.free();
    agent.stop();
}

/// If even the reserve of disk space is used up, gpushd often retries to record the ends of leases,
/// but does not log every attempt.
#[test]
fn unrecorded_lease_end_is_logged_once_per_lease() {
    const LEASES: usize = 16;
    if !strace::works("ends of leases that cannot be recorded") {
        return;
    }
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\n");
    let agent = Agent::start(&host, TIMESLICED);
    agent.wait_for_layouts_at_start();
    let body = json!({ "share": { "kind": "timeslice" }, "duration_s": 10 });
    let granted: Vec<_> = (0..LEASES).map(|_| request(&agent, &body).expect("a lease").lease.id).collect();
    // When strace has attached, every write to the disk fails.
    let pid = agent.pid().to_string();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=pwrite64,fallocate"]);
    strace.args(["-e", "inject=pwrite64,fallocate:error=ENOSPC", "-p", &pid]);
    let mut strace = strace.spawn().expect("strace");
    let about = |id: &LeaseId| {
        let (log, name) = (agent.log(), format!("lease {id}"));
        failures(&log)
            .iter()
            .filter(|line| line.split(&name).skip(1).any(|rest| !rest.starts_with(|c: char| c.is_ascii_digit())))
            .count()
    };
    agent.await_that("a line for each lease", || granted.iter().all(|id| about(id) > 0));
    // Wait several times as long as gpushd waits between two attempts.
    thread::sleep(Duration::from_secs(4));
    let counts: Vec<usize> = granted.iter().map(about).collect();
    assert!(counts.iter().all(|count| *count <= 2), "that it is releasing, and its end: {counts:?}");
    assert!(leases(&agent).len() == LEASES, "their capacity stays in use");
    // Use SIGTERM. SIGKILL could end strace during a system call of gpushd, which would then be
    // neither executed nor refused.
    kill(Pid::from_raw(strace.id().cast_signed()), Signal::SIGTERM).expect("strace");
    strace.wait().expect("its end");
    for id in granted {
        lease_becomes(&agent, id, LeaseState::Ended);
    }
    agent.stop();
}
