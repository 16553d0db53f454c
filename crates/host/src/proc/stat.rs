//! Start, state, parent and resource use of a process, from `/proc/PID/stat`.

use std::{io, path::Path, time::Duration};

use procfs::{
    Current, FromRead, Uptime,
    process::{ProcState, Stat},
};

use super::{AnyPid, of_process, positive, read};

/// Tolerance for rounding: the start time of a process and the time since boot are both rounded.
const ROUNDING: Duration = Duration::from_millis(50);

/// Maximum number of ancestors of a process to examine.
const MOST_ANCESTORS: usize = 64;

fn stat(pid: impl AnyPid) -> Option<Stat> {
    try_stat(pid).ok().flatten()
}

pub(super) fn try_stat(pid: impl AnyPid) -> io::Result<Option<Stat>> {
    let Some(pid) = positive(pid) else { return Ok(None) };
    in_directory(Path::new(&format!("/proc/{pid}")))
}

/// Reads the `stat` file in the directory of a process or thread; `None` if there is no such process or thread.
pub(super) fn in_directory(dir: &Path) -> io::Result<Option<Stat>> {
    let Some(bytes) = of_process(read::read(dir.join("stat")))? else { return Ok(None) };
    Stat::from_read(bytes.as_slice()).map(Some).map_err(io::Error::other)
}

/// Returns whether the first thread of a process has ended while another thread runs.
pub(super) fn has_lost_first_thread(pid: i32) -> io::Result<bool> {
    Ok(try_stat(pid)?.is_some_and(|stat| stat.num_threads > 1 && has_ended(&stat)))
}

/// Returns whether the thread that `stat` describes has ended.
pub(super) fn has_ended(stat: &Stat) -> bool {
    matches!(stat.state(), Ok(ProcState::Zombie | ProcState::Dead) | Err(_))
}

/// Returns whether the process is alive. A zombie is treated as alive only while other threads of
/// the process still run.
pub(super) fn is_living(stat: &Stat) -> bool {
    !has_ended(stat) || stat.num_threads > 1
}

pub(super) fn stat_if_alive(pid: impl AnyPid) -> Option<Stat> {
    stat(pid).filter(is_living)
}

/// Returns whether a process is alive.
pub fn is_alive(pid: impl AnyPid) -> bool {
    stat_if_alive(pid).is_some()
}

/// Returns whether a process with this pid is alive and began at least `ago` ago. A younger process
/// is a different process that got the same pid.
pub fn is_alive_since(pid: impl AnyPid, ago: Duration) -> bool {
    let Some(stat) = stat_if_alive(pid) else { return false };
    let ticks = now().saturating_sub(stat.starttime);
    Duration::from_secs(ticks) / ticks_per_second() + ROUNDING >= ago
}

/// Returns the time since boot in clock ticks, the unit of [`start`]; `u64::MAX` if it is unknown.
pub fn now() -> u64 {
    let Ok(uptime) = Uptime::current() else { return u64::MAX };
    (uptime.uptime_duration() * ticks_per_second()).as_secs() + 1
}

/// Returns a time since boot in clock ticks, the unit of [`start`].
pub fn ticks(since_boot: Duration) -> u64 {
    (since_boot * ticks_per_second()).as_secs()
}

/// Returns the start of a process in clock ticks since boot; `None` if there is no such process, or its start cannot be
/// read.
pub fn start(pid: impl AnyPid) -> Option<u64> {
    try_start(pid).ok().flatten()
}

/// Returns the start of a process in clock ticks since boot; `None` if there is no such process.
///
/// # Errors
/// The start cannot be read, for example because of too many open files.
pub fn try_start(pid: impl AnyPid) -> io::Result<Option<u64>> {
    Ok(try_stat(pid)?.filter(is_living).map(|stat| stat.starttime))
}

/// Returns the major and minor device number of the controlling terminal of a process; `None` if the process has none, has
/// ended or cannot be read.
pub fn terminal(pid: impl AnyPid) -> Option<(u32, u32)> {
    let (major, minor) = stat_if_alive(pid)?.tty_nr();
    Some((u32::try_from(major).ok().filter(|major| *major > 0)?, u32::try_from(minor).ok()?))
}

/// Set in the flags of a kernel thread (`PF_KTHREAD`).
const KERNEL_THREAD: u32 = 0x0020_0000;

/// One reading of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessReading {
    /// Start in clock ticks since boot; `None` if the process has ended, or does not exist.
    pub start: Option<u64>,
    /// The program that it executes, as in [`image`].
    pub image: Option<Image>,
    /// Whether it is a kernel thread, which executes no program.
    pub is_kernel_thread: bool,
}

/// Reads start and program of a process at once. If there is no such process, everything is absent.
///
/// # Errors
/// The process cannot be read, for example because of too many open files.
pub fn try_reading(pid: impl AnyPid) -> io::Result<ProcessReading> {
    let Some(stat) = try_stat(pid)?.filter(is_living) else { return Ok(ProcessReading::default()) };
    Ok(ProcessReading {
        start: Some(stat.starttime),
        image: Image::of(&stat),
        is_kernel_thread: stat.flags & KERNEL_THREAD != 0,
    })
}

/// The program that a process executes, identified by the start time of the process and the
/// addresses of its environment. These values do not change until the process executes another
/// program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    start: u64,
    environment: (u64, u64),
}

/// Returns the image of a process; `None` if there is no such process, or gpushd is not permitted to see its addresses.
pub fn image(pid: impl AnyPid) -> Option<Image> {
    try_image(pid).ok().flatten()
}

/// Does the same as [`image`].
///
/// # Errors
/// The process cannot be read, for example because of too many open files.
pub fn try_image(pid: impl AnyPid) -> io::Result<Option<Image>> {
    Ok(try_reading(pid)?.image)
}

impl Image {
    /// Returns the image of a living process.
    fn of(stat: &Stat) -> Option<Self> {
        let environment = (stat.env_start?, stat.env_end?);
        // Without permission, the kernel reports 0 for both addresses.
        (environment.1 > environment.0).then_some(Self { start: stat.starttime, environment })
    }
}

/// Returns whether a process is stopped (SIGSTOP) or traced, and so executes nothing.
pub fn is_suspended(pid: impl AnyPid) -> bool {
    stat(pid).is_some_and(|stat| matches!(stat.state(), Ok(ProcState::Stopped | ProcState::Tracing)))
}

/// Returns the pid of a process's parent.
pub fn parent(pid: impl AnyPid) -> Option<u32> {
    u32::try_from(stat(pid)?.ppid).ok()
}

/// Returns the ancestors of a process, except process 1. The parent of the process comes first. If a process cannot be
/// read, for example because of too many open files, the last item is the error.
pub fn try_ancestors(pid: u32) -> impl Iterator<Item = io::Result<u32>> {
    let parent = |pid: u32| try_stat(pid).map(|stat| u32::try_from(stat?.ppid).ok()).transpose();
    let above = move |last: &io::Result<u32>| last.as_ref().ok().and_then(|pid| parent(*pid));
    let is_ancestor = |found: &io::Result<u32>| found.as_ref().map_or(true, |pid| *pid > 1);
    std::iter::successors(parent(pid), above).take_while(is_ancestor).take(MOST_ANCESTORS)
}

/// Returns the ancestors of a process, except process 1. The parent of the process comes first.
pub fn ancestors(pid: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(parent(pid), |pid| parent(*pid)).take_while(|pid| *pid > 1).take(MOST_ANCESTORS)
}

/// Returns the resources that the ended children of a process used: page faults plus clock ticks.
/// Each child that runs and ends increases this number.
pub fn child_resource_use(pid: impl AnyPid) -> Option<u64> {
    let stat = stat(pid)?;
    let time = u64::try_from(stat.cutime).ok()? + u64::try_from(stat.cstime).ok()?;
    Some(stat.cminflt + stat.cmajflt + time)
}

fn ticks_per_second() -> u32 {
    u32::try_from(procfs::ticks_per_second()).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Child, Command, Stdio},
    };

    use nix::{
        sys::{
            signal::{Signal, kill},
            wait::{Id, WaitPidFlag, waitid},
        },
        unistd::Pid,
    };

    use super::*;
    use crate::proc::{Environment, cgroups, environment, executable, executable_id, is_ending, is_executing};

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    fn waited(child: &Child, flag: WaitPidFlag) {
        let id = Id::Pid(Pid::from_raw(child.id().cast_signed()));
        waitid(id, flag | WaitPidFlag::WNOWAIT).unwrap();
    }

    #[test]
    fn own_process_has_a_start_and_a_parent() {
        let me = std::process::id();
        assert!(start(me).is_some() && is_alive(me) && !is_suspended(me) && !is_executing(me));
        assert_eq!(parent(me), Some(std::os::unix::process::parent_id()));
    }

    #[test]
    fn kernel_thread_is_told_from_a_program() {
        let own = try_reading(std::process::id()).unwrap();
        assert!(!own.is_kernel_thread && own.start.is_some() && own.image.is_some(), "{own:?}");
        assert_eq!(try_reading(i32::MAX).unwrap(), ProcessReading::default(), "there is no such process");
        // In a container, process 2 may be missing or an ordinary process.
        match super::super::name(2).as_str() {
            "kthreadd" => assert!(try_reading(2).unwrap().is_kernel_thread),
            _ => eprintln!("SKIPPED: process 2 is not kthreadd"),
        }
    }

    #[test]
    fn pid_without_process_gives_nothing() {
        for pid in [i32::MAX, 0, -1, i32::MIN] {
            assert_eq!((start(pid), parent(pid), child_resource_use(pid)), (None, None, None), "{pid}");
            assert!(!is_alive(pid) && !is_suspended(pid), "{pid}");
        }
        assert_eq!(start(u32::MAX), None);
    }

    #[test]
    fn zombie_is_not_alive() {
        let mut child = sleeper();
        let pid = child.id();
        assert!(is_alive(pid) && is_alive_since(pid, Duration::ZERO));
        // The process started less than an hour ago.
        assert!(start(pid).unwrap() <= now());
        assert!(!is_alive_since(pid, Duration::from_secs(3600)) || start(pid).unwrap() < 100 * 3600);
        child.kill().unwrap();
        waited(&child, WaitPidFlag::WEXITED);
        assert!(!is_alive(pid) && start(pid).is_none());
        child.wait().unwrap();
        assert!(!is_alive(pid));
    }

    #[test]
    fn process_without_its_first_thread_is_alive() {
        const SCRIPT: &str = "import ctypes, threading, time\n\
            def stay():\n    print('up', flush=True)\n    time.sleep(600)\n\
            threading.Thread(target=stay).start()\n\
            ctypes.CDLL(None).pthread_exit(None)";
        let child = Command::new("python3").args(["-c", SCRIPT]).env("GPUSH_TEST", "7").stdout(Stdio::piped()).spawn();
        let Ok(mut child) = child else { return eprintln!("SKIPPED: no python3") };
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pid = child.id();
        while !matches!(stat(pid).unwrap().state(), Ok(ProcState::Zombie)) {
            std::thread::yield_now();
        }
        assert!(is_alive(pid) && start(pid).is_some());
        // Fault: if only the first thread had ended, gpushd treated the process as ending, and could not read which
        // program the process executes.
        assert!(!is_ending(pid));
        let parent = std::process::id();
        assert!(executable(pid).is_some() && executable_id(pid).is_some());
        assert_eq!(environment(pid, "GPUSH_TEST").unwrap(), Environment::Set(b"7".to_vec()));
        assert_eq!(cgroups(pid), cgroups(parent));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_alive(pid));
    }

    #[test]
    fn stopped_process_is_suspended() {
        let mut child = sleeper();
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGSTOP).unwrap();
        waited(&child, WaitPidFlag::WSTOPPED);
        assert!(is_suspended(child.id()) && is_alive(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn process_is_charged_for_children_that_ended() {
        let before = child_resource_use(std::process::id()).unwrap();
        assert!(Command::new("true").status().unwrap().success());
        assert!(child_resource_use(std::process::id()).unwrap() > before);
    }

    #[test]
    fn ancestors_of_the_test_begin_with_its_parent() {
        let own = std::process::id();
        let found: io::Result<Vec<u32>> = try_ancestors(own).collect();
        let found = found.expect("all can be read");
        assert_eq!(found, ancestors(own).collect::<Vec<_>>());
        let parent = u32::try_from(nix::unistd::getppid().as_raw()).expect("a pid");
        assert!(parent == 1 || found.first() == Some(&parent), "{found:?}");
        assert_eq!(try_image(own).expect("it can be read"), image(own));
    }
}
