//! Durability: the order of syncs, responses and driver calls. Also what gpushd does if its
//! database is deleted or its disk is full.

use gpush_api::{Code, Operation, OperationState, OperationSummary};
use gpush_tests::{
    agent::{Agent, Setup, gi_at, real_layout},
    host::Host,
    strace,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::disk::Disk;

/// Stops a gpushd that was started through another program.
fn stop(agent: &mut Agent) {
    let own = agent.get("/v1/health").json()["pid"].as_i64().expect("a pid");
    kill(Pid::from_raw(own.try_into().expect("a pid")), Signal::SIGTERM).expect("gpushd can be signalled");
    assert!(agent.wait().success(), "{}", agent.log());
}

#[test]
fn sync_precedes_reply_and_first_driver_call() {
    if !strace::works("the order of syncs, replies and driver calls") {
        return;
    }
    let host = Host::up("dgx-a100");
    let trace = host.scratch("strace");
    let path = trace.to_str().expect("a path");
    let calls = "trace=fdatasync,read,recvfrom,recvmsg,write,writev,sendto,sendmsg";
    let strace = ["strace", "-f", "-qq", "-s", "4096", "-o", path, "-e", calls];
    let mut agent = Setup::on(&host).config("").through(&strace).start();
    const APPLIES: usize = 5;
    for round in 0..APPLIES {
        let layout = if round % 2 == 0 { "3g.40gb" } else { "none" };
        assert_eq!(agent.apply(&["0"], &[layout]).state, OperationState::Done);
    }
    stop(&mut agent);
    let text = std::fs::read_to_string(&trace).expect("a trace");
    let lines: Vec<&str> = text.lines().collect();
    let find = |from: usize, what: &dyn Fn(&str) -> bool| {
        let found = lines[from..].iter().position(|line| what(line)).map(|at| from + at);
        found.unwrap_or_else(|| panic!("not in the trace after line {from}"))
    };
    let synced = |line: &str| line.contains("fdatasync") && line.ends_with("= 0");
    let changes = |line: &str| {
        (line.contains("write") || line.contains("send"))
            && ["create_gpu_instance", "destroy_compute_instance"].iter().any(|call| line.contains(call))
    };
    let mut at = 0;
    for round in 0..APPLIES {
        let asked = find(at, &|line| line.contains("POST /v1/mig/apply"));
        let sync = find(asked, &synced);
        let answered = find(asked, &|line| line.contains("202 Accepted"));
        let changed = find(asked, &changes);
        assert!(sync < answered && sync < changed, "apply {round}: sync {sync}, reply {answered}, call {changed}");
        at = answered;
    }
    println!("{APPLIES} applies: synced before each reply and each first change");
}

#[test]
fn deleted_database_is_noticed_before_any_change() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb"]).state, OperationState::Done);
    let state = Setup::on(&host).state_dir();
    std::fs::remove_file(state.join("gpush.db")).expect("the database is there");
    let before = real_layout(&host, 0);
    let error = agent.begin(&["0"], &["7g.80gb"]).expect_err("nothing can be recorded");
    assert_eq!(error.code, Code::Unavailable, "{error:?}");
    assert!(error.message.contains("gpush.db was deleted or replaced"), "{error:?}");
    assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("restart gpushd")), "{error:?}");
    assert_eq!(real_layout(&host, 0), before);
    // gpushd still answers reads, and reports that it is degraded.
    assert_eq!(agent.gpus().len(), 8);
    let health = agent.get("/v1/health").json();
    assert!(health["errors"].to_string().contains("was deleted or replaced"), "{health}");
    agent.stop();
}

fn all(agent: &Agent) -> Vec<Operation> {
    let all: Vec<OperationSummary> =
        serde_json::from_value(agent.get("/v1/operations?limit=200").json()).expect("operations");
    let one = |id: &str| serde_json::from_value(agent.get(&format!("/v1/operations/{id}")).json());
    all.iter().map(|summary| one(&summary.id).expect("an operation")).collect()
}

#[test]
fn full_disk_refuses_new_changes_and_finishes_recorded_ones() {
    if !strace::works("a full disk") {
        return;
    }
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb"]).state, OperationState::Done);
    agent.stop();
    let before = real_layout(&host, 0);
    // After `number` writes, every write to the disk fails.
    let (mut refused, mut carried_out) = (0, 0);
    for number in [1, 2, 3, 5, 8, 12, 16, 20, 30, 40] {
        let inject = format!("inject=pwrite64:error=ENOSPC:when={number}+");
        let strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=pwrite64", "-e", &inject];
        let what = format!("from write {number} on");
        match Setup::on(&host).config("").through(&strace).try_start() {
            Err((_, log)) => {
                assert!(log.contains("no space left") && log.contains("df -h"), "{what}: {log}");
                refused += 1;
            }
            Ok(mut agent) => {
                match agent.begin_with(&json!({ "selectors": ["0"], "layout_source": { "entries": ["7g.80gb"] } })) {
                    Err(error) => {
                        assert_eq!(error.code, Code::Unavailable, "{what}: {error:?}");
                        assert_eq!(real_layout(&host, 0), before, "{what}");
                        refused += 1;
                    }
                    Ok(operation) => {
                        // If gpushd has recorded the operation, it executes the operation, even if
                        // it cannot record the end of the operation.
                        assert_eq!(agent.follow(operation).state, OperationState::Done, "{what}");
                        carried_out += 1;
                    }
                }
                stop(&mut agent);
            }
        }
        // When the disk has free space again, the records of gpushd match the hardware.
        let agent = Agent::start(&host, "");
        for left in all(&agent).into_iter().filter(|one| !one.state.is_final()) {
            assert_eq!(agent.follow(left).state, OperationState::Done, "{what}");
        }
        assert_eq!(agent.apply(&["0"], &["3g.40gb"]).state, OperationState::Done, "{what}");
        agent.stop();
    }
    println!("disk full at 10 points: {refused} refused, {carried_out} carried out");
    assert!(refused > 0 && carried_out > 0, "{refused} {carried_out}");
}

#[test]
fn full_disk_is_reported_and_waiting_operations_remain() {
    let host = Host::up("dgx-a100");
    let Some(disk) = Disk::mount(Setup::on(&host).state_dir()) else { return };
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@0"]).state, OperationState::Done);
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 0)));
    let body = json!({ "selectors": ["0"], "layout_source": { "entries": ["7g.80gb"] }, "wait_s": 600 });
    let waiting = agent.begin_with(&body).expect("it waits");
    let look = |agent: &Agent| -> Operation {
        serde_json::from_value(agent.get(&format!("/v1/operations/{}", waiting.id)).json()).expect("an operation")
    };
    agent.await_that("operation that waits", || look(&agent).state == OperationState::Waiting);
    let says_full = |agent: &Agent| agent.get("/v1/health").json()["errors"].to_string().contains("no space left");
    disk.fill();
    // When gpushd has used up the remaining free space, it refuses changes.
    agent.await_that("refusal", || agent.begin(&["1"], &["7g.80gb"]).is_err());
    assert!(says_full(&agent), "{}", agent.get("/v1/health").json());
    // The GPU is now idle, so only the full disk still prevents the start of the operation.
    host.end_process(pid);
    agent.wait_for_log("cannot begin yet");
    assert_eq!(look(&agent).state, OperationState::Waiting, "{:?}", look(&agent));
    disk.free();
    agent.await_that("good health", || !says_full(&agent));
    let ended = agent.follow(look(&agent));
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    // If gpushd starts on a full disk, health reports the full disk until there is free space.
    agent.stop();
    std::fs::remove_file(disk.0.join("reserve")).expect("the reserve is there");
    disk.fill();
    let agent = Agent::start(&host, "");
    assert!(says_full(&agent), "{}", agent.get("/v1/health").json());
    disk.free();
    agent.await_that("good health", || !says_full(&agent));
    agent.stop();
}
