//! Commands to a daemon. Sends one command at a time, each with a deadline. Retries while another
//! process holds the control connection. Returns replies as typed values, and reads settings back.
//!
//! ```text
//! asked ──► the lock ──► session ─┬─ answered ─────────────────────► refusal, by its text? ──► value
//!                          ▲      ├─ closed: another connection, ask again ───┐
//!                          ├──────┼───────────────────────────────────────────┘ until the deadline: busy
//!                          └──────┼─ foreign: from then on through NVIDIA's front-end, if there is one
//!                                 └─ absent, silent: reported
//! ```

#[cfg(any(test, feature = "scripted"))]
use std::sync::Arc;
use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use gpush_api::{MemoryLimit, MpsServerState, Percentage, Priority};
use thiserror::Error;
use tokio::{sync::Mutex, time::Instant};

#[cfg(any(test, feature = "scripted"))]
use super::scripted::{self, ScriptedDaemons};
use super::{
    command::{Command, Pid},
    front,
    session::{self, Answer, Daemon, SessionError},
};

/// Pause between two attempts while another process holds the control connection.
const AGAIN: Duration = Duration::from_millis(20);

/// Why a command failed.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The daemon did not reply.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Another process held the control connection until the deadline: an open front-end, or a
    /// connection that hangs.
    #[error("another process holds the control connection of the MPS daemon")]
    Busy,
    /// The daemon refused the command.
    #[error("the control daemon refused `{command}`: {message}")]
    Refused {
        /// The command.
        command: String,
        /// The daemon's reply, or a description of the reply's status if the status was not 0.
        message: String,
    },
    /// This daemon does not know the command.
    #[error("this control daemon does not know the command `{0}`")]
    Unknown(String),
    /// There is no such server, or no server at all.
    #[error("the control daemon has no such server")]
    NoServer,
    /// The server is starting or ending, so the daemon did not pass the command to the server.
    #[error("the MPS server is starting or ending, so the control daemon did not pass the command to it")]
    ServerBusy,
    /// The daemon reported success, but the value read back differs.
    #[error("the control daemon accepted `{reported}` but then reported `{has}`")]
    NotSet {
        /// The command.
        reported: String,
        /// The value read back; empty if there is none.
        has: String,
    },
    /// A reply that cannot be parsed.
    #[error("the control daemon answered `{command}` with `{message}`, which gpushd does not understand")]
    Strange {
        /// The command.
        command: String,
        /// The reply.
        message: String,
    },
}

/// The control connection to a daemon. gpushd uses one such connection for all commands to the daemon.
#[derive(Debug)]
pub struct Control {
    directory: PathBuf,
    /// The daemon's pid. If another process listens on the socket, gpushd does not send a command
    /// to that process.
    only: Option<Pid>,
    /// NVIDIA's front-end, for a daemon whose protocol gpushd does not know.
    front: Option<PathBuf>,
    /// Why the direct protocol does not work with this daemon; empty until a command shows the
    /// reason.
    foreign: OnceLock<String>,
    turn: Mutex<()>,
    /// For tests: answers in place of the daemon.
    #[cfg(any(test, feature = "scripted"))]
    script: Option<Arc<dyn ScriptedDaemons>>,
}

/// How gpushd communicates with a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Protocol {
    /// Directly, through the daemon's socket.
    Direct,
    /// Through NVIDIA's front-end, with the reason.
    FrontEnd(String),
}

impl Control {
    /// Creates a connection to the daemon of a pipe directory. Opens nothing yet.
    #[must_use]
    pub fn of(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            only: None,
            front: None,
            foreign: OnceLock::new(),
            turn: Mutex::new(()),
            #[cfg(any(test, feature = "scripted"))]
            script: None,
        }
    }

    /// Sets the absolute path of the front-end, for a daemon whose protocol is unknown.
    #[must_use]
    pub fn with_front(self, program: &Path) -> Self {
        Self { front: Some(program.to_owned()), ..self }
    }

    /// Limits the connection to the daemon with this pid.
    #[must_use]
    pub fn with_expected_pid(self, pid: Pid) -> Self {
        Self { only: Some(pid), ..self }
    }

    /// Sets the script that answers in place of the daemon.
    #[cfg(any(test, feature = "scripted"))]
    #[must_use]
    pub fn with_script(self, script: Option<Arc<dyn ScriptedDaemons>>) -> Self {
        Self { script, ..self }
    }

    /// Returns the pipe directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns how gpushd communicates with the daemon, as far as gpushd knows this yet.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.foreign.get().map_or(Protocol::Direct, |what| Protocol::FrontEnd(what.clone()))
    }

    /// Sends a command and returns the reply. `deadline` includes the time during which this
    /// command waits for other commands.
    ///
    /// # Errors
    /// See [`ControlError`]. After [`SessionError::Silent`] the command may have taken effect.
    pub async fn send(&self, command: &Command, deadline: Duration) -> Result<Answer, ControlError> {
        let until = Instant::now() + deadline;
        let _turn = tokio::time::timeout_at(until, self.turn.lock()).await.map_err(|_| ControlError::Busy)?;
        let mut greeted = false;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = command.to_string();
            match self.ask(command, &line, left).await {
                Ok(answer) => return check_refusal(&line, answer),
                Err(SessionError::Closed) if command.ends_the_daemon() => return Err(SessionError::Closed.into()),
                Err(SessionError::Closed) if Instant::now() + AGAIN >= until => return Err(ControlError::Busy),
                Err(SessionError::Closed) => {
                    greeted = true;
                    tokio::time::sleep(AGAIN).await;
                }
                // The deadline expired during a retry, so another process held the connection until the deadline.
                Err(SessionError::Silent { .. }) if greeted => return Err(ControlError::Busy),
                Err(other) => return Err(other.into()),
            }
        }
    }

    /// Makes one attempt. Uses the front-end if an earlier attempt showed that the daemon's
    /// protocol is unknown.
    async fn ask(&self, command: &Command, line: &str, deadline: Duration) -> Result<Answer, SessionError> {
        #[cfg(any(test, feature = "scripted"))]
        if let Some(script) = &self.script {
            return scripted::ask(&**script, self.only.unwrap_or_default(), &self.directory, command);
        }
        let until = Instant::now() + deadline;
        if self.foreign.get().is_none() {
            match session::ask_only(self.only, &self.directory.join("control_privileged"), line, deadline).await {
                Err(SessionError::Foreign(what)) if self.front.is_some() => {
                    let _first = self.foreign.set(what);
                }
                other => return other,
            }
        }
        let Some(front) = &self.front else {
            return Err(SessionError::Foreign(self.foreign.get().cloned().unwrap_or_default()));
        };
        if let Some(meant) = self.only {
            front::check_lock_holder(meant, &self.directory)?;
        }
        front::ask(front, &self.directory, command, until.saturating_duration_since(Instant::now())).await
    }

    /// Returns the daemon process that answers on the control socket.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn daemon(&self, deadline: Duration) -> Result<Daemon, ControlError> {
        Ok(self.send(&Command::ServerList, deadline).await?.daemon)
    }

    /// Returns the pids of the daemon's servers.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn servers(&self, deadline: Duration) -> Result<Vec<Pid>, ControlError> {
        self.pids(Command::ServerList, deadline).await
    }

    /// Returns the pids of a server's clients. The list is empty for a server that is starting or
    /// ending.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn clients(&self, server: Pid, deadline: Duration) -> Result<Vec<Pid>, ControlError> {
        self.pids(Command::ClientList(server), deadline).await
    }

    async fn pids(&self, command: Command, deadline: Duration) -> Result<Vec<Pid>, ControlError> {
        let text = self.text(command, deadline).await?;
        text.split_whitespace().map(|word| word.parse().map_err(|_| strange(command, &text))).collect()
    }

    /// Returns the state of a server.
    ///
    /// # Errors
    /// As [`Control::send`]; [`ControlError::Unknown`] from daemons before version 550.
    pub async fn server_state(&self, server: Pid, deadline: Duration) -> Result<MpsServerState, ControlError> {
        let command = Command::ServerStatus(server);
        let text = self.text(command, deadline).await?;
        let upper = text.trim().to_ascii_uppercase();
        match upper.as_str() {
            "INITIALIZING" => Ok(MpsServerState::Initializing),
            "ACTIVE" => Ok(MpsServerState::Active),
            "FAULT" => Ok(MpsServerState::Fault),
            _ => Err(strange(command, &text)),
        }
    }

    /// Returns the active thread percentage of the next server.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn default_percentage(&self, deadline: Duration) -> Result<Percentage, ControlError> {
        let text = self.text(Command::DefaultPercentage, deadline).await?;
        text.trim().parse().map_err(|_| strange(Command::DefaultPercentage, &text))
    }

    /// Sets the active thread percentage of the next server, and reads the percentage back.
    ///
    /// # Errors
    /// As [`Control::send`]; [`ControlError::NotSet`].
    pub async fn set_default_percentage(&self, to: Percentage, deadline: Duration) -> Result<(), ControlError> {
        self.text(Command::SetDefaultPercentage(to), deadline).await?;
        let has = self.default_percentage(deadline).await?;
        if has == to { Ok(()) } else { Err(not_set(to, has)) }
    }

    /// Returns the priority of the next clients.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn default_priority(&self, deadline: Duration) -> Result<Priority, ControlError> {
        let text = self.text(Command::DefaultPriority, deadline).await?;
        let number = text.trim().parse().ok();
        number.and_then(Priority::of_number).ok_or_else(|| strange(Command::DefaultPriority, &text))
    }

    /// Sets the priority of the next clients, and reads the priority back.
    ///
    /// # Errors
    /// As [`Control::send`]; [`ControlError::NotSet`].
    pub async fn set_default_priority(&self, to: Priority, deadline: Duration) -> Result<(), ControlError> {
        self.text(Command::SetDefaultPriority(to), deadline).await?;
        let has = self.default_priority(deadline).await?;
        if has == to { Ok(()) } else { Err(not_set(to, has)) }
    }

    /// Returns the pinned memory limit of the next server; `None` if there is none. The daemon reports a limit of 1 GiB
    /// or more rounded down to whole GiB, so the real limit may be higher than the returned limit.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn default_memory_limit(&self, deadline: Duration) -> Result<Option<MemoryLimit>, ControlError> {
        limit(Command::DefaultMemoryLimit, &self.text(Command::DefaultMemoryLimit, deadline).await?)
    }

    /// Sets or removes the pinned memory limit of the next server. Reads the limit back with the precision of the
    /// daemon's report.
    ///
    /// # Errors
    /// As [`Control::send`]; [`ControlError::NotSet`].
    pub async fn set_default_memory_limit(
        &self,
        to: Option<MemoryLimit>,
        deadline: Duration,
    ) -> Result<(), ControlError> {
        let command = to.map_or(Command::ClearDefaultMemoryLimit, Command::SetDefaultMemoryLimit);
        self.text(command, deadline).await?;
        let has = self.default_memory_limit(deadline).await?;
        let words = |limit: Option<MemoryLimit>| limit.map_or_else(|| "no limit".to_owned(), |limit| limit.to_string());
        if has == to.map(as_reported) { Ok(()) } else { Err(not_set(words(to), words(has))) }
    }

    /// Starts a server for a user. [`Control::servers`] shows whether the start succeeded.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn start_server(&self, uid: u32, deadline: Duration) -> Result<(), ControlError> {
        self.text(Command::StartServer { uid }, deadline).await.map(|_| ())
    }

    /// Ends the daemon. `Ok` does not mean that the daemon has ended: only the end of the daemon's process shows this.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn quit(&self, force_after_s: Option<u32>, deadline: Duration) -> Result<(), ControlError> {
        match self.send(&Command::Quit { force_after_s }, deadline).await {
            Ok(_) | Err(ControlError::Session(SessionError::Closed)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns the reply with one line for each frame. The frames have no line breaks.
    pub(crate) async fn text(&self, command: Command, deadline: Duration) -> Result<String, ControlError> {
        Ok(self.send(&command, deadline).await?.text.join("\n"))
    }
}

/// Parses the memory limit of a reply; `None` if the reply is empty.
pub(crate) fn limit(command: Command, message: &str) -> Result<Option<MemoryLimit>, ControlError> {
    match message.trim() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| strange(command, message)),
    }
}

/// Returns a limit as the daemon reports it: from 1 GiB on, rounded down to whole GiB.
#[must_use]
pub fn as_reported(limit: MemoryLimit) -> MemoryLimit {
    let whole = limit.mib() / 1024 * 1024;
    MemoryLimit::of_mib(whole).unwrap_or(limit)
}

/// Separates refusals from values. A refusal is a text with status 0, like a value.
fn check_refusal(line: &str, answer: Answer) -> Result<Answer, ControlError> {
    let message = answer.text.first().map_or("", |first| first.trim());
    let refused = ["Insufficient privileges", "Not enough privilege", "Invalid", "Failed"];
    if message.starts_with("Unknown command") {
        Err(ControlError::Unknown(line.to_owned()))
    } else if message.starts_with("Server") && message.ends_with("not found") {
        Err(ControlError::NoServer)
    } else if refused.iter().any(|words| message.starts_with(words)) {
        Err(ControlError::Refused { command: line.to_owned(), message: message.to_owned() })
    } else if answer.status != 0 {
        Err(ControlError::Refused { command: line.to_owned(), message: format!("status {} {message}", answer.status) })
    } else {
        Ok(answer)
    }
}

pub(crate) fn strange(command: Command, message: &str) -> ControlError {
    ControlError::Strange { command: command.to_string(), message: message.trim().to_owned() }
}

pub(crate) fn not_set(reported: impl std::fmt::Display, has: impl std::fmt::Display) -> ControlError {
    ControlError::NotSet { reported: reported.to_string(), has: has.to_string() }
}
