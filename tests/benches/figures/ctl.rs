//! `gpushctl` and the agent that a bench measures.

use std::process::{Command, Output, Stdio};

use gpush_tests::{
    agent::{Agent, Setup},
    host::{Host, program},
};

/// Starts an agent with the default config and log level.
pub(crate) fn agent(host: &Host) -> Agent {
    // gpushd.service sets the second variable.
    Setup::on(host).env("GPUSH_LOG", "info").env("MALLOC_ARENA_MAX", "1").start()
}

/// Returns a `gpushctl` command that connects to the agent under test.
pub(crate) fn ctl(host: &Host, agent: &Agent, arguments: &[&str]) -> Command {
    let mut command = host.command(program("gpushctl"));
    command.args(arguments).env("GPUSH_SOCKET", agent.socket()).stdin(Stdio::null());
    command
}

/// Runs a command that must succeed.
pub(crate) fn must(host: &Host, agent: &Agent, arguments: &[&str]) -> Output {
    let output = ctl(host, agent, arguments).output().expect("gpushctl can be started");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "gpushctl {}: {printed}", arguments.join(" "));
    output
}
