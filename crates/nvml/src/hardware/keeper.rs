//! One thread for each worker, which starts the process, reads its messages, and waits for its end.
//!
//! It must be a thread that lives as long as the worker: the kernel kills a worker when the *thread* that
//! started it ends, and an async runtime starts and ends its threads. A worker that cannot be killed keeps its
//! thread, and nothing else.

use std::{
    env, io,
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
};

use tokio::sync::mpsc;

use super::{Options, THIS_PROGRAM, machine::WorkerId};
use crate::proto::{self, ToParent, ToWorker};

/// A worker's message, or its end.
#[derive(Debug)]
pub(super) enum Report {
    Spawned { pid: u32 },
    Said(ToParent),
    Gone { how: String },
}

/// The supervisor's end of a worker's socket.
#[derive(Debug)]
pub(super) struct Line {
    stream: UnixStream,
    pub(super) pid: Option<u32>,
}

impl Line {
    /// Starts a worker. Any failure is reported as its end.
    pub(super) fn open(
        worker: WorkerId,
        options: &Options,
        reports: mpsc::UnboundedSender<(WorkerId, Report)>,
    ) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let line = Self { stream: ours.try_clone()?, pid: None };
        line.say(&ToWorker::Init { library: options.library.clone(), events: options.events })?;
        let mut command = Command::new(&options.program);
        if options.program == Path::new(THIS_PROGRAM)
            && let Some(name) = env::args_os().next()
        {
            // Otherwise process lists would show /proc/self/exe.
            command.arg0(name);
        }
        command.args(&options.args).stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        thread::Builder::new().name(format!("driver-{worker}")).spawn(move || {
            let report = |report| reports.send((worker, report)).is_ok();
            let how = match command.spawn() {
                Ok(child) => {
                    // The child has its own end; a second copy here would hide that it closed.
                    drop(command);
                    report(Report::Spawned { pid: child.id() });
                    attend(child, ours, |said| report(Report::Said(said)))
                }
                Err(error) => format!("{}: {error}", command.get_program().to_string_lossy()),
            };
            report(Report::Gone { how });
        })?;
        Ok(line)
    }

    /// Sends a frame without blocking: each GPU has at most one call in flight, so the buffer suffices. A
    /// worker that does not read is ended.
    pub(super) fn say(&self, frame: &ToWorker) -> io::Result<()> {
        use nix::sys::socket::{MsgFlags, send};
        use std::os::fd::AsRawFd;
        let bytes = proto::encode(frame)?;
        let sent = send(self.stream.as_raw_fd(), &bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// Closes the sending side; the worker then ends by itself.
    pub(super) fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Makes the thread kill the worker.
    pub(super) fn kill(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Drop for Line {
    /// When the runtime stops, it drops the supervisor, and the workers must end with it.
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads until the worker or the supervisor closes the socket; then waits for the process to end.
fn attend(mut child: Child, mut stream: UnixStream, mut said: impl FnMut(ToParent) -> bool) -> String {
    let mut trouble = None;
    loop {
        match proto::read(&mut stream) {
            Ok(Some(frame)) => {
                if !said(frame) {
                    break;
                }
            }
            Ok(None) => break,
            Err(error) => {
                trouble = Some(error.to_string());
                break;
            }
        }
    }
    // Harmless if it has ended: it is not reaped before the wait.
    let _ = child.kill();
    let ended = child.wait().map_or_else(|e| e.to_string(), in_words);
    match trouble {
        Some(trouble) => format!("{ended}, after {trouble}"),
        None => ended,
    }
}

fn in_words(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name =
                nix::sys::signal::Signal::try_from(signal).map_or_else(|_| signal.to_string(), |s| s.to_string());
            format!("it was ended by signal {name}")
        }
        (None, Some(code)) => format!("it ended with status {code}"),
        (None, None) => "it ended".to_owned(),
    }
}
