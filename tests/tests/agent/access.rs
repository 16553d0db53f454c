//! Permissions and hidden fields: different users send the same requests, and gpushd identifies
//! them by their socket peer credentials.

use std::{
    io::Write,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
};

use gpush_api::{Code, OperationState};
use gpush_tests::{
    agent::{Agent, Answer, gi_at, parse, real_layout},
    host::Host,
};
use nix::unistd::{Group, geteuid};
use serde_json::{Value, json};

/// The uid of `nobody`, who belongs to none of the agent's groups.
const NOBODY: u32 = 65534;

/// Returns whether the test can send requests as another user. If not, prints the reason.
fn can_be_somebody_else() -> bool {
    let curl = Command::new("curl").arg("--version").stdout(Stdio::null()).status();
    if !geteuid().is_root() {
        println!("SKIPPED: only root can ask as another user");
        return false;
    }
    if !curl.is_ok_and(|status| status.success()) {
        println!("SKIPPED: curl is not installed");
        return false;
    }
    true
}

fn ask_as(uid: u32, gid: u32, agent: &Agent, method: &str, path: &str, body: Option<&Value>) -> Answer {
    let mut command = Command::new("curl");
    command.uid(uid).gid(gid);
    ask_with(command, agent, method, path, body).unwrap_or_else(|why| panic!("curl: {why}"))
}

/// Sends a request with `command`, whose last word is `curl`. If the command fails, returns its
/// output as the error.
fn ask_with(
    mut command: Command,
    agent: &Agent,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<Answer, String> {
    command.current_dir("/").env("HOME", "/");
    command.args(["--silent", "--show-error", "--include", "--request", method, "--unix-socket"]);
    command.arg(agent.socket()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if body.is_some() {
        command.args(["--header", "content-type: application/json", "--data", "@-"]);
    }
    command.arg(format!("http://gpush{path}"));
    let mut child = command.spawn().expect("curl can be started");
    let text = body.map(ToString::to_string).unwrap_or_default();
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("curl reads");
    let output = child.wait_with_output().expect("curl ends");
    parse(&output.stdout).ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn unprivileged_user_can_read_and_plan_but_not_change() {
    if !can_be_somebody_else() {
        return;
    }
    let host = Host::up("dgx-a100");
    let agent = Agent::start_public(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@4", "2g.20gb"]).state, OperationState::Done);
    let before = real_layout(&host, 0);
    host.start_trace();
    let wanted = json!({"selectors": ["0"], "layout_source": {"entries": ["7g.80gb"]}});
    let denied = ask_as(NOBODY, NOBODY, &agent, "POST", "/v1/mig/apply", Some(&wanted));
    assert_eq!(denied.status, 403);
    let error = denied.error();
    assert_eq!(error.code, Code::Denied);
    assert!(error.message.contains("uid 65534"), "{}", error.message);
    let hint = error.hint.expect("what to do");
    assert!(hint.contains("admin_groups") && hint.contains("reload"), "{hint}");
    assert_eq!(ask_as(NOBODY, NOBODY, &agent, "GET", "/v1/gpus", None).status, 200);
    assert_eq!(ask_as(NOBODY, NOBODY, &agent, "POST", "/v1/mig/plan", Some(&wanted)).status, 200);
    assert_eq!((real_layout(&host, 0), host.trace()), (before, Vec::new()));
    // The API shows which user requested an operation, but hides the pid of the process that sent
    // the request.
    let operations = ask_as(NOBODY, NOBODY, &agent, "GET", "/v1/operations", None).json();
    assert_eq!((&operations[0]["by"]["uid"], &operations[0]["by"]["pid"]), (&json!(0), &Value::Null));
}

/// Fault: if a container could connect to the socket, root of the container counted as an
/// administrator.
#[test]
fn root_in_another_pid_or_user_namespace_is_denied() {
    if !can_be_somebody_else() {
        return;
    }
    let host = Host::up("dgx-a100");
    let agent = Agent::start_public(&host, "");
    let before = real_layout(&host, 0);
    let wanted = json!({"selectors": ["0"], "layout_source": {"entries": ["7g.80gb"]}});
    for namespaces in [&["--fork", "--pid"][..], &["--user", "--map-root-user"]] {
        let through = || {
            let mut command = Command::new("unshare");
            command.args(namespaces).arg("curl");
            command
        };
        let denied = match ask_with(through(), &agent, "POST", "/v1/mig/apply", Some(&wanted)) {
            Ok(answer) => answer,
            Err(why) => {
                println!("SKIPPED: root in other namespaces {namespaces:?}: {why}");
                continue;
            }
        };
        assert_eq!(denied.status, 403, "{namespaces:?}");
        let error = denied.error();
        assert!(error.message.contains("uid 0 may not") && error.causes[0].contains("container"), "{error:?}");
        let plan = ask_with(through(), &agent, "POST", "/v1/mig/plan", Some(&wanted)).expect("an answer");
        assert_eq!(plan.status, 200, "{namespaces:?}");
    }
    assert_eq!(real_layout(&host, 0), before);
}

#[test]
fn members_of_admin_group_can_change() {
    if !can_be_somebody_else() {
        return;
    }
    let Ok(Some(group)) = Group::from_gid(NOBODY.into()) else {
        println!("SKIPPED: gid {NOBODY} has no name here");
        return;
    };
    let host = Host::up("a30x4");
    let agent = Agent::start_public(&host, &format!("[access]\nadmin_groups = [\"{}\"]\n", group.name));
    let wanted = json!({"selectors": ["0"], "layout_source": {"entries": ["2g.12gb"]}});
    assert_eq!(ask_as(NOBODY, 1, &agent, "POST", "/v1/mig/apply", Some(&wanted)).status, 403);
    let begun = ask_as(NOBODY, NOBODY, &agent, "POST", "/v1/mig/apply", Some(&wanted));
    assert_eq!(begun.status, 202, "{}", String::from_utf8_lossy(&begun.body));
    assert_eq!(agent.settle()[0].state, OperationState::Done);
    assert_eq!(agent.settle()[0].by.uid, NOBODY);
}

#[test]
fn other_users_processes_are_redacted() {
    if !can_be_somebody_else() {
        return;
    }
    let host = Host::up("dgx-a100");
    let agent = Agent::start_public(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@4", "2g.20gb@0"]).state, OperationState::Done);
    let (large, small) = (gi_at(&host, 0, 4), gi_at(&host, 0, 0));
    // Root has a process in one instance. `nobody` has a process in the other instance.
    let roots = host.process(&format!("--gpu 0 --gi {large} --ci 0 --memory 700"));
    let mut own = Command::new("sleep");
    let mut own = own.arg("987654").uid(NOBODY).gid(NOBODY).current_dir("/").spawn().expect("sleep can be started");
    let place = format!("--gpu 0 --gi {small} --ci 0 --pid {}", own.id());
    let words: Vec<&str> = std::iter::once("add").chain(place.split(' ')).collect();
    host.sim("process", &words);
    agent.settle_reads();

    let seen = ask_as(NOBODY, NOBODY, &agent, "GET", "/v1/gpus/0", None).json();
    let processes = |n: usize| &seen["mig"]["instances"][n]["compute_instances"][0]["processes"][0];
    let (mine, other) = (processes(0), processes(1));
    assert_eq!(mine["pid"], own.id(), "{seen}");
    assert_eq!(mine["uid"], NOBODY);
    assert_eq!(mine["command"], "sleep 987654");
    assert_eq!(other, &json!({"kind": "compute", "memory_mib": 700}), "of others only that they are there");

    // If gpushd refuses a plan, no field and no sentence of the error may show processes of other
    // users.
    let wanted = json!({"selectors": ["0"], "layout_source": {"entries": ["7g.80gb"]}});
    let plan = ask_as(NOBODY, NOBODY, &agent, "POST", "/v1/mig/plan", Some(&wanted));
    let text = String::from_utf8(plan.body.clone()).unwrap();
    assert!(text.contains("in use"), "{text}");
    assert!(!text.contains(&roots.to_string()), "{text}");
    assert!(text.contains(&own.id().to_string()), "{text}");

    // Root sees all processes.
    let all = agent.gpu(0).mig.unwrap().instances;
    let shown = &all[1].compute[0].processes[0];
    assert_eq!((shown.pid, shown.uid, shown.user.as_deref()), (Some(roots), Some(0), Some("root")));
    assert!(shown.command.as_ref().is_some_and(|command| !command.is_empty()));
    let _ = own.kill();
    let _ = own.wait();
}

/// The owner of a process chooses its command line. So the API must escape every part of the
/// command line that could deceive a reader.
#[test]
fn command_line_is_escaped_for_the_terminal() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["4g.24gb"]).state, OperationState::Done);
    let mut own = Command::new("sh");
    own.args(["-c", "read line", "\u{1b}[2Jtr\u{200b}ain\u{202e}yp.\nx"]).stdin(Stdio::piped());
    let mut own = own.spawn().expect("sh can be started");
    let place = format!("--gpu 0 --gi {} --ci 0 --pid {}", gi_at(&host, 0, 0), own.id());
    let words: Vec<&str> = std::iter::once("add").chain(place.split(' ')).collect();
    host.sim("process", &words);
    agent.settle_reads();
    let seen = agent.get("/v1/gpus/0").json();
    assert_eq!(
        seen["mig"]["instances"][0]["compute_instances"][0]["processes"][0]["command"],
        "sh -c read line ?[2Jtr?ain?yp. x",
        "{seen}"
    );
    drop(own.stdin.take());
    let _ = own.wait();
}

#[test]
fn one_user_cannot_use_all_connections() {
    if !can_be_somebody_else() {
        return;
    }
    let host = Host::up("a30x4");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --hang");
    let agent = Agent::start_public(&host, "");
    let mut operation = agent.begin(&["0"], &["4g.24gb"]).unwrap();
    // Wait until the operation hangs. From then on, the operation does not change, so a long poll
    // does not return before its timeout.
    while operation.progress[0].doing.is_none() {
        let path = format!("/v1/operations/{}?after={}&wait_ms=10000", operation.id, operation.revision);
        operation = serde_json::from_value(agent.get(&path).json()).unwrap();
    }
    let poll = format!("http://gpush/v1/operations/op-1?after={}&wait_ms=60000", operation.revision);
    // One curl opens as many long polls as the limit allows, and then another curl sends one more
    // request. The first curl retries, because a request of this test may use a connection at the
    // same moment.
    let mut held = Command::new("curl");
    held.uid(NOBODY).gid(NOBODY).current_dir("/").env("HOME", "/");
    held.args(["--silent", "--parallel", "--parallel-immediate", "--parallel-max", "40"]);
    held.args(["--retry", "1000", "--retry-delay", "1", "--unix-socket"]);
    held.arg(agent.socket()).stdout(Stdio::null()).stderr(Stdio::null());
    for _ in 0..32 {
        held.arg(&poll);
    }
    let mut held = held.spawn().expect("curl can be started");
    let mut tries = 0;
    let refused = loop {
        let answer = ask_as(NOBODY, NOBODY, &agent, "GET", "/v1/version", None);
        if answer.status != 200 {
            break answer;
        }
        tries += 1;
        assert!(tries < 5000, "never refused");
    };
    assert_eq!(refused.status, 503);
    assert!(
        refused.error().message.contains("uid 65534, together with its subordinate uids, has 32 connections"),
        "{:?}",
        refused.error()
    );
    // Root is not limited.
    assert_eq!(agent.get("/v1/version").status, 200);
    let _ = held.kill();
    let _ = held.wait();
    host.clear_faults();
    assert_eq!(agent.follow(operation).state, OperationState::Done);
}
