//! Kills gpushd during a change of MIG mode: around each program that it runs, at driver calls,
//! and at writes and syncs of its store. After that, GPU 0 must have the
//! previous or the requested layout, and the operation must report which of the two layouts it is.
//! Services that ran before must run again, and no reset may be pending.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use gpush_api::{GpuState, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, PATIENCE, Setup, real_layout},
    around::Around,
    host::Host,
    strace,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

const AMPERE: &str = "[[gpu]]\nmodel = \"a100-80\"\ncount = 3\nmig = false\n";
const LAYOUT: &[&str] = &["3g.40gb", "1g.10gb*2"];
const WHOLE: [&str; 1] = ["MIG off"];

fn off(agent: &Agent, gpu: u32) -> Value {
    json!({ "layout_source": { "per_gpu": [{ "selector": agent.gpu(gpu).uuid, "mig_enabled": false }] } })
}

/// Returns the last operation, or `None` if the agent does not answer.
fn last(agent: &Agent) -> Option<Operation> {
    let get = |path: &str| {
        use std::io::{Read, Write};
        let mut stream = std::os::unix::net::UnixStream::connect(agent.socket()).ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok()?;
        gpush_tests::agent::parse(&answer).filter(|answer| answer.status == 200).map(|answer| answer.json())
    };
    let list = get("/v1/operations?limit=1")?;
    serde_json::from_value(get(&format!("/v1/operations/{}", list[0]["id"].as_str()?))?).ok()
}

fn is_dead(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.trim_start().starts_with('Z'))
}

/// Starts gpushd again and again, until the last operation has ended in a gpushd that was not
/// killed.
fn outlive(host: &Host, config: &str, starts: &mut u32) -> Agent {
    loop {
        *starts += 1;
        let Ok(agent) = Setup::on(host).config(config).try_start() else { continue };
        let until = Instant::now() + PATIENCE;
        while !is_dead(agent.pid()) {
            if last(&agent).is_some_and(|operation| operation.state.is_final()) {
                return agent;
            }
            std::thread::sleep(Duration::from_millis(5));
            assert!(Instant::now() < until, "{}", agent.log());
        }
    }
}

/// Sends the request and ignores the response: the fault rule may kill gpushd before it answers.
fn ask(agent: &Agent, body: &Value) {
    let body = body.to_string();
    let head = "POST /v1/mig/apply HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\ncontent-type: application/json";
    let _ = agent.raw(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes());
}

/// How often gpushd was started, and how often each outcome occurred, over all kills.
#[derive(Default)]
struct Tally {
    starts: u32,
    ends: BTreeMap<String, u32>,
}

impl Tally {
    /// Checks how the last operation was recovered. GPU 0 must have the layout `before` or the
    /// requested layout, as the operation reports. Services that ran before must run again, and no
    /// reset may be pending.
    fn take(&mut self, host: &Host, agent: &Agent, around: &Around, layouts: [&[String]; 2], point: &str) {
        let operation = last(agent).expect("an operation");
        let point = format!("{point}: {operation:?}\n{}", agent.log());
        let [before, wanted] = layouts;
        let stands = match operation.state {
            OperationState::Done => wanted,
            OperationState::RolledBack | OperationState::NotStarted => before,
            OperationState::Queued
            | OperationState::Waiting
            | OperationState::Running
            | OperationState::Cancelling
            | OperationState::Interrupted
            | OperationState::Failed => panic!("{point}"),
        };
        assert_eq!(real_layout(host, 0), stands, "{point}");
        assert!(around.runs("nvidia-dcgm") && !around.runs("nvsm"), "{point}");
        let gpu = agent.gpu(0);
        assert_eq!(gpu.state, GpuState::Ready, "{point}");
        let mig = gpu.mig.expect("MIG");
        assert_eq!(mig.enabled, mig.pending_mode(), "nothing waits for a reset: {point}");
        *self.ends.entry(operation.state.to_string()).or_default() += 1;
    }

    fn points(&self) -> u32 {
        self.ends.values().sum()
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} points, {} starts: {:?}", self.points(), self.starts, self.ends)
    }
}

/// A host whose GPU 0 has MIG off, a service that runs, the layout to apply, and the config.
struct Scene {
    host: Host,
    around: Around,
    config: String,
    cut: Vec<String>,
    on: Value,
}

impl Scene {
    fn new() -> (Self, Agent) {
        let host = Host::up(AMPERE);
        let around = Around::of(&host);
        around.run("nvidia-dcgm");
        let config = around.config(&["nvidia-dcgm", "nvsm"], "");
        let agent = Agent::start(&host, &config);
        assert_eq!(agent.apply(&["0"], LAYOUT).state, OperationState::Done);
        let cut = real_layout(&host, 0);
        assert_eq!(agent.follow(agent.begin_with(&off(&agent, 0)).expect("an operation")).state, OperationState::Done);
        let on = json!({ "selectors": ["0"], "layout_source": { "entries": LAYOUT } });
        let _ = around.take_calls();
        (Self { host, around, config, cut, on }, agent)
    }

    /// Returns the next request and its expected result. If MIG is enabled, the request disables
    /// MIG. Otherwise, the request enables MIG.
    fn turn(&self, agent: &Agent) -> (Value, Vec<String>) {
        if real_layout(&self.host, 0) == WHOLE {
            (self.on.clone(), self.cut.clone())
        } else {
            (off(agent, 0), WHOLE.map(str::to_owned).to_vec())
        }
    }
}

/// Kills gpushd before and after each external program that it runs to enable or disable MIG mode.
/// With `again`, also kills the next two gpushd at one of their programs. Returns a summary.
fn killed_at_each_step(fault: Option<&str>, again: bool) -> String {
    let (scene, mut agent) = Scene::new();
    let Scene { host, around, config, on, .. } = &scene;
    if let Some(fault) = fault {
        host.fault(fault);
    }
    let operation = agent.follow(agent.begin_with(on).expect("an operation"));
    assert_eq!(operation.state == OperationState::Done, fault.is_none(), "{operation:?}");
    let steps = around.take_calls();
    let mut tally = Tally::default();
    for n in 1..=steps.len() {
        for when in ["before", "after"] {
            let before = real_layout(host, 0);
            let (body, wanted) = scene.turn(&agent);
            let mut moments = vec![(n, when)];
            if again {
                moments.extend([(n + 1, "before"), (n + 2, "after")]);
            }
            around.kill_at(&moments);
            ask(&agent, &body);
            agent.wait();
            agent = outlive(host, config, &mut tally.starts);
            let point = format!("{when} {} ({n} of {})", steps[n - 1], steps.len());
            tally.take(host, &agent, around, [&before, &wanted], &point);
            let _ = around.take_calls();
        }
    }
    format!("{} outer steps, {tally}", steps.len())
}

#[test]
fn kill_during_mode_recovery_is_recovered() {
    println!("killed thrice: {}", killed_at_each_step(None, true));
}

#[test]
fn kill_during_mode_rollback_is_recovered() {
    // The rollback needs a second reset. Meanwhile the services must stay stopped.
    let fault = "nvmlGpuInstanceCreateComputeInstance* --rc UNKNOWN";
    println!("an instance fails: {}", killed_at_each_step(Some(fault), false));
}

/// Kills gpushd at every second call. An in-process test ends gpushd before and after each call of a change without a reset.
#[test]
fn kill_at_mode_change_calls_is_recovered() {
    let (scene, mut agent) = Scene::new();
    let Scene { host, around, config, .. } = &scene;
    let mut tally = Tally::default();
    for direction in ["on", "off"] {
        let calls = calls(&scene, &agent);
        for (k, call) in calls.iter().enumerate().step_by(2) {
            // gpushd resets a GPU by running a program, not by a call of the driver worker. Another
            // test kills gpushd around this program.
            if call == "gpu-reset" {
                continue;
            }
            let when = if k % 4 == 0 { "before" } else { "after" };
            bring(&scene, &agent, direction);
            let before = real_layout(host, 0);
            let (body, wanted) = scene.turn(&agent);
            let passed = calls[..k].iter().filter(|other| *other == call).count();
            host.fault(&format!("{call} --gpu 0 --after {passed} --times 1 --kill {when} --parent"));
            ask(&agent, &body);
            agent.wait();
            host.clear_faults();
            agent = outlive(host, config, &mut tally.starts);
            let point = format!("{direction}, {when} {call} ({k} of {})", calls.len());
            tally.take(host, &agent, around, [&before, &wanted], &point);
        }
        // Change the mode in the other direction.
        bring(&scene, &agent, "off");
    }
    println!("killed at driver calls: {tally}");
    assert!(tally.points() > 5, "{tally}");
}

/// Prepares GPU 0, so that the next change goes in this direction (`on` or `off`). If necessary,
/// changes the MIG mode.
fn bring(scene: &Scene, agent: &Agent, direction: &str) {
    if (real_layout(&scene.host, 0) == WHOLE) != (direction == "on") {
        let (body, _) = scene.turn(agent);
        assert_eq!(agent.follow(agent.begin_with(&body).expect("an operation")).state, OperationState::Done);
    }
}

/// Makes the next change. Returns the driver functions that have changed GPU 0, in order.
fn calls(scene: &Scene, agent: &Agent) -> Vec<String> {
    scene.host.start_trace();
    let (body, _) = scene.turn(agent);
    assert_eq!(agent.follow(agent.begin_with(&body).expect("an operation")).state, OperationState::Done);
    scene.host.trace().into_iter().filter(|call| call.gpu == Some(0)).map(|call| call.function).collect()
}

#[test]
fn kill_at_store_writes_in_mode_change_is_recovered() {
    if !strace::works("kills at each write and sync of the store in a mode change") {
        return;
    }
    let (scene, mut agent) = Scene::new();
    let Scene { host, around, config, .. } = &scene;
    let mut tally = Tally::default();
    let mut unbegun = 0;
    for call in ["pwrite64", "fdatasync"] {
        // Each kill of this test takes long. A soak kills gpushd at every write.
        for number in (1..400).step_by(crate::write_step(6)) {
            // The helper programs also write files, and must not be killed. So the fault applies
            // only to files in the state directory.
            let (trace, inject) = (format!("trace={call}"), format!("inject={call}:signal=SIGKILL:when={number}"));
            let state = Setup::on(host).state_dir();
            let files = ["gpush.db", "gpush.db-wal", "watermark"].map(|name| state.join(name).display().to_string());
            let mut strace = vec!["strace", "-f", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &inject];
            files.iter().for_each(|file| strace.extend(["-P", file]));
            let before = real_layout(host, 0);
            let (body, wanted) = scene.turn(&agent);
            let known = last(&agent).map(|one| one.id);
            agent.stop();
            let survived = match Setup::on(host).config(config).through(&strace).try_start() {
                Err(_) => false,
                Ok(mut agent) => {
                    ask(&agent, &body);
                    let id = last(&agent).map(|one| one.id);
                    let ended = id.filter(|id| known.as_ref() != Some(id)).and_then(|id| agent.outlives(&id));
                    let own = ended.and_then(|_| own_pid(&agent));
                    if let Some(own) = own {
                        let _ = kill(Pid::from_raw(own), Signal::SIGTERM);
                    }
                    agent.wait().success() && own.is_some()
                }
            };
            agent = outlive(host, config, &mut tally.starts);
            if last(&agent).map(|one| one.id) == known {
                assert_eq!(real_layout(host, 0), before, "{call} {number}: changed without a record");
                unbegun += 1;
            } else {
                tally.take(host, &agent, around, [&before, &wanted], &format!("{call} {number}"));
            }
            let _ = around.take_calls();
            if survived {
                break;
            }
        }
    }
    println!("killed at writes and syncs of the store: {tally}, {unbegun} before it was begun");
    assert!(tally.points() > 3, "{tally}");
}

/// Returns the pid of a gpushd that was started through another program.
fn own_pid(agent: &Agent) -> Option<i32> {
    let answer = agent.try_raw(b"GET /v1/health HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\n\r\n")?;
    gpush_tests::agent::parse(&answer)?.json()["pid"].as_i64()?.try_into().ok()
}
