//! Processes, from `/proc`.
//!
//! The owner of a process decides how long its command line, environment and group list are (`prctl(PR_SET_MM_MAP)`,
//! `setgroups`). So every read is bounded: see [`LIMIT`].
//!
//! | module | subject |
//! |---|---|
//! | `read` | bounded reads |
//! | `stat` | start, state, parent, resource use |
//! | `status` | user ids, groups, pids in nested namespaces |
//! | `command` | command line and name |
//! | `environment` | environment variables |
//! | `files` | executable and open files |
//! | `namespaces` | namespaces, compared with those of gpushd |
//!
//! When a process ends, another process may get its pid. Code that acts on a process must first
//! open a [`crate::pidfd::PidFd`]. Code that remembers a process must also remember its start time.

mod command;
mod environment;
mod files;
mod namespaces;
mod read;
mod stat;
mod status;

pub use self::{
    command::{command_line, name, words},
    environment::{Environment, environment},
    files::{FileId, executable, executable_id, open_file, open_file_metadata, program},
    namespaces::{is_in_our_network, is_in_our_pid_namespace, is_on_this_host},
    read::{LIMIT, read},
    stat::{
        Image, ancestors, child_resource_use, image, is_alive, is_alive_since, is_ending, is_suspended, now, parent,
        start,
    },
    status::{Status, local_pid, owner, uids},
};

/// A pid of any integer type.
pub trait AnyPid: TryInto<i32> + Copy {}

impl<T: TryInto<i32> + Copy> AnyPid for T {}

/// Returns the text of `/proc/PID/cgroup`; see [`crate::cgroup`].
pub fn cgroups(pid: impl AnyPid) -> Option<String> {
    read::text(open(pid)?.open_relative("cgroup").ok()?).ok()
}

/// Returns the pids of all processes that `/proc` lists.
pub fn pids() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Converts a pid to the kernel's type; `None` unless it is positive.
fn positive(pid: impl AnyPid) -> Option<i32> {
    pid.try_into().ok().filter(|pid| *pid > 0)
}

/// Opens the directory of a process; `None` if there is no such process.
fn open(pid: impl AnyPid) -> Option<procfs::process::Process> {
    procfs::process::Process::new(positive(pid)?).ok()
}
