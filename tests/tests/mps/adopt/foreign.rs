//! A process that is not the daemon holds the daemon's `control_lock`. Any user with a lease can
//! start a process that waits for this lock and gets it when the daemon ends.

use std::{
    fs::{self, OpenOptions},
    io::{BufRead, BufReader, Read},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
};

use gpush_api::MpsState;
use gpush_tests::mps::{Served, becomes, pid_of, reaches, signal};
use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
    sys::signal::Signal,
};

const FINDING: &str = "a process that is not the MPS daemon holds `control_lock`";

/// Environment variable with the path of the lock file, for the process of a [`Waiter`].
const FILE: &str = "GPUSH_TEST_CONTROL_LOCK";
/// Environment variable that makes the process use an open file description lock. The kernel
/// reports no pid for such a lock.
const OPEN_FILE: &str = "GPUSH_TEST_OPEN_FILE_LOCK";

/// A process of root that waits for a lock. It leads a process group, which also contains another
/// process of root, the bystander.
struct Waiter {
    child: Child,
    printed: BufReader<ChildStdout>,
    bystander: Child,
}

impl Waiter {
    fn on(pipe: &Path, open_file: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        let (_program, module) = module_path!().split_once("::").expect("a module of a test program");
        let test = format!("{module}::takes_a_lock_and_keeps_it");
        command.args(["--exact", &test, "--ignored", "--nocapture"]);
        command.env(FILE, pipe.join("control_lock")).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        if open_file {
            command.env(OPEN_FILE, "1");
        }
        let mut child = command.spawn().expect("the process can be started");
        let group = child.id().cast_signed();
        let bystander =
            Command::new("sleep").arg("600").process_group(group).spawn().expect("the process can be started");
        let printed = BufReader::new(child.stdout.take().expect("piped"));
        let mut waiter = Self { child, printed, bystander };
        waiter.await_line("waits");
        waiter
    }

    fn await_line(&mut self, word: &str) {
        let heard = self.printed.by_ref().lines().map_while(Result::ok).any(|line| line.ends_with(word));
        assert!(heard, "the process ended before its line {word:?}");
    }

    /// Returns whether the kernel shows that the process waits for the lock.
    fn is_blocked(&self, pipe: &Path) -> bool {
        use std::os::unix::fs::MetadataExt;
        let inode = fs::metadata(pipe.join("control_lock")).expect("a lock").ino();
        let locks = fs::read_to_string("/proc/locks").expect("/proc/locks");
        locks.lines().any(|line| line.contains("->") && line.contains(&format!(":{inode} ")))
    }

    fn is_alive(&mut self) -> bool {
        [&mut self.child, &mut self.bystander].into_iter().all(|one| matches!(one.try_wait(), Ok(None)))
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        for one in [&mut self.child, &mut self.bystander] {
            let _ = one.kill();
            let _ = one.wait();
        }
    }
}

#[test]
#[ignore = "other tests run it as a process"]
fn takes_a_lock_and_keeps_it() {
    let Some(path) = std::env::var_os(FILE) else { return };
    let file = OpenOptions::new().read(true).write(true).open(path).expect("every user can open the lock");
    let whole = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    println!("waits");
    let open_file = std::env::var_os(OPEN_FILE).is_some();
    let how = if open_file { FcntlArg::F_OFD_SETLKW(&whole) } else { FcntlArg::F_SETLKW(&whole) };
    fcntl(&file, how).expect("the process gets the lock");
    println!("has it");
    // Wait until the test ends.
    let _ended = std::io::stdin().read_line(&mut String::new());
}

/// Returns whether all threads of a process are stopped.
fn is_stopped(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("a process").map_while(Result::ok);
    let state = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
    let is_stopped = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'));
    threads.map(state).all(is_stopped)
}

/// Kills the daemon while a waiter waits for the daemon's lock. gpushd must not notice the end of
/// the daemon before the waiter holds the lock.
///
/// The kernel frees a lock before it wakes the waiter. On a busy host, gpushd may run in between.
/// It would then find the lock free, start the next daemon with a new lock file, and report
/// nothing. So this function suspends gpushd until the waiter holds the lock.
fn kill_daemon_with_waiter(served: &Served, open_file: bool) -> Waiter {
    let pipe = served.pipe();
    let mut waiter = Waiter::on(&pipe, open_file);
    served.agent.await_that("a blocked waiter", || waiter.is_blocked(&pipe));
    served.agent.signal(Signal::SIGSTOP);
    // A thread that got SIGSTOP stops only when it next runs on a CPU.
    served.agent.await_that("gpushd to be stopped", || is_stopped(served.agent.pid()));
    assert!(signal(served.pid, Signal::SIGKILL));
    waiter.await_line("has it");
    served.agent.signal(Signal::SIGCONT);
    waiter
}

#[test]
fn process_that_waited_for_the_lock_is_not_adopted() {
    for open_file in [false, true] {
        let served = Served::up();
        let mut waiter = kill_daemon_with_waiter(&served, open_file);
        let next = served.another();
        assert!(waiter.is_alive());
        let log = served.agent.wait_for_log(FINDING);
        assert!(open_file || log.contains(&format!("pid={}", waiter.child.id())), "{log}");
        assert_eq!(next.reasons, Vec::<String>::new());
        // The waiter does not block later daemons.
        served.client().end();
    }
}

#[test]
fn restarted_gpushd_does_not_adopt_the_lock_waiter() {
    for open_file in [false, true] {
        let mut served = Served::up();
        let client = served.client();
        let mut waiter = None;
        served.restart(|served| {
            let pipe = served.place().join("1");
            let one = waiter.insert(Waiter::on(&pipe, open_file));
            while !one.is_blocked(&pipe) {
                std::thread::yield_now();
            }
            assert!(signal(served.pid, Signal::SIGKILL));
            one.await_line("has it");
        });
        // The server of the killed daemon still has a client, so gpushd cannot start a daemon yet.
        // gpushd reports this, and also the process that holds the lock.
        let reported = becomes(&served.agent, "0", "reported", |daemon| {
            let has = |words: &str| daemon.reasons.iter().any(|reason| reason.contains(words));
            has(FINDING) && has("still serves 1 client")
        });
        assert_eq!((reported.pid, reported.state), (None, MpsState::BackingOff), "{reported:#?}");
        client.end();
        let next = reaches(&served.agent, "0", MpsState::Ready);
        assert_eq!(served.controls(), [pid_of(&next)]);
        assert!(waiter.is_some_and(|mut one| one.is_alive()));
    }
}
