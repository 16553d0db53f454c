//! Somebody else who holds a daemon's `control_lock`: whoever has a share can wait for it, and has it as soon
//! as the daemon dies.

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

const TOLD: &str = "a process that is not its daemon holds control_lock";

/// Names the file to the process that [`Waits`] is.
const FILE: &str = "GPUSH_TEST_CONTROL_LOCK";
/// Set when the lock shall be that of an open file, which has no pid.
const OPEN_FILE: &str = "GPUSH_TEST_OPEN_FILE_LOCK";

/// Somebody of root's who waits for a lock, leads a process group, and has another of root's in it.
struct Waits {
    child: Child,
    said: BufReader<ChildStdout>,
    bystander: Child,
}

impl Waits {
    fn on(pipe: &Path, open_file: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        let (_program, module) = module_path!().split_once("::").expect("a module of a test program");
        let test = format!("{module}::takes_a_lock_and_keeps_it");
        command.args(["--exact", &test, "--ignored", "--nocapture"]);
        command.env(FILE, pipe.join("control_lock")).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        if open_file {
            command.env(OPEN_FILE, "1");
        }
        let mut child = command.spawn().expect("it can be started");
        let group = child.id().cast_signed();
        let bystander = Command::new("sleep").arg("600").process_group(group).spawn().expect("it can be started");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        let mut waits = Self { child, said, bystander };
        waits.hears("waits");
        waits
    }

    fn hears(&mut self, word: &str) {
        let heard = self.said.by_ref().lines().map_while(Result::ok).any(|line| line.ends_with(word));
        assert!(heard, "it ended before it {word}");
    }

    /// Whether it waits in the kernel.
    fn stands_in_line(&self, pipe: &Path) -> bool {
        use std::os::unix::fs::MetadataExt;
        let inode = fs::metadata(pipe.join("control_lock")).expect("a lock").ino();
        let locks = fs::read_to_string("/proc/locks").expect("/proc/locks");
        locks.lines().any(|line| line.contains("->") && line.contains(&format!(":{inode} ")))
    }

    fn is_unhurt(&mut self) -> bool {
        [&mut self.child, &mut self.bystander].into_iter().all(|one| matches!(one.try_wait(), Ok(None)))
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        for one in [&mut self.child, &mut self.bystander] {
            let _ = one.kill();
            let _ = one.wait();
        }
    }
}

#[test]
#[ignore = "is what the others run as a process"]
fn takes_a_lock_and_keeps_it() {
    let Some(path) = std::env::var_os(FILE) else { return };
    let file = OpenOptions::new().read(true).write(true).open(path).expect("it is everybody's to open");
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
    fcntl(&file, how).expect("it is had in the end");
    println!("has it");
    // Until whoever started it is gone.
    let _ended = std::io::stdin().read_line(&mut String::new());
}

/// The daemon dies while somebody waits for its lock.
fn dies(served: &Served, open_file: bool) -> Waits {
    let pipe = served.pipe();
    let mut waits = Waits::on(&pipe, open_file);
    served.agent.await_that("it stands in line", || waits.stands_in_line(&pipe));
    assert!(signal(served.pid, Signal::SIGKILL));
    waits.hears("has it");
    waits
}

#[test]
fn who_waited_for_the_lock_of_a_daemon_is_not_the_next_daemon() {
    for open_file in [false, true] {
        let served = Served::up();
        let mut waits = dies(&served, open_file);
        let next = served.another();
        assert!(waits.is_unhurt());
        let log = served.agent.wait_for_log(TOLD);
        assert!(open_file || log.contains(&format!("pid={}", waits.child.id())), "{log}");
        assert_eq!(next.reasons, Vec::<String>::new());
        // It is not in the way of the one after that either, nor of its end.
        served.client().end();
    }
}

#[test]
fn nor_is_it_for_a_gpushd_that_starts() {
    for open_file in [false, true] {
        let mut served = Served::up();
        let client = served.client();
        let mut waits = None;
        served.restart(|served| {
            let pipe = served.place().join("1");
            let one = waits.insert(Waits::on(&pipe, open_file));
            while !one.stands_in_line(&pipe) {
                std::thread::yield_now();
            }
            assert!(signal(served.pid, Signal::SIGKILL));
            one.hears("has it");
        });
        // A server is left, so no daemon can be started yet: both are told.
        let told = becomes(&served.agent, "0", "told", |daemon| {
            let has = |words: &str| daemon.reasons.iter().any(|reason| reason.contains(words));
            has(TOLD) && has("still serves 1 client")
        });
        assert_eq!((told.pid, told.state), (None, MpsState::BackingOff), "{told:#?}");
        client.end();
        let next = reaches(&served.agent, "0", MpsState::Ready);
        assert_eq!(served.controls(), [pid_of(&next)]);
        assert!(waits.is_some_and(|mut one| one.is_unhurt()));
    }
}
