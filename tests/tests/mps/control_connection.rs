//! Processes that keep an MPS daemon from answering, and daemons with an unknown protocol. The
//! tests check what gpushd reports to which users.

use std::{
    fs,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{PermissionsExt, symlink},
            process::CommandExt,
        },
    },
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use gpush_tests::{
    agent::{Agent, PATIENCE, parse},
    host::{Host, program},
    mps::{Served, becomes, fault},
};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};
use serde_json::{Value, json};

const CONFIG: &str = "[mps]\nhealth = \"1s\"\n\n[[gpu]]\nmatch = [\"4\"]\nmode = \"mps\"\n";

/// Uid of `nobody`, who is in no group of this test.
const NOBODY: u32 = 65534;

fn until(what: &str, agent: &Agent, is_so: impl Fn(&Value) -> bool) -> Value {
    let started = Instant::now();
    loop {
        let daemon = agent.get("/v1/mps/4").json();
        if is_so(&daemon) {
            return daemon;
        }
        assert!(started.elapsed() < PATIENCE, "not in time: {what}: {daemon:#}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn ready(agent: &Agent) -> Value {
    until("the daemon is ready", agent, |daemon| daemon["state"] == "ready" && daemon["reasons"] == json!([]))
}

/// A process. Dropping this value kills the process.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

/// Starts a process that connects to the daemon's public socket and sends nothing.
fn half_open(pipe: &str) -> Ended {
    let fd: OwnedFd =
        socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    let at = UnixAddr::new(&std::path::Path::new(pipe).join("control")).expect("a short path");
    socket::connect(std::os::fd::AsRawFd::as_raw_fd(&fd), &at).expect("the daemon listens");
    Ended(Command::new("sleep").arg("600").stdin(fd).spawn().expect("the process can be started"))
}

/// Starts a client of the daemon. While a daemon has a client, gpushd does not end the daemon.
fn client(host: &Host, pipe: &str) -> Ended {
    let mut command = Command::new(program("gpush-sim"));
    command.arg("mps-client").env("NVML_SIM_STATE", host.dir()).env("CUDA_MPS_PIPE_DIRECTORY", pipe);
    Ended(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("the process can be started"))
}

fn reasons_for(uid: u32, agent: &Agent) -> Option<String> {
    let mut command = Command::new("curl");
    command.uid(uid).gid(uid).current_dir("/").args(["--silent", "--include", "--unix-socket"]);
    let output = command.arg(agent.socket()).arg("http://gpush/v1/mps").output().ok()?;
    Some(parse(&output.stdout)?.json()[0]["reasons"].to_string())
}

/// A process has connected to the daemon and sends nothing, so the daemon does not answer. gpushd
/// does not show the pid of this process to other users.
#[test]
fn blocking_process_is_named_only_to_permitted_users() {
    let host = Host::up("mixed");
    let agent = Agent::start_public(&host, CONFIG);
    let daemon = until("the daemon is ready", &agent, |daemon| daemon["state"] == "ready");
    let pipe = daemon["pipe_directory"].as_str().unwrap().to_owned();
    let _client = client(&host, &pipe);
    until("the client is seen", &agent, |daemon| daemon["clients"].as_array().is_some_and(|all| all.len() == 1));

    let peer = half_open(&pipe);
    let named = format!("sleep 600 (pid {},", peer.0.id());
    let hung = until("the process is named", &agent, |daemon| daemon["reasons"].to_string().contains(&named));
    let reasons = hung["reasons"].to_string();
    assert!(
        reasons.contains("another process is connected to the MPS daemon, so the daemon does not answer gpushd"),
        "{reasons}"
    );
    assert!(reasons.contains("holds the control connection of the MPS daemon"), "{reasons}");
    agent.wait_for_log("so the daemon does not answer gpushd");
    agent.wait_for_log(&format!("pid={}", peer.0.id()));
    if nix::unistd::geteuid().is_root()
        && let Some(theirs) = reasons_for(NOBODY, &agent)
    {
        assert!(theirs.contains("another process is connected") && !theirs.contains("pid"), "{theirs}");
    } else {
        println!("SKIPPED what another user sees: only root can ask as another user, with curl");
    }

    drop(peer);
    let well = ready(&agent);
    assert_eq!(well["pid"], daemon["pid"], "gpushd did not end the daemon");
}

#[test]
fn daemon_with_unknown_protocol_is_used_through_its_front_end() {
    let host = Host::up("mixed");
    let agent = Agent::start(&host, CONFIG);
    let daemon = ready(&agent);
    assert_eq!(daemon["protocol"], "of driver 550.163.01, direct connection");
    host.sim("mps", &["fault", "add", "foreign-hello"]);
    let front_end = until("gpushd uses the front-end", &agent, |daemon| {
        daemon["protocol"].as_str().is_some_and(|how| how.contains("through NVIDIA's front-end"))
    });
    assert_eq!((&front_end["state"], &front_end["pid"]), (&json!("ready"), &daemon["pid"]));
    let set = agent.post("/v1/mps/4/settings", &json!({"percentage": 30})).json();
    assert_eq!(set["daemon"]["effective_settings"]["percentage"], 30, "{set:#}");
}

/// Creates a directory with the simulated programs, in which a script starts the control daemon.
fn through(host: &Host, script: &str) -> std::path::PathBuf {
    let dir = host.dir().join("own");
    fs::create_dir(&dir).expect("a directory");
    symlink(program("gpush-sim"), dir.join("nvidia-cuda-mps-server")).expect("a link");
    let control = host.dir().join("bin/nvidia-cuda-mps-control");
    let path = dir.join("nvidia-cuda-mps-control");
    fs::write(&path, format!("#!/bin/sh\n{}\n", script.replace("CONTROL", &control.display().to_string())))
        .expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    dir
}

#[test]
fn silent_daemon_with_an_unsupported_protocol_is_reported() {
    let host = Host::up(Served::HOST);
    let programs = through(&host, "CUDA_MPS_PROTOCOL_VERSION=3 exec CONTROL \"$@\"");
    let served = Served::on(host, Some(&programs));
    fault(&served.host, "silent-hello");
    becomes(&served.agent, "0", "reported with its protocol", |daemon| {
        daemon.reasons.iter().any(|reason| reason == "the MPS daemon uses MPS v3, which gpushd does not support yet")
    });
}
