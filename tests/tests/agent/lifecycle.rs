//! Start and stop: one agent for each state directory, stale and live sockets, signals, systemd.

use std::{
    io::{Read, Write},
    os::unix::{fs::FileTypeExt, net::UnixListener, process::ExitStatusExt},
    process::Command,
    time::{Duration, Instant},
};

use gpush_api::{GpuState, OperationState};
use gpush_tests::{
    agent::{Agent, Setup, real_layout},
    host::Host,
};
use nix::sys::signal::Signal;

#[test]
fn second_agent_on_same_state_is_refused() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let other = host.scratch("other.sock");
    // The second agent uses the same state directory, and another socket.
    let (status, log) = Setup::on(&host).socket(&other).refused();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains(&format!("another gpushd (pid {}) uses the state directory", agent.pid())), "{log}");
    assert!(log.contains("systemctl stop gpushd") && log.contains("--state-dir"), "{log}");
    assert!(!other.exists());
    assert_eq!(agent.get("/v1/version").status, 200);
}

#[test]
fn live_socket_is_refused_and_stale_one_replaced() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let (status, log) = Setup::on(&host).named("second").socket(agent.socket()).refused();
    assert_eq!(status.code(), Some(1));
    assert!(log.contains(&format!("another gpushd (pid {}) has the socket", agent.pid())), "{log}");
    assert_eq!(agent.get("/v1/version").status, 200);
    let socket = agent.socket().to_owned();
    agent.kill();
    assert!(socket.exists(), "a killed agent leaves its socket file");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.get("/v1/version").status, 200);
    agent.stop();
    assert!(!socket.exists(), "one that stops does not");
    // gpushd must not remove a file that is not a socket.
    std::fs::write(&socket, "precious").unwrap();
    let (_, log) = Setup::on(&host).refused();
    assert!(log.contains("is not a socket"), "{log}");
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "precious");
}

#[test]
fn one_of_ten_agents_serves_and_the_others_name_it() {
    let host = Host::up("a30x4");
    let socket = host.scratch("shared.sock");
    // In the first round, the directory is empty. In the second round, it has the socket file of an
    // agent that was killed.
    for round in 0..2 {
        let started: Vec<_> = std::thread::scope(|scope| {
            let agents: Vec<_> = (0..10)
                .map(|n| {
                    let setup = Setup::on(&host).named(&format!("{round}-{n}")).socket(&socket);
                    scope.spawn(|| setup.try_start())
                })
                .collect();
            agents.into_iter().map(|agent| agent.join().unwrap()).collect()
        });
        let (served, refused): (Vec<_>, Vec<_>) = started.into_iter().partition(Result::is_ok);
        assert_eq!((served.len(), refused.len()), (1, 9), "round {round}");
        let agent = served.into_iter().flatten().next().unwrap();
        for (status, log) in refused.into_iter().filter_map(Result::err) {
            assert_eq!(status.code(), Some(1), "{log}");
            assert!(log.contains(&format!("another gpushd (pid {}) has the socket", agent.pid())), "{log}");
        }
        assert_eq!(agent.get("/v1/health").json()["pid"], agent.pid());
        agent.kill();
        assert!(socket.exists());
    }
}

#[test]
fn idle_agent_with_waiting_clients_stops_at_once() {
    let host = Host::up("a30x4");
    let mut agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["4g.24gb"]).state, OperationState::Done);
    let _idle = agent.connect();
    let begun = Instant::now();
    agent.signal(Signal::SIGTERM);
    assert!(agent.wait().success(), "{}", agent.log());
    let took = begun.elapsed();
    println!("stopped after {} ms", took.as_millis());
    // gpushd waits at most two seconds for its connections. Permit two more seconds for a busy
    // machine.
    assert!(took < Duration::from_secs(4), "{took:?}");
}

/// A package upgrade restarts gpushd at this moment: a client has connected, but has not sent its
/// request yet.
#[test]
fn connection_without_request_is_answered_while_gpushd_stops() {
    let host = Host::up("a30x4");
    let mut agent = Agent::start(&host, "");
    let mut early = agent.connect();
    let mut idle = agent.connect();
    let request = b"GET /v1/version HTTP/1.1\r\nHost: gpushd\r\n\r\n";
    idle.write_all(request).unwrap();
    let mut head = [0; 12];
    idle.read_exact(&mut head).unwrap();
    agent.signal(Signal::SIGTERM);
    // When gpushd stops, it at once closes connections whose requests are all answered.
    idle.read_to_end(&mut Vec::new()).unwrap();
    early.write_all(request).unwrap();
    let mut answer = String::new();
    early.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(agent.wait().success(), "{}", agent.log());
}

#[test]
fn stop_during_apply_finishes_operation_first() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --after 1 --times 1 --delay-ms 700");
    let begun = agent.begin(&["0"], &["1g.10gb*4"]).unwrap();
    let mut operation = begun;
    while operation.progress[0].done < 2 {
        let path = format!("/v1/operations/op-1?after={}&wait_ms=10000", operation.revision);
        operation = serde_json::from_value(agent.get(&path).json()).unwrap();
    }
    agent.signal(Signal::SIGTERM);
    agent.wait_for("STATUS=finishing operations");
    // gpushd still answers, but accepts no new operation.
    let refused = agent.begin(&["1"], &["7g.80gb"]).unwrap_err();
    assert_eq!(refused.code, gpush_api::Code::Stopping, "{refused:?}");
    assert!(agent.wait().success(), "{}", agent.log());
    assert_eq!(real_layout(&host, 0).len(), 4, "{:?}", real_layout(&host, 0));
    assert!(real_layout(&host, 1).is_empty());
}

#[test]
fn two_sigterms_at_once_count_as_one() {
    let host = Host::up("a30x4");
    let mut agent = Agent::start(&host, "");
    let socket = agent.socket().to_owned();
    // `timeout 2 gpushd` sends the signal to its child, and then again to the process group. So
    // gpushd gets the signal twice.
    agent.signal(Signal::SIGTERM);
    agent.signal(Signal::SIGTERM);
    assert!(agent.wait().success(), "{}", agent.log());
    assert!(!socket.exists(), "it ended without taking its socket along");
}

#[test]
fn second_sigterm_ends_gpushd_at_once() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --hang");
    let operation = agent.begin(&["0"], &["7g.80gb"]).unwrap();
    agent.signal(Signal::SIGTERM);
    agent.wait_for("STATUS=finishing operations");
    // `timeout` sends two signals, so gpushd counts two signals in quick succession as one. A later
    // signal ends gpushd at once.
    while !agent.has_ended() {
        agent.signal(Signal::SIGTERM);
        std::thread::yield_now();
    }
    assert_eq!(agent.wait().signal(), Some(Signal::SIGTERM as i32), "{}", agent.log());
    host.clear_faults();
    // The next agent finishes the interrupted operation.
    let agent = Agent::start(&host, "");
    let operation = agent.follow(operation);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    assert!(operation.notes[0].contains("gpushd ended while the operation was running"), "{:?}", operation.notes);
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
    assert_eq!(agent.gpu(0).state, GpuState::Ready);
}

#[test]
fn reload_takes_effect_and_shows_pending_restart() {
    let host = Host::up("a30x4");
    // The test harness sets a log level in the environment, which overrides the config. Remove this
    // variable here.
    let setup = Setup::on(&host).config("[log]\nlevel = \"error\"\n").through(&["env", "-u", "GPUSH_LOG"]);
    let mut agent = setup.start();
    assert_eq!(agent.log(), "");
    agent.write_config("[log]\nlevel = \"info\"\n[driver]\nlibrary = \"libother.so.1\"\n[health]\npoll = \"2m\"\n");
    agent.signal(Signal::SIGHUP);
    agent.wait_for("STATUS=the config was reloaded");
    let shown = agent.get("/v1/config").json();
    let pending = serde_json::json!([{"key": "driver.library", "effective": "\"libnvidia-ml.so.1\"", "in_file": "\"libother.so.1\""}]);
    assert_eq!(shown["pending_settings"], pending);
    let effective = shown["effective"].as_str().unwrap();
    for line in ["level = \"info\"", "library = \"libnvidia-ml.so.1\"", "poll = \"2m\""] {
        assert!(effective.contains(line), "{effective}");
    }
    agent.wait_for_log(
        "driver.library changes only when gpushd is restarted: present value \"libnvidia-ml.so.1\", value in the config \
         file \"libother.so.1\"",
    );

    // If one setting of a file is wrong, gpushd refuses the whole file.
    agent.write_config("[log]\nlevel = \"error\"\n[health]\npoll = 120\n");
    agent.signal(Signal::SIGHUP);
    agent.wait_for("STATUS=the config has errors and was not loaded");
    let shown = agent.get("/v1/config").json();
    assert!(shown["effective"].as_str().unwrap().contains("level = \"info\""), "{shown}");
    assert_eq!(shown["pending_settings"], pending);
    let health = agent.get("/v1/health").json();
    assert!(health["errors"][0]["causes"][0].as_str().unwrap().contains("`poll` takes a duration"), "{health}");

    // The empty file does not change `library` any more. So no setting waits for a restart.
    agent.write_config("");
    agent.signal(Signal::SIGHUP);
    agent.wait_for("STATUS=the config was reloaded");
    assert_eq!(agent.get("/v1/config").json()["pending_settings"], serde_json::json!([]));
}

#[test]
fn ready_notification_means_requests_are_answered() {
    let host = Host::up("dgx-a100");
    // The driver loads slowly. gpushd must become ready before the driver is loaded.
    host.fault("nvmlInit* --delay-ms 1500");
    let begun = Instant::now();
    let agent = Agent::start(&host, "");
    let ready = begun.elapsed();
    assert!(agent.socket().symlink_metadata().unwrap().file_type().is_socket());
    assert_eq!(agent.get("/v1/config").json()["rules"], serde_json::json!([]));
    assert_eq!(agent.gpus().len(), 8, "the first reading is waited for");
    let read = begun.elapsed();
    println!("ready after {} ms, first reading after {} ms", ready.as_millis(), read.as_millis());
    assert!(ready < read);
}

#[test]
fn socket_from_systemd_is_used_and_not_removed() {
    let host = Host::up("a30x4");
    let path = host.scratch("handed.sock");
    // The test does what systemd does: it passes a listening socket as descriptor 3, and sets the
    // variables that announce the socket.
    let listener = UnixListener::bind(&path).unwrap();
    let script = "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$@\"";
    let agent = Setup::on(&host)
        .socket(host.scratch("unused.sock"))
        .through(&["sh", "-c", script, "sh"])
        .stdin(listener.try_clone().unwrap().into())
        .start_at(&path);
    assert_eq!(agent.get("/v1/version").status, 200);
    assert!(!host.scratch("unused.sock").exists());
    // If the driver worker inherited the socket, it would keep the socket open.
    let holders = Command::new("sh")
        .arg("-c")
        .arg(format!("ls -l /proc/{}/task/*/children >/dev/null 2>&1; cat /proc/{0}/task/*/children", agent.pid()))
        .output()
        .unwrap();
    for worker in String::from_utf8_lossy(&holders.stdout).split_whitespace() {
        let three = std::fs::read_link(format!("/proc/{worker}/fd/3"));
        let ours = std::fs::read_link(format!("/proc/{}/fd/3", agent.pid())).unwrap();
        assert!(three.is_err() || three.unwrap() != ours, "worker {worker} has the listening socket");
    }
    agent.stop();
    assert!(path.exists(), "it is systemd's to remove");
}

#[test]
fn unread_log_delays_nothing() {
    let host = Host::up("dgx-a100");
    // Create a small pipe, which fills up quickly because its reader does not read.
    let (mut reader, writer) = std::io::pipe().unwrap();
    let size = nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    let agent = Setup::on(&host).env("GPUSH_LOG", "trace").stderr(writer.into()).start();
    for round in 0..40 {
        let layout: &[&str] = if round % 2 == 0 { &["1g.10gb*7"] } else { &["none"] };
        assert_eq!(agent.apply(&["all"], layout).state, OperationState::Done, "round {round}");
    }
    agent.stop();
    let mut written = Vec::new();
    reader.read_to_end(&mut written).unwrap();
    println!("{} bytes were written before the pipe, of {size}, was full", written.len());
    assert!(written.len() + 512 > usize::try_from(size).unwrap(), "the pipe never was full");
}

#[test]
fn watchdog_is_notified_while_gpu_hangs() {
    let host = Host::up("dgx-a100");
    // The service manager enables the watchdog for one process only, whose pid is in WATCHDOG_PID.
    let printed = ["sh", "-c", "WATCHDOG_USEC=200000 WATCHDOG_PID=$$ exec \"$0\" \"$@\""];
    let mut agent = Setup::on(&host).config("").through(&printed).start();
    agent.wait_for("WATCHDOG=1");
    host.fault("nvmlDeviceGetMigMode --gpu 0 --hang");
    let _operation = agent.begin(&["1"], &["7g.80gb"]);
    for _ in 0..5 {
        agent.wait_for("WATCHDOG=1");
    }
    // gpushd answers other requests while the GPU hangs.
    assert_eq!(agent.get("/v1/version").status, 200);
    host.clear_faults();
    agent.stop();
}
