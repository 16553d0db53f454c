//! The control connection. A daemon accepts only one control connection at a time.

use std::{
    io::IoSlice,
    os::fd::{AsRawFd, OwnedFd},
    process::{Command as Program, Stdio},
    time::Duration,
};

use gpush_api::Percentage;
use gpush_mps::protocol::{
    command::Command,
    control::{Control, ControlError},
    front, holder,
    session::{self, SessionError},
};
use nix::sys::socket::{self, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, UnixCredentials};

use crate::daemon::{Daemon, LONG, Setup};

pub(crate) async fn twenty_concurrent_callers_are_answered(setup: Setup) {
    let daemon = setup.start().await;
    let control = std::sync::Arc::new(Control::of(&daemon.setup.pipe));
    let asked = (0..20).map(|_| {
        let control = std::sync::Arc::clone(&control);
        tokio::spawn(async move { control.default_percentage(LONG).await })
    });
    for asked in asked.collect::<Vec<_>>() {
        assert_eq!(asked.await.unwrap().unwrap(), Percentage::ALL);
    }
    // Each of these callers opens its own control connection. The callers block each other, and
    // retry.
    let asked = (0..20).map(|_| {
        let control = Control::of(&daemon.setup.pipe);
        tokio::spawn(async move { control.default_percentage(LONG).await })
    });
    for asked in asked.collect::<Vec<_>>() {
        assert_eq!(asked.await.unwrap().unwrap(), Percentage::ALL);
    }
}

pub(crate) async fn open_front_end_keeps_the_daemon_busy_until_it_ends(setup: Setup) {
    let daemon = setup.start().await;
    let sit_down = || {
        let mut prompt = daemon.setup.command(&daemon.setup.control_program());
        prompt.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    };
    let mut prompt = sit_down();
    let control = &daemon.control;
    // The front-end connects a moment after its start. If this test holds the control connection at
    // that moment, the front-end ends. So try again.
    let busy = loop {
        if let Err(error) = control.default_percentage(Duration::from_millis(300)).await {
            break error;
        }
        if prompt.try_wait().unwrap().is_some() {
            prompt = sit_down();
        }
    };
    assert!(matches!(busy, ControlError::Busy | ControlError::Session(SessionError::Silent { .. })), "{busy:?}");
    assert_eq!(who(&daemon), [i32::try_from(prompt.id()).unwrap()]);
    drop(prompt.stdin.take());
    prompt.wait().unwrap();
    assert_eq!(who(&daemon), [] as [i32; 0]);
    assert_eq!(control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
}

/// Returns the processes that hold the control connection of the daemon, except this process.
fn who(daemon: &Daemon) -> Vec<i32> {
    holder::holders(i32::try_from(daemon.child.id()).unwrap(), &daemon.setup.pipe).unwrap()
}

/// A process that has connected to the daemon's public socket and sends nothing.
struct HalfOpen(std::process::Child);

impl HalfOpen {
    /// Starts the process, which inherits an open connection to the public socket.
    fn at(setup: &Setup) -> Self {
        let fd = knock(setup);
        let mut command = Program::new("sleep");
        command.arg("600").stdin(fd).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for HalfOpen {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

pub(crate) async fn only_holder_of_the_control_connection_is_found(setup: Setup) {
    let daemon = setup.start().await;
    let mut client = daemon.client(&[]);
    assert!(client.next().starts_with("active "));
    daemon.ready_server().await;
    assert_eq!(who(&daemon), [] as [i32; 0], "a server and a client are there");
    let peer = HalfOpen::at(&daemon.setup);
    is_stopped(&daemon).await;
    assert_eq!(who(&daemon), [i32::try_from(peer.0.id()).unwrap()]);
    drop(peer);
    daemon.control.default_percentage(LONG).await.unwrap();
    assert_eq!(who(&daemon), [] as [i32; 0]);
}

/// Connects to the public socket of the daemon.
fn knock(setup: &Setup) -> OwnedFd {
    let fd = socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let at = UnixAddr::new(&setup.pipe.join("control")).unwrap();
    socket::connect(fd.as_raw_fd(), &at).unwrap();
    fd
}

async fn is_stopped(daemon: &Daemon) {
    let stopped = daemon.control.default_percentage(Duration::from_millis(300)).await.unwrap_err();
    assert!(matches!(stopped, ControlError::Session(SessionError::Silent { .. })), "{stopped:?}");
}

/// A connection that sends nothing blocks the daemon. So any user can block the daemon for all
/// users.
pub(crate) async fn half_open_connection_blocks_the_daemon(setup: Setup) {
    let daemon = setup.start().await;
    let fd = knock(&daemon.setup);
    is_stopped(&daemon).await;
    drop(fd);
    assert_eq!(daemon.control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
}

/// The daemon has passed the client to a server, but still waits for a message of the client.
pub(crate) async fn silent_client_blocks_the_daemon(setup: Setup) {
    let daemon = setup.start().await;
    let fd = knock(&daemon.setup);
    let receive = |length: usize| {
        let mut bytes = vec![0; length];
        let got = socket::recv(fd.as_raw_fd(), &mut bytes, MsgFlags::empty()).unwrap();
        bytes.truncate(got);
        bytes
    };
    assert_eq!(receive(64), b"OUTBHELL\0");
    let own = UnixCredentials::new();
    let with = [ControlMessage::ScmCredentials(&own)];
    let parts = [IoSlice::new(b"OUTBCRED\0")];
    socket::sendmsg::<()>(fd.as_raw_fd(), &parts, &with, MsgFlags::empty(), None).unwrap();
    socket::send(fd.as_raw_fd(), &2_u32.to_le_bytes(), MsgFlags::empty()).unwrap();
    assert_eq!(receive(64), b"OUTBCUFD\0");
    is_stopped(&daemon).await;
    drop(fd);
    assert_eq!(daemon.control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
}

/// NVIDIA's front-end prints the same answers that the daemon sends on its socket.
pub(crate) async fn front_end_and_socket_give_the_same_answers(setup: Setup) {
    let daemon = setup.start().await;
    let (pipe, program) = (&daemon.setup.pipe, daemon.setup.control_program());
    let mut client = daemon.client(&[]);
    assert!(client.next().starts_with("active "));
    let server = daemon.ready_server().await;
    let commands = [
        Command::ServerList,
        Command::ClientList(server),
        Command::DefaultPercentage,
        Command::SetDefaultPercentage("33.4".parse().unwrap()),
        Command::SetDefaultMemoryLimit("2G".parse().unwrap()),
        Command::DefaultMemoryLimit,
        Command::Percentage(server),
        Command::ServerStatus(server),
        Command::ServerStatus(1),
        Command::Processes,
    ];
    for command in commands {
        let direct = session::ask(&pipe.join("control_privileged"), &command.to_string(), LONG).await.unwrap();
        let front = front::ask(&program, pipe, &command, LONG).await.unwrap();
        let plain = |text: &[String]| text.join("\n").trim_end().to_owned();
        assert_eq!(plain(&front.text), plain(&direct.text), "{command}");
        assert_eq!(front.daemon, direct.daemon, "{command}");
    }
    let peer = HalfOpen::at(&daemon.setup);
    let silent = front::ask(&program, pipe, &Command::ServerList, Duration::from_millis(300)).await.unwrap_err();
    assert!(matches!(silent, SessionError::Silent { .. }), "{silent:?}");
    drop(peer);
    let quit = Command::Quit { force_after_s: Some(1) };
    let ended = front::ask(&program, pipe, &quit, LONG).await;
    assert!(matches!(ended, Ok(_) | Err(SessionError::Closed)), "{ended:?}");
    let gone = async || front::ask(&program, pipe, &Command::ServerList, LONG).await.err();
    let gone = crate::daemon::until("it is gone", gone).await;
    assert!(matches!(gone, SessionError::Absent { .. } | SessionError::Closed), "{gone:?}");
}

pub(crate) async fn front_end_exit_code_shows_only_a_missing_daemon(setup: Setup) {
    let daemon = setup.start().await;
    let asked = |lines: &str| {
        let mut front = daemon.setup.command(&daemon.setup.control_program());
        let mut front = front.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Ignore an error: if no daemon is running, the front-end ends before it reads its standard
        // input.
        let _unread = std::io::Write::write_all(&mut front.stdin.take().unwrap(), lines.as_bytes());
        let ended = front.wait_with_output().unwrap();
        let message = [ended.stdout, ended.stderr].concat();
        (ended.status.code(), String::from_utf8(message).unwrap())
    };
    let lines = "get_default_active_thread_percentage\nfoo\n\nget_server_list\nset_default_client_priority 3";
    let message = "100.0\nUnknown command \"foo\"\nUnknown command \"\"\nInvalid priority value - must be 0 or 1!\n";
    assert_eq!(asked(lines), (Some(0), message.to_owned()));
    assert_eq!(asked(""), (Some(0), String::new()));
    daemon.control.quit(None, LONG).await.unwrap();
    let gone = crate::daemon::until("it ends", async || {
        let (status, message) = asked("get_server_list\n");
        (status == Some(1)).then_some(message)
    });
    assert_eq!(gone.await, "Cannot find MPS control daemon process\n");
}
