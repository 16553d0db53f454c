//! A program that computes on the GPU, for the checks: its start, its output and its end.
//!
//! `tests/gpu/client.py` documents the output. `gpush-sim mps-client --compute` prints the same.

use std::{fs::File, os::unix::process::ExitStatusExt, path::PathBuf, process::Stdio};

use nix::{
    sys::signal::{Signal, kill, killpg},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, Command},
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    time::timeout,
};

use super::PATIENCE;

/// What a client does.
#[derive(Debug, Clone, Copy, Default)]
pub struct Work {
    /// Duration of the computation. `None` means that the client computes until it is asked to end.
    pub seconds: Option<f64>,
    /// MiB of device memory that the client allocates first.
    pub allocate: u64,
    /// Whether the client uses kernels that need only a small part of the GPU.
    pub small: bool,
    /// Part of the time in which the client's kernels run. `None` means that the client does not pause.
    pub duty: Option<f64>,
    /// Whether the client waits for a command before it computes. So several clients can begin to
    /// compute at the same time.
    pub wait: bool,
}

impl Work {
    /// A client that starts, computes nothing and ends.
    pub const NONE: Self = Self { seconds: Some(0.0), allocate: 0, small: false, duty: None, wait: false };

    /// Returns the client's arguments.
    #[must_use]
    pub fn arguments(self) -> Vec<String> {
        let mut words = Vec::new();
        if let Some(seconds) = self.seconds {
            words.extend(["--seconds".to_owned(), seconds.to_string()]);
        }
        if self.allocate > 0 {
            words.extend(["--allocate".to_owned(), self.allocate.to_string()]);
        }
        words.extend(self.small.then(|| "--small".to_owned()));
        if let Some(duty) = self.duty {
            words.extend(["--duty".to_owned(), duty.to_string()]);
        }
        words.extend(self.wait.then(|| "--wait".to_owned()));
        words
    }
}

/// A line that a client prints.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum Printed {
    Ready(Ready),
    Computing { iterations: u64 },
    Ended(Ended),
    Failed { error: String },
}

/// The line of a client that is ready to compute.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Ready {
    /// The pid of the client. The pid of `gpushctl run` may differ.
    pub pid: u32,
    /// Name of the GPU.
    pub device: String,
    /// Number of multiprocessors that the client can use.
    pub multiprocessors: u32,
}

/// The result of a client's computation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// Total iterations.
    pub iterations: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Iterations per second.
    pub iterations_per_second: f64,
    /// Longest time between two iterations, in ms.
    pub longest_pause_ms: f64,
    /// Time in which its kernels ran, in seconds. Only with a duty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_seconds: Option<f64>,
}

impl Ended {
    /// Returns the part of the time in which the client's kernels ran.
    ///
    /// # Errors
    /// If the client does not measure it, or has not computed.
    pub fn duty(&self) -> Result<f64, String> {
        let busy = self.busy_seconds.ok_or("the client does not print busy_seconds")?;
        if self.seconds > 0.0 { Ok(busy / self.seconds) } else { Err("the client has not computed".to_owned()) }
    }
}

/// A running client. Dropping this value sends SIGTERM to the client.
#[derive(Debug)]
pub struct Client {
    child: Child,
    /// The process group of the client. The group also contains the programs that started the
    /// client.
    group: Pid,
    stdin: Option<ChildStdin>,
    lines: UnboundedReceiver<String>,
    stderr: PathBuf,
}

impl Client {
    /// Starts a command that becomes a client. The client's standard error goes to a file.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn start(command: std::process::Command, stderr: PathBuf) -> Result<Self, String> {
        let name = command.get_program().to_owned();
        let cannot = |error: std::io::Error| format!("{} can't be started: {error}", name.display());
        let file = File::create(&stderr).map_err(cannot)?;
        let mut command = Command::from(command);
        // Give the client a separate process group, so that Ctrl-C reaches only the program with
        // the checks. This program then ends the clients in the right order.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().map_err(cannot)?;
        let pid = child.id().ok_or("a client without a pid")?.cast_signed();
        let (tell, lines) = unbounded_channel();
        let out = child.stdout.take().ok_or("a client without an output")?;
        tokio::spawn(async move {
            let mut out = BufReader::new(out).lines();
            while let Ok(Some(line)) = out.next_line().await {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { stdin: child.stdin.take(), group: Pid::from_raw(pid), child, lines, stderr })
    }

    /// Returns the next line that the client prints.
    async fn says(&mut self) -> Result<Printed, String> {
        let Ok(line) = timeout(PATIENCE, self.lines.recv()).await else {
            return Err(format!("a client printed nothing for {} s", PATIENCE.as_secs()));
        };
        let Some(line) = line else {
            let status = self.child.wait().await.map_err(|error| error.to_string())?;
            let how = match (status.code(), status.signal()) {
                (Some(code), _) => format!("status {code}"),
                (None, signal) => format!("signal {}", signal.unwrap_or_default()),
            };
            return Err(format!("a client ended with {how} before it was done{}", self.last_words()));
        };
        match serde_json::from_str(&line) {
            Ok(Printed::Failed { error }) => Err(error),
            Ok(printed) => Ok(printed),
            Err(error) => Err(format!("a client printed {line:?}, which is none of its lines: {error}")),
        }
    }

    /// Returns the last line of the client's standard error, for an error message.
    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.stderr).unwrap_or_default();
        text.trim().lines().last().map_or_else(String::new, |line| format!(": {line}"))
    }

    /// Waits until the client is ready to compute.
    ///
    /// # Errors
    /// The client's error message, if it fails instead.
    pub async fn ready(&mut self) -> Result<Ready, String> {
        match self.says().await? {
            Printed::Ready(ready) => Ok(ready),
            other => Err(format!("a client began with {other:?}")),
        }
    }

    /// Starts the computation of a client that waits for a command.
    ///
    /// # Errors
    /// If the client has ended.
    pub async fn begin(&mut self) -> Result<(), String> {
        let stdin = self.stdin.as_mut().ok_or("a client without an input")?;
        stdin.write_all(b"begin\n").await.map_err(|error| format!("a client is gone: {error}"))
    }

    /// Waits until the client has completed an iteration that began after this call.
    ///
    /// # Errors
    /// If the client completes no such iteration.
    pub async fn computes(&mut self) -> Result<(), String> {
        // The next line of the client may belong to an iteration that began before this call. So
        // wait for the line after that line.
        while self.lines.try_recv().is_ok() {}
        let mut before = None;
        loop {
            match self.says().await? {
                Printed::Computing { iterations } if before.is_some_and(|before| iterations > before) => return Ok(()),
                Printed::Computing { iterations } => before = Some(before.unwrap_or(iterations)),
                other => return Err(format!("a client that should compute printed {other:?}")),
            }
        }
    }

    /// Waits until the client ends by itself.
    ///
    /// # Errors
    /// The client's error message or exit status, if it failed.
    pub async fn ended(&mut self) -> Result<Ended, String> {
        let ended = loop {
            match self.says().await? {
                Printed::Ready(_) | Printed::Computing { .. } => {}
                Printed::Ended(ended) => break ended,
                Printed::Failed { error } => return Err(error),
            }
        };
        let status = timeout(PATIENCE, self.child.wait()).await.map_err(|_| "a client that is done does not end")?;
        let status = status.map_err(|error| error.to_string())?;
        if status.success() { Ok(ended) } else { Err(format!("a client that was done ended with {status}")) }
    }

    /// Sends SIGTERM to the client, and waits until the client has ended.
    ///
    /// # Errors
    /// As for [`Client::ended`].
    pub async fn stop(mut self) -> Result<Ended, String> {
        kill(self.group, Signal::SIGTERM).map_err(|errno| format!("a client can't be ended: {errno}"))?;
        self.ended().await
    }

    /// Waits until the client and the programs that started it have ended. The client was killed or
    /// has failed.
    ///
    /// # Errors
    /// If the client does not end in time.
    pub async fn gone(&mut self) -> Result<std::process::ExitStatus, String> {
        let status = timeout(PATIENCE, self.child.wait()).await.map_err(|_| "a client does not end")?;
        status.map_err(|error| error.to_string())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Send no signal if the child was reaped: the kernel may have given its pid to another
        // process.
        if self.child.id().is_some() {
            let _ended_by_itself = killpg(self.group, Signal::SIGTERM);
        }
    }
}
