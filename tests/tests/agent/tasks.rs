//! Injected panics in the background tasks of gpushd. The names of the tasks come from `GET /v1/health`, so that no task
//! is forgotten. Unit tests show the policy for every task.

use std::{
    fs,
    path::{Path, PathBuf},
};

use gpush_api::{Code, EventKind, Health, HealthStatus, LeaseState, MpsState, OperationState, TaskHealth, TaskKind};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    mps::{lease, lease_becomes, reaches, release},
};
use nix::{sys::stat::Mode, unistd::mkfifo};
use serde_json::json;

use crate::leases::{leases, request};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n[[gpu]]\nmodel = \"h100-80-sxm\"\n";
const CONFIG: &str = "[mps]\nhealth = \"1s\"\n# --constants mps.start=2s,mps.stop=2s\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n\
                      [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\n[[gpu]]\nmatch = [\"2\"]\nmode = \"mig\"\n\
                      layout = [\"1g.10gb\"]\n";

/// Creates the FIFO that a debug build of gpushd reads the names of tasks from.
fn fifo(host: &Host) -> PathBuf {
    let path = host.scratch("task-faults");
    mkfifo(&path, Mode::S_IRWXU).expect("a FIFO");
    path
}

fn start(host: &Host, config: &str, faults: &Path) -> Agent {
    // The service manager enables the watchdog for one process only, whose pid is in WATCHDOG_PID.
    let watched = ["sh", "-c", "WATCHDOG_USEC=200000 WATCHDOG_PID=$$ exec \"$0\" \"$@\""];
    let setup = Setup::on(host).config(config).env("GPUSH_TEST_TASK_FAULTS", faults.display().to_string());
    setup.through(&watched).start()
}

fn health(agent: &Agent) -> Health {
    serde_json::from_value(agent.get("/v1/health").json()).expect("health")
}

fn tasks(agent: &Agent, is: impl Fn(&TaskHealth) -> bool) -> Vec<TaskHealth> {
    let tasks: Vec<TaskHealth> = health(agent).tasks.into_iter().filter(is).collect();
    assert!(!tasks.is_empty());
    tasks
}

/// Lets a task panic, and waits until health shows the failure.
fn fail(agent: &Agent, faults: &Path, name: &str) -> TaskHealth {
    fs::write(faults, format!("{name}\n")).expect("the FIFO is read");
    agent.until(name, || tasks(agent, |task| task.name == name).pop().filter(|task| task.failures > 0))
}

#[test]
fn restarted_tasks_do_their_work_again() {
    let host = Host::up(HOST);
    let faults = fifo(&host);
    let mut agent = start(&host, CONFIG, &faults);
    agent.wait_for_layouts_at_start();
    reaches(&agent, "0", MpsState::Ready);
    let shared = lease(&agent, "0", &json!({})).expect("a lease").lease.id;
    let mut restarted = Vec::new();
    let with_object = |task: &TaskHealth| ["lease", "mps_daemon"].contains(&task.name.as_str());
    for task in tasks(&agent, |task| task.kind == TaskKind::Service || with_object(task)) {
        let shown = fail(&agent, &faults, &task.name);
        assert_eq!((shown.failures, shown.restarts), (1, 1), "{shown:?}");
        assert_eq!(shown.failure.as_deref(), Some("it panicked: injected fault"));
        restarted.push(task.name);
    }
    let health = health(&agent);
    assert_eq!(health.status, HealthStatus::Degraded);
    for name in &restarted {
        agent.wait_for_log(&format!("the task `{name}`"));
        let error = format!("gpushd's task `{name}` has failed; gpushd restarted the task");
        assert!(health.errors.iter().any(|one| one.message == error && one.hint.is_some()), "{health:?}");
    }
    println!("restarted: {}", restarted.join(", "));

    agent.wait_for("WATCHDOG=1");
    // The monitor publishes an Xid.
    let mut listener = agent.listen("", None);
    host.sim("xid", &["63", "--gpu", "1"]);
    listener.next_of(EventKind::Xid);
    // The supervisor task has adopted its daemon. The lease ends.
    reaches(&agent, "0", MpsState::Ready);
    release(&agent, shared);
    lease_becomes(&agent, shared, LeaseState::Ended);
    // A lease expires, and the next request gets its GPU.
    let whole = json!({ "share": { "kind": "whole" }, "selectors": ["1"], "duration_s": 1, "wait": "unlimited" });
    let first = request(&agent, &whole).expect("a lease").lease.id;
    let second = request(&agent, &whole).expect("the lease after it").lease.id;
    assert_ne!(first, second);
    // An operation begins when the lease in its way has ended.
    let device = json!({ "share": { "kind": "mig_profile", "profile": "1g.10gb" }, "selectors": ["2"] });
    let device = request(&agent, &device).expect("a lease").lease.id;
    let order = json!({ "selectors": ["2"], "layout_source": { "entries": ["7g.80gb"] }, "wait_s": 600 });
    let queued = agent.begin_with(&order).expect("a queued operation");
    release(&agent, device);
    assert_eq!(agent.follow(queued).state, OperationState::Done);
    agent.stop();
}

#[test]
fn panic_in_a_request_or_operation_ends_only_that_one() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\n");
    let faults = fifo(&host);
    let agent = start(&host, "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb\"]\n", &faults);
    agent.wait_for_layouts_at_start();
    let inject = |name: &str| fs::write(&faults, format!("{name}\n")).expect("the FIFO is read");
    let failures = |name: &str| tasks(&agent, |task| task.name == name)[0].failures;

    inject("request");
    // gpushd reads the FIFO in a separate thread, so earlier requests may still succeed.
    let failed = agent.until("a failed request", || Some(agent.get("/v1/version")).filter(|one| one.status != 200));
    assert_eq!((failed.status, failed.error().code), (500, Code::Internal));
    assert_eq!((agent.get("/v1/version").status, failures("request")), (200, 1));

    let mut listener = agent.listen("", None);
    inject("event_stream");
    while listener.event().is_some() {}
    assert_eq!(failures("event_stream"), 1);

    inject("connection");
    agent.until("a closed connection", || {
        let answer = agent.try_raw(b"GET /v1/version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        answer.is_none_or(|bytes| bytes.is_empty()).then_some(())
    });
    agent.until("the failure of the connection", || (failures("connection") == 1).then_some(()));

    // The first read that fails shows that gpushd has read the FIFO before the operation begins.
    inject("operation\nrequest");
    agent.until("a failed request", || (agent.get("/v1/version").status != 200).then_some(()));
    let failed = agent.apply(&["0"], &["7g.80gb"]);
    assert_eq!(failed.state, OperationState::Failed, "{failed:?}");
    assert_eq!(failed.error.expect("an error").code, Code::Internal);
    assert_eq!(failures("operation"), 1);
    let next = agent.apply(&["0"], &["7g.80gb"]);
    assert_eq!(next.state, OperationState::Done, "the GPU is free: {next:?}");
    agent.stop();
}

#[test]
fn failure_of_a_final_task_ends_gpushd_and_leases_survive() {
    let host = Host::up(HOST);
    let faults = fifo(&host);
    let mut agent = start(&host, CONFIG, &faults);
    agent.wait_for_layouts_at_start();
    let held = json!({ "share": { "kind": "whole" }, "selectors": ["1"] });
    let held = request(&agent, &held).expect("a lease").lease.id;
    let last = tasks(&agent, |task| task.kind == TaskKind::Final);
    for name in last.iter().map(|task| task.name.as_str()).chain(["scheduler"]) {
        if name == "scheduler" {
            fail(&agent, &faults, name);
        }
        fs::write(&faults, format!("{name}\n")).expect("the FIFO is read");
        let status = agent.wait();
        assert_eq!(status.code(), Some(1), "{name}: {}", agent.log());
        let log = agent.log();
        assert!(log.contains(&format!("gpushd exits: the task `{name}` has failed")), "{log}");
        agent = start(&host, CONFIG, &faults);
        assert_eq!(leases(&agent).iter().map(|lease| lease.id).collect::<Vec<_>>(), [held], "{name}");
    }
    release(&agent, held);
    agent.stop();
}

/// Fault: if the task of a lease failed before the client was answered, the lease became active although no client had it.
#[test]
fn lease_ends_if_its_task_fails_before_the_answer() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\n");
    let faults = fifo(&host);
    let dynamic = "# --constants driver.change=60s\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";
    let agent = start(&host, dynamic, &faults);
    agent.wait_for_layouts_at_start();
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --hang");
    let device = json!({ "share": { "kind": "mig_profile", "profile": "1g.10gb" } });
    std::thread::scope(|scope| {
        let client = scope.spawn(|| request(&agent, &device));
        let granting = || leases(&agent).into_iter().find(|lease| lease.state == LeaseState::Granting);
        let id = agent.until("the device is created", granting).id;
        fail(&agent, &faults, "lease");
        let error = client.join().expect("an answer").expect_err("the task has failed");
        assert_eq!(error.code, Code::Internal, "{error:?}");
        host.clear_faults();
        lease_becomes(&agent, id, LeaseState::Ended);
    });
    request(&agent, &json!({ "share": { "kind": "mig_profile", "profile": "7g.80gb" } })).expect("the GPU is free");
    agent.stop();
}
