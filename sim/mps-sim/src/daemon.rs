//! The control daemon: one loop that serves two sockets, the control connection and the server.
//!
//! ```text
//!  poll ─┬─ a socket: greet, read the kind ─┬─ 1 server ready    ─┐
//!        │                                  ├─ 2 client           ├──► servers
//!        │                                  ├─ 10 fatal exception ─┘
//!        │                                  └─ 4 user interface: gets the control connection; closed if it is held
//!        ├─ the control connection: a command, or its end
//!        └─ a server ended
//! ```
//!
//! No step has a deadline. If a peer sends only a part of its data, the daemon blocks, as the real daemon does.

use std::{
    io,
    os::fd::AsFd,
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{
    command::{self, Verdict},
    fault::{Kind as Fault, LOOK, Rule},
    files::{self, Files, NoFiles},
    log::{self, Lines, Log, Source},
    options,
    place::Environment,
    servers::{DEVICES, Defaults, Servers, Users},
    state::DaemonState,
    value,
    wire::{self, Kind, Peer, Socket},
};

/// The text that the background process prints when it has begun to listen.
const LISTENS: &str = "listens";

struct Daemon {
    state: DaemonState,
    files: Files,
    /// The control connection, if a user interface is connected.
    ear: Option<(Socket, Peer)>,
    /// Connections to which the daemon sends no greeting, because of a fault rule.
    ungreeted: Vec<(Socket, Rule)>,
}

/// Runs the daemon in the foreground (`-f`).
pub(crate) fn foreground(place: Environment, users: Users) -> anyhow::Result<ExitCode> {
    serve(place, users, &Lines::Output, || {})
}

/// Starts the daemon as a separate process (`-d`). Returns when the daemon listens.
pub(crate) fn background(called: &Path, users: Users) -> anyhow::Result<ExitCode> {
    let own = std::env::current_exe().context("cannot find my own executable")?;
    let mut command = Command::new(own);
    std::os::unix::process::CommandExt::arg0(&mut command, called);
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    // Call the program under the same name, because the name selects what the program does: see main.rs.
    command
        .arg(options::BEHIND)
        .args(users.argument())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    let mut child = command.spawn().context("cannot start the daemon")?;
    let mut message = String::new();
    if let Some(out) = child.stdout.take() {
        io::BufRead::read_line(&mut io::BufReader::new(out), &mut message)?;
    }
    if message.trim() == LISTENS {
        return Ok(ExitCode::SUCCESS);
    }
    out!("{message}");
    Ok(if child.wait()?.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the background process of `-d`.
pub(crate) fn behind(place: Environment, users: Users) -> anyhow::Result<ExitCode> {
    let made = std::fs::create_dir(&place.log);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    if made.is_ok() {
        std::fs::set_permissions(&place.log, mode)?;
    }
    let lines = Lines::Directory(place.log.clone());
    serve(place, users, &lines, || {
        outln!("{LISTENS}");
        // From now on, no process reads the daemon's output and errors, so send them to /dev/null.
        if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
            let _as_it_is = nix::unistd::dup2_stdout(&null).and_then(|()| nix::unistd::dup2_stderr(&null));
        }
    })
}

fn serve(place: Environment, users: Users, lines: &Lines, listening: impl FnOnce()) -> anyhow::Result<ExitCode> {
    let lock = match files::lock(&place.pipe) {
        Ok(lock) => lock,
        Err(NoFiles::Taken) => {
            outln!("An instance of this daemon is already running");
            return Ok(ExitCode::FAILURE);
        }
        Err(NoFiles::TooLong) => return Ok(ExitCode::FAILURE),
        Err(NoFiles::System(error)) => {
            outln!("Cannot access CUDA_MPS_PIPE_DIRECTORY={}", place.pipe.display());
            return Err(error.into());
        }
    };
    if let Some(rule) = place.faults.fires(Fault::SlowStart) {
        std::thread::sleep(rule.longer());
    }
    log::open(&place.pipe, lines).context("cannot open the log")?;
    let log = Log::of(&place.pipe, Source::Control);
    let pipe = place.pipe.display();
    log.say(&format!("Starting control daemon using socket {pipe}/control"));
    log.say(&format!("To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe}"));
    let defaults = from_environment(&log);
    let files = files::listen(&place, lock).context("cannot listen")?;
    listening();
    let version = place.version();
    let state = DaemonState { place, version, log, defaults, servers: Servers::serving(users) };
    Daemon { state, files, ear: None, ungreeted: Vec::new() }.run()
}

/// Reads percentage and priority from the environment. The real daemon reads no memory limit there, so this function
/// does not read it either.
fn from_environment(log: &Log) -> Defaults {
    let mut defaults = Defaults { percentage: 100.0, memory: [0; DEVICES as usize], priority: 0 };
    if let Some(text) = crate::place::variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") {
        match value::percentage(&text) {
            Some(percentage) => defaults.percentage = percentage,
            None => log.say("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE should be between (0.0, 100.0]"),
        }
    }
    if let Some(text) = crate::place::variable("CUDA_MPS_CLIENT_PRIORITY") {
        match u32::try_from(value::number(Some(&text))) {
            Ok(priority @ 0..=1) => defaults.priority = priority,
            Ok(_) | Err(_) => log.say("CUDA_MPS_CLIENT_PRIORITY should be between [0,1]"),
        }
    }
    defaults
}

impl Daemon {
    fn run(mut self) -> anyhow::Result<ExitCode> {
        loop {
            self.meet_faults();
            if self.state.place.is_gone() {
                self.state.servers.interrupt();
                return Ok(ExitCode::SUCCESS);
            }
            let (privileged, control, ear) = self.wait()?;
            while self.state.servers.reap(&self.state.log).is_some() {}
            if privileged {
                self.door(true);
            }
            if control {
                self.door(false);
            }
            if ear && let Some(code) = self.listen() {
                return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
            }
        }
    }

    /// Waits for input. Returns three flags: whether there is input on the privileged socket, on
    /// the other socket, and on the control connection.
    fn wait(&self) -> anyhow::Result<(bool, bool, bool)> {
        let wanted = |socket| PollFd::new(socket, PollFlags::POLLIN);
        let mut fds = vec![wanted(self.files.privileged.as_fd()), wanted(self.files.control.as_fd())];
        fds.extend(self.ear.as_ref().map(|(ear, _)| wanted(ear.as_fd())));
        let timeout = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO);
        match poll(&mut fds, timeout) {
            Err(nix::errno::Errno::EINTR) | Ok(_) => {}
            Err(errno) => return Err(errno).context("cannot wait"),
        }
        let ready = |at: usize| fds.get(at).and_then(PollFd::any).unwrap_or(false);
        Ok((ready(0), ready(1), ready(2)))
    }

    fn meet_faults(&mut self) {
        if let Some(rule) = self.state.place.faults.fires(Fault::HungDaemon) {
            self.state.place.faults.wait_out(&rule);
        }
        if self.state.place.faults.fires(Fault::OrphanServer).is_some() {
            let _dying = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
        }
        self.ungreeted.retain(|(_, rule)| self.state.place.faults.is_there(rule));
        match self.state.servers.made_up() {
            Some(rule) if self.state.place.faults.is_there(rule) => {}
            Some(_) => self.state.servers.unmake(),
            None => {
                if let Some(rule) = self.state.place.faults.fires(Fault::SecondUid) {
                    self.state.servers.make_up(rule, &self.state.log);
                }
            }
        }
    }

    /// Handles a new connection. Errors go only to the log.
    fn door(&mut self, privileged: bool) {
        let door = if privileged { &self.files.privileged } else { &self.files.control };
        let Ok(socket) = door.accept() else {
            self.state.log.say("Unable to accept connection");
            return;
        };
        self.state.log.say("Accepting connection...");
        if let Some(rule) = self.state.place.faults.fires(Fault::SilentHello) {
            self.ungreeted.push((socket, rule));
            return;
        }
        if let Some(rule) = self.state.place.faults.fires(Fault::SlowHello) {
            std::thread::sleep(rule.longer());
        }
        let foreign = self.state.place.faults.fires(Fault::ForeignHello).is_some();
        let hello = if foreign { wire::FOREIGN_HELLO } else { wire::HELLO };
        let introduced = socket.send(hello).and_then(|()| socket.receive());
        let peer =
            introduced.ok().filter(|message| message.bytes == wire::CREDENTIALS).and_then(|message| message.from);
        let Some(peer) = peer else {
            self.state.log.say("User did not send valid credentials");
            return;
        };
        let Ok(kind) = socket.receive_u32() else {
            self.state.log.say("Unable to read new connection type information");
            return;
        };
        self.introduced(socket, peer, Kind::of(kind));
    }

    fn introduced(&mut self, socket: Socket, peer: Peer, kind: Option<Kind>) {
        match kind {
            Some(Kind::Server) => {
                if self.state.servers.ready(socket, peer, &self.state.defaults, &self.state.log).is_err() {
                    self.state.log.say("Unable to read new connection type information");
                }
            }
            Some(Kind::Client) => self.state.servers.client(socket, peer, &self.state.log),
            Some(Kind::Debuggee) => self.state.log.say(&format!("NEW DEBUGGEE {} from user {}", peer.pid, peer.uid)),
            Some(Kind::UserInterface) => {
                let busy = self.state.place.faults.fires(Fault::BusyUi).is_some();
                if self.ear.is_none() && !busy {
                    self.state.log.say("NEW UI");
                    self.ear = Some((socket, peer));
                }
            }
            Some(Kind::FatalException) => {
                self.state.servers.failed(peer, &self.state.log);
                // Ignore an error: a peer that has closed the connection does not need this message.
                let _gone = socket.send(&0_u32.to_le_bytes());
            }
            None => self.state.log.say("Unknown type of connection"),
        }
    }

    /// Handles input on the control connection. Returns the exit code if the daemon must end.
    fn listen(&mut self) -> Option<i32> {
        let (ear, peer) = self.ear.take()?;
        match self.hear(&ear, peer) {
            Ok(Verdict::Goes) => self.ear = Some((ear, peer)),
            Ok(Verdict::Quit { force_after }) => {
                let code = self.quit(force_after);
                let _gone = ear.send(&status(code));
                return Some(code);
            }
            Err(_) => self.state.log.say("UI closed"),
        }
        None
    }

    /// Reads one command from the control connection and answers it. Returns an error if the connection has ended.
    fn hear(&mut self, ear: &Socket, peer: Peer) -> io::Result<Verdict> {
        if u64::from_le_bytes(ear.receive_array()?) == 0 {
            ear.send(&status(0))?;
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let body = ear.receive()?.bytes;
        let line = String::from_utf8_lossy(&body);
        let line = line.trim_end_matches('\0').trim_end_matches('\n');
        self.state.log.say(&format!("Cmd:{line}\n"));
        if let Some(rule) = self.state.place.faults.fires(Fault::UnreadPipe) {
            self.state.place.faults.wait_out(&rule);
        }
        let (answer, verdict) = command::obey(&mut self.state, line, peer);
        let mute = !answer.is_empty() && self.state.place.faults.fires(Fault::EmptyReply).is_some();
        for text in answer {
            self.state.log.say(&text);
            if !mute {
                ear.send(&[&0_u32.to_le_bytes(), text.as_bytes()].concat())?;
            }
        }
        Ok(verdict)
    }

    /// Ends the server, waits until it has ended, and cleans up. Returns the server's exit code.
    fn quit(&mut self, force_after: Option<Duration>) -> i32 {
        if let Some(after) = force_after {
            self.state.log.say(&format!("quit command issued with timeout of {}", after.as_secs()));
        }
        let mut interrupt_at = force_after.map(|after| Instant::now() + after);
        self.state.servers.end_all();
        let mut code = 0;
        while self.state.servers.now().is_some() {
            if interrupt_at.is_some_and(|at| at <= Instant::now()) {
                self.state.servers.interrupt();
                interrupt_at = None;
            }
            match self.state.servers.reap(&self.state.log) {
                Some(ended) => code = ended,
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        if let Some(rule) = self.state.place.faults.fires(Fault::SlowQuit) {
            std::thread::sleep(rule.longer());
        }
        self.state.log.say(&format!("Exit with status {code}"));
        // The thread that prints the log needs a moment to write this line before the process ends.
        std::thread::sleep(Duration::from_millis(2));
        files::remove(&self.state.place.pipe);
        code
    }
}

fn status(code: i32) -> Vec<u8> {
    [1_u32.to_le_bytes(), code.to_le_bytes()].concat()
}
