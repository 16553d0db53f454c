//! Threads of a process whose first thread has ended.
//!
//! A program can end its first thread (`pthread_exit` in `main`) while other threads continue. `/proc/PID` describes the
//! first thread, which is then a zombie without memory. The other threads are in `/proc/PID/task`.

use std::{
    io,
    path::{Path, PathBuf},
};

use procfs::process::ProcState;

use super::{AnyPid, numbers_in, of_process, positive, read, stat};

/// Maximum number of times that gpushd lists the threads. gpushd lists them again if it found no value, because threads
/// may have ended in the meantime.
const ATTEMPTS: usize = 3;

/// Returns the children of a process; empty if there is no such process, or the kernel does not list them.
pub fn children(pid: impl AnyPid) -> Vec<i32> {
    let Some(pid) = positive(pid) else { return Vec::new() };
    let lists = directories(pid).unwrap_or_default();
    let texts = lists.iter().filter_map(|thread| read::read(thread.join("children")).ok());
    let words = |text: Vec<u8>| {
        let text = String::from_utf8_lossy(&text).into_owned();
        text.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<i32>>()
    };
    texts.flat_map(words).collect()
}

/// If the first thread of a process has ended and another one runs, reads something from the directory of a running
/// thread in `/proc/PID/task`. Returns the first value that `read` finds.
///
/// # Errors
/// As `read`, or the threads cannot be listed.
pub(super) fn of_living<T>(pid: impl AnyPid, read: impl Fn(&Path) -> io::Result<Option<T>>) -> io::Result<Option<T>> {
    let Some(pid) = positive(pid) else { return Ok(None) };
    if !stat::has_lost_first_thread(pid)? {
        return Ok(None);
    }
    for _ in 0..ATTEMPTS {
        for dir in directories(pid)? {
            if is_running(&dir)?
                && let Some(found) = read(&dir)?
            {
                return Ok(Some(found));
            }
        }
    }
    Ok(None)
}

/// Returns the directories of the threads of a process; none if there is no such process.
pub(super) fn directories(pid: i32) -> io::Result<Vec<PathBuf>> {
    let all = PathBuf::from(format!("/proc/{pid}/task"));
    let threads = of_process(numbers_in(&all))?.unwrap_or_default();
    Ok(threads.into_iter().map(|thread| all.join(thread.to_string())).collect())
}

fn is_running(dir: &Path) -> io::Result<bool> {
    let stat = stat::in_directory(dir)?;
    Ok(stat.is_some_and(|stat| !matches!(stat.state(), Ok(ProcState::Zombie | ProcState::Dead) | Err(_))))
}
