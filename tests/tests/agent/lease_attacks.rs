//! Leases with bad requests, floods, races, crashes, full disks and lost GPUs.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use gpush_api::{Code, EndReason, LeaseGrant, LeaseId, LeaseState};
use gpush_tests::{
    agent::{Agent, Setup, real_layout},
    host::Host,
    mps::{lease_becomes, lease_now, release},
    strace,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};
use serde_json::{Value, json};

use crate::{
    disk::Disk,
    leases::{MIG, WHOLE, leases, request, two_gpus},
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
fn request_outside_every_limit_is_refused_and_changes_nothing() {
    let (_host, agent) = two_gpus(MIG);
    let refused = [
        (json!({ "duration_s": -1 }), Code::BadRequest, "duration_s"),
        (json!({ "duration_s": 0 }), Code::BadRequest, ""),
        (json!({ "duration_s": u64::MAX }), Code::BadRequest, "52 weeks"),
        (json!({ "wait": "-5s" }), Code::BadRequest, ""),
        (json!({ "share": { "kind": "mps", "percentage": 0 } }), Code::BadRequest, "percentage"),
        (json!({ "share": { "kind": "mps", "percentage": 101 } }), Code::BadRequest, "percentage"),
        (json!({ "share": { "kind": "mig_size", "memory_mib": 1_u64 << 40 } }), Code::BadRequest, ""),
        (json!({ "share": { "kind": "mig_size", "memory_mib": u64::MAX } }), Code::BadRequest, ""),
        (json!({ "share": { "kind": "mig_profile", "profile": "1g.11gb" } }), Code::UnknownProfile, "1g.10gb"),
        (json!({ "share": { "kind": "mig_profile", "profile": "1g.10gb" }, "count": 9 }), Code::BadRequest, ""),
        (
            json!({ "share": { "kind": "mig_profile", "profile": "1g.10gb" }, "count": 0 }),
            Code::BadRequest,
            "1 to 64 devices",
        ),
        (json!({ "share": { "kind": "mig_profile", "profile": "1g.10gb" }, "count": u32::MAX }), Code::BadRequest, ""),
        (json!({ "share": { "kind": "mig_profile", "profile": "1g.10gb" }, "selectors": ["9"] }), Code::NotFound, "9"),
        (json!({ "share": { "kind": "fpga" } }), Code::BadRequest, "fpga"),
        (json!({ "holder_uid": u32::MAX }), Code::BadRequest, "user id"),
        (json!({ "process": 0 }), Code::BadRequest, ""),
        (json!({ "process": 0, "bind_to": "cgroup" }), Code::BadRequest, "process 0"),
        (json!({ "bind_to": "cgroup" }), Code::BadRequest, "needs an end"),
        (json!({ "unknown": 1 }), Code::BadRequest, "unknown"),
    ];
    for (body, code, part) in refused {
        let error = request(&agent, &body).expect_err("a refusal");
        let text = error.sentences().join("; ") + &error.hint.clone().unwrap_or_default();
        assert_eq!(error.code, code, "{body}: {error:?}");
        assert!(text.contains(part), "{body}: {error:?}");
    }
    assert!(leases(&agent).is_empty());
}

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

/// Fault: gpushd trimmed a selector for its check, but stored, audited and logged the text with 63,000 blanks.
#[test]
fn padded_request_is_stored_in_its_normal_form() {
    let (_host, agent) = two_gpus(WHOLE);
    let blanks = " ".repeat(3000);
    let body = json!({ "share": { "kind": "whole" }, "selectors": [format!("{blanks}1")] });
    let lease = request(&agent, &body).expect("a lease").lease;
    assert_eq!(lease.request.expect("the own request").gpus, ["1"]);
    for size in [5000, 60_000] {
        let body = json!({ "share": { "kind": "whole" }, "target": "x".repeat(size) });
        assert_eq!(request(&agent, &body).unwrap_err().code, Code::BadRequest, "{size}");
    }
}

/// Returns whether gpushd grants a lease to a user, or denies it.
fn is_granted(agent: &Agent, uid: u32, body: &Value) -> bool {
    let mut curl = Command::new("curl");
    curl.uid(uid).gid(uid).current_dir("/").env("HOME", "/").args(["--silent", "--output", "/dev/null"]);
    curl.args(["--write-out", "%{http_code}", "--unix-socket"]).arg(agent.socket());
    curl.args(["--json", &body.to_string(), "http://gpush/v1/leases"]);
    let output = curl.output().expect("curl can be started");
    match String::from_utf8_lossy(&output.stdout).as_ref() {
        "200" => true,
        "403" => false,
        other => panic!("uid {uid}: {other}"),
    }
}

/// Fault: gpushd checked the limit of waiting requests only after the search for a placement.
#[test]
fn waiting_request_beyond_the_quota_is_refused_before_a_search() {
    if !geteuid().is_root() {
        return println!("SKIPPED a quota of waiting requests: only root can have other uids");
    }
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 1\n");
    let agent = Agent::start_public(&host, &format!("{TIMESLICED}[[quota]]\neverybody = true\nwaiting = 0\n"));
    agent.wait_for_layouts_at_start();
    // A share is free, so a search would find a placement.
    let body = |wait: &str| json!({ "share": { "kind": "timeslice" }, "duration_s": 600, "wait": wait });
    assert!(!is_granted(&agent, 65_534, &body("10s")));
    assert!(is_granted(&agent, 65_534, &body("no")));
}

/// Fault: with `leases = 1`, a user got eight GPUs with eight subordinate uids, because each uid had its own quota.
#[test]
fn uids_without_a_user_share_one_quota() {
    if !geteuid().is_root() {
        return println!("SKIPPED uids without a user: only root can have other uids");
    }
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 1\n");
    let quota = "[[quota]]\nusers = [\"nobody\"]\nleases = 4\n[[quota]]\neverybody = true\nleases = 2\n";
    let agent = Agent::start_public(&host, &format!("{TIMESLICED}{quota}"));
    agent.wait_for_layouts_at_start();
    let granted = |uid: u32| is_granted(&agent, uid, &json!({ "share": { "kind": "timeslice" }, "duration_s": 600 }));
    let unknown: Vec<bool> = (0..6).map(|n| granted(4_100_000 + n)).collect();
    assert_eq!(unknown, [true, true, false, false, false, false]);
    let nobody: Vec<bool> = (0..6).map(|_| granted(65_534)).collect();
    assert_eq!(nobody, [true, true, true, true, false, false], "a user of the host has its own quota");
}

#[test]
fn gangs_for_the_same_gpus_are_granted_one_by_one() {
    let (_host, agent) = two_gpus(WHOLE);
    let body = json!({ "share": { "kind": "whole" }, "count": 2, "wait": "100s" });
    thread::scope(|scope| {
        let gang = || {
            for _ in 0..5 {
                let granted = request(&agent, &body).expect("both GPUs");
                assert_eq!(granted.lease.members.len(), 2);
                release(&agent, granted.lease.id);
            }
        };
        for one in [scope.spawn(gang), scope.spawn(gang), scope.spawn(gang)] {
            one.join().expect("a gang that is not stuck");
        }
    });
}

#[test]
fn concurrent_lease_and_operation_get_different_devices() {
    /// Number of rounds for each of the eight GPUs.
    const ROUNDS: u32 = 250;
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"7g.80gb\"]\n");
    agent.wait_for_layouts_at_start();
    // Let some readings be late, so that gpushd plans and grants with old readings.
    host.fault("nvmlDeviceGetGpuInstances --delay-ms 1 --probability 0.3 --seed 7");
    let run = |gpu: usize| {
        let mut rng = fastrand::Rng::with_seed(20_261_123 + gpu as u64);
        let name = gpu.to_string();
        let (mut leased, mut changed, mut waits) = (0, 0, 0);
        for round in 0..ROUNDS {
            // The operation replaces the current layout with the other layout. The lease request
            // names a profile of the current layout.
            let profile = if real_layout(&host, gpu).len() == 1 { "7g.80gb" } else { "3g.40gb" };
            let other: &[&str] = if profile == "7g.80gb" { &["3g.40gb", "3g.40gb"] } else { &["7g.80gb"] };
            let lease = json!({ "share": { "kind": "mig_profile", "profile": profile }, "selectors": [name] });
            let first = rng.usize(..3);
            let (granted, operation) = thread::scope(|scope| {
                let asks = scope.spawn(|| {
                    if first == 0 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    request(&agent, &lease)
                });
                if first == 1 {
                    thread::sleep(Duration::from_millis(1));
                }
                let body = json!({ "selectors": [name], "layout_source": { "entries": other }, "once": true });
                let begun = agent.begin_with(&body).map(|operation| agent.follow(operation));
                (asks.join().expect("an answer"), begun)
            });
            match &granted {
                Ok(granted) => {
                    leased += 1;
                    // If gpushd granted the lease after the layout change, the lease has a new
                    // device. If gpushd granted the lease before the change, the lease has kept its
                    // device.
                    let target = &granted.lease.members[0].target;
                    let there = agent
                        .gpu(u32::try_from(gpu).unwrap())
                        .mig
                        .expect("MIG")
                        .instances
                        .iter()
                        .any(|one| one.compute.iter().any(|compute| compute.uuid.as_ref() == Some(target)));
                    assert!(there, "GPU {gpu}, round {round}: {target} is gone: {operation:?}");
                    release(&agent, granted.lease.id);
                    lease_becomes(&agent, granted.lease.id, LeaseState::Ended);
                }
                Err(error) => {
                    let expected = matches!(error.code, Code::Blocked | Code::Conflict | Code::UnknownProfile);
                    assert!(expected || error.code == Code::BadRequest, "GPU {gpu}, round {round}: {error:?}");
                }
            }
            match operation {
                Ok(_) => changed += 1,
                Err(error) => {
                    assert!(matches!(error.code, Code::Blocked | Code::Conflict), "{error:?}");
                    waits += 1;
                }
            }
        }
        (leased, changed, waits)
    };
    let all: Vec<(u32, u32, u32)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|gpu| scope.spawn(move || run(gpu))).collect();
        threads.into_iter().map(|one| one.join().expect("no violation")).collect()
    });
    let sum = |of: fn(&(u32, u32, u32)) -> u32| all.iter().map(of).sum::<u32>();
    let (leased, changed, refused) = (sum(|one| one.0), sum(|one| one.1), sum(|one| one.2));
    println!("{} rounds: {leased} leases, {changed} changes, {refused} changes refused", 8 * ROUNDS);
    assert!(leased > 50 && changed > 50 && refused > 20, "{leased} {changed} {refused}");
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
fn lease_of_a_lost_gpu_ends() {
    let (host, agent) = two_gpus(WHOLE);
    let granted = request(&agent, &json!({ "share": { "kind": "whole" }, "selectors": ["1"] })).expect("a lease");
    let other = request(&agent, &json!({ "share": { "kind": "whole" }, "selectors": ["0"] })).expect("a lease");
    host.fault("nvmlDeviceGetMemoryInfo* --gpu 1 --mutate lose --times 1");
    let ended = lease_becomes(&agent, granted.lease.id, LeaseState::Releasing);
    assert_eq!(ended.reason, Some(EndReason::GpuLost));
    assert_eq!(lease_now(&agent, other.lease.id).state, LeaseState::Active);
}

#[test]
fn lease_continues_after_its_rule_changes() {
    let (host, agent) = two_gpus(MIG);
    let granted =
        request(&agent, &json!({ "share": { "kind": "mig_profile", "profile": "1g.10gb" } })).expect("a lease");
    let before = real_layout(&host, 0);
    agent.reload("[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"7g.80gb\"]\n");
    let body = json!({ "selectors": ["0"], "layout_source": "wanted" });
    let blocked = agent.begin_with(&body).unwrap_err();
    assert_eq!(blocked.code, Code::Blocked, "{blocked:?}");
    assert!(blocked.causes.iter().any(|cause| cause.contains("lease L1")), "{blocked:?}");
    assert_eq!((real_layout(&host, 0), lease_now(&agent, granted.lease.id).state), (before, LeaseState::Active));
    release(&agent, granted.lease.id);
    lease_becomes(&agent, granted.lease.id, LeaseState::Ended);
    assert_eq!(
        agent.follow(agent.begin_with(&body).expect("nothing is leased")).state,
        gpush_api::OperationState::Done
    );
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
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

#[test]
fn lease_numbers_do_not_repeat_after_a_lost_database() {
    let (host, agent) = two_gpus(WHOLE);
    let state = Setup::on(&host).state_dir();
    let body = json!({ "share": { "kind": "whole" } });
    let first = request(&agent, &body).expect("a lease").lease.id;
    agent.kill();
    for file in ["gpush.db", "gpush.db-wal", "gpush.db-shm"] {
        let _may_be_absent = fs::remove_file(state.join(file));
    }
    let agent = Agent::start(&host, WHOLE);
    assert!(leases(&agent).is_empty());
    agent.until("readings", || Some(agent.gpus()).filter(|gpus| gpus.len() == 2));
    let held = request(&agent, &body).unwrap_err();
    assert!(matches!(held.code, Code::Blocked | Code::Conflict), "nothing is granted before `recover`: {held:?}");
    let recovered =
        agent.post("/v1/recover", &Value::Object([("reason".to_owned(), "a test".into())].into_iter().collect()));
    assert_eq!(recovered.status, 200, "{}", String::from_utf8_lossy(&recovered.body));
    let next = agent.until("a lease", || request(&agent, &body).ok());
    assert!(next.lease.id > first, "{} and {first}", next.lease.id);
}
