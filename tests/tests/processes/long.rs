//! Processes with command lines of any length.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::Command,
};

use gpush_api::UnleasedStep;

use super::{END, Job, OTHER, listed, start, step_event};

/// Returns the maximum memory that gpushd has used, in KiB.
fn peak_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("gpushd's status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("its peak memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Fault: for a command line of 32 MiB, each check used 1.4 GB of memory. The check then failed for
/// every process, so gpushd ended no unleased process.
#[test]
fn process_with_huge_command_line_is_ended_within_memory() {
    let Some((host, agent)) = start("endless command lines", END) else { return };
    let before = peak_memory(agent.pid());
    let mut listener = agent.listen("?kinds=unleased", None);
    let mut command = Command::new(env!("CARGO_BIN_EXE_long_command_line"));
    command.stdout(std::process::Stdio::piped());
    let mut long = Job::start(&mut command, OTHER);
    let mut line = String::new();
    BufReader::new(long.0.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    if line.trim() != "ready" {
        return println!("SKIPPED endless command lines: this kernel has no PR_SET_MM_MAP");
    }
    let long = long.on(&host, "--gpu 0 --kind compute");
    let seen = agent.until("the process is listed", || listed(&agent, long.pid()));
    assert_eq!(seen.process.uid, Some(OTHER));
    assert!(seen.process.command.is_some_and(|command| command.starts_with("x x x")));
    step_event(&mut listener, long.pid(), UnleasedStep::Asked);
    let grown = peak_memory(agent.pid()) - before;
    assert!(grown < 24 << 10, "gpushd has grown by {grown} KiB");
}
