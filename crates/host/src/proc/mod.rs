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
//! | `threads` | threads that run after the first thread has ended |
//! | `time_limit` | a time limit for reads that can block |
//! | `command` | command line and name |
//! | `environment` | environment variables |
//! | `files` | executable and open files |
//! | `namespaces` | namespaces, compared with those of gpushd |
//! | `process_id` | a pid with the start time of its process |
//!
//! A function that returns an `Option` gives `None` for every error. That includes errors that say nothing about the
//! process, such as too many open files. Code that acts when a process is missing must use the functions that return
//! these errors: [`pids`], [`try_start`], [`try_owner`], [`try_cgroups`] and [`environment()`].
//!
//! If the first thread of a process has ended, `/proc/PID` has no executable, environment and v1 cgroups of the process.
//! This module then reads them from a thread that still runs.
//!
//! When a process ends, another process may get its pid. Code that acts on a process must first
//! open a [`crate::pidfd::PidFd`]. Code that remembers a process must also remember its start time.

mod command;
mod ending;
mod environment;
mod files;
mod namespaces;
mod process_id;
mod read;
mod stat;
mod status;
mod threads;
mod time_limit;

use std::{
    fs::{DirEntry, File},
    io,
    mem::MaybeUninit,
    path::Path,
};

use nix::libc;
use rustix::fs::RawDir;

pub use self::{
    command::{command_line, name, words},
    ending::is_ending,
    environment::{Environment, environment},
    files::{
        FileId, FileStatus, executable, executable_id, executable_id_in_time, file_id_in_time, is_executing, open_file,
        open_file_status, program, visible_file,
    },
    namespaces::{is_in_our_network, is_in_our_pid_namespace, is_on_this_host},
    process_id::ProcessId,
    read::{LIMIT, read},
    stat::{
        Image, ProcessReading, ancestors, child_resource_use, image, is_alive, is_alive_since, is_suspended, now,
        parent, start, terminal, ticks, try_ancestors, try_image, try_reading, try_start,
    },
    status::{Status, local_pid, owner, try_owner, try_uids, uids},
    threads::children,
    time_limit::count_hanging_reads_by_account,
};

/// A pid of any integer type.
pub trait AnyPid: TryInto<i32> + Copy {}

impl<T: TryInto<i32> + Copy> AnyPid for T {}

/// Returns the text of `/proc/PID/cgroup`; see [`crate::cgroup`]. `None` if it cannot be read.
pub fn cgroups(pid: impl AnyPid) -> Option<String> {
    try_cgroups(pid).ok().flatten()
}

/// Returns the text of `/proc/PID/cgroup`; `None` if there is no such process, or gpushd is not permitted to see it.
///
/// # Errors
/// The file cannot be read for another reason, such as too many open files.
pub fn try_cgroups(pid: impl AnyPid) -> io::Result<Option<String>> {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let found = match file(pid, "cgroup") {
        // A user can nest cgroups so deeply that older kernels cannot report the path. gpushd creates no such cgroup,
        // so return an empty text.
        Err(error) if error.raw_os_error() == Some(libc::ENAMETOOLONG) => return Ok(Some(String::new())),
        found => found?.map(text),
    };
    let Some(found) = found else { return Ok(None) };
    // In cgroup hierarchies of version 1, the kernel shows an ended thread as a member of the root cgroup. The main
    // thread may have ended, so read the file of a live thread.
    if found.lines().any(|line| line.ends_with(":/"))
        && let Some(bytes) = threads::of_living(pid, |dir| of_process(read::read(dir.join("cgroup"))))?
    {
        return Ok(Some(text(bytes)));
    }
    Ok(Some(found))
}

/// Returns the pids of all processes that `/proc` lists.
///
/// # Errors
/// `/proc` cannot be read.
pub fn pids() -> io::Result<Vec<i32>> {
    let mut pids = Vec::new();
    each_pid(|pid| pids.push(pid))?;
    Ok(pids)
}

/// Calls `visit` with the pid of each process that `/proc` lists. Calls it soon after the kernel has listed the process,
/// so that few processes end in between.
///
/// # Errors
/// `/proc` cannot be read.
pub fn each_pid(mut visit: impl FnMut(i32)) -> io::Result<()> {
    // The kernel fills the buffer before it returns, so a small one. It must be large enough for the longest name.
    let (dir, mut buffer) = (File::open("/proc")?, [MaybeUninit::uninit(); 320]);
    let mut entries = RawDir::new(dir, &mut buffer);
    while let Some(entry) = entries.next() {
        if let Some(pid) = entry?.file_name().to_str().ok().and_then(|name| name.parse().ok()) {
            visit(pid);
        }
    }
    Ok(())
}

/// Returns the entries of a directory that are numbers: pids, or ids of threads.
fn numbers_in(dir: &Path) -> io::Result<Vec<i32>> {
    let number = |entry: io::Result<DirEntry>| entry.map(|entry| entry.file_name().to_str()?.parse().ok());
    std::fs::read_dir(dir)?.filter_map(|entry| number(entry).transpose()).collect()
}

/// Returns whether an error means that gpushd has no free descriptor or memory. Such an error says nothing about the
/// process.
fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Converts an error about one process to `None`: there is no such process, or gpushd is not permitted to see it.
fn of_process<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads a file of a process; `None` if there is no such process, or gpushd is not permitted to see it.
fn file(pid: impl AnyPid, name: &str) -> io::Result<Option<Vec<u8>>> {
    let Some(pid) = positive(pid) else { return Ok(None) };
    of_process(read::read(format!("/proc/{pid}/{name}")))
}

/// Converts a pid to the kernel's type; `None` unless it is positive.
fn positive(pid: impl AnyPid) -> Option<i32> {
    pid.try_into().ok().filter(|pid| *pid > 0)
}

/// Opens the directory of a process; `None` if there is no such process.
fn open(pid: impl AnyPid) -> Option<procfs::process::Process> {
    procfs::process::Process::new(positive(pid)?).ok()
}
