//! How gpush's protocol crate reacts to each fault. After a fault is cleared, the crate works
//! again.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed, in a helper too")]

use std::{
    os::unix::fs::symlink,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use gpush_api::{MpsServerState, Percentage};
use gpush_mps::protocol::{
    control::{Control, ControlError, Protocol},
    lock,
    session::{SessionError, Stage},
};
use mps_sim::fault::{FaultFile, Kind};

const LONG: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(300);

struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
    faults: FaultFile,
    control: Control,
}

impl Daemon {
    fn prepared() -> (tempfile::TempDir, FaultFile) {
        let dir = tempfile::tempdir().unwrap();
        for name in ["pipe", "bin"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        symlink(env!("CARGO_BIN_EXE_mps-sim"), dir.path().join("bin/nvidia-cuda-mps-server")).unwrap();
        let faults = FaultFile::at(dir.path().join("faults.toml"));
        (dir, faults)
    }

    fn spawn((dir, faults): (tempfile::TempDir, FaultFile)) -> Self {
        let pipe = dir.path().join("pipe");
        let mut command = Command::new(env!("CARGO_BIN_EXE_mps-sim"));
        command
            .args(["nvidia-cuda-mps-control", "-f"])
            .env_clear()
            .env("PATH", dir.path().join("bin"))
            .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
            .env("MPS_SIM_FAULTS", dir.path().join("faults.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        Self { child: command.spawn().unwrap(), faults, control: Control::of(&pipe), dir }
    }

    async fn start() -> Self {
        let daemon = Self::spawn(Self::prepared());
        until(async || daemon.control.daemon(LONG).await.ok()).await;
        daemon
    }

    fn pipe(&self) -> PathBuf {
        self.dir.path().join("pipe")
    }

    fn fault(&self, kind: Kind, times: Option<u64>) {
        self.faults.add(kind, None, times, Some(300)).unwrap();
    }

    async fn is_well(&self) {
        self.faults.clear(None).unwrap();
        assert_eq!(self.control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
    }

    async fn server(&self) -> i32 {
        let uid = nix::unistd::geteuid().as_raw();
        self.control.start_server(uid, LONG).await.unwrap();
        until(async || self.control.servers(LONG).await.unwrap().first().copied()).await
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

async fn until<T>(ask: impl AsyncFn() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(started.elapsed() < LONG, "not in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn silent_at(daemon: &Daemon) -> Stage {
    match daemon.control.default_percentage(SHORT).await {
        Err(ControlError::Session(SessionError::Silent { stage })) => stage,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn silent_hello_fires_the_given_times() {
    let daemon = Daemon::start().await;
    daemon.fault(Kind::SilentHello, Some(2));
    for _ in 0..2 {
        assert_eq!(silent_at(&daemon).await, Stage::Hello);
    }
    assert_eq!(daemon.control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
    daemon.is_well().await;
}

#[tokio::test]
async fn foreign_hello_is_answered_through_the_front_end_from_then_on() {
    let daemon = Daemon::start().await;
    daemon.fault(Kind::ForeignHello, None);
    let foreign = daemon.control.default_percentage(LONG).await.unwrap_err();
    assert!(matches!(foreign, ControlError::Session(SessionError::Foreign(_))), "{foreign:?}");
    assert_eq!(daemon.control.protocol(), Protocol::Direct);

    let program = daemon.dir.path().join("bin/nvidia-cuda-mps-control");
    symlink(env!("CARGO_BIN_EXE_mps-sim"), &program).unwrap();
    let control = Control::of(&daemon.pipe()).with_front(&program);
    control.set_default_percentage("12.5".parse().unwrap(), LONG).await.unwrap();
    let front_end = Protocol::FrontEnd("the greeting has 13 bytes".to_owned());
    assert_eq!(control.protocol(), front_end);
    assert_eq!(control.servers(LONG).await.unwrap(), [] as [i32; 0]);
    assert_eq!(control.daemon(LONG).await.unwrap().pid, i32::try_from(daemon.child.id()).unwrap());
    match control.server_state(1, LONG).await {
        Err(ControlError::NoServer | ControlError::Unknown(_)) => {}
        other => panic!("{other:?}"),
    }
    control.set_default_percentage(Percentage::ALL, LONG).await.unwrap();

    daemon.faults.add(Kind::BusyUi, None, None, None).unwrap();
    let busy = control.servers(SHORT).await.unwrap_err();
    assert!(matches!(busy, ControlError::Busy | ControlError::Session(SessionError::Silent { .. })), "{busy:?}");
    daemon.is_well().await;
    assert_eq!(control.servers(LONG).await.unwrap(), [] as [i32; 0]);
    assert_eq!(control.protocol(), front_end, "it is not asked by its own again");
    control.quit(None, LONG).await.unwrap();
}

#[tokio::test]
async fn busy_ui_makes_the_daemon_report_busy() {
    let daemon = Daemon::start().await;
    daemon.fault(Kind::BusyUi, None);
    let busy = daemon.control.default_percentage(SHORT).await.unwrap_err();
    // Accept both errors, because the deadline may expire during any attempt to connect.
    let reported = matches!(busy, ControlError::Busy | ControlError::Session(SessionError::Silent { .. }));
    assert!(reported, "{busy:?}");
    daemon.is_well().await;
}

#[tokio::test]
async fn empty_reply_is_reported_as_strange() {
    let daemon = Daemon::start().await;
    daemon.fault(Kind::EmptyReply, None);
    let empty = daemon.control.default_percentage(LONG).await.unwrap_err();
    assert!(matches!(&empty, ControlError::Strange { message, .. } if message.is_empty()), "{empty:?}");
    daemon.is_well().await;
}

#[tokio::test]
async fn unread_pipe_and_hung_daemon_block_at_different_stages() {
    let daemon = Daemon::start().await;
    daemon.fault(Kind::UnreadPipe, None);
    assert_eq!(silent_at(&daemon).await, Stage::Answer);
    daemon.is_well().await;
    daemon.fault(Kind::HungDaemon, None);
    // The daemon may have checked the fault rules just before the test added this rule. Wait until
    // the daemon checks again.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(silent_at(&daemon).await, Stage::Hello);
    assert_eq!(lock::holder(&daemon.pipe()).unwrap(), Some(daemon.child.id().cast_signed()));
    daemon.is_well().await;
}

#[tokio::test]
async fn stale_pid_file_does_not_hide_the_lock_holder() {
    let (dir, faults) = Daemon::prepared();
    faults.add(Kind::StalePidFile, None, None, None).unwrap();
    let daemon = Daemon::spawn((dir, faults));
    until(async || daemon.control.daemon(LONG).await.ok()).await;
    let reported: u32 =
        std::fs::read_to_string(daemon.pipe().join("nvidia-cuda-mps-control.pid")).unwrap().parse().unwrap();
    assert_ne!(reported, daemon.child.id());
    assert_eq!(lock::holder(&daemon.pipe()).unwrap(), Some(daemon.child.id().cast_signed()), "the lock does not lie");
}

#[tokio::test]
async fn never_active_and_server_dies_keep_servers_unready() {
    let daemon = Daemon::start().await;
    daemon.fault(Kind::NeverActive, None);
    let server = daemon.server().await;
    tokio::time::sleep(SHORT).await;
    assert_eq!(daemon.control.server_state(server, LONG).await.unwrap(), MpsServerState::Initializing);
    daemon.faults.clear(None).unwrap();
    until(async || (daemon.control.server_state(server, LONG).await.unwrap() == MpsServerState::Active).then_some(()))
        .await;
    daemon.fault(Kind::ServerDies, None);
    daemon.control.shutdown_server(server, true, LONG).await.unwrap();
    until(async || daemon.control.servers(LONG).await.unwrap().is_empty().then_some(())).await;
    daemon.control.start_server(nix::unistd::geteuid().as_raw(), LONG).await.unwrap();
    until(async || daemon.control.servers(LONG).await.unwrap().is_empty().then_some(())).await;
    daemon.is_well().await;
}

#[tokio::test]
async fn orphan_server_survives_its_daemon() {
    let mut daemon = Daemon::start().await;
    let server = daemon.server().await;
    until(async || daemon.control.percentage(server, LONG).await.ok()).await;
    daemon.fault(Kind::OrphanServer, Some(1));
    daemon.child.wait().unwrap();
    assert!(PathBuf::from(format!("/proc/{server}")).exists());
    assert_eq!(lock::holder(&daemon.pipe()).unwrap(), None);
    // The server ends when its pipe directory is removed.
    let pipe = daemon.pipe();
    std::fs::remove_dir_all(pipe).unwrap();
    until(async || (!PathBuf::from(format!("/proc/{server}")).exists()).then_some(())).await;
}

#[tokio::test]
async fn second_uid_replaces_a_server_without_clients() {
    let daemon = Daemon::start().await;
    let server = daemon.server().await;
    until(async || daemon.control.percentage(server, LONG).await.ok()).await;
    daemon.fault(Kind::SecondUid, Some(1));
    let other = until(async || {
        let first = daemon.control.servers(LONG).await.unwrap().first().copied();
        first.filter(|pid| *pid != server)
    });
    let other = other.await;
    until(async || (!daemon.control.clients(other, LONG).await.unwrap().is_empty()).then_some(())).await;
    daemon.control.start_server(nix::unistd::geteuid().as_raw(), LONG).await.unwrap();
    tokio::time::sleep(SHORT).await;
    assert_eq!(daemon.control.servers(LONG).await.unwrap(), [other], "ours waits");
    daemon.faults.clear(None).unwrap();
    until(async || {
        let first = daemon.control.servers(LONG).await.unwrap().first().copied();
        first.filter(|pid| *pid != other)
    })
    .await;
}

#[tokio::test]
async fn slow_quit_and_slow_start_delay_the_daemon() {
    let (dir, faults) = Daemon::prepared();
    faults.add(Kind::SlowStart, None, None, Some(400)).unwrap();
    let started = Instant::now();
    let mut daemon = Daemon::spawn((dir, faults));
    until(async || daemon.control.daemon(LONG).await.ok()).await;
    assert!(started.elapsed() >= Duration::from_millis(400));
    daemon.fault(Kind::SlowQuit, None);
    let reported = Instant::now();
    let silent = daemon.control.quit(None, Duration::from_millis(100)).await.unwrap_err();
    assert!(matches!(silent, ControlError::Session(SessionError::Silent { .. })), "{silent:?}");
    daemon.child.wait().unwrap();
    assert!(reported.elapsed() >= Duration::from_millis(300));
}

#[tokio::test]
async fn fault_is_targeted_by_part_of_the_directory() {
    let (one, other) = (Daemon::start().await, Daemon::start().await);
    let part = one.dir.path().file_name().unwrap().to_str().unwrap().to_owned();
    for daemon in [&one, &other] {
        daemon.faults.add(Kind::BusyUi, Some(part.clone()), None, None).unwrap();
    }
    assert!(one.control.default_percentage(SHORT).await.is_err());
    assert_eq!(other.control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
}

#[tokio::test]
async fn invalid_fault_file_ends_the_daemon() {
    let mut daemon = Daemon::start().await;
    std::fs::write(daemon.dir.path().join("faults.toml"), "[[fault]]\nkind = \"buzy-ui\"\n").unwrap();
    assert_eq!(daemon.child.wait().unwrap().code(), Some(70));
}
