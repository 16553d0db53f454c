//! Lines that another program writes into a daemon's log. Every user who has or had access to the
//! pipe directory can write such lines. They must not make gpushd report a client or a fault, and
//! must not fill a disk.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use gpush_api::{Code, MpsState};
use gpush_tests::{
    host::Host,
    mps::{Client, Served, act, becomes, clear_faults, daemon, end_leases, fault, reaches, real_programs, release_all},
};
use serde_json::json;

use super::serves;

/// Runs a test with the simulated daemon, and then with NVIDIA's daemon if it is installed.
fn each(what: &str, config: &str, test: impl Fn(Served)) {
    test(Served::of(Host::up(Served::HOST), "0", config, None));
    let host = Host::up(Served::HOST);
    if let Some(programs) = real_programs(&host, &format!("{what} of NVIDIA's own daemon")) {
        test(Served::of(host, "0", config, Some(&programs)));
    }
}

/// Encodes a log record in the format of the daemon, servers and clients.
fn record(text: &str) -> Vec<u8> {
    let numbers = [0xabcd_e000, 4711, 2026, 11, 22, 0, 4, 0, 0, 0];
    let mut record: Vec<u8> = numbers.iter().flat_map(|number: &u32| number.to_le_bytes()).collect();
    record.extend((text.len() as u64).to_le_bytes());
    record.extend(text.as_bytes());
    record
}

fn fifo(served: &Served) -> File {
    OpenOptions::new().write(true).open(served.pipe().join("log")).expect("a FIFO")
}

fn control_log(served: &Served) -> PathBuf {
    Path::new(&daemon(&served.agent, "0").log_directory.expect("logs")).join("control.log")
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).map(|meta| meta.len()).unwrap_or_default()
}

#[test]
fn forged_log_lines_create_no_client_and_no_fault() {
    each("made-up lines in the log", Served::CONFIG, |served| {
        // gpushd ignores lines that are older than its first read of the log. So wait until gpushd
        // has read the log once.
        reaches(&served.agent, "0", MpsState::Ready);
        let mut fifo = fifo(&served);
        let pending = "Server is not ready, push client to pending list";
        // No client has the pid 1 or the pid of this test.
        let me = (std::process::id(), nix::unistd::geteuid());
        for (pid, uid) in [(1, 0), (me.0, me.1.as_raw())] {
            fifo.write_all(&record(&format!("NEW CLIENT {pid} from user {uid}: {pending}")))
                .expect("the record can be written");
        }
        for _ in 0..4 {
            fifo.write_all(&record("Server 4711 exited with status 1")).expect("the record can be written");
        }
        fifo.write_all(&record("the end of the log")).expect("the record can be written");
        let log = control_log(&served);
        let printed =
            || fs::read(&log).is_ok_and(|printed| String::from_utf8_lossy(&printed).contains("the end of the log"));
        served.agent.await_that("the lines are in the log", printed);
        let now = daemon(&served.agent, "0");
        assert_eq!((now.state, now.reasons.as_slice()), (MpsState::Ready, [].as_slice()), "{now:#?}");
        assert!(now.clients_known && now.findings.is_empty(), "{now:#?}");
        assert!(serves(&served));
        // The clients of the forged lines do not exist, so they must not block a stop.
        end_leases(&served.agent, "0");
        let stopped = act(&served.agent, "0", "stop", &json!({}));
        assert_eq!(stopped.status, 200, "{}", String::from_utf8_lossy(&stopped.body));
        reaches(&served.agent, "0", MpsState::Stopped);
    });
}

/// Forged lines say that the server has ended, but a client still waits for the server.
#[test]
fn waiting_client_counts_despite_forged_log_lines() {
    each("a client that waits", Served::CONFIG, |served| {
        fault(&served.host, "never-active");
        let mut waits = Client::begin(&served.host, &served.environment, None);
        becomes(&served.agent, "0", "with a server", |daemon| daemon.servers.len() == 1);
        let mut fifo = fifo(&served);
        for line in ["Starting control daemon", "Server 4711 exited with status 0", "the end of the log"] {
            fifo.write_all(&record(line)).expect("the record can be written");
        }
        let log = control_log(&served);
        let printed =
            || fs::read(&log).is_ok_and(|printed| String::from_utf8_lossy(&printed).contains("the end of the log"));
        served.agent.await_that("the lines are in the log", printed);
        let refused = act(&served.agent, "0", "stop", &json!({})).error();
        assert_eq!(refused.code, Code::Blocked, "{refused:?}");
        let pid = format!("process {} is connected and waits for an MPS server", waits.pid());
        assert!(refused.causes.contains(&pid), "{refused:?}");
        assert!(waits.lives() && waits.printed().is_empty());
        assert_eq!(act(&served.agent, "0", "drain", &json!({})).status, 200);
        assert_eq!(daemon(&served.agent, "0").state, MpsState::Draining);
        clear_faults(&served.host);
        assert!(waits.says().starts_with("active"), "the client is served until it ends");
        release_all(&served.agent, "0");
        waits.end();
        reaches(&served.agent, "0", MpsState::Stopped);
    });
}

#[test]
fn flooded_log_of_a_hung_daemon_is_truncated_and_reported() {
    let config = Served::CONFIG.replace("health = \"1s\"", "health = \"1s\"\n# --constants mps.log=1M");
    each("a flood of the log", &config, |served| {
        fault(&served.host, "busy-ui");
        let log = control_log(&served);
        let mut fifo = fifo(&served);
        // Write one record at a time. The kernel may mix a write of more than PIPE_BUF bytes with
        // the lines of the daemon.
        let line = record(&"x".repeat(4000));
        let mut largest = 0;
        // Write twice as much as gpushd treats as a flood.
        for _ in 0..34 {
            (0..256).for_each(|_| fifo.write_all(&line).expect("the record can be written"));
            largest = length(&log).max(largest);
        }
        let reported = becomes(&served.agent, "0", "reported", |daemon| {
            daemon.findings.iter().any(|finding| finding.starts_with("control.log grew by "))
        });
        println!("{largest} bytes at most: {:?}", reported.findings);
        served.agent.await_that("the log is truncated", || length(&log) <= 1 << 20);
        assert!(length(&log.with_file_name("control.log.1")) <= 2 << 20, "only the end of the log is kept");
        served.agent.wait_for_log("control.log grew by ");
        clear_faults(&served.host);
        assert!(serves(&served));
    });
}

#[test]
fn log_of_a_running_daemon_is_truncated_and_still_written() {
    let config = Served::CONFIG.replace("health = \"1s\"", "health = \"1s\"\n# --constants mps.log=1M");
    let served = Served::of(Host::up(Served::HOST), "0", &config, None);
    let mut client = served.client();
    let logs = daemon(&served.agent, "0").log_directory.expect("logs");
    let log = Path::new(&logs).join("control.log");
    let mut grown = OpenOptions::new().append(true).open(&log).expect("its log");
    grown.write_all("some line of it\n".repeat(70_000).as_bytes()).expect("the log can be written");
    let length = |path: &Path| fs::metadata(path).map(|meta| meta.len()).unwrap_or_default();
    served.agent.await_that("the log is truncated", || length(&log) < 1 << 20);
    assert!(length(&Path::new(&logs).join("control.log.1")) > 1 << 20, "the earlier lines are kept");
    let cut = length(&log);
    let second = Client::start(&served.host, &served.environment);
    served.agent.await_that("the daemon writes more lines", || length(&log) > cut);
    assert!(second.first.starts_with("active") && client.lives());
    assert_eq!(daemon(&served.agent, "0").pid.map(u32::cast_signed), Some(served.pid));
}
