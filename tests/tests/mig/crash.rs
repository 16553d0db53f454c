//! Kills gpushd during an apply: before and after every driver call, and at every fourth write and
//! sync of its store (in a soak at each one). The next gpushd must reach the new or the previous layout, and report which of
//! them. Instances in use must not change. In-process tests end gpushd during rollback and recovery.

use std::collections::BTreeMap;

use gpush_api::{GpuState, Operation, OperationState, OperationSummary};
use gpush_tests::{
    agent::{Agent, Setup, gi_at, parse, real_layout},
    host::{Host, Traced},
    strace,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::faults::fault_at;

const CONFIG: &str = "# --constants driver.change=5s\n";

/// A change of layout. The change must keep an instance that is in use.
struct Change {
    before: &'static [&'static str],
    after: &'static [&'static str],
    /// Start slice of the instance in use. The slice is the same in both layouts.
    used: u64,
}

/// It destroys and creates instances. In-process tests have other changes.
const CHANGE: Change = Change { before: &["3g.40gb@4", "2g.20gb@0"], after: &["3g.40gb@4", "1g.10gb@2"], used: 4 };

/// Makes the change once. Returns its driver calls that change the GPU.
fn calls(host: &Host, agent: &Agent, change: &Change) -> Vec<Traced> {
    prepare(agent, change);
    host.start_trace();
    assert_eq!(agent.apply(&["0"], change.after).state, OperationState::Done);
    host.trace()
}

fn prepare(agent: &Agent, change: &Change) {
    let operation = agent.apply(&["0"], change.before);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
}

/// Requests the change, and waits until the fault rule has killed the agent. Returns the id of the
/// operation. The agent may have died before it answered, but not before it recorded the operation.
fn begin(agent: &mut Agent, change: &Change) -> String {
    let last = operations(agent).into_iter().filter_map(|id| id.strip_prefix("op-")?.parse::<u64>().ok()).max();
    let _reported = agent.try_raw(request(change).as_bytes());
    agent.wait();
    format!("op-{}", last.unwrap_or(0) + 1)
}

fn request(change: &Change) -> String {
    let body = json!({ "selectors": ["0"], "layout_source": { "entries": change.after } }).to_string();
    format!(
        "POST /v1/mig/apply HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Starts a process in an instance that the change must keep.
fn occupy(host: &Host, change: &Change) -> (u64, u32) {
    let gi = gi_at(host, 0, change.used);
    (gi, host.process(&format!("--gpu 0 --gi {gi} --ci 0")))
}

/// Checks what the next agent has done. The hardware must match the state that the operation
/// reports.
fn judge(host: &Host, agent: &Agent, id: &str, layouts: [&[String]; 2], what: &str) -> OperationState {
    let operation = agent.follow(agent.operation(id));
    let [before, after] = layouts;
    let now = real_layout(host, 0);
    let reported = || format!("{what}: {operation:?}\n{}", agent.log());
    match operation.state {
        OperationState::Done => assert_eq!(now, after, "{}", reported()),
        OperationState::RolledBack | OperationState::NotStarted => {
            assert_eq!(now, before, "{}", reported());
            assert!(operation.error.is_some(), "{}", reported());
        }
        OperationState::Queued
        | OperationState::Waiting
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted
        | OperationState::Failed => panic!("{}", reported()),
    }
    assert!(operation.notes.iter().any(|note| note.contains("gpushd ended while the operation was")), "{}", reported());
    let gpu = agent.gpu(0);
    assert_eq!(gpu.state, GpuState::Ready, "{what}: {:?}", gpu.reasons);
    operation.state
}

/// Checks that the process is still in its instance, and ends the process.
fn vacate(host: &Host, change: &Change, (gi, pid): (u64, u32), what: &str) {
    assert_eq!(gi_at(host, 0, change.used), gi, "{what}: the instance in use is another");
    let alive = std::path::Path::new(&format!("/proc/{pid}")).exists();
    assert!(alive, "{what}: the process in use was ended");
    host.end_process(pid);
}

#[test]
fn kill_around_every_driver_call_is_recovered() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, CONFIG);
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    let change = &CHANGE;
    let calls = calls(&host, &agent, change);
    let after = real_layout(&host, 0);
    for k in 0..calls.len() {
        for when in ["before", "after"] {
            prepare(&agent, change);
            let before = real_layout(&host, 0);
            let occupied = occupy(&host, change);
            let what = format!("{when} call {k} ({})", calls[k].function);
            host.fault(&fault_at(&calls, k, &format!("--kill {when} --parent")));
            let id = begin(&mut agent, change);
            host.clear_faults();
            agent = Agent::start(&host, CONFIG);
            let end = judge(&host, &agent, &id, [&before, &after], &what);
            *ends.entry(end.to_string()).or_default() += 1;
            vacate(&host, change, occupied, &what);
        }
    }
    println!("killed at {} points of an apply: {ends:?}", ends.values().sum::<u32>());
    assert_eq!(ends.values().sum::<u32>(), 8, "{ends:?}");
}

#[test]
fn kill_at_store_writes_and_syncs_is_recovered() {
    if !strace::works("kills at each write and sync of the store") {
        return;
    }
    let host = Host::up("dgx-a100");
    let change = &CHANGE;
    let agent = Agent::start(&host, CONFIG);
    calls(&host, &agent, change);
    let after = real_layout(&host, 0);
    agent.stop();
    let mut points: BTreeMap<&str, u32> = BTreeMap::new();
    let (mut unheard, mut before_ready) = (0, 0);
    for call in ["pwrite64", "fdatasync"] {
        for number in (1..400).step_by(crate::write_step(4)) {
            let agent = Agent::start(&host, CONFIG);
            prepare(&agent, change);
            let before = real_layout(&host, 0);
            let known = operations(&agent);
            agent.stop();
            let (trace, inject) = (format!("trace={call}"), format!("inject={call}:signal=SIGKILL:when={number}"));
            let strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &inject];
            let what = format!("{call} {number}");
            let (reported, survived) = match Setup::on(&host).config(CONFIG).through(&strace).try_start() {
                Err(_) => {
                    before_ready += 1;
                    (None, false)
                }
                Ok(mut agent) => {
                    let answer = agent.try_raw(request(change).as_bytes()).and_then(|answer| parse(&answer));
                    let reported: Option<Operation> = answer.map(|answer| {
                        assert_eq!(answer.status, 202, "{what}");
                        serde_json::from_value(answer.json()).expect("an operation")
                    });
                    let outlived = reported.as_ref().is_some_and(|one| agent.outlives(&one.id).is_some());
                    if outlived {
                        // The test has started strace, which has started gpushd. So ask gpushd for
                        // its pid.
                        let own = agent.get("/v1/health").json()["pid"].as_i64().expect("a pid");
                        let own = Pid::from_raw(own.try_into().expect("a pid"));
                        kill(own, Signal::SIGTERM).expect("gpushd can be signalled");
                    }
                    // The fault rule may also kill gpushd while gpushd stops.
                    let survived = agent.wait().success() && outlived;
                    (reported, survived)
                }
            };
            let agent = Agent::start(&host, CONFIG);
            let new: Vec<_> = operations(&agent).into_iter().filter(|id| !known.contains(id)).collect();
            assert!(new.len() <= 1, "{what}: {new:?}");
            match (&reported, new.first()) {
                // If gpushd has answered a client with an operation, it must have recorded this
                // operation before.
                (Some(reported), Some(there)) => assert_eq!(reported.id, *there, "{what}"),
                (Some(reported), None) => panic!("{what}: {} was reported, and is not on record", reported.id),
                (None, Some(_)) => unheard += 1,
                (None, None) => assert_eq!(real_layout(&host, 0), before, "{what}: changed without a record"),
            }
            if let Some(id) = new.first() {
                let operation = agent.follow(agent.operation(id));
                let expected = if operation.state == OperationState::Done { &after } else { &before };
                assert!(matches!(operation.state, OperationState::Done | OperationState::RolledBack), "{operation:?}");
                assert_eq!(real_layout(&host, 0), *expected, "{what}: {operation:?}");
            }
            assert_eq!(agent.gpu(0).state, GpuState::Ready, "{what}");
            agent.stop();
            if survived {
                break;
            }
            *points.entry(call).or_default() += 1;
        }
    }
    println!("killed at {points:?}: {before_ready} before it was ready, {unheard} begun without an answer");
    assert!(points["pwrite64"] > 4 && points["fdatasync"] > 1, "{points:?}");
}

fn operations(agent: &Agent) -> Vec<String> {
    let all: Vec<OperationSummary> =
        serde_json::from_value(agent.get("/v1/operations?limit=200").json()).expect("operations");
    all.into_iter().map(|one| one.id).collect()
}
