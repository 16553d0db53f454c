//! The lines that hooks print, and their lines in the system log.

use std::{
    io::{self, Write as _},
    os::unix::net::UnixDatagram,
    path::Path,
};

use gpush_api::ApiError;

use crate::FAILS;

/// Socket of the system log, for syslog daemons and for journald.
const SYSLOG: &str = "/dev/log";

/// Facility `daemon` and priority `notice`, as syslog(3) encodes them.
const DAEMON_NOTICE: &str = "<29>";

/// Maximum length of a line for a log, in characters.
const LONGEST_LINE: usize = 1000;

/// Prints in one line why a hook has failed, because Slurm's log and the reason of a drain have no
/// room for more.
pub(crate) fn fail(job: u32, why: &str) -> u8 {
    print_error(&format!("gpush: job {job}: {}", one_line(why)));
    FAILS
}

/// Prints a line on standard error. Ignores an error: `eprintln!` would panic, and the hook would
/// drain the node.
pub fn print_error(line: &str) {
    let _lost = writeln!(io::stderr(), "{line}");
}

/// Prints in one line why a job was refused. Also sends the line to the system log: the hook
/// succeeds, and slurmd 22.05 logs the output only of hooks that fail.
pub(crate) fn say_refused(job: u32, reasons: &[String]) {
    let line = format!("gpushctl slurm prolog: job {job}: refused: {}", one_line(&reasons.join(": ")));
    print_error(&line);
    // If there is no system log, or it is full, drop the line instead of delaying the job.
    let _lost = to_syslog(Path::new(SYSLOG), &line);
}

/// Sends a line to the system log. Never waits.
fn to_syslog(socket: &Path, line: &str) -> io::Result<()> {
    let datagram = UnixDatagram::unbound()?;
    datagram.set_nonblocking(true)?;
    datagram.send_to(format!("{DAEMON_NOTICE}{line}").as_bytes(), socket).map(drop)
}

/// Returns a text as one line of limited length. The text may come from a user.
fn one_line(text: &str) -> String {
    text.chars().take(LONGEST_LINE).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Returns an error as one sentence.
#[must_use]
pub fn sentence(error: &ApiError) -> String {
    error.sentences().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_is_one_line_in_the_system_log() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("log");
        assert!(to_syslog(&socket, "no receiver").is_err());
        let log = UnixDatagram::bind(&socket).unwrap();
        to_syslog(&socket, &one_line("job 7: refused\nwhy")).unwrap();
        let mut buffer = [0; 100];
        let length = log.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"<29>job 7: refused why");
    }
}
