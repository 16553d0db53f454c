//! One thread for each worker. The thread starts the process, reads its messages, and waits for its
//! end.
//!
//! This thread must live as long as the worker: the kernel kills a worker when the *thread* that
//! started it ends, and the threads of an async runtime may end at any time. If a worker cannot be
//! killed, it blocks only its own thread.

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
use crate::{
    proto::{self, ToParent, ToWorker},
    worker,
};

/// A worker's message, or its end.
#[derive(Debug)]
pub(super) enum Report {
    Spawned { pid: u32 },
    Printed(ToParent),
    Gone { how: String },
}

/// gpushd's side of a worker's socket.
#[derive(Debug)]
pub(super) struct WorkerSocket {
    stream: UnixStream,
    pub(super) pid: Option<u32>,
}

impl WorkerSocket {
    /// Starts a worker. A failed start is reported in the same way as the end of a worker.
    pub(super) fn open(
        worker: WorkerId,
        options: &Options,
        reports: mpsc::UnboundedSender<(WorkerId, Report)>,
    ) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let line = Self { stream: ours.try_clone()?, pid: None };
        line.say(&ToWorker::Init { library: options.library.clone(), events: options.events })?;
        let start = start(options, theirs);
        thread::Builder::new().name(format!("driver-{worker}")).spawn(move || {
            let report = |report| reports.send((worker, report)).is_ok();
            let how = match start() {
                Ok(running) => {
                    report(Report::Spawned { pid: running.pid() });
                    attend(running, ours, |printed| report(Report::Printed(printed)))
                }
                Err(how) => how,
            };
            report(Report::Gone { how });
        })?;
        Ok(line)
    }

    /// Sends a frame without blocking. The buffer of the socket is large enough, because each GPU
    /// has at most one call in flight. If the buffer is full, the worker is not reading, and the
    /// error makes the caller end the worker.
    pub(super) fn say(&self, frame: &ToWorker) -> io::Result<()> {
        use nix::sys::socket::{MsgFlags, send};
        use std::os::fd::AsRawFd;
        let bytes = proto::encode(frame)?;
        let sent = send(self.stream.as_raw_fd(), &bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// Closes the sending side. The worker then exits.
    pub(super) fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Shuts the socket down, so that the thread kills the worker.
    pub(super) fn kill(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Drop for WorkerSocket {
    /// Kills the worker, even if the supervisor is dropped because the async runtime stops.
    fn drop(&mut self) {
        self.kill();
    }
}

/// A worker that has started.
enum RunningWorker {
    Process(Child),
    /// A scripted driver, which answers in a thread of this process.
    Thread(thread::JoinHandle<io::Result<()>>),
}

impl RunningWorker {
    fn pid(&self) -> u32 {
        match self {
            Self::Process(child) => child.id(),
            Self::Thread(_) => std::process::id(),
        }
    }

    /// Ends the worker, and waits for its end. Returns how it ended.
    fn end(self) -> String {
        match self {
            Self::Process(mut child) => {
                // If the process has ended, the kill has no effect: the pid is not reused before `wait`.
                let _ = child.kill();
                child.wait().map_or_else(|error| error.to_string(), in_words)
            }
            Self::Thread(thread) => match thread.join() {
                Ok(Ok(())) => "its thread ended".to_owned(),
                Ok(Err(error)) => format!("its thread ended: {error}"),
                Err(_) => "its thread panicked".to_owned(),
            },
        }
    }
}

/// Returns the function that starts a worker on a socket. If the start fails, the function returns why.
fn start(options: &Options, socket: UnixStream) -> Box<dyn FnOnce() -> Result<RunningWorker, String> + Send> {
    if let Some(driver) = options.scripted.clone() {
        return Box::new(move || {
            let name = "scripted-driver".to_owned();
            let thread = thread::Builder::new().name(name).spawn(move || worker::serve_scripted(socket, &driver));
            thread.map(RunningWorker::Thread).map_err(|error| error.to_string())
        });
    }
    let mut command = Command::new(&options.program);
    if options.program == Path::new(THIS_PROGRAM)
        && let Some(name) = env::args_os().next()
    {
        // Sets the name in process lists. Otherwise the name would be /proc/self/exe.
        command.arg0(name);
    }
    command.args(&options.args).stdin(OwnedFd::from(socket)).stdout(Stdio::null());
    // The function owns `command`, and with it a copy of the worker's end of the socket. While that copy is open, gpushd
    // does not notice when the worker closes its own copy. So the function must end before gpushd reads the socket.
    Box::new(move || match command.spawn() {
        Ok(child) => Ok(RunningWorker::Process(child)),
        Err(error) => Err(format!("{}: {error}", command.get_program().to_string_lossy())),
    })
}

/// Reads until the worker or the supervisor closes the socket. Then waits for the worker to end.
fn attend(worker: RunningWorker, mut stream: UnixStream, mut printed: impl FnMut(ToParent) -> bool) -> String {
    let mut trouble = None;
    loop {
        match proto::read(&mut stream) {
            Ok(Some(frame)) => {
                if !printed(frame) {
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
    let ended = worker.end();
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
