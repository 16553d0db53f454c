//! Mode changes of GPUs with the real programs. Each change is one operation, which ends and starts
//! MPS daemons. A reload ends or starts no daemon. A lease on the GPU blocks the operation.

use std::fs;

use gpush_api::{ApiError, Code, ComputeMode, LeaseState, MpsState, MpsStep, Operation, OperationState, Phase, Step};
use gpush_tests::{
    agent::{Agent, Setup, parse, real_layout},
    host::Host,
    mps::{self, Client},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const HOPPER: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 2\nmig = false\n";
const MIG: &str = "mode = \"mig\"\nlayout = [\"3g.40gb*2\"]";

fn rule(how: &str) -> String {
    format!("[[gpu]]\nmatch = [\"0\"]\n{how}\n")
}

fn wanted() -> Value {
    json!({ "selectors": ["0"], "layout_source": "wanted" })
}

fn apply(agent: &Agent) -> Operation {
    let operation =
        agent.follow(agent.begin_with(&wanted()).unwrap_or_else(|error| panic!("{error:?}\n{}", agent.log())));
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}\n{}", agent.log());
    assert_eq!(operation.progress[0].done, operation.progress[0].total, "{operation:#?}");
    operation
}

fn refused(agent: &Agent) -> ApiError {
    agent.begin_with(&wanted()).expect_err("the request is refused")
}

/// Waits until all operations have ended, also those of an earlier gpushd.
fn all_ended(agent: &Agent) {
    let all = agent.get("/v1/operations?limit=50").json();
    for one in all.as_array().expect("operations") {
        let _ended = agent.follow(agent.operation(one["id"].as_str().expect("an id")));
    }
}

/// Requests the desired state. Returns the id of the operation. If gpushd is killed before it
/// answers, returns `None`.
fn asked(agent: &Agent) -> Option<String> {
    let body = wanted().to_string();
    let length = body.len();
    let head = "POST /v1/mig/apply HTTP/1.1\r\nhost: gpush\r\ncontent-type: application/json\r\nconnection: close\r\n";
    let answer = agent.try_raw(format!("{head}content-length: {length}\r\n\r\n{body}").as_bytes())?;
    let operation = parse(&answer).filter(|answer| answer.status == 202)?.json();
    operation["id"].as_str().map(str::to_owned)
}

/// Starts gpushd with a rule that shares GPU 0 through MPS, and waits until the daemon is ready.
fn shared(host: &Host) -> Agent {
    let agent = Agent::start(host, &rule("mode = \"mps\""));
    mps::reaches(&agent, "0", MpsState::Ready);
    let _begun = agent.settle();
    agent
}

#[test]
fn plan_and_refused_apply_probe_the_daemon_once() {
    let host = Host::up(HOPPER);
    let rule = |how: &str| format!("[mps]\nhealth_s = 3600\n{}", rule(how));
    let agent = Agent::start(&host, &rule("mode = \"mps\""));
    mps::reaches(&agent, "0", MpsState::Ready);
    let _begun = agent.settle();
    mps::lease(&agent, "0", &json!({})).expect("a lease");
    agent.reload(rule(MIG));
    let log = mps::daemon(&agent, "0").log_directory.expect("a directory");
    // Each probe sends this command once, so its count in the log is the number of probes.
    let logged = "Cmd:get_default_client_priority";
    let probes = || fs::read_to_string(format!("{log}/control.log")).expect("a log").matches(logged).count();
    let show = |more: usize, before: usize| {
        drop(mps::daemon(&agent, "0"));
        // The daemon may write its log later than its answer.
        agent.await_that("the probes", || probes() >= before + more);
        probes()
    };
    let before = show(1, probes());
    assert_eq!(agent.post("/v1/mig/plan", &wanted()).status, 200);
    assert_eq!(refused(&agent).code, Code::Blocked);
    assert_eq!(show(3, before) - before, 3, "a plan, a refused request and `mps show`");
}

#[test]
fn mode_change_is_one_operation_and_reaches_the_new_mode() {
    let host = Host::up(HOPPER);
    let agent = shared(&host);
    assert_eq!(agent.gpu(0).compute_mode, Some(ComputeMode::ExclusiveProcess));
    let moves = [
        (MIG, 0, true),
        ("mode = \"mps\"", 1, false),
        ("mode = \"exclusive\"", 0, false),
        ("mode = \"mps\"", 1, false),
        ("mode = \"timeslice\"", 0, false),
        ("mode = \"mps\"", 1, false),
        (MIG, 0, true),
    ];
    for (how, daemons, mig) in moves {
        agent.reload(rule(how));
        assert_ne!(agent.gpu(0).drift, [] as [String; 0], "{how}: nothing is done by a reload");
        let operation = apply(&agent);
        let plan = &operation.plans[0];
        assert_eq!((plan.starts_mps(), plan.stopped_daemons().next().is_none()), (daemons == 1, daemons == 1), "{how}");
        let words = match (daemons, mig) {
            (1, _) => "whole GPU, shared through MPS",
            (_, false) if how.contains("timeslice") => "whole GPU, time-sliced",
            (_, false) => "whole GPU, not shared through MPS",
            (_, true) => &plan.layout.join(", "),
        };
        assert_eq!(plan.end_state(), words, "{how}");
        let gpu = agent.gpu(0);
        assert_eq!(gpu.drift, [] as [String; 0], "{how}\n{}", agent.log());
        assert_eq!(mps::controls(&mps::base(&host)).len(), daemons, "{how}");
        let exclusive = gpu.compute_mode == Some(ComputeMode::ExclusiveProcess);
        assert_eq!((exclusive, real_layout(&host, 0) != ["MIG off"]), (daemons == 1, mig), "{how}: {gpu:?}");
    }
}

/// A reload changes nothing. gpushd refuses the operation until the lease is released and its
/// client has ended.
#[test]
fn reload_ends_no_client_and_a_lease_blocks_the_mode_change() {
    let host = Host::up(HOPPER);
    let agent = shared(&host);
    let pid = mps::daemon(&agent, "0").pid;
    let share = mps::lease(&agent, "0", &json!({ "percentage": 25 })).unwrap();
    let mut client = Client::start(&host, &share.environment);
    assert!(client.first.starts_with("active"), "{}", client.first);
    agent.reload(rule(MIG));
    assert!(agent.gpu(0).drift.iter().any(|one| one.contains("shared through MPS")), "{:?}", agent.gpu(0).drift);
    let error = refused(&agent);
    assert_eq!((error.code, error.retryable), (Code::Blocked, true), "{error:?}");
    assert!(error.causes.iter().any(|cause| cause.contains(&format!("lease {} of", share.lease.id))), "{error:?}");
    assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("gpushctl lease revoke")), "{error:?}");
    assert_eq!((mps::daemon(&agent, "0").pid, client.lives()), (pid, true));
    // The operation waits, and starts when the last client and the last lease have ended.
    let mut waiting = wanted();
    waiting["wait_s"] = json!(600);
    let operation = agent.begin_with(&waiting).unwrap();
    assert!(!operation.state.is_final(), "{operation:?}");
    client.end();
    mps::release(&agent, share.lease.id);
    let operation = agent.follow(operation);
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}\n{}", agent.log());
    assert_eq!((real_layout(&host, 0).len(), mps::controls(&mps::base(&host)).len()), (2, 0));
    agent.await_that("no GPU is shared", || agent.get("/v1/mps").json() == json!([]));
}

/// While the first operation runs, gpushd refuses a second one. With `wait_s`, the second one
/// waits.
#[test]
fn conflicting_mode_changes_run_one_after_the_other() {
    let host = Host::up(HOPPER);
    let agent = Agent::start(&host, &rule(MIG));
    agent.until("the layout is applied", || (real_layout(&host, 0).len() == 2).then_some(()));
    let _begun = agent.settle();
    mps::fault(&host, "slow-start --ms 600000 --times 1");
    agent.reload(rule("mode = \"mps\""));
    let first = agent.begin_with(&wanted()).unwrap();
    agent.await_that("its daemon has been started", || mps::controls(&mps::base(&host)).len() == 1);
    // Another administrator changes the rule back to mode `mig`.
    agent.reload(rule(MIG));
    let error = refused(&agent);
    assert!(format!("{error:?}").contains(&first.id), "{error:?}");
    assert!(error.retryable, "{error:?}");
    let mut waiting = wanted();
    waiting["wait_s"] = json!(600);
    let second = agent.begin_with(&waiting).unwrap();
    mps::clear_faults(&host);
    // The first operation may succeed, or gpushd may roll it back because its rule has changed.
    assert!(agent.follow(first).state.is_final());
    let second = agent.follow(second);
    assert_eq!(second.state, OperationState::Done, "{second:#?}\n{}", agent.log());
    assert_eq!((real_layout(&host, 0).len(), mps::controls(&mps::base(&host)).len()), (2, 0));
    let gpu = agent.gpu(0);
    assert_eq!((gpu.drift, gpu.compute_mode.unwrap_or_default()), (Vec::new(), ComputeMode::Default));
}

#[test]
fn failed_daemon_start_rolls_the_operation_back() {
    let host = Host::up(HOPPER);
    let agent = Agent::start(&host, &rule(MIG));
    agent.until("the layout is applied", || (real_layout(&host, 0).len() == 2).then_some(()));
    let _begun = agent.settle();
    let before = real_layout(&host, 0);
    agent.reload(rule("mode = \"mps\""));
    // Without the control program, the daemon cannot start.
    let control = host.dir().join("bin/nvidia-cuda-mps-control");
    std::fs::remove_file(&control).unwrap();
    let operation = agent.follow(agent.begin_with(&wanted()).unwrap());
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:#?}\n{}", agent.log());
    let error = operation.error.expect("the operation has an error");
    assert!(error.message.contains("does not start"), "{error:?}");
    assert_eq!(real_layout(&host, 0), before);
    assert_eq!((mps::controls(&mps::base(&host)).len(), agent.gpu(0).compute_mode), (0, Some(ComputeMode::Default)));
}

/// An operation that removes one MIG device must not affect the daemon and the client of another
/// device.
#[test]
fn removed_mig_device_ends_only_its_own_daemon() {
    let host = Host::up(HOPPER);
    let agent = Agent::start(&host, &rule("mode = \"mig\"\nlayout = [\"3g.40gb@0:mps\", \"3g.40gb@4:mps\"]"));
    let first = mps::reaches(&agent, "0:3g.40gb@0", MpsState::Ready);
    let second = mps::reaches(&agent, "0:3g.40gb@4", MpsState::Ready);
    let _begun = agent.settle();
    let share = mps::lease(&agent, "0:3g.40gb@0", &json!({ "percentage": 50 })).unwrap();
    let mut client = Client::start(&host, &share.environment);
    agent.reload(rule("mode = \"mig\"\nlayout = [\"3g.40gb@0:mps\", \"1g.10gb@4\"]"));
    let operation = apply(&agent);
    let label = "MIG device 0:3g.40gb@4".to_owned();
    let stop = Step::Mps(MpsStep::StopDaemon { uuid: second.uuid.clone(), label });
    assert_eq!(operation.plans[0].phase(Phase::Before).collect::<Vec<_>>(), [&stop]);
    assert_eq!((mps::daemon(&agent, "0:3g.40gb@0").pid, client.lives()), (first.pid, true));
    assert_eq!(mps::controls(&mps::base(&host)), [first.pid.unwrap().cast_signed()], "{second:?}");
    // A device on which a program runs blocks the operation.
    agent.reload(rule("mode = \"mig\"\nlayout = \"none\""));
    let error = refused(&agent);
    assert_eq!(error.code, Code::Blocked, "{error:?}");
    assert!(client.lives());
}

/// Kills gpushd before and after each driver call of a mode change, in both directions. Then checks
/// which state the next gpushd reaches.
#[test]
fn restarted_gpushd_completes_or_rolls_back_a_mode_change() {
    let mut deaths = 0;
    for (from, to) in [("mode = \"mps\"", MIG), (MIG, "mode = \"mps\"")] {
        for call in [
            "nvmlDeviceSetComputeMode",
            "nvmlDeviceSetMigMode",
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            "nvmlGpuInstanceDestroy",
        ] {
            for moment in ["before", "after"] {
                let host = Host::up(HOPPER);
                let mut agent = Agent::start(&host, &rule(from));
                agent.until("the GPU has its desired state", || {
                    let gpu = agent.gpu(0);
                    (gpu.drift.is_empty() && !gpu.stale).then_some(())
                });
                let _begun = agent.settle();
                agent.reload(rule(to));
                host.fault(&format!("{call} --gpu 0 --kill {moment} --parent --times 1"));
                let begun = asked(&agent);
                // A mode change does not make all of these calls, so gpushd may survive.
                let survived = begun.and_then(|id| agent.outlives(&id)).is_some();
                if survived {
                    agent.stop();
                } else {
                    deaths += 1;
                    drop(agent);
                }
                host.clear_faults();
                let agent = Setup::on(&host).config(rule(to)).start();
                all_ended(&agent);
                let daemons = mps::controls(&mps::base(&host)).len();
                let mig = real_layout(&host, 0) != ["MIG off"];
                assert!(daemons <= 1, "{from} to {to}, killed {moment} {call}: {daemons} daemons");
                assert!(!(mig && daemons == 1), "MIG and MPS at once: killed {moment} {call}\n{}", agent.log());
                // A new request must reach the desired state from every state in between.
                apply(&agent);
                let daemons = mps::controls(&mps::base(&host)).len();
                let mig = real_layout(&host, 0) != ["MIG off"];
                assert_eq!((daemons, mig), if to == MIG { (0, true) } else { (1, false) }, "{}", agent.log());
                let exclusive = agent.gpu(0).compute_mode == Some(ComputeMode::ExclusiveProcess);
                assert_eq!(exclusive, daemons == 1, "killed {moment} {call}\n{}", agent.log());
            }
        }
    }
    assert!(deaths >= 8, "{deaths}");
    println!("{deaths} deaths");
}

#[test]
fn mode_change_succeeds_when_the_daemon_is_killed() {
    let host = Host::up(HOPPER);
    let agent = shared(&host);
    agent.reload(rule(MIG));
    let pid = mps::daemon(&agent, "0").pid.unwrap().cast_signed();
    assert!(mps::signal(pid, Signal::SIGKILL));
    apply(&agent);
    assert_eq!(mps::controls(&mps::base(&host)).len(), 0);
}

/// If a GPU has no rule any more, gpushd grants no new lease on it. When the last client has ended,
/// gpushd ends the daemon.
#[test]
fn gpu_without_a_rule_is_drained_and_restarted_by_operation() {
    let host = Host::up(HOPPER);
    let agent = shared(&host);
    let share = mps::lease(&agent, "0", &json!({ "percentage": 25 })).unwrap();
    let mut client = Client::start(&host, &share.environment);
    agent.reload("");
    let reported = "no lease is granted";
    mps::becomes(&agent, "0", "without new leases", |daemon| {
        daemon.findings.iter().any(|finding| finding.contains(reported))
    });
    mps::lease(&agent, "0", &json!({ "percentage": 1 })).expect_err("no new lease is granted");
    mps::release(&agent, share.lease.id);
    assert!(client.lives() && client.printed().is_empty(), "the client may finish");
    client.end();
    mps::lease_becomes(&agent, share.lease.id, LeaseState::Ended);
    agent.await_that("the target is forgotten", || agent.get("/v1/mps").json() == json!([]));
    agent.await_that("its compute mode is restored", || agent.gpu(0).compute_mode == Some(ComputeMode::Default));
    // The GPU has an MPS rule again. A reload only reports the difference. An operation then
    // applies the rule.
    agent.reload(rule("mode = \"mps\""));
    assert_eq!(agent.gpu(0).drift, ["it is not shared through MPS yet"]);
    assert_eq!(agent.get("/v1/mps").json(), json!([]));
    apply(&agent);
    assert_eq!(mps::reaches(&agent, "0", MpsState::Ready).leases, []);
}

/// The present lease stays active until it is released. If a request has drained the daemon, the
/// daemon does not block the mode change.
#[test]
fn target_without_mps_rule_grants_no_lease_and_can_change_mode() {
    let host = Host::up(HOPPER);
    let agent = shared(&host);
    let share = mps::lease(&agent, "0", &json!({ "percentage": 25 })).unwrap();
    agent.reload(rule("mode = \"timeslice\""));
    let refused = mps::lease(&agent, "0", &json!({ "percentage": 1 })).expect_err("no new lease is granted");
    assert_eq!(refused.code, Code::Unsupported, "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains("`timeslice` when L1 ends")), "{refused:?}");
    let reported = mps::daemon(&agent, "0");
    assert!(reported.findings.iter().any(|finding| finding.contains("no lease is granted")), "{reported:#?}");
    // After a restart of gpushd, the lease is still active.
    agent.kill();
    let agent = Agent::start(&host, &rule("mode = \"timeslice\""));
    agent.await_that("the target is listed", || agent.get("/v1/mps/0").status == 200);
    let client = Client::start(&host, &share.environment);
    assert!(client.first.starts_with("active"), "{}", client.first);
    client.end();
    for verb in ["start", "restart"] {
        let refused = mps::act(&agent, "0", verb, &json!({})).error();
        assert_eq!(refused.code, Code::Conflict, "{verb}: {refused:?}");
    }
    let refused = agent.post("/v1/mps/0/settings", &json!({ "percentage": 10 })).error();
    assert_eq!(refused.code, Code::Conflict, "{refused:?}");
    mps::release(&agent, share.lease.id);
    // A drain does not change the desired state. So a request for all GPUs also changes the mode of
    // this GPU.
    assert_eq!(mps::act(&agent, "0", "drain", &json!({})).status, 200);
    mps::reaches(&agent, "0", MpsState::Stopped);
    let operation = agent.follow(agent.begin_with(&json!({ "layout_source": "wanted" })).unwrap());
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}\n{}", agent.log());
    let gpu = agent.gpu(0);
    assert_eq!((gpu.drift.as_slice(), gpu.compute_mode), ([].as_slice(), Some(ComputeMode::Default)), "{gpu:?}");
    agent.await_that("no GPU is shared", || agent.get("/v1/mps").json() == json!([]));
}

#[test]
fn layout_operation_ends_after_all_its_daemons_are_ready() {
    let host = Host::up(HOPPER);
    let agent = Agent::start(&host, &rule("mode = \"mig\"\nlayout = [\"3g.40gb*2:mps\"]"));
    agent.until("daemons", || (agent.get("/v1/mps").json().as_array()?.len() == 2).then_some(()));
    let operation = agent.settle().pop().expect("the operation at the start");
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}");
    for daemon in mps::daemons(&agent) {
        assert_eq!(daemon.state, MpsState::Ready, "{daemon:#?}");
    }
}

/// An operation changes two GPUs. If one of the daemons cannot start, gpushd rolls both GPUs back.
#[test]
fn started_daemon_is_rolled_back_when_another_fails_to_start() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 2\n");
    let config = |mode: &str| format!("[mps]\nstart_s = 60\n[[gpu]]\nmatch = [\"0-1\"]\nmode = \"{mode}\"\n");
    let agent = Agent::start(&host, &config("exclusive"));
    agent.settle_reads();
    // Put a file at the path of the second daemon's directory, so that this daemon cannot start.
    let second = agent.gpu(1).uuid;
    let short = gpush_core::sharing::short_name(&second, &std::collections::BTreeSet::new());
    fs::create_dir_all(mps::base(&host)).expect("a directory");
    fs::write(mps::base(&host).join(&short), "").expect("a file");
    agent.reload(config("mps"));
    let operation =
        agent.follow(agent.begin_with(&json!({ "selectors": ["0-1"], "layout_source": "wanted" })).unwrap());
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:#?}");
    assert!(operation.error.is_some_and(|error| error.message.contains("GPU 1")), "the error names the GPU");
    agent.await_that("no GPU is shared", || agent.get("/v1/mps").json() == json!([]));
    assert_eq!(mps::controls(&mps::base(&host)), [0; 0]);
    agent.await_that("both compute modes are restored", || {
        (0..2).all(|index| agent.gpu(index).compute_mode == Some(ComputeMode::Default))
    });
    fs::remove_file(mps::base(&host).join(&short)).expect("the file can be removed");
    let operation =
        agent.follow(agent.begin_with(&json!({ "selectors": ["0-1"], "layout_source": "wanted" })).unwrap());
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}");
    assert_eq!(mps::controls(&mps::base(&host)).len(), 2);
}
