//! What `/proc` tells of a process now. A moment later its pid may be another's: whoever does something to a process
//! holds it first ([`crate::processes`]), and whoever remembers one does so with its start.

use std::{fs, os::unix::fs::MetadataExt, time::Duration};

use gpush_api::text;
use procfs::{
    Current, Uptime,
    process::{ProcState, Process, Stat},
};

/// Both the start of a process and the time since the boot are rounded.
const ROUNDED: Duration = Duration::from_millis(50);

/// A pid, of whichever type it came.
pub trait AnyPid: TryInto<i32> {}

impl<T: TryInto<i32>> AnyPid for T {}

fn stat(pid: impl AnyPid) -> Option<Stat> {
    Process::new(pid.try_into().ok().filter(|pid| *pid > 0)?).ok()?.stat().ok()
}

/// A zombie has ended, unless it is only its first thread that has.
fn lives(stat: &Stat) -> bool {
    let has_ended = matches!(stat.state(), Ok(ProcState::Zombie | ProcState::Dead) | Err(_));
    !has_ended || stat.num_threads > 1
}

fn living(pid: impl AnyPid) -> Option<Stat> {
    stat(pid).filter(lives)
}

/// Whether a process is there.
pub fn is_alive(pid: impl AnyPid) -> bool {
    living(pid).is_some()
}

/// Whether a process is there that was before this time: one that has begun since has the pid of another.
pub fn is_alive_since(pid: impl AnyPid, ago: Duration) -> bool {
    let Some(stat) = living(pid) else { return false };
    let ticks = now().saturating_sub(stat.starttime);
    Duration::from_secs(ticks) / u32::try_from(procfs::ticks_per_second()).unwrap_or(100) + ROUNDED >= ago
}

/// Now, as the starts of processes are counted: clock ticks since the boot. The end of time when that can't be told.
pub fn now() -> u64 {
    let Ok(uptime) = Uptime::current() else { return u64::MAX };
    let ticks = uptime.uptime_duration() * u32::try_from(procfs::ticks_per_second()).unwrap_or(100);
    ticks.as_secs() + 1
}

/// Start of a process in clock ticks since the boot; `None` when there is none.
pub fn start(pid: impl AnyPid) -> Option<u64> {
    living(pid).map(|stat| stat.starttime)
}

/// What a process runs, by when it began and where the kernel has put its environment: another program that it
/// becomes has another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image {
    start: u64,
    environment: (u64, u64),
}

/// That of a process; `None` when there is none, or we may not know.
pub fn image(pid: impl AnyPid) -> Option<Image> {
    let stat = living(pid)?;
    let environment = (stat.env_start?, stat.env_end?);
    // Whoever may not know is told of none.
    (environment.1 > environment.0).then_some(Image { start: stat.starttime, environment })
}

/// Whether somebody has suspended a process (SIGSTOP), so that it does nothing.
pub fn is_suspended(pid: impl AnyPid) -> bool {
    stat(pid).is_some_and(|stat| matches!(stat.state(), Ok(ProcState::Stopped | ProcState::Tracing)))
}

/// Parent of a process.
pub fn parent(pid: impl AnyPid) -> Option<u32> {
    u32::try_from(stat(pid)?.ppid).ok()
}

/// The pid that we know a process by of which `peer` says that it is `named`.
///
/// # Errors
/// Why it can't be told: pids of another namespace are known here of the peer itself alone.
pub fn from_there(peer: Option<u32>, named: u32) -> Result<u32, &'static str> {
    const ELSEWHERE: &str = "it is of another pid namespace, as in a container, from which only whoever asks is known";
    let peer = peer.ok_or(ELSEWHERE)?;
    let status = Process::new(i32::try_from(peer).map_err(|_| ELSEWHERE)?).and_then(|process| process.status());
    // It has ended, and may be anybody.
    let Ok(status) = status else { return Err("whoever asked has ended") };
    let its = status.nspid.unwrap_or_default();
    match its.as_slice() {
        // Of our own namespace.
        [] | [_] => Ok(named),
        [.., own] if u32::try_from(*own) == Ok(named) => Ok(peer),
        _ => Err(ELSEWHERE),
    }
}

/// What a process has been charged with for children that ended: faults of pages, and time. Nothing runs and ends
/// without some.
pub fn charged(pid: impl AnyPid) -> Option<u64> {
    let stat = stat(pid)?;
    let time = u64::try_from(stat.cutime).ok()? + u64::try_from(stat.cstime).ok()?;
    Some(stat.cminflt + stat.cmajflt + time)
}

/// User of a process.
pub fn owner(pid: impl AnyPid) -> Option<u32> {
    let pid: i32 = pid.try_into().ok()?;
    Some(fs::metadata(format!("/proc/{pid}")).ok()?.uid())
}

/// Real, effective, saved and file system user of a process.
pub fn uids(pid: impl AnyPid) -> Option<[u32; 4]> {
    let status = Process::new(pid.try_into().ok().filter(|pid| *pid > 0)?).ok()?.status().ok()?;
    Some([status.ruid, status.euid, status.suid, status.fuid])
}

/// What a process calls itself, without what a terminal would obey; empty when there is none.
pub fn name(pid: impl AnyPid) -> String {
    let path = pid.try_into().ok().map(|pid: i32| format!("/proc/{pid}/comm"));
    let name = path.and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
    text::plain(name.trim_end())
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

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    fn waited(child: &Child, flag: WaitPidFlag) {
        let id = Id::Pid(Pid::from_raw(child.id().cast_signed()));
        waitid(id, flag | WaitPidFlag::WNOWAIT).unwrap();
    }

    #[test]
    fn our_own_process_is_known_by_its_start_owner_and_parent() {
        let me = std::process::id();
        assert!(start(me).is_some() && is_alive(me) && !is_suspended(me));
        assert_eq!(owner(me), Some(nix::unistd::geteuid().as_raw()));
        assert_eq!(uids(me).unwrap()[..2], [nix::unistd::getuid().as_raw(), nix::unistd::geteuid().as_raw()]);
        assert_eq!(parent(me), Some(std::os::unix::process::parent_id()));
        assert!(!name(me).is_empty());
    }

    #[test]
    fn of_what_is_not_there_nothing_is_told() {
        for pid in [i32::MAX, 0, -1, i32::MIN] {
            assert_eq!((start(pid), parent(pid), charged(pid), uids(pid)), (None, None, None, None), "{pid}");
            assert!(!is_alive(pid) && !is_suspended(pid) && name(pid).is_empty(), "{pid}");
        }
        assert_eq!((start(u32::MAX), owner(u32::MAX), owner(i32::MAX)), (None, None, None));
    }

    #[test]
    fn what_has_ended_is_not_alive_though_nobody_waited_for_it() {
        let mut child = sleeper();
        let pid = child.id();
        assert!(is_alive(pid) && is_alive_since(pid, Duration::ZERO));
        // The pid was another's then.
        assert!(start(pid).unwrap() <= now());
        assert!(!is_alive_since(pid, Duration::from_secs(3600)) || start(pid).unwrap() < 100 * 3600);
        child.kill().unwrap();
        waited(&child, WaitPidFlag::WEXITED);
        assert!(!is_alive(pid) && start(pid).is_none());
        child.wait().unwrap();
        assert!(!is_alive(pid));
    }

    #[test]
    fn what_goes_on_without_its_first_thread_is_alive() {
        const SCRIPT: &str = "import ctypes, threading, time\n\
            def stay():\n    print('up', flush=True)\n    time.sleep(600)\n\
            threading.Thread(target=stay).start()\n\
            ctypes.CDLL(None).pthread_exit(None)";
        let child = Command::new("python3").args(["-c", SCRIPT]).stdout(Stdio::piped()).spawn();
        let Ok(mut child) = child else { return eprintln!("SKIPPED: no python3") };
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pid = child.id();
        while !matches!(stat(pid).unwrap().state(), Ok(ProcState::Zombie)) {
            std::thread::yield_now();
        }
        assert!(is_alive(pid) && start(pid).is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_alive(pid));
    }

    #[test]
    fn a_pid_is_taken_for_what_the_asker_means_by_it() {
        let me = std::process::id();
        assert_eq!(from_there(Some(me), 4711), Ok(4711), "of our own namespace");
        assert!(from_there(None, me).is_err(), "of one that we can't see");
        assert!(from_there(Some(u32::MAX), me).is_err() && from_there(Some(i32::MAX.cast_unsigned()), me).is_err());
    }

    #[test]
    fn who_is_suspended_is_known() {
        let mut child = sleeper();
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGSTOP).unwrap();
        waited(&child, WaitPidFlag::WSTOPPED);
        assert!(is_suspended(child.id()) && is_alive(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_is_charged_for_its_children() {
        let before = charged(std::process::id()).unwrap();
        assert!(Command::new("true").status().unwrap().success());
        assert!(charged(std::process::id()).unwrap() > before);
    }
}
