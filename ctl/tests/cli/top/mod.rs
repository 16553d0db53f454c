//! Tests of `gpushctl top` on a pseudoterminal, with a program that answers instead of gpushd.

mod pty;

use std::{
    os::unix::process::ExitStatusExt as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use gpush_api::{
    Actor, Driver, Enforcement, Gpu, GpuProcesses, Health, HealthStatus, HostUsage, Lease, LeaseBinding, LeaseHolder,
    LeaseId, LeaseKind, LeaseMember, LeasePast, LeaseState, MemberShare, Mode, UnleasedPolicy, UsageBucket, Version,
};
use jiff::Timestamp;
use nix::sys::signal::Signal;

use self::pty::Terminal;
use crate::support::{Agent, Answer, Host, Request};

fn version() -> Version {
    let driver = Driver {
        version: "550.163.01".into(),
        nvml: "12.550.163.01".into(),
        cuda: "12.4".into(),
        library: "libnvidia-ml.so.1".into(),
        simulated: false,
        memory_limits: false,
    };
    Version { agent: "9.8.7".into(), api: "v1".into(), driver: Some(driver) }
}

fn health() -> Health {
    Health {
        status: HealthStatus::Ok,
        errors: Vec::new(),
        simulated: false,
        gpu_count: 1,
        maintenance: None,
        config_file_changed: false,
        layouts_at_start: None,
        tasks: Vec::new(),
        pid: 812,
    }
}

fn gpus() -> Vec<Gpu> {
    let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
    gpus.truncate(1);
    gpus[0].mode = Mode::Exclusive;
    // gpushctl requests leases only if a GPU has a rule.
    gpus[0].rule = Some("all".to_owned());
    gpus
}

fn lease() -> Lease {
    let gpu = &gpus()[0];
    let member = LeaseMember {
        target: gpu.uuid.as_str().into(),
        gpu_uuid: gpu.uuid.clone(),
        share: MemberShare::Whole,
        memory_mib: 40_960,
        gpu_memory_mib: 40_960,
    };
    Lease {
        id: LeaseId(17),
        holder: LeaseHolder { uid: 1000, user: Some("alice".into()) },
        account: None,
        asked_by: Some(Actor { uid: 1000, user: Some("alice".into()), pid: None }),
        kind: LeaseKind::Whole,
        enforcement: Enforcement::Exclusive,
        device_access: None,
        state: LeaseState::Active,
        reason: None,
        request: None,
        members: vec![member],
        binding: LeaseBinding::None,
        operation: None,
        created_at: Timestamp::UNIX_EPOCH,
        granted_at: Some(Timestamp::UNIX_EPOCH),
        expires_at: None,
        ended_at: None,
        queue: None,
        waits_for: Vec::new(),
        revocation: None,
        notice: None,
        usage: None,
        keep: None,
        idle: None,
        over_limit: None,
    }
}

fn answer(request: &Request) -> Answer {
    let processes = GpuProcesses { policy: UnleasedPolicy::Report, processes: Vec::new(), unknown: Vec::new() };
    match request.path.split('?').next().unwrap() {
        "/v1/version" => Answer::ok(&version()),
        "/v1/health" => Answer::ok(&health()),
        "/v1/gpus" => Answer::ok(&gpus()),
        "/v1/leases" => Answer::ok(&[lease()]),
        "/v1/processes" => Answer::ok(&processes),
        "/v1/usage" => Answer::ok(&HostUsage::default()),
        "/v1/leases/L17/usage" => {
            let begins_at = Timestamp::UNIX_EPOCH;
            let minute =
                UsageBucket { begins_at, busy_s: 60, unused_s: 0, unknown_s: 0, memory_peak_mib: 0, energy_j: 0.0 };
            Answer::ok(&LeasePast { lease_id: LeaseId(17), minutes: vec![minute], hours: Vec::new(), days: Vec::new() })
        }
        "/v1/leases/L17/release" => Answer::ok(&Lease { state: LeaseState::Ended, ..lease() }),
        other => {
            let error = gpush_api::ApiError::new(gpush_api::Code::NotFound, format!("no {other}"));
            Answer::error(&error)
        }
    }
}

/// Starts top on a terminal of 24 lines and 80 columns, and waits for its picture.
fn started(host: &Host) -> Terminal {
    let terminal = Terminal::start(host, &["top", "--interval", "1s"], 24, 80);
    terminal.wait_for_text("L17 alice");
    terminal
}

#[test]
fn top_uses_the_whole_terminal_and_restores_it() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), answer);
    let terminal = started(&host);
    terminal.wait("the picture", vt100::Screen::alternate_screen);
    assert!(terminal.is_raw());
    terminal.resize(30, 120);
    terminal.wait_for_text("HISTORY, ENDS");
    terminal.resize(5, 30);
    terminal.wait_for_text("top needs 40x8, not 30x5");
    terminal.resize(24, 80);
    // While the terminal is too small, top ignores most keys.
    terminal.wait_for_text("L17 alice");
    terminal.press("h");
    terminal.wait_for_text("Letters after");
    terminal.press("\x1b");
    terminal.wait_for_text("L17 alice");
    // The details of the lease, with the past that gpushd has recorded.
    terminal.press("j\r");
    terminal.wait_for_text("by minute");
    terminal.press("\x1b");
    terminal.wait_for_text("L17 alice");
    terminal.press("q");
    assert_eq!(terminal.ended().code(), Some(0));
}

#[test]
fn signals_end_top_and_restore_the_terminal() {
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT] {
        let host = Host::new();
        Agent::listen(&host.path("gpushd.sock"), answer);
        let terminal = started(&host);
        assert!(terminal.is_raw());
        terminal.signal(signal);
        assert_eq!(terminal.ended().signal(), Some(signal as i32));
    }
}

#[test]
fn lease_is_released_after_a_confirmation() {
    let host = Host::new();
    let agent = Agent::listen(&host.path("gpushd.sock"), answer);
    let terminal = started(&host);
    // The first row is the GPU, the second one the lease.
    terminal.press("jx");
    terminal.wait_for_text("Release L17?");
    terminal.press("n");
    terminal.wait_for_text("nothing was changed");
    terminal.press("x");
    terminal.wait_for_text("Release L17?");
    assert_eq!(agent.bodies("/v1/leases/L17/release").len(), 0);
    terminal.press("y");
    terminal.wait_for_text("L17 has ended");
    assert_eq!(agent.bodies("/v1/leases/L17/release").len(), 1);
    terminal.press("\x03");
    assert_eq!(terminal.ended().code(), Some(130));
}

#[test]
fn last_picture_stays_until_gpushd_answers_again() {
    let host = Host::new();
    let is_away = Arc::new(AtomicBool::new(false));
    let away = Arc::clone(&is_away);
    Agent::listen(&host.path("gpushd.sock"), move |request| {
        if away.load(Ordering::SeqCst) { Answer::HangUp } else { answer(request) }
    });
    let terminal = started(&host);
    is_away.store(true, Ordering::SeqCst);
    terminal.wait_for_text("! the figures are");
    terminal.wait_for_text("L17 alice");
    is_away.store(false, Ordering::SeqCst);
    terminal.wait("the new picture", |screen| !screen.contents().contains("! the figures are"));
    terminal.press("q");
    assert_eq!(terminal.ended().code(), Some(0));
}

#[test]
fn top_without_a_terminal_prints_one_picture() {
    let host = Host::new();
    let agent = Agent::listen(&host.path("gpushd.sock"), |request| match request.path.as_str() {
        // Without ready GPUs, top does not wait for samples.
        "/v1/gpus" => {
            let mut gpus = gpus();
            gpus[0].state = gpush_api::GpuState::Cordoned;
            Answer::ok(&gpus)
        }
        _ => answer(request),
    });
    let text = host.run(&["top", "0"]);
    assert!(text.contains("L17 alice") && text.ends_with("[exit 0]\n"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    let json = host.run(&["top", "--json"]);
    assert!(json.contains("\"gpu_usage\"") && json.contains("\"gpu_processes\""), "{json}");
    assert_eq!(agent.asked().iter().filter(|path| *path == "GET /v1/usage?watch=true").count(), 2);
}
