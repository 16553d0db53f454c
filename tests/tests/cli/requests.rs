//! `gpushctl` with a real agent. Even if gpushd is killed, it executes a request only once.
//! gpushctl follows waiting operations, and shows events and the audit trail.
//!
//! The helper functions may use `unwrap`, because a panic makes the test fail.
#![allow(clippy::unwrap_used)]

use std::{
    io::{BufRead, BufReader, Read},
    os::unix::process::CommandExt,
    process::{Child, Command, Output, Stdio},
};

use gpush_api::{AuditRecord, Event, EventKind, EventPayload, Operation, OperationState, OperationSummary};
use gpush_tests::{
    agent::{Agent, Setup, gi_at, real_layout},
    host::{Host, program},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};

/// The uid of `nobody`.
const NOBODY: u32 = 65534;

fn gpushctl(agent: &Agent, args: &[&str]) -> Command {
    let mut command = Command::new(program("gpushctl"));
    command
        .args(args)
        .env("GPUSH_SOCKET", agent.socket())
        .env("LANG", "C.UTF-8")
        .env("COLUMNS", "120")
        .env("TZ", "UTC");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(agent: &Agent, args: &[&str]) -> Output {
    gpushctl(agent, args).output().expect("gpushctl can be started")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn json<T: serde::de::DeserializeOwned>(output: &Output) -> T {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Returns lines of the standard error of a child, up to and including the first line for which
/// `is` returns true.
fn lines_until(reader: &mut impl BufRead, is: impl Fn(&str) -> bool) -> Vec<String> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).unwrap() > 0, "it ended after {lines:?}");
        let line = line.trim_end().to_owned();
        let last = is(&line);
        lines.push(line);
        if last {
            return lines;
        }
    }
}

fn ended(mut child: Child) -> (Option<i32>, String) {
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    (child.wait().unwrap().code(), text)
}

#[test]
fn apply_while_agent_dies_is_one_operation() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    agent.settle_reads();
    let mut operations = 0;
    // In the first round, the agent is killed while it reads the GPU, before it has recorded the
    // operation. In the second round, it is killed while it executes the recorded operation, and
    // gpushctl follows the operation.
    for (fault, layout) in [
        ("nvmlDeviceGetMemoryInfo* --gpu 0 --times 1 --delay-ms 3000", "7g.80gb"),
        ("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 3000", "1g.10gb*2"),
    ] {
        host.fault(fault);
        let child = gpushctl(&agent, &["mig", "apply", "--gpu", "0", "--layout", layout, "--json"]).spawn().unwrap();
        // Wait until the slow driver call has begun. The counter of the fault rule shows this.
        let until = std::time::Instant::now() + gpush_tests::agent::PATIENCE;
        while !host.sim("fault", &["list"]).contains("fired 1") {
            assert!(std::time::Instant::now() < until, "{}", host.sim("fault", &["list"]));
        }
        agent.kill();
        host.clear_faults();
        agent = Agent::start(&host, "");
        let (status, text) = ended(child);
        operations += 1;
        assert_eq!(status, Some(0), "{text}\n{}", agent.log());
        let all: Vec<OperationSummary> = json(&run(&agent, &["operation", "list", "--json"]));
        assert_eq!(all.len(), operations, "{all:?}");
        assert!(all.iter().all(|one| one.state == OperationState::Done), "{all:?}");
    }
    assert_eq!(real_layout(&host, 0).len(), 2);
}

#[test]
fn waiting_operation_is_followed_and_cancelled() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start_public(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@4"]).state, OperationState::Done);
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0 --memory 100", gi_at(&host, 0, 4)));
    let wanted = ["mig", "apply", "--gpu", "0", "--layout", "7g.80gb"];
    let blocked = run(&agent, &wanted);
    assert_eq!(blocked.status.code(), Some(4), "{blocked:?}");
    let waiting = || {
        let mut child =
            gpushctl(&agent, &[&wanted[..], &["--wait", "--reason", "for the\nworkshop"]].concat()).spawn().unwrap();
        let mut reader = BufReader::new(child.stderr.take().unwrap());
        let reported = lines_until(&mut reader, |line| line.starts_with("waits: "));
        (child, reader, reported)
    };
    let (child, _reader, reported) = waiting();
    // gpushctl tells root only once which process blocks the operation.
    assert_eq!(reported.iter().filter(|line| line.contains(&format!("pid {pid}"))).count(), 1, "{reported:?}");
    assert!(reported.iter().all(|line| !line.contains("is in use")), "{reported:?}");
    let all: Vec<OperationSummary> = json(&run(&agent, &["operation", "list", "--json"]));
    let id = all.last().unwrap().id.clone();
    let list = stdout(&run(&agent, &["operation", "list"]));
    assert!(list.lines().last().unwrap().contains("waiting"), "{list}");
    let show = stdout(&run(&agent, &["operation", "show", &id]));
    assert!(show.contains("reason: for the workshop") && show.contains("waits: "), "{show}");
    assert!(show.contains(&format!("pid {pid}")), "root reads which process blocks the operation: {show}");
    if geteuid().is_root() {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--unix-socket"]).arg(agent.socket()).arg(format!("http://gpush/v1/operations/{id}"));
        let answer = curl.uid(NOBODY).gid(NOBODY).current_dir("/").output().unwrap();
        let answer: Operation = serde_json::from_slice(&answer.stdout).unwrap();
        assert_eq!((answer.state, answer.waits_for.is_empty()), (OperationState::Waiting, false), "{answer:?}");
        assert!(!format!("{answer:?}").contains(&pid.to_string()), "another user does not: {answer:?}");
    }
    // The command that cancels the operation succeeds. The other command, which follows the
    // operation, reports that the operation was cancelled.
    let cancelled = run(&agent, &["operation", "cancel", &id]);
    assert_eq!(cancelled.status.code(), Some(0), "{cancelled:?}");
    let (status, text) = ended(child);
    assert_eq!(status, Some(1), "{text}");
    let again = run(&agent, &["operation", "cancel", &id]);
    assert_eq!(again.status.code(), Some(4), "{again:?}");

    // After Ctrl-C, the agent keeps the operation, and starts it as soon as the operation can
    // start.
    let (mut child, _reader, _) = waiting();
    kill(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let (child, mut reader, _) = {
        let id =
            json::<Vec<OperationSummary>>(&run(&agent, &["operation", "list", "--json"])).last().unwrap().id.clone();
        let mut child = gpushctl(&agent, &["operation", "wait", &id]).spawn().unwrap();
        let mut reader = BufReader::new(child.stderr.take().unwrap());
        let reported = lines_until(&mut reader, |line| line.starts_with("waits: "));
        (child, reader, reported)
    };
    host.end_process(pid);
    // gpushctl shows the new plan.
    lines_until(&mut reader, |line| line.contains("4 steps on GPU 0"));
    let (status, text) = ended(child);
    assert_eq!(status, Some(0), "{text}");
    let timed_out = run(&agent, &["mig", "apply", "--gpu", "0", "--layout", "1g.10gb", "--wait=0"]);
    assert_eq!(timed_out.status.code(), Some(0), "what can begin at once does: {timed_out:?}");
    let done = run(&agent, &["mig", "apply", "--gpu", "0", "--layout", "1g.10gb*2", "--detach"]);
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    let page = run(&agent, &["operation", "list", "-n", "2"]);
    assert_eq!(stdout(&page).lines().count(), 3);
    assert!(String::from_utf8_lossy(&page.stderr).contains("--before op-"), "{page:?}");
    let _ = agent.settle();
}

#[test]
fn events_continue_after_an_agent_restart() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    agent.settle_reads();
    let mut child = gpushctl(&agent, &["events", "-f", "--kind", "operation", "--json"]).spawn().unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let next_end = |reader: &mut BufReader<std::process::ChildStdout>| {
        let lines = lines_until(reader, |line| {
            let event: Event = serde_json::from_str(line).unwrap();
            match event.what {
                EventPayload::Operation(change) => change.operation.state.is_final(),
                _ => event.what.kind() == EventKind::Resync,
            }
        });
        serde_json::from_str::<Event>(lines.last().unwrap()).unwrap().what.kind()
    };
    // Only an event shows that the listener is connected. So repeat the apply until the listener
    // gets an event.
    let reported = std::thread::scope(|scope| {
        let listening = scope.spawn(|| next_end(&mut reader));
        while !listening.is_finished() {
            let _ = agent.apply(&["0"], &["7g.80gb"]);
        }
        listening.join().unwrap()
    });
    assert_eq!(reported, EventKind::Operation);
    agent.kill();
    agent = Agent::start(&host, "");
    let mut kind = next_end(&mut reader);
    while kind != EventKind::Resync {
        kind = next_end(&mut reader);
    }
    assert_eq!(agent.apply(&["0"], &["1g.10gb"]).state, OperationState::Done);
    assert_eq!(next_end(&mut reader), EventKind::Operation);
    child.kill().unwrap();
    let _ = child.wait();
    // gpushctl prints the stored events as lines and as JSON.
    let kept: Vec<Event> = json(&run(&agent, &["events", "--json", "--kind", "operation"]));
    assert!(!kept.is_empty());
    // With `-n` or `--since`, `events -f` first prints stored events, and then prints each new
    // event once.
    let mut child = gpushctl(&agent, &["events", "-f", "-n", "1", "--kind", "operation", "--json"]).spawn().unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let past: Event = serde_json::from_str(&lines_until(&mut reader, |_| true)[0]).unwrap();
    assert_eq!(past.id, kept.last().unwrap().id);
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    assert_eq!(next_end(&mut reader), EventKind::Operation);
    child.kill().unwrap();
    let _ = child.wait();
    let kept: Vec<Event> = json(&run(&agent, &["events", "--json", "--kind", "operation"]));
    let lines = stdout(&run(&agent, &["events", "--steps", "--kind", "operation"]));
    assert_eq!(lines.lines().count(), kept.len());
    assert!(lines.contains("creating GPU instance 1g.10gb@"), "{lines}");
    let wrong = run(&agent, &["events", "--gpu", "9"]);
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
}

#[test]
fn audit_needs_administrator_and_events_hide_pids() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start_public(&host, "");
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    let missing = agent.cancel("op-9");
    assert_eq!(missing.status, 404);
    let trail: Vec<AuditRecord> = json(&run(&agent, &["audit", "--json"]));
    let reported: Vec<_> =
        trail.iter().map(|one| (one.action.as_str(), one.object.as_str(), one.result.as_str())).collect();
    assert_eq!(reported, [("mig.apply", "op-1", "accepted"), ("mig.apply", "op-1", "done")]);
    assert!(trail[0].by.as_ref().is_some_and(|by| by.pid.is_some()) && trail[1].by.is_none());
    let table = stdout(&run(&agent, &["audit", "--since", "1h", "--object", "op-1"]));
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.contains("accepted") && table.contains("7g.80gb") && table.contains("gpushd"), "{table}");
    // `--object` finds a record by any name of its GPU, but not by the name of another GPU.
    let gpu = agent.gpu(0);
    let device = gpu.mig.as_ref().unwrap().instances[0].compute[0].uuid.clone().unwrap();
    let device_start = &device.as_str()[..14];
    for object in [
        "0",
        "GPU 0",
        gpu.uuid.as_str(),
        &gpu.uuid.as_str()[..12],
        &gpu.pci,
        "0,1",
        "op-7,0",
        "0:7g.80gb@0",
        device.as_str(),
        device_start,
    ] {
        let found: Vec<AuditRecord> = json(&run(&agent, &["audit", "--json", "--object", object]));
        assert_eq!(found, trail, "{object}");
    }
    assert_eq!(json::<Vec<AuditRecord>>(&run(&agent, &["audit", "--json", "--object", "1-7"])), []);
    for wrong in ["9", "GPU-ffffffff", "7-3"] {
        let wrong = run(&agent, &["audit", "--object", wrong]);
        assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    }
    // If a MIG device no longer exists, its complete UUID still finds its records.
    for other in ["op-7", "MIG-00000000-0000-0000-0000-000000000000"] {
        let none = run(&agent, &["audit", "--object", other]);
        assert_eq!((none.status.code(), none.stdout.len()), (Some(0), 0), "{none:?}");
    }
    // The API returns the audit trail in pages.
    let after = agent.get("/v1/audit?after=0&limit=1").json();
    assert_eq!(after[0]["sequence"], trail[0].sequence);
    let next = agent.get(&format!("/v1/audit?after={}&limit=1", trail[0].sequence)).json();
    assert_eq!(next[0]["result"], "done");
    for wrong in ["?limit=0", "?limit=1001", "?since=yesterday", "?before=1"] {
        assert_eq!(agent.get(&format!("/v1/audit{wrong}")).status, 400, "{wrong}");
    }
    let own: Vec<Event> = json(&run(&agent, &["events", "--json", "--kind", "operation"]));
    let pids = |events: &[Event]| {
        let pid = |event: &Event| match &event.what {
            EventPayload::Operation(change) => change.operation.by.pid,
            _ => None,
        };
        events.iter().filter_map(pid).count()
    };
    assert_eq!(pids(&own), own.len());
    if !geteuid().is_root() {
        println!("SKIPPED: only root can ask as another user");
        return;
    }
    // Other users may not be able to execute a program in root's directory.
    let copy = agent.socket().with_file_name("gpushctl");
    std::fs::copy(program("gpushctl"), &copy).unwrap();
    let ask = |args: &[&str]| {
        let mut command = Command::new(&copy);
        command.args(args).env("GPUSH_SOCKET", agent.socket()).env("LANG", "C.UTF-8").uid(NOBODY).gid(NOBODY);
        command.current_dir("/").stdin(Stdio::null()).output().unwrap()
    };
    let denied = ask(&["audit"]);
    assert_eq!(denied.status.code(), Some(5), "{denied:?}");
    let theirs: Vec<Event> = json(&ask(&["events", "--json", "--kind", "operation"]));
    assert_eq!((theirs.len(), pids(&theirs)), (own.len(), 0));
    let denied = ask(&["operation", "cancel", "op-1"]);
    assert_eq!(denied.status.code(), Some(5), "{denied:?}");
}

#[test]
fn request_refused_by_stopping_agent_goes_to_the_next() {
    let host = Host::up("dgx-a100");
    let mut agent = Setup::on(&host).start();
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --hang");
    let following = gpushctl(&agent, &["mig", "apply", "--gpu", "0", "--layout", "7g.80gb"]).spawn().unwrap();
    agent.until("it runs", || {
        let all: Vec<OperationSummary> = serde_json::from_value(agent.get("/v1/operations").json()).unwrap();
        all.into_iter().find(|one| one.state == OperationState::Running)
    });
    agent.signal(Signal::SIGTERM);
    agent.wait_for("STATUS=finishing operations");
    let health: gpush_api::Health = serde_json::from_value(agent.get("/v1/health").json()).unwrap();
    assert!(health.errors.iter().any(|cause| cause.message.contains("is stopping")), "{health:?}");
    // gpushd refuses the change. gpushctl repeats the request with the same key until another gpushd
    // runs.
    let mut asking = gpushctl(&agent, &["mig", "apply", "--gpu", "1", "--layout", "7g.80gb"]).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(asking.stderr.as_mut().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("gpushd is stopping and finishes its operations"), "{first}");
    // When the fault is cleared, the operation ends.
    host.clear_faults();
    assert!(agent.wait().success(), "{}", agent.log());
    let (status, text) = ended(following);
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("op-1 done"), "{text}");
    assert_eq!(real_layout(&host, 1), [] as [String; 0]);
    let agent = Setup::on(&host).start();
    let (status, text) = ended(asking);
    assert_eq!(status, Some(0), "{text}\n{}", agent.log());
    assert_eq!([0, 1].map(|gpu| real_layout(&host, gpu)), [["7g.80gb@0[7g.80gb@0]"], ["7g.80gb@0[7g.80gb@0]"]]);
}
