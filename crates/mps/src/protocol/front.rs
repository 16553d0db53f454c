//! NVIDIA's front-end, for daemons with an unknown protocol: one process per command.
//!
//! ```text
//! nvidia-cuda-mps-control ◄ COMMAND
//!                         ◄ get_default_active_thread_percentage      always gets an answer
//!                         ► answer, then a percentage, status 0       the daemon received the command
//!                         ► no percentage, status 0                   another process holds the control connection
//!                         ► status 1                                  no daemon
//! ```
//!
//! The front-end exits with status 0 even if the daemon refused the command, or if the daemon did not listen. A reply
//! may also be empty. So gpushd sends a second command that always gets an answer. Only this answer shows that the
//! daemon received the first command. The front-end does not identify the daemon, so gpushd identifies the daemon by
//! the lock of the directory.

use std::{
    io,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use gpush_api::Percentage;
use gpush_host::proc;
use tokio::{io::AsyncWriteExt, process::Command as Program};

use super::{
    command::Command,
    lock,
    session::{Answer, Daemon, SessionError, Stage},
};

/// Sends one command to the daemon of a directory through the front-end. `program` is an absolute path.
///
/// # Errors
/// See [`SessionError`]. The front-end cannot distinguish a daemon that ends from a busy control
/// connection: both are [`SessionError::Closed`].
pub async fn ask(
    program: &Path,
    directory: &Path,
    command: &Command,
    deadline: Duration,
) -> Result<Answer, SessionError> {
    let ended = tokio::time::timeout(deadline, run(program, directory, &lines(command))).await;
    let output = ended.map_err(|_| SessionError::Silent { stage: Stage::Answer })?.map_err(SessionError::System)?;
    let message = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() && !command.ends_the_daemon() {
        let message = format!("{message}{}", String::from_utf8_lossy(&output.stderr));
        return Err(absent(directory, io::Error::other(message.trim().to_owned())));
    }
    let daemon = match (holder(directory), command.ends_the_daemon()) {
        (Ok(daemon), _) => daemon,
        // The command ended the daemon, as requested.
        (Err(_), true) => return Err(SessionError::Closed),
        (Err(cause), false) => return Err(absent(directory, cause)),
    };
    let text = if command.ends_the_daemon() { Some(answer(&message)) } else { heard(&message) };
    text.map(|text| Answer { daemon, text, status: 0 }).ok_or(SessionError::Closed)
}

/// Returns the input for the front-end. A command that ends the daemon is the last line.
fn lines(command: &Command) -> String {
    if command.ends_the_daemon() {
        return format!("{command}\n");
    }
    format!("{command}\n{}\n", Command::DefaultPercentage)
}

async fn run(program: &Path, directory: &Path, lines: &str) -> io::Result<Output> {
    let mut child = Program::new(program)
        .env_clear()
        .env("CUDA_MPS_PIPE_DIRECTORY", directory)
        .env("LANG", "C.UTF-8")
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // If there is no daemon, the front-end ends before it reads its input, so ignore a write
        // error.
        let _unread = stdin.write_all(lines.as_bytes()).await;
    }
    child.wait_with_output().await
}

fn absent(directory: &Path, cause: io::Error) -> SessionError {
    let at: PathBuf = directory.join("control_privileged");
    SessionError::Absent { at, cause }
}

/// Checks that the expected process holds the lock of a directory. The front-end does not check this, and connects to
/// any process that listens.
pub(crate) fn check_lock_holder(meant: i32, directory: &Path) -> Result<(), SessionError> {
    match holder(directory) {
        Ok(Daemon { pid, .. }) if pid != meant => Err(SessionError::Another { pid, meant }),
        Ok(_) => Ok(()),
        Err(cause) => Err(absent(directory, cause)),
    }
}

/// Returns the process that holds the lock of the directory.
fn holder(directory: &Path) -> io::Result<Daemon> {
    let no_holder = || io::Error::new(io::ErrorKind::NotFound, "no process holds the lock of the pipe directory");
    let pid = lock::holder(directory)?.ok_or_else(no_holder)?;
    let uid = proc::owner(pid).ok_or_else(no_holder)?;
    Ok(Daemon { pid, uid })
}

/// Returns the reply without the percentage at its end; `None` if the percentage is missing.
fn heard(message: &str) -> Option<Vec<String>> {
    let mut text = answer(message);
    text.pop()?.trim().parse::<Percentage>().ok()?;
    Some(text)
}

fn answer(message: &str) -> Vec<String> {
    message.lines().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_followed_by_a_percentage_was_received() {
        let text = |lines: &[&str]| Some(lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
        assert_eq!(heard("100.0\n"), text(&[]));
        assert_eq!(heard("4711\n4712\n33.4\n"), text(&["4711", "4712"]));
        assert_eq!(heard("25.0\n25.0\n"), text(&["25.0"]), "asked for itself");
        for unheard in ["", "\n", "Unknown command \"x\"\n", "4711\n"] {
            assert_eq!(heard(unheard), None, "{unheard:?}");
        }
    }

    #[test]
    fn quit_is_the_last_line_sent() {
        assert_eq!(lines(&Command::Quit { force_after_s: Some(1) }), "quit -t 1\n");
        assert_eq!(lines(&Command::ServerList), "get_server_list\nget_default_active_thread_percentage\n");
    }

    #[tokio::test]
    async fn missing_program_daemon_and_end_are_distinguished() {
        let dir = tempfile::tempdir().unwrap();
        let ask = |program: &'static str, ms| {
            let dir = dir.path().to_owned();
            async move { ask(Path::new(program), &dir, &Command::ServerList, Duration::from_millis(ms)).await }
        };
        assert!(matches!(ask("/nonexistent/control", 9000).await, Err(SessionError::System(_))));
        assert!(matches!(ask("/bin/false", 9000).await, Err(SessionError::Absent { .. })));
        assert!(matches!(ask("/usr/bin/yes", 50).await, Err(SessionError::Silent { .. })));
    }
}
