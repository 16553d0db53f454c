//! What goes wrong with MPS daemons, one thing at a time: each is told in `gpushctl mps show`, never leads
//! to a second daemon on a target, and costs no client that need not be lost.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::Instant,
};

use gpush_api::{Code, MpsDaemon, MpsState};
use gpush_tests::{
    agent::{Agent, PATIENCE, Setup},
    host::{Host, program},
    mps::{
        Client, Role, act, base, becomes, clear_faults, controls, daemon, daemons, fault, is_open, names, parts,
        reaches, real_programs, share, signal,
    },
};
use nix::sys::signal::Signal;
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str =
    "[mps]\nhealth_s = 1\nstart_s = 2\nstop_s = 2\n[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// An agent whose daemon serves, and an environment that is let in.
struct Served {
    host: Host,
    agent: Agent,
    environment: Vec<(String, String)>,
    pid: i32,
}

impl Served {
    fn on(host: Host, programs: Option<&Path>) -> Self {
        let setup = Setup::on(&host).config(CONFIG);
        let setup = match programs {
            Some(dir) => setup.env("GPUSH_MPS_PROGRAMS", dir.display().to_string()),
            None => setup,
        };
        let agent = setup.start();
        let ready = reaches(&agent, "0", MpsState::Ready);
        let environment = share(&agent, "0", &json!({})).expect("a share").environment;
        Self { host, agent, environment, pid: pid_of(&ready) }
    }

    fn up() -> Self {
        Self::on(Host::up(HOST), None)
    }

    fn client(&self) -> Client {
        let client = Client::start(&self.host, &self.environment);
        assert!(client.first.starts_with("active"), "{}", client.first);
        becomes(&self.agent, "0", "with its client", |daemon| {
            daemon.clients.iter().any(|one| one.pid.map(u32::cast_signed) == Some(client.pid()))
        });
        client
    }

    fn pipe(&self) -> PathBuf {
        daemon(&self.agent, "0").pipe_directory.expect("a pipe directory").into()
    }

    fn controls(&self) -> Vec<i32> {
        controls(&base(&self.host))
    }

    /// Waits for a state whose reasons have these words, with nobody let in.
    fn is(&self, state: MpsState, words: &str) -> MpsDaemon {
        let told =
            |daemon: &MpsDaemon| daemon.state == state && daemon.reasons.iter().any(|reason| reason.contains(words));
        let daemon = becomes(&self.agent, "0", &format!("{} for {words:?}", state.name()), told);
        assert!(self.controls().len() <= 1, "{:?}", parts(&base(&self.host)));
        if state != MpsState::Ready {
            let refused = share(&self.agent, "0", &json!({})).expect_err("nobody is let in");
            assert_eq!(refused.code, Code::Unavailable, "{refused:?}");
            assert!(!is_open(Path::new(daemon.pipe_directory.as_deref().expect("a pipe directory"))), "{daemon:#?}");
        }
        daemon
    }

    /// Waits until it serves again, and says whether by the same daemon.
    fn serves(&self) -> bool {
        let ready = reaches(&self.agent, "0", MpsState::Ready);
        assert_eq!(self.controls(), [pid_of(&ready)]);
        pid_of(&ready) == self.pid
    }
}

fn pid_of(daemon: &MpsDaemon) -> i32 {
    daemon.pid.expect("a pid").cast_signed()
}

#[test]
fn a_daemon_that_says_nothing_is_left_to_its_clients_and_replaced_when_they_have_gone() {
    for (kind, words) in [
        ("silent-hello", "does not greet"),
        ("hung-daemon", "does not greet"),
        // Stopped at the first question, it greets nobody who asks the next one.
        ("unread-pipe", "says nothing"),
        ("empty-reply", "answered"),
    ] {
        let served = Served::up();
        let mut client = served.client();
        fault(&served.host, kind);
        let hung = served.is(MpsState::Hung, words);
        assert_eq!(hung.clients.len(), 1, "{kind}: {hung:#?}");
        assert!(hung.reasons.iter().any(|reason| reason.contains("left alone for the sake of its 1 clients")));
        assert!(client.lives() && client.said().is_empty(), "{kind}");
        assert_eq!(served.controls(), [served.pid], "{kind}");
        // It recovers: the same goes on.
        clear_faults(&served.host);
        assert!(served.serves(), "{kind}");
        // It does not, and nobody needs it any more.
        fault(&served.host, kind);
        served.is(MpsState::Hung, words);
        client.end();
        becomes(&served.agent, "0", "replaced", |daemon| daemon.pid.is_some_and(|pid| pid.cast_signed() != served.pid));
        clear_faults(&served.host);
        assert!(!served.serves(), "{kind}");
    }
}

#[test]
fn a_stopped_process_is_a_hung_daemon() {
    for real in [false, true] {
        let host = Host::up(HOST);
        let programs = if real { real_programs(&host, "NVIDIA's own daemon, stopped") } else { None };
        if real && programs.is_none() {
            return;
        }
        let served = Served::on(host, programs.as_deref());
        let mut client = served.client();
        assert!(signal(served.pid, Signal::SIGSTOP));
        served.is(MpsState::Hung, "does not greet");
        // Whoever asks does not wait for it.
        let refused = act(&served.agent, "0", "stop", &json!({})).error();
        assert_eq!(refused.code, Code::Blocked);
        assert!(signal(served.pid, Signal::SIGCONT));
        assert!(served.serves() && client.lives());
        // Forced, it ends though it can't hear that.
        assert!(signal(served.pid, Signal::SIGSTOP));
        assert_eq!(act(&served.agent, "0", "restart", &json!({ "force": true })).status, 200);
        becomes(&served.agent, "0", "another", |daemon| daemon.pid.is_some_and(|pid| pid.cast_signed() != served.pid));
        assert!(!served.serves());
    }
}

/// A front-end that has the daemon's ear until what it reads from is closed. NVIDIA's own keeps what it has to
/// say to itself until its end, so it is by gpushd's word.
fn has_the_ear(front: &Path, served: &Served) -> (Child, ChildStdin) {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        let mut command = Command::new(front);
        command.env("CUDA_MPS_PIPE_DIRECTORY", served.pipe()).stdin(Stdio::piped());
        let mut prompt = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a front-end");
        let mut typed = prompt.stdin.take().expect("piped");
        let _hung_up_on = typed.write_all(b"get_default_client_priority\n");
        let patience = Instant::now() + PATIENCE / 6;
        while Instant::now() < patience && matches!(prompt.try_wait(), Ok(None)) {
            if daemon(&served.agent, "0").state == MpsState::Hung {
                return (prompt, typed);
            }
        }
        // gpushd had the ear at that moment: another try.
        drop(typed);
        prompt.wait().expect("it ends");
    }
    panic!("nobody has the ear:\n{}", served.agent.log());
}

/// The stand-in of the front-end, in which somebody typed something that is answered.
fn at_a_prompt(front: &Path, pipe: &Path, typed: &str) -> (Child, ChildStdin) {
    loop {
        let mut command = Command::new(front);
        command.env("CUDA_MPS_PIPE_DIRECTORY", pipe).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut prompt = command.spawn().expect("a front-end");
        let mut input = prompt.stdin.take().expect("piped");
        let typed = input.write_all(format!("{typed}\n").as_bytes());
        let mut answer = String::new();
        let read = BufReader::new(prompt.stdout.take().expect("piped")).read_line(&mut answer);
        if typed.is_ok() && read.is_ok() && !answer.trim().is_empty() {
            return (prompt, input);
        }
        // gpushd had the ear at this moment, and the front-end says nothing of that.
        drop(input);
        prompt.wait().expect("it ends");
    }
}

#[test]
fn somebody_at_a_prompt_is_no_reason_to_kill_a_daemon() {
    for real in [false, true] {
        let host = Host::up(HOST);
        let programs = if real { real_programs(&host, "somebody at the prompt of NVIDIA's own daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        let front = programs.clone().unwrap_or_else(|| host.dir().join("bin")).join("nvidia-cuda-mps-control");
        let served = Served::on(host, programs.as_deref());
        let (mut prompt, typed) = has_the_ear(&front, &served);
        // Nobody uses it, and it stays all the same.
        let busy = served.is(MpsState::Hung, "somebody else has the control daemon's ear");
        assert_eq!((busy.clients.len(), served.controls()), (0, vec![served.pid]));
        drop(typed);
        prompt.wait().expect("a front-end ends");
        assert!(served.serves());
    }
    let served = Served::up();
    fault(&served.host, "busy-ui");
    served.is(MpsState::Hung, "somebody else has");
    clear_faults(&served.host);
    assert!(served.serves());
}

#[test]
fn a_server_that_dies_or_never_serves_or_met_a_fault_shuts_the_door() {
    let served = Served::up();
    fault(&served.host, "server-dies");
    for _ in 0..3 {
        let client = Client::start(&served.host, &served.environment);
        assert_eq!(client.first, "error 805");
    }
    served.is(MpsState::Fault, "end as soon as they are started");
    assert_eq!(served.controls(), [served.pid]);

    let served = Served::up();
    fault(&served.host, "never-active");
    let waits = Client::begin(&served.host, &served.environment, None);
    let stuck = served.is(MpsState::Fault, "is not ready after");
    assert_eq!(stuck.servers.len(), 1);
    clear_faults(&served.host);
    assert!(waits.says().starts_with("active") && served.serves());

    let served = Served::up();
    let mut client = served.client();
    fault(&served.host, "fault --times 1");
    assert_eq!(client.says(), "fault");
    let faulty = served.is(MpsState::Fault, "met a fatal fault");
    assert_eq!(faulty.clients.len(), 1, "those concerned are known though the server is not asked any more");
    let refused = act(&served.agent, "0", "stop", &json!({})).error();
    assert!(refused.causes.iter().any(|cause| cause.contains(&client.pid().to_string())), "{refused:?}");
    assert!(client.lives());
    client.end();
    assert!(served.serves());
}

#[test]
fn a_server_that_its_daemon_left_behind_serves_to_the_end_and_no_daemon_is_started_beside() {
    for real in [false, true] {
        let host = Host::up(HOST);
        let programs = if real { real_programs(&host, "what NVIDIA's own daemon leaves behind") } else { None };
        if real && programs.is_none() {
            return;
        }
        left_behind(Served::on(host, programs.as_deref()), programs.as_deref());
    }
}

fn left_behind(served: Served, programs: Option<&Path>) {
    let mut client = served.client();
    let server: i32 = client.word("server").parse().expect("a pid");
    assert!(signal(served.pid, Signal::SIGKILL));
    let waits = served.is(MpsState::BackingOff, "still serves 1 client");
    assert_eq!((waits.clients.len(), served.controls().len()), (1, 0));
    assert!(waits.reasons.iter().any(|reason| reason.contains(&format!("server {server}"))), "{waits:#?}");
    assert!(client.lives() && client.said().is_empty());
    // The next agent knows it from the driver alone.
    let Served { host, agent, environment, .. } = served;
    agent.kill();
    let setup = Setup::on(&host).config(CONFIG);
    let agent = match programs {
        Some(dir) => setup.env("GPUSH_MPS_PROGRAMS", dir.display().to_string()).start(),
        None => setup.start(),
    };
    let waits = becomes(&agent, "0", "waiting", |daemon| {
        daemon.reasons.iter().any(|reason| reason.contains("still serves 1 client"))
    });
    assert_eq!((waits.failures, controls(&base(&host)).len()), (0, 0));
    let refused = act(&agent, "0", "restart", &json!({})).error();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    client.end();
    let ready = reaches(&agent, "0", MpsState::Ready);
    let left = parts(&base(&host));
    assert_eq!((left.len(), left[0].pid), (1, pid_of(&ready)), "the server went when nobody needed it");

    // Forced, it is ended under its client.
    let client = Client::start(&host, &environment);
    assert!(signal(pid_of(&ready), Signal::SIGKILL));
    becomes(&agent, "0", "waiting", |daemon| daemon.state == MpsState::BackingOff && daemon.clients.len() == 1);
    assert_eq!(act(&agent, "0", "restart", &json!({ "force": true })).status, 200);
    assert_eq!(client.says(), "lost");
    reaches(&agent, "0", MpsState::Ready);
    assert_eq!(controls(&base(&host)).len(), 1);
}

#[test]
fn stale_files_a_slow_start_and_a_slow_end_cost_time_alone() {
    let served = Served::up();
    fault(&served.host, "stale-pid-file --times 1");
    assert!(signal(served.pid, Signal::SIGKILL));
    becomes(&served.agent, "0", "another", |daemon| daemon.pid.is_some_and(|pid| pid.cast_signed() != served.pid));
    assert!(!served.serves());
    fault(&served.host, "slow-quit --ms 600000 --times 1");
    assert_eq!(act(&served.agent, "0", "stop", &json!({})).status, 200);
    reaches(&served.agent, "0", MpsState::Stopping);
    // It takes too long, and is killed.
    reaches(&served.agent, "0", MpsState::Stopped);
    assert_eq!(parts(&base(&served.host)), []);
    fault(&served.host, "slow-start --ms 600000 --times 1");
    assert_eq!(act(&served.agent, "0", "start", &json!({})).status, 200);
    let slow = reaches(&served.agent, "0", MpsState::Starting);
    let second = becomes(&served.agent, "0", "another", |daemon| daemon.state == MpsState::Ready);
    assert_ne!(second.pid, slow.pid);
    assert_eq!(served.controls(), [pid_of(&second)]);
}

#[test]
fn a_directory_that_was_deleted_under_a_daemon_is_told_and_made_anew_when_nobody_is_left() {
    for real in [false, true] {
        let host = Host::up(HOST);
        let programs = if real { real_programs(&host, "a deleted directory of NVIDIA's own daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        let served = Served::on(host, programs.as_deref());
        fs::remove_dir_all(served.pipe()).expect("it can be deleted");
        becomes(&served.agent, "0", "another", |daemon| daemon.pid.is_some_and(|pid| pid.cast_signed() != served.pid));
        assert!(!served.serves());
        assert!(served.client().lives());
    }
}

#[test]
fn settings_that_somebody_changes_past_gpushd_are_set_back_and_told() {
    // Version 535 lets anybody do that who is let in.
    let served = Served::on(Host::up(&format!("driver = \"535.183.06\"\n{HOST}")), None);
    let client = served.client();
    let server = client.word("server");
    let front = served.host.dir().join("bin/nvidia-cuda-mps-control");
    let say = |line: &str| {
        let (mut front, typed) = at_a_prompt(&front, &served.pipe(), &format!("{line}\nget_default_client_priority"));
        drop(typed);
        front.wait().expect("it ends");
    };
    for (line, words) in [
        ("set_default_active_thread_percentage 5".to_owned(), "percentage 5, not 100".to_owned()),
        (format!("set_active_thread_percentage {server} 7"), format!("percentage 7 at server {server}, not 100")),
        ("set_default_device_pinned_mem_limit 0 2G".to_owned(), "memory limit 2048M, not none".to_owned()),
        (format!("set_device_pinned_mem_limit {server} 0 3G"), format!("memory limit 3072M at server {server}")),
    ] {
        say(&line);
        let told = becomes(&served.agent, "0", &words, |daemon| {
            daemon.findings.iter().any(|finding| finding.contains(&words))
        });
        assert_eq!((told.state, told.in_force), (MpsState::Ready, Some(told.wanted.settings)), "{line}");
    }
    assert!(served.agent.log().contains("somebody changed it past gpushd"));
}

#[test]
fn what_can_not_be_started_is_given_up_with_its_reason_and_started_by_hand() {
    let host = Host::up(HOST);
    let broken = host.scratch("broken");
    fs::create_dir(&broken).expect("a directory");
    for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
        fs::write(broken.join(name), "#!/bin/sh\nexit 3\n").expect("a program");
        fs::set_permissions(broken.join(name), fs::Permissions::from_mode(0o755)).expect("a program");
    }
    let config = CONFIG.replace("health_s = 1", "health_s = 1\nfailures = 2\npause_s = 1");
    let agent = Setup::on(&host).config(&config).env("GPUSH_MPS_PROGRAMS", broken.display().to_string()).start();
    let given_up = reaches(&agent, "0", MpsState::GivenUp);
    assert!(given_up.reasons.iter().any(|reason| reason.contains("ended with status 3")), "{given_up:#?}");
    assert!(given_up.reasons.iter().any(|reason| reason.contains("gpushctl mps start 0")), "{given_up:#?}");
    // Mended, and started by hand.
    for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
        fs::remove_file(broken.join(name)).expect("it goes");
        std::os::unix::fs::symlink(program("gpush-sim"), broken.join(name)).expect("a link");
    }
    assert_eq!(act(&agent, "0", "start", &json!({})).status, 200);
    reaches(&agent, "0", MpsState::Ready);
}

#[test]
fn a_path_that_is_too_long_is_refused_with_its_length() {
    let host = Host::up(HOST);
    let long = host.scratch(&"x".repeat(80));
    let agent = Setup::on(&host).config(CONFIG).env("GPUSH_MPS_DIR", long.display().to_string()).start();
    let told =
        becomes(&agent, "0", "told", |daemon| daemon.reasons.iter().any(|reason| reason.contains("too long a path")));
    assert!(told.reasons.iter().any(|reason| reason.contains("bytes")), "{told:#?}");
    assert_eq!(names(&long), Vec::<String>::new());
}

#[test]
fn what_has_no_mps_is_told_and_nothing_is_started() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-40\"\nmig = true\n");
    let agent = Agent::start(&host, CONFIG);
    agent.await_that("a finding", || {
        let error = agent.get("/v1/mps/0").error();
        error.code == Code::NotFound && error.causes.iter().any(|cause| cause.contains("MIG mode is on"))
    });
    assert_eq!((daemons(&agent).len(), parts(&base(&host)).len()), (0, 0));
}

#[test]
fn garbage_in_the_log_of_a_daemon_is_told() {
    for real in [false, true] {
        let host = Host::up(HOST);
        let programs = if real { real_programs(&host, "garbage in the log of NVIDIA's own daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        let served = Served::on(host, programs.as_deref());
        let pipe = served.pipe();
        let mut log = fs::OpenOptions::new().write(true).open(pipe.join("log")).expect("a FIFO");
        log.write_all(b"11 bytes of").expect("it can be written to");
        drop(log);
        if real {
            let told = becomes(&served.agent, "0", "told", |daemon| {
                !daemon.findings.is_empty() || daemon.pid.is_some_and(|pid| pid.cast_signed() != served.pid)
            });
            println!("{:?} {:?}", told.findings, told.reasons);
        }
        assert_eq!(served.controls().len(), 1);
    }
}

#[test]
fn a_full_disk_for_logs_is_told_and_stops_nobody() {
    for real in [false, true] {
        let host = Host::up(HOST);
        let programs = if real { real_programs(&host, "a full disk for logs of NVIDIA's own daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        let logs = host.scratch("logs");
        fs::create_dir(&logs).expect("a directory");
        let dir = logs.display();
        let full =
            format!("mount -t tmpfs -o size=16k none {dir} && head -c 16k /dev/zero > {dir}/full && exec \"$@\"");
        let may = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", &dir.to_string()]).output();
        if !may.is_ok_and(|may| may.status.success()) {
            println!("SKIPPED a full disk for logs: no file system can be mounted here");
            return;
        }
        let config = CONFIG.replace("health_s = 1", &format!("health_s = 1\nlog_directory = \"{dir}\""));
        let setup = Setup::on(&host).config(&config).through(&["unshare", "-m", "sh", "-c", &full, "sh"]);
        let agent = match &programs {
            Some(dir) => setup.env("GPUSH_MPS_PROGRAMS", dir.display().to_string()).start(),
            None => setup.start(),
        };
        let told = becomes(&agent, "0", "told", |daemon| {
            daemon.state == MpsState::Ready
                && daemon.findings.iter().any(|finding| finding.contains("the disk is full"))
        });
        let environment = share(&agent, "0", &json!({})).expect("a share").environment;
        let client = Client::start(&host, &environment);
        assert!(client.first.starts_with("active"), "{}", client.first);
        client.end();
        assert_eq!(controls(&base(&host)), [pid_of(&told)]);
    }
}

#[test]
fn whoever_dies_in_whatever_order_one_daemon_is_left() {
    let served = Served::up();
    let mut served = served;
    for order in ["dsa", "sda", "ads", "asd", "das", "sad"] {
        let client = Client::start(&served.host, &served.environment);
        assert!(client.first.starts_with("active"), "{order}: {}", client.first);
        let all = parts(&base(&served.host));
        let of = |role| all.iter().find(|part| part.role == role).expect("one").pid;
        let (control, server) = (of(Role::Control), of(Role::Server));
        for who in order.chars() {
            match who {
                'd' => drop(signal(control, Signal::SIGKILL)),
                's' => drop(signal(server, Signal::SIGKILL)),
                _ => {
                    served.agent.kill();
                    served.agent = Agent::start(&served.host, CONFIG);
                }
            }
        }
        assert_eq!(client.says(), "lost", "{order}");
        drop(client);
        let ready = becomes(&served.agent, "0", "ready with another", |daemon| {
            daemon.state == MpsState::Ready && daemon.pid.is_some_and(|pid| pid.cast_signed() != control)
        });
        let left = parts(&base(&served.host));
        assert_eq!((left.len(), left[0].pid), (1, pid_of(&ready)), "{order}: {left:?}");
        assert_eq!(ready.shares.len(), 1, "{order}");
        // So many failures in so short a time are too many otherwise.
        assert_eq!(act(&served.agent, "0", "stop", &json!({})).status, 200);
        reaches(&served.agent, "0", MpsState::Stopped);
        assert_eq!(act(&served.agent, "0", "start", &json!({})).status, 200);
        reaches(&served.agent, "0", MpsState::Ready);
    }
}
