//! A `gpushctl` command in a test, with its whole output.

use std::process::{Command, Output};

use gpush_tests::{agent::Agent, host::program};

/// Returns a `gpushctl` command that connects to `agent`, on a terminal with this number of
/// columns. It does not inherit the environment of the test.
pub(crate) fn gpushctl(agent: &Agent, args: &[&str], columns: u16) -> Command {
    let mut command = Command::new(program("gpushctl"));
    command.args(args).env_clear().env("LANG", "C.UTF-8").env("COLUMNS", columns.to_string());
    command.env("GPUSH_SOCKET", agent.socket());
    command
}

/// Returns the command line, standard output, standard error and exit code as one text.
pub(crate) fn transcript(args: &[&str], output: &Output) -> String {
    let mut text = format!("$ gpushctl {}\n{}", args.join(" "), String::from_utf8_lossy(&output.stdout));
    if !output.stderr.is_empty() {
        text += &format!("[stderr]\n{}", String::from_utf8_lossy(&output.stderr));
    }
    text + &format!("[exit {}]\n", output.status.code().expect("gpushctl ends without a signal"))
}
