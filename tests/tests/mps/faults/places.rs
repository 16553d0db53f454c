//! Faults in a daemon's directories and logs.

use std::{fs, io::Write, process::Command};

use gpush_api::{Code, MpsState};
use gpush_tests::{
    agent::Setup,
    host::Host,
    mps::{
        Client, Served, act, base, becomes, clear_faults, controls, end_leases, fault, lease, pid_of, reaches,
        real_programs, signal,
    },
};
use nix::sys::signal::Signal;
use serde_json::json;

#[test]
fn deleted_pipe_directory_is_reported_and_recreated_when_idle() {
    for real in [false, true] {
        let host = Host::up(Served::HOST);
        let programs = if real { real_programs(&host, "a deleted directory of NVIDIA's own daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        let served = Served::on(host, programs.as_deref());
        let mut client = served.client();
        fs::remove_dir_all(served.pipe()).expect("the directory can be deleted");
        // The daemon still serves its present client, but new clients cannot connect.
        let reported = becomes(&served.agent, "0", "reported", |daemon| {
            daemon.reasons.iter().any(|reason| reason.contains("was deleted: the MPS daemon still serves its clients"))
        });
        assert_eq!((reported.pid.map(u32::cast_signed), served.controls()), (Some(served.pid), vec![served.pid]));
        assert!(client.lives() && client.printed().is_empty());
        assert_eq!(
            lease(&served.agent, "0", &json!({})).expect_err("no client can reach the daemon").code,
            Code::Blocked
        );
        client.end();
        served.another();
        assert!(served.client().lives());
    }
}

#[test]
fn garbage_in_log_or_stale_pid_file_leaves_one_daemon() {
    for real in [false, true] {
        let host = Host::up(Served::HOST);
        let programs = if real { real_programs(&host, "garbage in the log of NVIDIA's own daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        let served = Served::on(host, programs.as_deref());
        let pipe = served.pipe();
        let mut log = fs::OpenOptions::new().write(true).open(pipe.join("log")).expect("a FIFO");
        log.write_all(b"11 bytes of").expect("the FIFO can be written to");
        drop(log);
        if real {
            let reports = becomes(&served.agent, "0", "reported", |daemon| {
                !daemon.findings.is_empty() || daemon.pid.is_some_and(|pid| pid.cast_signed() != served.pid)
            });
            println!("{:?} {:?}", reports.findings, reports.reasons);
        }
        assert_eq!(served.controls().len(), 1);
        if !real {
            fault(&served.host, "stale-pid-file --times 1");
            assert!(signal(served.pid, Signal::SIGKILL));
            served.another();
        }
    }
}

#[test]
fn full_log_disk_is_reported_and_ends_no_client() {
    for real in [false, true] {
        let host = Host::up(Served::HOST);
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
        let config = Served::CONFIG.replace("health = \"1s\"", &format!("health = \"1s\"\nlog_directory = \"{dir}\""));
        let setup = Setup::on(&host).config(&config).through(&["unshare", "-m", "sh", "-c", &full, "sh"]);
        let agent = match &programs {
            Some(dir) => setup.env("GPUSH_MPS_PROGRAMS", dir.display().to_string()).start(),
            None => setup.start(),
        };
        let reports = becomes(&agent, "0", "reported", |daemon| {
            daemon.state == MpsState::Ready
                && daemon.findings.iter().any(|finding| finding.contains("the disk is full"))
        });
        let environment = lease(&agent, "0", &json!({})).expect("a lease").environment;
        let client = Client::start(&host, &environment);
        assert!(client.first.starts_with("active"), "{}", client.first);
        client.end();
        assert_eq!(controls(&base(&host)), [pid_of(&reports)]);
        // After the log was truncated, it shows no waiting client. So gpushd assumes that no client
        // waits.
        end_leases(&agent, "0");
        assert_eq!(act(&agent, "0", "restart", &json!({})).status, 200);
        becomes(&agent, "0", "ready with another pid", |daemon| {
            daemon.state == MpsState::Ready && daemon.pid != reports.pid
        });
        let environment = lease(&agent, "0", &json!({})).expect("a lease").environment;
        fault(&host, "never-active");
        let mut waits = Client::begin(&host, &environment, None);
        becomes(&agent, "0", "with a server", |daemon| daemon.servers.len() == 1);
        let refused = act(&agent, "0", "stop", &json!({})).error();
        assert_eq!(refused.code, Code::Blocked, "{refused:?}");
        assert!(refused.causes.iter().any(|why| why.contains("waits for an MPS server")), "{refused:?}");
        assert!(waits.lives() && waits.printed().is_empty());
        clear_faults(&host);
        assert!(waits.says().starts_with("active"));
        waits.end();
        end_leases(&agent, "0");
        assert_eq!(act(&agent, "0", "stop", &json!({})).status, 200);
        reaches(&agent, "0", MpsState::Stopped);
    }
}
