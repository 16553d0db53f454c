//! Leases on MPS targets: gpushd grants and refuses them, programs use them, and they end. Other
//! tests check which users can enter the pipe directory.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

use gpush_api::{Code, LeaseGrant, LeaseState, MpsState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{
        Client, act, base, becomes, controls, daemon, is_open, lease, lease_becomes, lease_for, reaches, release,
        signal,
    },
};
use nix::{sys::signal::Signal, unistd::geteuid};
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[mps]\nhealth = \"1s\"\n[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// Uid of `nobody`. The next constant is the uid of another user.
const NOBODY: u32 = 65534;
const OTHER: u32 = 65532;

fn ready(config: &str) -> (Host, Agent) {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, config);
    reaches(&agent, "0", MpsState::Ready);
    (host, agent)
}

/// Starts a host whose directories other users can enter.
fn public() -> Host {
    Host::up(HOST).opened()
}

fn pipe(taken: &LeaseGrant) -> String {
    taken.environment.iter().find(|(name, _)| name == "CUDA_MPS_PIPE_DIRECTORY").expect("a directory").1.clone()
}

/// Runs two clients, each with a lease of 50 % of a daemon. Kills one client at a time, and immediately requests its
/// share again. In every second round, the client is still a zombie at the request.
#[test]
fn share_of_a_killed_client_is_granted_at_once() {
    const ROUNDS: usize = 16;
    let (host, agent) = ready(CONFIG);
    let run = || {
        let mut command = host.command(program("gpushctl"));
        let words = ["--socket", agent.socket().to_str().expect("text"), "run", "--mps", "50", "--"];
        command.args(words).arg(program("gpush-sim")).arg("mps-client");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gpushctl");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).expect("a line");
        assert!(line.starts_with("active"), "{line}");
        child
    };
    let (mut clients, mut refused) = (vec![run(), run()], Vec::new());
    for round in 0..ROUNDS {
        let mut killed = clients.remove(0);
        killed.kill().expect("it runs");
        if round % 2 == 0 {
            killed.wait().expect("its end");
        }
        // The request has no `wait`. Nevertheless, gpushd lets the request wait, because the process of a lease has
        // ended.
        let asked = std::time::Instant::now();
        match lease(&agent, "0", &json!({ "percentage": 50 })) {
            Ok(granted) => drop(release(&agent, granted.lease.id)),
            Err(error) => refused.push((round, asked.elapsed(), error)),
        }
        killed.wait().expect("its end");
        becomes(&agent, "0", "with one lease", |daemon| daemon.leases.len() == 1);
        clients.push(run());
    }
    for mut client in clients {
        client.kill().expect("it runs");
        client.wait().expect("its end");
    }
    assert!(refused.is_empty(), "{} of {ROUNDS}: {refused:#?}\n{}", refused.len(), agent.log());
}

/// A daemon serves one user at a time. gpushd refuses a second user until the last client of the
/// first user has ended.
#[test]
fn next_user_gets_a_new_directory_and_daemon() {
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
    let theirs = lease_for(&agent, NOBODY, "0", &json!({ "percentage": 10 })).expect("a lease");
    assert!(looks(NOBODY, &pipe(&theirs)) && !looks(OTHER, &pipe(&theirs)), "the access list of the directory");
    let client = Client::begin(&host, &theirs.environment, Some(NOBODY));
    let first_line = client.says();
    assert!(first_line.starts_with("active"), "{first_line} {:?}", agent.get("/v1/mps/0/logs?lines=12").json());
    let seen = becomes(&agent, "0", "with its client", |daemon| daemon.clients.len() == 1);
    assert_eq!((seen.uid, seen.clients[0].uid, seen.servers[0].uid), (Some(NOBODY), Some(NOBODY), Some(NOBODY)));
    // Root can always enter the directory. If root starts a client, that client waits until the other
    // clients have ended.
    let waits = Client::begin(&host, &theirs.environment, None);
    let reported = becomes(&agent, "0", "with a waiting client", |daemon| !daemon.findings.is_empty());
    let named = format!("(pid {}, root) waits: the daemon serves one user at a time", waits.pid());
    assert!(reported.findings.iter().any(|finding| finding.contains(&named)), "{:?}", reported.findings);
    agent.wait_for_log("a client waits because its MPS daemon serves another user");
    waits.end();
    becomes(&agent, "0", "without a waiting client", |daemon| daemon.findings.is_empty());
    // The error names the holder of the lease to the other user.
    let refused = lease_for(&agent, OTHER, "0", &json!({})).unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    let named = format!("lease {} of nobody", theirs.lease.id);
    assert!(refused.causes.iter().any(|cause| cause.contains(&named)), "{refused:?}");
    // The lease is released, but its client still runs.
    assert_eq!(release(&agent, theirs.lease.id).state, LeaseState::Releasing);
    assert!(!looks(NOBODY, &pipe(&theirs)), "not admitted any more");
    let refused = lease_for(&agent, OTHER, "0", &json!({})).unwrap_err();
    assert!(refused.causes.iter().any(|cause| cause.contains(&named)), "{refused:?}");
    assert_eq!(daemon(&agent, "0").pid, first.pid);
    client.end();
    lease_becomes(&agent, theirs.lease.id, LeaseState::Ended);

    let others = lease_for(&agent, OTHER, "0", &json!({})).expect("a lease");
    let second = reaches(&agent, "0", MpsState::Ready);
    assert_ne!((second.pid, pipe(&others)), (first.pid, pipe(&theirs)));
    assert!(second.since >= first.since, "another daemon since then: {second:?}");
    assert_eq!(second.uid, Some(OTHER));
    assert!(looks(OTHER, &pipe(&others)) && !looks(NOBODY, &pipe(&others)));
    assert!(!Path::new(&pipe(&theirs)).exists());
    assert_eq!(controls(&base(&host)), [second.pid.expect("a pid").cast_signed()]);
    let client = Client::begin(&host, &others.environment, Some(OTHER));
    assert!(client.says().starts_with("active"));
    // With the environment of the first lease, a client finds no daemon any more.
    let late = Client::begin(&host, &theirs.environment, Some(NOBODY));
    assert_eq!(late.says(), "without MPS");
    late.end();
    client.end();
}

/// Two administrators restart the daemon while clients start. While a client is connected, gpushd
/// refuses a restart.
#[test]
fn concurrent_restarts_end_no_client() {
    if !geteuid().is_root() {
        println!("SKIPPED clients of restarted MPS daemons: only root can start programs of other users");
        return;
    }
    let host = public();
    let agent = Agent::start_public(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let theirs = lease_for(&agent, NOBODY, "0", &json!({ "percentage": 10 })).expect("a lease");
    let dir = pipe(&theirs);
    let open = || agent.await_that("access is open", || is_open(Path::new(&dir)));
    let (over, mut served, mut lost) = (AtomicBool::new(false), 0, Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let rounds = (0..).take_while(|_| !over.load(Ordering::Relaxed));
                for round in rounds {
                    let _refused_or_not = act(&agent, "0", "restart", &json!({}));
                    open();
                    // Make a different number of requests in each round, so that clients connect at
                    // different moments.
                    (0..round % 12).for_each(|_| drop(daemon(&agent, "0")));
                }
            });
        }
        for _ in 0..30 {
            open();
            // Several clients start while several restarts are requested. A client may block the
            // restart of one administrator, but not that of the other.
            let come = [(); 3].map(|()| Client::begin(&host, &theirs.environment, Some(NOBODY)));
            // If a client starts while the daemon does not serve, it runs without MPS.
            let mut inside: Vec<Client> = come.into_iter().filter(|one| one.says().starts_with("active")).collect();
            served += inside.len();
            if !inside.is_empty() {
                let answers = [(); 3].map(|()| act(&agent, "0", "restart", &json!({})).status);
                let stay = inside.iter_mut().all(|client| client.lives() && client.printed().is_empty());
                lost.extend((answers != [409; 3] || !stay).then_some(answers));
            }
            inside.into_iter().for_each(Client::end);
        }
        over.store(true, Ordering::Relaxed);
    });
    println!("{served} clients");
    assert!(served > 0 && lost.is_empty(), "{lost:?} of {served}");
}

/// The pipe directory is deleted while gpushd does not run. gpushd still knows the user, because the lease names the
/// user.
#[test]
fn lease_keeps_its_user_when_the_directory_is_deleted() {
    if !geteuid().is_root() {
        println!("SKIPPED users of MPS daemons: only root can ask as another user");
        return;
    }
    let host = public();
    let agent = Agent::start_public(&host, CONFIG);
    let first = reaches(&agent, "0", MpsState::Ready);
    let theirs = lease_for(&agent, NOBODY, "0", &json!({ "percentage": 10 })).expect("a lease");
    // Let these driver calls fail. gpushd then cannot know whether the leftover server has clients.
    for function in ["Compute", "Graphics", "MPSCompute"] {
        host.fault(&format!("nvmlDeviceGet{function}RunningProcesses* --rc UNKNOWN"));
    }
    agent.kill();
    fs::remove_dir_all(base(&host).join(&first.target)).expect("the directory can be deleted");
    let agent = Agent::start_public(&host, CONFIG);
    // gpushd cannot start the daemon yet, but the lease stays active.
    becomes(&agent, "0", "waiting for the leftovers", |daemon| {
        daemon.state == MpsState::BackingOff && daemon.leases.len() == 1
    });
    host.clear_faults();
    let second = becomes(&agent, "0", "ready", |daemon| daemon.state == MpsState::Ready && daemon.leases.len() == 1);
    assert_eq!(second.uid, Some(NOBODY), "the daemon belongs to the holder of the lease");
    release(&agent, theirs.lease.id);
    lease_becomes(&agent, theirs.lease.id, LeaseState::Ended);
    let others = lease_for(&agent, OTHER, "0", &json!({})).expect("a lease");
    let third = reaches(&agent, "0", MpsState::Ready);
    assert_eq!(third.uid, Some(OTHER));
    assert_ne!((third.pid, Some(pipe(&others))), (second.pid, second.pipe_directory));
}

#[test]
fn process_of_another_pid_namespace_is_refused_as_a_binding() {
    let (_host, agent) = ready(CONFIG);
    let printed = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); \
                body = b'{\"share\": {\"kind\": \"mps\"}, \"process\": 2}'; \
                s.sendall(b'POST /v1/leases HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\n\
                content-length: %d\\r\\nconnection: close\\r\\n\\r\\n' % len(body) + body); print(s.recv(65536).decode())";
    let asked =
        Command::new("unshare").args(["--pid", "--fork", "python3", "-c", printed]).arg(agent.socket()).output().ok();
    match asked
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .filter(|reported| !reported.is_empty())
    {
        Some(reported) => assert!(reported.contains("in another pid namespace"), "{reported}"),
        None => println!("SKIPPED a pid of another namespace: there is no unshare or no python3"),
    }
    assert!(daemon(&agent, "0").leases.is_empty());
}

#[test]
fn client_that_outlives_run_keeps_the_capacity_until_it_ends() {
    let (host, agent) = ready(CONFIG);
    let script = format!("setsid {} mps-client > /dev/null 2>&1 & read _", program("gpush-sim").display());
    let mut run = host.command(program("gpushctl"));
    run.args(["run", "--mps", "100", "--", "/bin/sh", "-c", &script]);
    let mut run = run.env("GPUSH_SOCKET", agent.socket()).stdin(Stdio::piped()).spawn().expect("gpushctl");
    let seen = becomes(&agent, "0", "with the client", |daemon| daemon.clients.len() == 1);
    let (id, client) = (seen.leases[0].id, seen.clients[0].pid.expect("a pid"));
    drop(run.stdin.take());
    run.wait().expect("gpushctl ends");
    lease_becomes(&agent, id, LeaseState::Releasing);
    let refused = lease(&agent, "0", &json!({ "percentage": 100 })).expect_err("the client runs");
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains(&format!("lease {id} of"))), "{refused:?}");
    assert!(signal(client.cast_signed(), Signal::SIGKILL));
    lease_becomes(&agent, id, LeaseState::Ended);
    lease(&agent, "0", &json!({ "percentage": 100 })).expect("a lease");
}
