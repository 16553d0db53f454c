//! Shares of a GPU through MPS: taken, used, refused, ended; and whom the daemon's directory lets in.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

use gpush_api::{ApiError, Code, MpsShareTaken, MpsState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{Client, act, base, becomes, controls, daemon, fault, is_open, names, parts, reaches, share},
};
use nix::unistd::geteuid;
use serde_json::{Value, json};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[mps]\nhealth_s = 1\n[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// The user `nobody`, and another one.
const NOBODY: u32 = 65534;
const OTHER: u32 = 65532;

fn ready(config: &str) -> (Host, Agent) {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, config);
    reaches(&agent, "0", MpsState::Ready);
    (host, agent)
}

fn ctl(host: &Host, agent: &Agent, args: &[&str]) -> Command {
    let mut command = host.command(program("gpushctl"));
    command.args(args).env("GPUSH_SOCKET", agent.socket()).env("LANG", "C.UTF-8").env("PATH", path());
    command.stdin(Stdio::null());
    command
}

fn path() -> String {
    let ours = program("gpushctl").parent().expect("a directory").display().to_string();
    format!("{ours}:{}", std::env::var("PATH").unwrap_or_default())
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// As a user: the answer of `gpushctl --json`, or its error.
pub(crate) fn share_as(uid: u32, host: &Host, agent: &Agent, args: &[&str]) -> Result<MpsShareTaken, ApiError> {
    let mut command = ctl(host, agent, &[&["mps", "env", "0", "--json", "--for", "1h"], args].concat());
    let output = command.uid(uid).gid(uid).current_dir("/").env("HOME", "/").output().expect("gpushctl");
    let parsed = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
    match parsed(&output.stdout) {
        Some(value) if output.status.success() => Ok(serde_json::from_value(value).expect("a share")),
        other => {
            let value = parsed(&output.stderr).or(other).unwrap_or_else(|| panic!("{output:?}"));
            Err(serde_json::from_value(value["error"].clone()).unwrap_or_else(|error| panic!("{error}: {output:?}")))
        }
    }
}

/// A host that other users compute on.
fn public() -> Host {
    opened(Host::up(HOST))
}

/// Opens a host's directories to other users.
pub(crate) fn opened(host: Host) -> Host {
    // The directory of a test is its own user's otherwise.
    let around = host.dir().parent().expect("a directory");
    fs::set_permissions(around, fs::Permissions::from_mode(0o755)).expect("it can be opened");
    // Whoever computes on the host notes there that it does.
    fs::set_permissions(host.dir().join("proc"), fs::Permissions::from_mode(0o777)).expect("it can be opened");
    host
}

fn pipe(taken: &MpsShareTaken) -> String {
    taken.environment.iter().find(|(name, _)| name == "CUDA_MPS_PIPE_DIRECTORY").expect("a directory").1.clone()
}

#[test]
fn env_run_and_release_hand_out_what_a_client_needs_and_take_it_back() {
    let (host, agent) = ready(CONFIG);
    let env = ctl(&host, &agent, &["mps", "env", "0", "--percentage", "25", "--memory", "2G", "--for", "2h"]);
    let env = { env }.output().expect("gpushctl");
    let script = format!("{}\nexec gpush-sim mps-client", stdout(&env));
    let mut shell = host.command("sh");
    let output = shell.args(["-c", &script]).env("PATH", path()).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut client = output.expect("a shell");
    let seen = becomes(&agent, "0", "with a client", |daemon| daemon.clients.len() == 1);
    assert_eq!((seen.shares.len(), seen.granted_percent), (1, 25));
    assert_eq!(seen.clients[0].share.as_ref(), Some(&seen.shares[0].id));
    let id = seen.shares[0].id.clone();
    assert!(ctl(&host, &agent, &["mps", "release", &id]).output().expect("gpushctl").status.success());
    let without = daemon(&agent, "0");
    assert_eq!((without.shares.len(), without.clients.len()), (0, 1), "its clients go on, without share");
    assert!(without.findings.iter().any(|finding| finding.contains("1 client runs without a share")), "{without:#?}");
    assert!(!is_open(Path::new(&without.pipe_directory.expect("a directory"))));
    client.kill().and_then(|()| client.wait()).expect("a client ends");

    // `run` gives it back at the end of the command, whose status is its own.
    let run = ctl(
        &host,
        &agent,
        &["mps", "run", "0", "--percentage", "12.5", "--", "sh", "-c", "env | grep ^CUDA_MPS; exit 7"],
    );
    let run = { run }.output().expect("gpushctl");
    assert_eq!(run.status.code(), Some(7), "{run:?}");
    assert!(stdout(&run).contains("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=12.5"), "{run:?}");
    becomes(&agent, "0", "without shares", |daemon| daemon.shares.is_empty());
}

#[test]
fn no_more_is_handed_out_than_the_rule_allows_and_a_request_counts_once() {
    let (host, agent) = ready(&format!("{CONFIG}mps = {{ percentage = 60, shares_percent = 100, max_clients = 3 }}\n"));
    let bad = share(&agent, "0", &json!({ "percentage": 61 })).unwrap_err();
    assert_eq!(bad.code, Code::BadRequest, "{bad:?}");
    for memory in [json!(24 * 1024), json!(u64::MAX), json!(0), json!("1.5G")] {
        let bad = share(&agent, "0", &json!({ "memory_limit_mib": memory })).unwrap_err();
        assert_eq!(bad.code, Code::BadRequest, "{memory}: {bad:?}");
        assert!(format!("{bad:?}").contains("memory"), "{memory}: {bad:?}");
    }
    share(&agent, "0", &json!({ "percentage": 60 })).expect("a share");
    let full = share(&agent, "0", &json!({ "percentage": 40.1 })).unwrap_err();
    assert_eq!(full.code, Code::Conflict, "{full:?}");
    assert!(full.message.contains("40% of 100% left"), "{full:?}");
    share(&agent, "0", &json!({ "percentage": 39 })).expect("a share");
    let keyed = |percentage: f64| {
        let headers = "content-type: application/json\r\nidempotency-key: once\r\n";
        agent.request("POST", "/v1/mps/0/shares", headers, json!({ "percentage": percentage }).to_string().as_bytes())
    };
    let (one, same) = (keyed(1.0), keyed(1.0));
    assert_eq!(one.json()["share"], same.json()["share"], "the same request, sent again");
    assert_eq!(keyed(0.5).error().code, Code::Conflict, "another one under its key");
    let most = share(&agent, "0", &json!({ "percentage": 0.1 })).unwrap_err();
    assert!(most.message.contains("3 shares"), "{most:?}");
    assert_eq!(daemon(&agent, "0").shares.len(), 3);
    for wrong in
        [json!({ "for_s": 0 }), json!({ "with_pid": 4_000_000 }), json!({ "percentage": 0 }), json!({ "percents": 1 })]
    {
        assert_eq!(share(&agent, "0", &wrong).unwrap_err().code, Code::BadRequest, "{wrong}");
    }
    drop(host);
}

/// Without a lock per key, several targets each gave a share: 54 of 60 rounds.
#[test]
fn one_key_on_several_targets_takes_one_share() {
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 4\n");
    let agent = Agent::start(&host, &CONFIG.replace("\"0\"", "\"0-3\""));
    for target in ["0", "1", "2", "3"] {
        reaches(&agent, target, MpsState::Ready);
    }
    for round in 0..10 {
        let headers = format!("content-type: application/json\r\nidempotency-key: round-{round}\r\n");
        let take = |target: usize| {
            let body = json!({ "percentage": 1 }).to_string();
            agent.request("POST", &format!("/v1/mps/{target}/shares"), &headers, body.as_bytes()).status
        };
        let statuses: Vec<u16> = std::thread::scope(|scope| {
            let asked: Vec<_> = (0..4).map(|target| scope.spawn(move || take(target))).collect();
            asked.into_iter().map(|one| one.join().expect("an answer")).collect()
        });
        let taken = statuses.iter().filter(|status| **status == 200).count();
        assert_eq!(taken, 1, "round {round}: {statuses:?}");
    }
    let shares: usize = (0..4).map(|target| daemon(&agent, &target.to_string()).shares.len()).sum();
    assert_eq!(shares, 10);
}

#[test]
fn a_share_ends_with_its_process_its_time_and_its_boot() {
    let (host, agent) = ready(CONFIG);
    let process = host.process("--gpu 0");
    let of = |body: Value| share(&agent, "0", &body).expect("a share").share.id;
    of(json!({ "percentage": 1, "with_pid": process }));
    of(json!({ "percentage": 2, "for_s": 1 }));
    let lasting = of(json!({ "percentage": 3 }));
    assert_eq!(daemon(&agent, "0").shares.len(), 3);
    host.end_process(process);
    let left = becomes(&agent, "0", "with one share", |daemon| daemon.shares.len() == 1);
    assert_eq!(left.shares[0].id, lasting);
    // Over the agent's end, and not over the host's.
    agent.kill();
    let agent = Agent::start(&host, CONFIG);
    assert_eq!(reaches(&agent, "0", MpsState::Ready).shares, left.shares);
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    for pid in controls(&base(&host)) {
        assert!(gpush_tests::mps::signal(pid, nix::sys::signal::Signal::SIGKILL));
    }
    let agent = Agent::start(&host, CONFIG);
    assert_eq!(reaches(&agent, "0", MpsState::Ready).shares, []);
}

#[test]
fn one_user_at_a_time_and_the_next_one_gets_a_directory_and_a_daemon_of_its_own() {
    if !geteuid().is_root() {
        println!("SKIPPED users of MPS daemons: only root can ask as another user");
        return;
    }
    let host = public();
    let agent = Agent::start_public(&host, CONFIG);
    let first = reaches(&agent, "0", MpsState::Ready);
    let looks = |uid: u32, dir: &str| {
        let list = Command::new("ls").arg(dir).uid(uid).gid(uid).stdout(Stdio::null()).stderr(Stdio::null()).status();
        list.expect("ls").success()
    };
    let theirs = share_as(NOBODY, &host, &agent, &["--percentage", "10"]).expect("a share");
    assert!(looks(NOBODY, &pipe(&theirs)) && !looks(OTHER, &pipe(&theirs)), "the access list of the directory");
    let client = Client::begin(&host, &theirs.environment, Some(NOBODY));
    let first_line = client.says();
    assert!(first_line.starts_with("active"), "{first_line} {:?}", agent.get("/v1/mps/0/logs?lines=12").json());
    let seen = becomes(&agent, "0", "with its client", |daemon| daemon.clients.len() == 1);
    assert_eq!((seen.uid, seen.clients[0].uid, seen.servers[0].uid), (Some(NOBODY), Some(NOBODY), Some(NOBODY)));
    // Nothing keeps root out, whose client the daemon lets hang until the others have ended.
    let waits = Client::begin(&host, &theirs.environment, None);
    let told = becomes(&agent, "0", "with one that waits", |daemon| !daemon.findings.is_empty());
    let named = format!("(pid {}, root) waits: a daemon serves one user at a time", waits.pid());
    assert!(told.findings.iter().any(|finding| finding.contains(&named)), "{:?}", told.findings);
    agent.wait_for_log("a client waits, for its daemon serves another user");
    waits.end();
    becomes(&agent, "0", "with nobody who waits", |daemon| daemon.findings.is_empty());
    // Another one is told whose it is.
    let refused = share_as(OTHER, &host, &agent, &[]).unwrap_err();
    assert_eq!(refused.code, Code::Conflict, "{refused:?}");
    assert!(refused.message.contains("is in use by nobody"), "{refused:?}");
    // Without share, and still there: its clients would be in the way of another's.
    let released = agent.request("DELETE", &format!("/v1/mps/shares/{}", theirs.share.id), "", b"");
    assert_eq!(released.status, 200);
    assert!(!looks(NOBODY, &pipe(&theirs)), "let in no more");
    let refused = share_as(OTHER, &host, &agent, &[]).unwrap_err();
    assert!(refused.message.contains("1 client of another user"), "{refused:?}");
    assert_eq!(daemon(&agent, "0").pid, first.pid);
    client.end();

    let others = share_as(OTHER, &host, &agent, &[]).expect("a share");
    let second = reaches(&agent, "0", MpsState::Ready);
    assert_ne!((second.pid, pipe(&others)), (first.pid, pipe(&theirs)));
    assert!(second.since >= first.since, "another daemon since then: {second:?}");
    assert_eq!(second.uid, Some(OTHER));
    assert!(looks(OTHER, &pipe(&others)) && !looks(NOBODY, &pipe(&others)));
    assert!(!Path::new(&pipe(&theirs)).exists());
    assert_eq!(controls(&base(&host)), [second.pid.expect("a pid").cast_signed()]);
    let client = Client::begin(&host, &others.environment, Some(OTHER));
    assert!(client.says().starts_with("active"));
    // What the first one kept of its environment leads nowhere.
    let late = Client::begin(&host, &theirs.environment, Some(NOBODY));
    assert_eq!(late.says(), "without MPS");
    late.end();
    client.end();
}

#[test]
fn two_administrators_who_restart_at_a_time_end_no_client() {
    if !geteuid().is_root() {
        println!(
            "SKIPPED clients of restarted MPS daemons: the door is shut to other users than its own, which only root can be"
        );
        return;
    }
    let host = public();
    let agent = Agent::start_public(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let theirs = share_as(NOBODY, &host, &agent, &["--percentage", "10"]).expect("a share");
    let dir = pipe(&theirs);
    let open = || agent.await_that("the door open", || is_open(Path::new(&dir)));
    let (over, mut served, mut lost) = (AtomicBool::new(false), 0, Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let rounds = (0..).take_while(|_| !over.load(Ordering::Relaxed));
                for round in rounds {
                    let _refused_or_not = act(&agent, "0", "restart", &json!({}));
                    open();
                    // Longer and shorter, for clients to come at any time.
                    (0..round % 12).for_each(|_| drop(daemon(&agent, "0")));
                }
            });
        }
        for _ in 0..30 {
            open();
            // Several: while one keeps an administrator out, the other one's deed is done.
            let come = [(); 3].map(|()| Client::begin(&host, &theirs.environment, Some(NOBODY)));
            // Whoever comes while the daemon does not serve runs past it.
            let mut inside: Vec<Client> = come.into_iter().filter(|one| one.says().starts_with("active")).collect();
            served += inside.len();
            if !inside.is_empty() {
                let answers = [(); 3].map(|()| act(&agent, "0", "restart", &json!({})).status);
                let stay = inside.iter_mut().all(|client| client.lives() && client.said().is_empty());
                lost.extend((answers != [409; 3] || !stay).then_some(answers));
            }
            inside.into_iter().for_each(Client::end);
        }
        over.store(true, Ordering::Relaxed);
    });
    println!("{served} clients");
    assert!(served > 0 && lost.is_empty(), "{lost:?} of {served}");
}

#[test]
fn the_user_of_a_directory_that_was_deleted_is_not_forgotten_with_it() {
    if !geteuid().is_root() {
        println!("SKIPPED users of MPS daemons: only root can ask as another user");
        return;
    }
    let host = public();
    let agent = Agent::start_public(&host, CONFIG);
    let first = reaches(&agent, "0", MpsState::Ready);
    let theirs = share_as(NOBODY, &host, &agent, &["--percentage", "10"]).expect("a share");
    // What is left of the daemon may have clients.
    for function in ["Compute", "Graphics", "MPSCompute"] {
        host.fault(&format!("nvmlDeviceGet{function}RunningProcesses* --rc UNKNOWN"));
    }
    agent.kill();
    fs::remove_dir_all(base(&host).join(&first.target)).expect("it can be deleted");
    let agent = Agent::start_public(&host, CONFIG);
    // The share stands while its daemon can't be started yet.
    becomes(&agent, "0", "waiting for what is left", |daemon| {
        daemon.state == MpsState::BackingOff && daemon.shares.len() == 1
    });
    host.clear_faults();
    let second = becomes(&agent, "0", "ready", |daemon| daemon.state == MpsState::Ready && daemon.shares.len() == 1);
    assert_eq!(second.uid, Some(NOBODY), "whose it is, before anybody else may have it");
    let released = agent.request("DELETE", &format!("/v1/mps/shares/{}", theirs.share.id), "", b"");
    assert_eq!(released.status, 200);
    let others = share_as(OTHER, &host, &agent, &[]).expect("a share");
    let third = reaches(&agent, "0", MpsState::Ready);
    assert_eq!(third.uid, Some(OTHER));
    assert_ne!((third.pid, Some(pipe(&others))), (second.pid, second.pipe_directory));
}

#[test]
fn while_a_daemon_does_not_serve_nobody_is_let_in_and_no_environment_is_handed_out() {
    let (host, agent) = ready(CONFIG);
    let taken = share(&agent, "0", &json!({})).expect("a share");
    let pipe = daemon(&agent, "0").pipe_directory.expect("a directory");
    assert!(is_open(Path::new(&pipe)));
    fault(&host, "slow-start --ms 3000 --times 1");
    let pid = daemon(&agent, "0").pid.expect("a pid").cast_signed();
    assert!(gpush_tests::mps::signal(pid, nix::sys::signal::Signal::SIGKILL));
    reaches(&agent, "0", MpsState::Starting);
    assert!(!is_open(Path::new(&pipe)), "shut while it starts");
    let env = { ctl(&host, &agent, &["--request-timeout", "1", "mps", "env", "0", "--for", "1h"]) }
        .output()
        .expect("gpushctl");
    assert!(!env.status.success() && env.stdout == b"false\n", "a shell that evaluates it stops: {env:?}");
    let said = String::from_utf8_lossy(&env.stderr).into_owned();
    assert!(said.contains("its MPS daemon is starting"), "{said}");
    let ran = { ctl(&host, &agent, &["--request-timeout", "1", "mps", "run", "0", "--", "true"]) }
        .output()
        .expect("gpushctl");
    assert_eq!(ran.status.code(), Some(125), "{ran:?}");
    reaches(&agent, "0", MpsState::Ready);
    assert!(is_open(Path::new(&pipe)), "whoever had a share has it still");
    let client = Client::start(&host, &taken.environment);
    assert!(client.first.starts_with("active"), "{}", client.first);
    client.end();
    assert_eq!(names(&base(&host)).len(), 3, "one target, the lock, and the logs");
    assert_eq!(parts(&base(&host)).iter().filter(|part| part.role == gpush_tests::mps::Role::Control).count(), 1);
}

#[test]
fn a_command_in_a_pid_namespace_of_its_own_has_its_share_for_as_long_as_it_runs() {
    if !geteuid().is_root() {
        println!("SKIPPED shares from another pid namespace: only root can make one");
        return;
    }
    let (host, agent) = ready(CONFIG);
    let mut unshared = host.command("unshare");
    unshared.args(["--pid", "--fork", "--kill-child"]).arg(program("gpushctl"));
    unshared.args(["mps", "run", "0", "-p", "10", "--", "sleep", "600"]);
    unshared.env("GPUSH_SOCKET", agent.socket()).env("PATH", path()).stdin(Stdio::null());
    let Ok(mut child) = unshared.spawn() else {
        println!("SKIPPED shares from another pid namespace: there is no unshare");
        return;
    };
    let shared = becomes(&agent, "0", "with a share", |daemon| !daemon.shares.is_empty());
    // There it is process 1.
    let pid = shared.shares[0].with_pid.expect("a pid");
    assert!(pid > 1 && fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives").contains("NSpid:"));
    child.kill().and_then(|()| child.wait()).expect("it ends");
    becomes(&agent, "0", "without shares", |daemon| daemon.shares.is_empty());
    // Another one of there is nobody here.
    let said = "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); \
                body = b'{\"with_pid\": 2}'; \
                s.sendall(b'POST /v1/mps/0/shares HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\n\
                content-length: %d\\r\\nconnection: close\\r\\n\\r\\n' % len(body) + body); print(s.recv(65536).decode())";
    let asked = Command::new("unshare")
        .args(["--pid", "--fork", "python3", "-c", said])
        .arg(agent.socket())
        .output()
        .expect("unshare");
    let told = stdout(&asked);
    if told.is_empty() {
        println!("SKIPPED a pid of another namespace: there is no python3");
    } else {
        assert!(told.contains("in another pid namespace"), "{asked:?}");
    }
    assert!(daemon(&agent, "0").shares.is_empty());
}
