//! What can be done to a daemon's process: start it, know that it ended, kill it with all that it
//! started. The life of a daemon ([`gpush_core::supervisor`]) does not care how.
//!
//! ```text
//!           start                              ended                      kill
//! Child     gpushd mps-daemon DIR, detached    pidfd of the daemon        its process group
//! ```
//!
//! A daemon that is found alive is had by a pidfd like one that was just started: nothing but its pid,
//! which its lock tells, is needed to go on with it.

use std::{
    io,
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use gpush_mps::lock;
use nix::{
    errno::Errno,
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt, unix::AsyncFd},
    process::Command,
    task::JoinHandle,
};

use super::place::Place;

/// How long the program that becomes the daemon may take to do so.
const BECOME: Duration = Duration::from_secs(10);

/// How long the end of a child that has ended may take to be told.
const REAPED: Duration = Duration::from_millis(200);

/// Why a daemon was not started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotStarted {
    /// Something of one before runs still.
    #[error("something of the daemon before is still there")]
    Taken,
    /// The system refused, or it ended before it was a daemon.
    #[error("{0}")]
    Failed(String),
}

/// A process that can be waited for, whoever's child it is.
#[derive(Debug)]
pub(super) struct Process {
    /// Its pid.
    pub(super) pid: i32,
    fd: AsyncFd<OwnedFd>,
    /// How it ended, where it is a child of ours.
    status: Option<JoinHandle<io::Result<ExitStatus>>>,
}

impl Process {
    /// The process of a pid; `None` when there is none.
    pub(super) fn of(pid: i32) -> io::Result<Option<Self>> {
        let Some(own) = rustix::process::Pid::from_raw(pid) else { return Ok(None) };
        match rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()) {
            Ok(fd) => {
                #[expect(deprecated, reason = "its successor is unsafe for types that may change their descriptor")]
                let fd = AsyncFd::with_interest(fd, tokio::io::Interest::READABLE)?;
                Ok(Some(Self { pid, fd, status: None }))
            }
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns once it has ended.
    pub(super) async fn ended(&self) {
        // A pidfd is readable for ever then; an error can't come from a process that goes on.
        let _ = self.fd.readable().await;
    }

    /// How it ended, in words, once it has.
    pub(super) async fn how(self) -> String {
        let Some(status) = self.status else { return "ended".to_owned() };
        match tokio::time::timeout(REAPED, status).await {
            Ok(Ok(Ok(status))) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("ended with status {code}"),
                (None, Some(signal)) => format!("was ended by signal {signal}"),
                (None, None) => "ended".to_owned(),
            },
            Ok(_) | Err(_) => "ended".to_owned(),
        }
    }
}

/// Starts the daemon that the place's spec describes. It is in the place's lock when this returns.
pub(super) async fn start(place: &Place) -> Result<Process, NotStarted> {
    let failed = |error: io::Error| NotStarted::Failed(error.to_string());
    if place.is_taken() {
        return Err(NotStarted::Taken);
    }
    let mut child = Command::new("/proc/self/exe")
        .arg("mps-daemon")
        .arg(place.dir())
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        // It becomes the daemon, whose own words go elsewhere: then this end closes.
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or_default();
    let mut said = String::new();
    if let Some(mut trouble) = child.stderr.take() {
        let read = tokio::time::timeout(BECOME, trouble.read_to_string(&mut said)).await;
        if read.is_err() {
            said = "it did not become the daemon in time".to_owned();
        }
    }
    let process = Process::of(pid).map_err(failed)?;
    // Nobody else waits for it: without that it would stay as a zombie.
    let status = tokio::spawn(async move { child.wait().await });
    match (said.trim(), process) {
        ("", Some(process)) => Ok(Process { status: Some(status), ..process }),
        ("", None) => Err(NotStarted::Failed("it ended as soon as it was started".to_owned())),
        (said, _) => Err(NotStarted::Failed(gpush_api::text::plain(said))),
    }
}

/// The daemon that runs in a place: who holds the lock that only a daemon takes.
pub(super) fn find(place: &Place, tenure: u32) -> io::Result<Option<Process>> {
    let pipe = place.pipe(tenure);
    let Some(pid) = lock::holder(&pipe)? else { return Ok(None) };
    let process = Process::of(pid)?;
    // The pid may have become another's between the two, the lock not.
    Ok(if lock::holder(&pipe)? == Some(pid) { process } else { None })
}

/// Kills a daemon with all that it started.
pub(super) fn kill(pid: i32) {
    match killpg(Pid::from_raw(pid), Signal::SIGKILL) {
        Ok(()) | Err(Errno::ESRCH) => {}
        Err(errno) => tracing::error!("the MPS daemon {pid} can't be killed: {errno}"),
    }
}

/// Whether a process is there.
pub(super) fn is_alive(pid: i32) -> bool {
    !matches!(nix::sys::signal::kill(Pid::from_raw(pid), None), Err(Errno::ESRCH))
}
