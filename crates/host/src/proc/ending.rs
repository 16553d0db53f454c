//! Processes that end.

use std::path::{Path, PathBuf};

use super::{
    AnyPid, positive, read,
    stat::{has_ended, in_directory, is_living, try_stat},
    status::Status,
    threads,
};

/// Set in the flags of a process that is exiting (`PF_EXITING`).
const EXITING: u32 = 0x4;

/// Returns whether a process has ended, is exiting, or has been sent SIGKILL. `kill -9` can return
/// long before the process has ended, especially on a busy machine. Returns `false` if the state
/// cannot be read.
pub fn is_ending(pid: impl AnyPid) -> bool {
    let Some(pid) = positive(pid) else { return true };
    match try_stat(pid) {
        Ok(Some(stat)) if is_living(&stat) => is_killed(Path::new(&format!("/proc/{pid}"))) || all_threads_end(pid),
        Ok(Some(_) | None) => true,
        Err(_) => false,
    }
}

/// Returns whether all threads of a process have ended, are exiting, or have been sent SIGKILL. The first thread can
/// exit long before the others.
fn all_threads_end(pid: i32) -> bool {
    let ends = |dir: &PathBuf| match in_directory(dir) {
        Ok(Some(stat)) => has_ended(&stat) || stat.flags & EXITING != 0 || is_killed(dir),
        Ok(None) => true,
        Err(_) => false,
    };
    threads::directories(pid).is_ok_and(|threads| threads.iter().all(ends))
}

/// Returns whether SIGKILL is pending for a process or thread.
fn is_killed(dir: &Path) -> bool {
    const SIGKILL: u64 = 1 << (nix::libc::SIGKILL - 1);
    let text = read::read(dir.join("status")).unwrap_or_default();
    Status::parse(&String::from_utf8_lossy(&text)).is_some_and(|status| status.pending & SIGKILL != 0)
}
