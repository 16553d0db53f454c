//! The MPS daemons of an in-process test. Each daemon is a process that does nothing and holds the lock of its directory;
//! this script answers commands in its place. It can fail to start, be silent, and ignore `quit`.
//!
//! The supervisor task, its launcher and the directories are the real ones.

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Command as ProcessCommand, Stdio},
    sync::Arc,
};

use gpush_api::{MemoryLimit, Percentage, Priority};
use gpush_host::proc;
use gpush_locked::Locked;
use gpush_mps::{
    daemon::TargetDir,
    protocol::{
        command::{Command, Pid},
        scripted::ScriptedDaemons,
        session::{SessionError, Stage},
    },
};
use nix::sys::signal::{Signal, kill};

use super::programs::UserProgram;

/// The scripted daemons of a host.
#[derive(Debug, Default)]
pub(super) struct ScriptedMps(Locked<MpsScript>);

#[derive(Debug, Default)]
struct MpsScript {
    daemons: BTreeMap<Pid, ScriptedDaemon>,
    /// How the next daemons start.
    start: DaemonStart,
    ignores_quit: bool,
    silence: Option<Silence>,
    /// Whether the test has ended.
    is_over: bool,
    /// The commands so far, in the form `get_server_list`.
    commands: Vec<String>,
}

/// How a daemon starts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum DaemonStart {
    /// It answers at once.
    #[default]
    Ready,
    /// It runs, but does not listen yet, until [`ScriptedMps::clear_faults`].
    Slow,
    /// It prints an error and ends.
    Refused,
    /// It starts, and ends at once with status 3.
    Ends,
    /// It starts with a server, which is its child and holds the lock.
    WithServer,
}

/// How the daemons do not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Silence {
    /// They send no greeting.
    Hello,
    /// They send an empty answer to every command.
    EmptyReply,
}

/// A daemon that runs.
#[derive(Debug, Default)]
struct ScriptedDaemon {
    percentage: Option<Percentage>,
    limit: Option<MemoryLimit>,
    priority: Priority,
    servers: Vec<ScriptedServer>,
    /// Whether it does not listen yet.
    is_starting: bool,
}

#[derive(Debug)]
struct ScriptedServer {
    /// Ends with the server.
    _job: Option<UserProgram>,
    pid: Pid,
    state: &'static str,
    percentage: Option<Percentage>,
    limit: Option<MemoryLimit>,
    clients: Vec<Pid>,
}

impl ScriptedMps {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Sets how the next daemons start.
    pub(super) fn start_next(&self, start: DaemonStart) {
        self.0.lock().start = start;
    }

    /// Lets all daemons not answer.
    pub(super) fn silence(&self, silence: Silence) {
        self.0.lock().silence = Some(silence);
    }

    /// Lets all daemons ignore `quit`.
    pub(super) fn ignore_quit(&self) {
        self.0.lock().ignores_quit = true;
    }

    /// Ends all faults. Daemons that start slowly are ready now.
    pub(super) fn clear_faults(&self) {
        let mut script = self.0.lock();
        let script = &mut *script;
        (script.start, script.silence, script.ignores_quit) = (DaemonStart::Ready, None, false);
        script.daemons.values_mut().for_each(|daemon| daemon.is_starting = false);
    }

    /// Connects a process to the server of a daemon.
    pub(super) fn connect(&self, daemon: u32, client: &UserProgram) {
        let mut script = self.0.lock();
        let daemon = script.daemons.entry(daemon.cast_signed()).or_default();
        if daemon.servers.is_empty() {
            let job = UserProgram::sleep(client.uid());
            let (pid, percentage, limit) = (job.pid().cast_signed(), daemon.percentage, daemon.limit);
            let server =
                ScriptedServer { pid, _job: Some(job), state: "ACTIVE", percentage, limit, clients: Vec::new() };
            daemon.servers.push(server);
        }
        daemon.servers[0].clients.push(client.pid().cast_signed());
    }

    /// Sets the state of the servers of a daemon.
    pub(super) fn set_server_state(&self, daemon: u32, state: &'static str) {
        let mut script = self.0.lock();
        let daemon = script.daemons.get_mut(&daemon.cast_signed()).expect("a daemon");
        daemon.servers.iter_mut().for_each(|server| server.state = state);
    }

    /// Ends the servers of a daemon, as by SIGKILL.
    pub(super) fn kill_servers(&self, daemon: u32) {
        self.0.lock().daemons.get_mut(&daemon.cast_signed()).expect("a daemon").servers.clear();
    }

    /// Disconnects a process from all daemons.
    pub(super) fn disconnect(&self, client: &UserProgram) {
        let mut script = self.0.lock();
        let servers = script.daemons.values_mut().flat_map(|daemon| &mut daemon.servers);
        servers.for_each(|server| server.clients.retain(|pid| *pid != client.pid().cast_signed()));
    }

    /// Changes the settings of a daemon as another program does.
    pub(super) fn change_settings(&self, daemon: u32, percentage: &str, limit: Option<&str>) {
        let mut script = self.0.lock();
        let daemon = script.daemons.get_mut(&daemon.cast_signed()).expect("a daemon");
        daemon.percentage = Some(percentage.parse().expect("a percentage"));
        daemon.limit = limit.map(|limit| limit.parse().expect("a limit"));
    }

    /// Changes the percentage of the servers of a daemon as another program does.
    pub(super) fn change_server_percentage(&self, daemon: u32, percentage: &str) {
        let mut script = self.0.lock();
        let daemon = script.daemons.get_mut(&daemon.cast_signed()).expect("a daemon");
        daemon.servers.iter_mut().for_each(|server| server.percentage = Some(percentage.parse().expect("a number")));
    }

    /// Returns the commands of this name so far.
    pub(super) fn count(&self, command: &str) -> usize {
        self.0.lock().commands.iter().filter(|line| line.split(' ').next() == Some(command)).count()
    }

    /// Ends all daemons in this directory with their servers, and starts no more.
    pub(super) fn end(&self, base: &Path) {
        self.0.lock().is_over = true;
        let is_part = |pid: &Pid| proc::open_file(*pid, 0).is_some_and(|input| input.starts_with(base));
        for pid in proc::pids().unwrap_or_default().into_iter().filter(is_part) {
            let _has_ended = kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL);
        }
    }

    /// Returns how many daemons run.
    pub(super) fn running(&self) -> usize {
        self.0.lock().daemons.keys().filter(|pid| proc::is_alive(**pid)).count()
    }
}

impl ScriptedDaemons for ScriptedMps {
    fn program(&self, dir: &Path) -> ProcessCommand {
        if self.0.lock().is_over {
            return ProcessCommand::new("/bin/false");
        }
        let script = match self.0.lock().start {
            DaemonStart::Ready | DaemonStart::Slow => "exec 2> /dev/null; exec tail -f /dev/null",
            DaemonStart::Refused => "echo the device is busy >&2; exit 1",
            DaemonStart::Ends => "exec 2> /dev/null; exit 3",
            DaemonStart::WithServer => {
                "exec 3<&0; sleep 1000 <&3 3<&- 2> /dev/null & exec tail -f /dev/null 3<&- 2> /dev/null"
            }
        };
        let mut program = ProcessCommand::new("/bin/sh");
        // Another thread may be about to execute a program, and still have a copy of the lock.
        let lock = (0..200).find_map(|_| {
            let lock = TargetDir::at(dir).lock().expect("the lock can be opened");
            lock.or_else(|| {
                std::thread::sleep(std::time::Duration::from_millis(5));
                None
            })
        });
        program.args(["-c", script]).stdin(lock.map_or_else(Stdio::null, Stdio::from));
        program
    }

    fn answer(&self, daemon: Pid, _pipe: &Path, command: &Command) -> Result<Vec<String>, SessionError> {
        let mut script = self.0.lock();
        let (start, silence, ignores_quit) = (script.start, script.silence, script.ignores_quit);
        script.commands.push(command.to_string());
        let known = script.daemons.entry(daemon).or_insert_with(|| ScriptedDaemon::new(daemon, start));
        if known.is_starting || !proc::is_alive(daemon) {
            return Err(SessionError::Absent { at: "control".into(), cause: std::io::ErrorKind::NotFound.into() });
        }
        match silence {
            Some(Silence::Hello) => return Err(SessionError::Silent { stage: Stage::Hello }),
            Some(Silence::EmptyReply) => return Ok(Vec::new()),
            None => {}
        }
        if let Command::Quit { .. } = command {
            if !ignores_quit {
                known.servers.clear();
                let _has_ended = kill(nix::unistd::Pid::from_raw(daemon), Signal::SIGTERM);
            }
            return Ok(Vec::new());
        }
        Ok(known.answer(*command))
    }
}

impl ScriptedDaemon {
    fn new(pid: Pid, start: DaemonStart) -> Self {
        let servers = proc::children(pid).into_iter().map(|pid| ScriptedServer {
            _job: None,
            pid,
            state: "ACTIVE",
            percentage: None,
            limit: None,
            clients: Vec::new(),
        });
        Self { servers: servers.collect(), is_starting: start == DaemonStart::Slow, ..Self::default() }
    }

    /// Answers like NVIDIA's daemon of version 555.
    fn answer(&mut self, command: Command) -> Vec<String> {
        let percentage = |percentage: Option<Percentage>| {
            percentage.map_or_else(|| "100.0".to_owned(), |percentage| percentage.to_string())
        };
        let of = |pid: Pid| self.servers.iter().position(|server| server.pid == pid);
        let gone = |pid: Pid| vec![format!("Server {pid} not found")];
        match command {
            Command::ServerList => self.servers.iter().map(|server| server.pid.to_string()).collect(),
            Command::ServerStatus(pid) => {
                of(pid).map_or_else(|| gone(pid), |at| vec![self.servers[at].state.to_owned()])
            }
            Command::ClientList(pid) => {
                let clients = |at: usize| self.servers[at].clients.iter().map(Pid::to_string).collect();
                of(pid).map_or_else(|| gone(pid), clients)
            }
            Command::DefaultPercentage => vec![percentage(self.percentage)],
            Command::SetDefaultPercentage(to) => {
                self.percentage = Some(to);
                Vec::new()
            }
            Command::Percentage(pid) => {
                of(pid).map_or_else(|| gone(pid), |at| vec![percentage(self.servers[at].percentage)])
            }
            Command::SetPercentage(pid, to) => of(pid).map_or_else(
                || gone(pid),
                |at| {
                    self.servers[at].percentage = Some(to);
                    Vec::new()
                },
            ),
            Command::DefaultMemoryLimit => shown(self.limit),
            Command::SetDefaultMemoryLimit(to) => {
                self.limit = Some(to);
                Vec::new()
            }
            Command::ClearDefaultMemoryLimit => {
                self.limit = None;
                Vec::new()
            }
            Command::MemoryLimit(pid) => of(pid).map_or_else(|| gone(pid), |at| shown(self.servers[at].limit)),
            Command::SetMemoryLimit(pid, to) => of(pid).map_or_else(
                || gone(pid),
                |at| {
                    self.servers[at].limit = Some(to);
                    Vec::new()
                },
            ),
            Command::DefaultPriority => vec![self.priority.number().to_string()],
            Command::SetDefaultPriority(to) => {
                self.priority = to;
                Vec::new()
            }
            Command::TerminateClient { server, client } => {
                if let Some(at) = of(server) {
                    self.servers[at].clients.retain(|pid| *pid != client);
                }
                Vec::new()
            }
            Command::Processes
            | Command::StartServer { .. }
            | Command::ShutdownServer { .. }
            | Command::Quit { .. } => Vec::new(),
        }
    }
}

/// Returns a memory limit as the daemon reports it: from 1 GiB on, in whole GiB.
fn shown(limit: Option<MemoryLimit>) -> Vec<String> {
    let text = |limit: MemoryLimit| match limit.mib() {
        mib @ 1024.. => format!("{}G", mib / 1024),
        mib => format!("{mib}M"),
    };
    limit.map(text).into_iter().collect()
}
