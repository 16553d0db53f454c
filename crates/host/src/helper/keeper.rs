//! The keeper, `gpushd helper DIR`. The keeper takes the lock of a run, runs the program of the
//! run's spec, ends the program at its deadline, and records the result. The keeper does not
//! communicate with gpushd, and outlives gpushd.

use std::{
    fs::File,
    io::{self, PipeReader, Read, Seek, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::Path,
    process::{Command, ExitCode, ExitStatus},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use gpush_locked::Locked;
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use rustix::{fs::MemfdFlags, io::FdFlags};

use super::run_dir::{End, Ended, RunDir, Spec};

/// Maximum number of bytes of output that the keeper keeps, from the beginning of the output.
const KEPT: usize = 32 * 1024;

/// How long the keeper reads output after the program has ended. Without this limit, a child that
/// inherited the pipe could block the keeper.
const OUTPUT_DRAIN: Duration = Duration::from_millis(200);

/// `PATH` of the programs that gpushd runs.
pub const SEARCH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs the program of the spec in `dir`.
pub fn main(dir: &Path) -> ExitCode {
    // Ignore the error: the call fails if systemd has already created a session for the keeper.
    let _ = nix::unistd::setsid();
    match keep(&RunDir::at(dir)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpushd helper {}: {error}", dir.display());
            ExitCode::FAILURE
        }
    }
}

fn keep(run: &RunDir) -> io::Result<()> {
    let Some(lock) = run.lock()? else { return Err(io::Error::other("another process holds the lock of this run")) };
    if run.outcome().is_some() {
        return Err(io::Error::other("gpushd has abandoned this run"));
    }
    let spec = run.spec().ok_or_else(|| io::Error::other("the directory has no spec.json"))?;
    run.begin()?;
    let _ = sd_notify::notify(true, &[sd_notify::NotifyState::Ready]);
    let mut out = io::stdout();
    let _ = out.write_all(b"begun\n").and_then(|()| out.flush());
    run.record_outcome(&execute(&spec, &lock)?)
}

fn execute(spec: &Spec, lock: &std::fs::File) -> io::Result<Ended> {
    let (reader, writer) = io::pipe()?;
    // The program inherits a descriptor of the lock, so the lock is held while the program runs: as its empty standard
    // input, or in addition to its input.
    let held = lock.try_clone()?;
    let input = match &spec.input {
        None => held.try_clone()?,
        Some(text) => {
            rustix::io::fcntl_setfd(&held, FdFlags::empty())?;
            in_memory(text)?
        }
    };
    let mut command = Command::new(&spec.program);
    command
        .arg0(&spec.name)
        .args(&spec.args)
        .env_clear()
        .env("PATH", SEARCH)
        .env("LANG", "C.UTF-8")
        .envs(&spec.env)
        .current_dir("/")
        .stdin(input)
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .process_group(0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(Ended { end: End::NotStarted(error.to_string()), output: String::new() }),
    };
    drop(held);
    // Drop `command` to close the keeper's write end of the pipe. Otherwise the pipe would never end.
    drop(command);
    let kept = read_output(reader);
    let group = Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX));
    let (tx, ended) = mpsc::channel();
    thread::spawn(move || tx.send(child.wait()));
    let mut timed_out = false;
    let status = match ended.recv_timeout(Duration::from_millis(spec.deadline_ms)) {
        Ok(status) => status,
        Err(_) => {
            timed_out = true;
            let _ = killpg(group, Signal::SIGTERM);
            match ended.recv_timeout(Duration::from_millis(spec.grace_ms)) {
                Ok(status) => status,
                Err(_) => {
                    let _ = killpg(group, Signal::SIGKILL);
                    ended.recv().map_err(io::Error::other)?
                }
            }
        }
    };
    // Also end the processes that the program left in its process group.
    let _ = killpg(group, Signal::SIGKILL);
    let end = if timed_out { End::TimedOut } else { end_of(status?) };
    Ok(Ended { end, output: kept.output() })
}

/// Returns a file that contains a text and exists only in memory.
fn in_memory(text: &str) -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create("input", MemfdFlags::CLOEXEC)?);
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

fn end_of(status: ExitStatus) -> End {
    match (status.code(), status.signal()) {
        (Some(code), _) => End::Exited(code),
        (None, Some(signal)) => End::Signalled(signal),
        (None, None) => End::Lost,
    }
}

/// Output of a program up to a limit. The keeper reads and discards further output, so that the
/// program does not block.
struct CapturedOutput {
    bytes: Arc<Locked<Vec<u8>>>,
    closed: mpsc::Receiver<()>,
}

fn read_output(mut from: PipeReader) -> CapturedOutput {
    let (bytes, (tx, closed)) = (Arc::new(Locked::new(Vec::new())), mpsc::channel());
    let kept = Arc::clone(&bytes);
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            let mut kept = kept.lock();
            let room = KEPT.saturating_sub(kept.len()).min(read);
            kept.extend_from_slice(&buffer[..room]);
        }
        let _ = tx.send(());
    });
    CapturedOutput { bytes, closed }
}

impl CapturedOutput {
    fn output(self) -> String {
        let _ = self.closed.recv_timeout(OUTPUT_DRAIN);
        String::from_utf8_lossy(&self.bytes.lock()).into_owned()
    }
}
