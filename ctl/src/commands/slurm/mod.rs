//! `gpushctl slurm`: the hooks of Slurm.
//!
//! Prolog and Epilog run as root. They write the files of jobs, because gpushd may lack the
//! permission to give a file to a user. TaskProlog runs as the user and only reads. If all is well,
//! a hook prints nothing. If it fails or refuses the job, it prints one line.
//!
//! | file | subject |
//! |---|---|
//! | `settings` | the config and the flags of a hook |
//! | `directory` | the files of jobs |
//! | `hook_start` | when Slurm started a hook |
//! | `call` | requests to gpushd within the time of the hook |
//! | `mapping` | the devices of a job |
//! | `prolog`, `epilog`, `task`, `reconcile` | the commands |
//! | `admin_comment` | what a job used, in Slurm's accounting |
//! | `usage` | what the leases of a job were used for |
//! | `gres_conf` | lines for gres.conf; the check of a request |

mod admin_comment;
mod call;
mod directory;
mod epilog;
mod gres_conf;
mod hook_start;
mod mapping;
mod prolog;
mod reconcile;
mod settings;
mod slurmd;
mod task;
mod usage;

use std::{
    io::{self, Write as _},
    os::unix::net::UnixDatagram,
    path::Path,
};

use gpush_api::ApiError;

use crate::{
    args::{Global, Slurm},
    exit::Outcome,
    output::Output,
};

/// Exit status of a hook that has failed.
const FAILS: u8 = 1;

/// Socket of the system log, for syslog daemons and for journald.
const SYSLOG: &str = "/dev/log";

/// Facility `daemon` and priority `notice`, as syslog(3) encodes them.
const DAEMON_NOTICE: &str = "<29>";

/// Maximum length of a line for a log, in characters.
const LONGEST_LINE: usize = 1000;

pub(super) fn run(global: &Global, command: &Slurm, out: &Output) -> Outcome {
    match command {
        Slurm::Prolog { files, limits, gres_conf } => Ok(prolog::run(global, files, limits, gres_conf.as_deref())),
        Slurm::Epilog { files, limits } => Ok(epilog::run(global, files, limits)),
        Slurm::TaskProlog { files } => task::run(files, out),
        Slurm::GresConf { which, node } => gres_conf::run(global, which, node.as_deref(), out),
        Slurm::CheckSpec { spec } => gres_conf::check(spec),
        Slurm::Reconcile { files, limits, squeue, cluster } => {
            reconcile::run(global, files, limits, squeue, cluster.as_deref(), out)
        }
        Slurm::Usage { job } => super::ask(global, async |client| usage::run(client, job, out).await),
    }
}

/// Prints in one line why a hook has failed, because Slurm's log and the reason of a drain have no
/// room for more.
fn fail(job: u32, why: &str) -> u8 {
    print_error(&format!("gpush: job {job}: {}", one_line(why)));
    FAILS
}

/// Prints a line on standard error. Ignores an error: `eprintln!` would panic, and the hook would
/// drain the node.
fn print_error(line: &str) {
    let _lost = writeln!(io::stderr(), "{line}");
}

/// Prints in one line why a job was refused. Also sends the line to the system log: the hook
/// succeeds, and slurmd 22.05 logs the output only of hooks that fail.
fn say_refused(job: u32, reasons: &[String]) {
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
fn sentence(error: &ApiError) -> String {
    error.sentences().join(": ")
}

/// Returns a variable that Slurm sets. Replaces bytes that are not UTF-8; such a value comes from
/// the user.
fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_is_one_line_in_the_system_log() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("log");
        assert!(to_syslog(&socket, "nobody listens").is_err());
        let log = UnixDatagram::bind(&socket).unwrap();
        to_syslog(&socket, &one_line("job 7: refused\nwhy")).unwrap();
        let mut buffer = [0; 100];
        let length = log.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"<29>job 7: refused why");
    }
}
