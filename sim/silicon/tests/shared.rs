//! One simulated host, which many processes share: no update is lost or partly written, and no
//! process waits for a process that has ended.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.
#![allow(unsafe_code)] // The tests fork a child that shares the parent's open host.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::{ForkResult, Pid as SystemPid, fork};
use silicon::description::GpuDescription;
use silicon::fault::{Kill, Rule};
use silicon::machine::{Pid, Process, ProcessKind};
use silicon::{Call, Description, Host, Return};

mod invariants;

/// Runs `body` in a forked child. The child exits with 0 if `body` returns, and with 101 if it
/// panics.
fn child(body: impl FnOnce()) -> SystemPid {
    // SAFETY: the child uses only the host and the allocator. The host creates its locks again
    // after a fork, and glibc keeps the allocator usable. The child exits without running the
    // parent's destructors.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(if done.is_ok() { 0 } else { 101 }) }
        }
    }
}

fn reap(pid: SystemPid) -> WaitStatus {
    waitpid(pid, None).unwrap()
}

fn make(dir: &Path, model: &str, count: u32) -> Host {
    Host::create(dir, &Description::of(vec![GpuDescription::new(model, count)])).unwrap()
}

/// Makes one random change of one GPU.
fn change(host: &Host, rng: &mut fastrand::Rng) {
    let gpu = rng.usize(..4) as u32;
    let step = rng.usize(..4);
    let profile = rng.usize(..7);
    let n = rng.usize(..8);
    let done = host.update(|machine| {
        let part = machine.part(gpu)?;
        let profile = part.profiles[profile % part.profiles.len()].data.id;
        let gi = machine.gpu(gpu)?.instances.get(n).map(|gi| gi.id);
        match (step, gi) {
            (0, _) | (_, None) => machine.create_gpu_instance(gpu, profile, None).map(drop),
            (1, Some(gi)) => {
                let handle = machine.gpu_instance_handle(gpu, gi)?;
                machine.create_compute_instance(handle, 0, None).map(drop)
            }
            (2, Some(_)) => {
                let device = machine.mig_device_by_index(gpu, n as u32)?;
                machine.destroy_compute_instance(device)
            }
            (_, Some(gi)) => {
                let handle = machine.gpu_instance_handle(gpu, gi)?;
                machine.destroy_gpu_instance(handle)
            }
        }
    });
    match done {
        Ok(()) | Err(Return::InsufficientResources | Return::InUse | Return::NotFound | Return::InvalidArgument) => {}
        Err(rc) => panic!("the host answers {rc}"),
    }
}

#[test]
fn state_stays_valid_after_two_thousand_kills() {
    const KILLS: u32 = 2000;
    let dir = tempfile::tempdir().unwrap();
    let host = make(dir.path(), "a100-80", 4);
    let mut rng = fastrand::Rng::with_seed(0x5eed);
    let worker = |seed: u64| {
        child(|| {
            let mut rng = fastrand::Rng::with_seed(seed);
            host.connect().unwrap();
            loop {
                change(&host, &mut rng);
                // The lock is not fair. Without a pause, three workers would keep all other
                // processes from getting the lock.
                std::thread::sleep(Duration::from_micros(rng.usize(..300) as u64));
            }
        })
    };
    let mut workers: Vec<SystemPid> = (0..3).map(|seed| worker(seed + 1)).collect();
    let (mut instances, mut last) = (0, 0);
    for round in 0..KILLS {
        let victim = rng.usize(..workers.len());
        std::thread::sleep(Duration::from_micros(rng.usize(..1500) as u64));
        kill(workers[victim], Signal::SIGKILL).unwrap();
        let ended = reap(workers[victim]);
        assert!(matches!(ended, WaitStatus::Signaled(_, Signal::SIGKILL, _)), "a worker ended by itself: {ended:?}");
        // Check that the state is valid for three processes: one that has the host open, one that
        // opens it now, and one that changes it.
        let machine = host.read().unwrap();
        instances += invariants::check(&machine);
        let fresh = Host::open(dir.path()).unwrap();
        invariants::check(&fresh.read().unwrap());
        fresh.update(|machine| machine.xid(0, u64::from(round), None, None)).unwrap();
        let generation = machine.state().next_generation;
        assert!(generation >= last, "an update was taken back");
        last = generation;
        workers[victim] = worker(u64::from(round) + 100);
    }
    for pid in workers {
        kill(pid, Signal::SIGKILL).unwrap();
        reap(pid);
    }
    host.update(|_| Ok::<_, Return>(())).unwrap();
    assert_eq!(host.read().unwrap().clients(None).count(), 0, "dead clients are forgotten");
    println!("{KILLS} clients killed among {last} created instances; {instances} instances checked, no state torn");
    assert!(last > u64::from(KILLS), "the workers were at work");
}

#[test]
fn concurrent_updates_are_not_lost() {
    const EACH: u64 = 250;
    let dir = tempfile::tempdir().unwrap();
    let host = make(dir.path(), "a30-24", 1);
    let count = |host: &Host| {
        for n in 0..EACH {
            host.update(|machine| machine.xid(0, n, None, None)).unwrap();
            invariants::check(&host.read().unwrap());
        }
    };
    // The children use the `Host` that the parent has opened. At the same time, threads of the
    // parent use it, too.
    let children: Vec<SystemPid> = (0..3).map(|_| child(|| count(&host))).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| count(&host));
        scope.spawn(|| count(&Host::open(dir.path()).unwrap()));
    });
    for pid in children {
        assert_eq!(reap(pid), WaitStatus::Exited(pid, 0));
    }
    let cursor = host.read().unwrap().events().cursor();
    println!("{cursor} updates by 3 processes and 2 threads");
    assert_eq!(cursor, 5 * EACH);
}

#[test]
fn fork_during_a_held_lock_does_not_hang_the_child() {
    let dir = tempfile::tempdir().unwrap();
    let host = make(dir.path(), "a30-24", 1);
    for _ in 0..50 {
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    host.update(|machine| machine.xid(0, 1, None, None)).unwrap();
                }
            });
            let pid = child(|| host.update(|machine| machine.xid(0, 2, None, None)).unwrap());
            assert_eq!(reap(pid), WaitStatus::Exited(pid, 0));
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}

#[test]
fn process_on_gpu_is_listed_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let host = make(dir.path(), "l4", 1);
    let pid = child(|| {
        loop {
            std::thread::park();
        }
    });
    let found = Pid::find(pid.as_raw().cast_unsigned()).unwrap();
    let process =
        Process { pid: found, kind: ProcessKind::Compute, memory_mib: 9, gpu_instance: None, compute_instance: None };
    host.update(|machine| machine.attach(0, process)).unwrap();
    assert_eq!(host.read().unwrap().gpus()[0].processes, [process]);
    kill(pid, Signal::SIGKILL).unwrap();
    // Wait until the process has ended, but do not reap it. A zombie uses no GPU.
    waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
    assert_eq!(host.read().unwrap().gpus()[0].processes, []);
    assert!(matches!(reap(pid), WaitStatus::Signaled(..)));
}

#[test]
fn kill_rules_kill_before_or_after_the_call_takes_effect() {
    let dir = tempfile::tempdir().unwrap();
    let host = make(dir.path(), "a100-80", 1);
    let call = Call::on("nvmlDeviceCreateGpuInstance", 0);
    let create = || {
        let pid = child(|| {
            let decision = host.before(&call).unwrap();
            assert_eq!(decision.rc, None);
            host.update(|machine| machine.create_gpu_instance(0, 19, None)).unwrap();
            host.after(decision);
        });
        (pid, reap(pid))
    };
    let rule = |kill| Rule { kill: Some(kill), times: Some(1), ..Rule::new(call.function) };
    let count = || host.read().unwrap().gpus()[0].instances.len();
    host.add_fault(rule(Kill::Before)).unwrap();
    let (_, ended) = create();
    assert!(matches!(ended, WaitStatus::Signaled(_, Signal::SIGKILL, _)), "{ended:?}");
    assert_eq!(count(), 0, "killed before");
    let (pid, ended) = create();
    assert_eq!((ended, count()), (WaitStatus::Exited(pid, 0), 1), "once only");
    host.clear_faults(None).unwrap();
    host.add_fault(rule(Kill::After)).unwrap();
    let (_, ended) = create();
    assert!(matches!(ended, WaitStatus::Signaled(_, Signal::SIGKILL, _)), "{ended:?}");
    assert_eq!(count(), 2, "killed after");
}

#[test]
fn events_wake_waiting_listeners() {
    let dir = tempfile::tempdir().unwrap();
    let host = make(dir.path(), "a30-24", 1);
    let cursor = host.read().unwrap().events().cursor();
    assert_eq!(host.wait_event(cursor, Duration::ZERO, |_| true).unwrap(), None);
    let pid = child(|| {
        let mut waits =
            std::iter::repeat_with(|| host.wait_event(cursor, Duration::from_secs(60), |e| e.data == 79).unwrap());
        let event = waits.find(Option::is_some).flatten();
        assert_eq!(event.map(|event| event.data), Some(79));
    });
    host.update(|machine| machine.xid(0, 13, None, None)).unwrap();
    host.update(|machine| machine.xid(0, 79, None, None)).unwrap();
    assert_eq!(reap(pid), WaitStatus::Exited(pid, 0));
}

#[test]
fn trace_has_whole_lines_of_all_callers() {
    let dir = tempfile::tempdir().unwrap();
    let host = make(dir.path(), "a30-24", 1);
    host.trace("nvmlDeviceCreateGpuInstance", Some(0), "14", Return::Success);
    assert!(!dir.path().join("trace").exists(), "none is wanted");
    std::fs::write(dir.path().join("trace"), "").unwrap();
    let children: Vec<SystemPid> = (0..4)
        .map(|n| {
            child(|| {
                let host = Host::open(dir.path()).unwrap();
                for i in 0..100 {
                    host.trace("nvmlGpuInstanceDestroy", Some(n), format_args!("gi {i}"), Return::InUse);
                }
            })
        })
        .collect();
    for pid in &children {
        assert_eq!(reap(*pid), WaitStatus::Exited(*pid, 0));
    }
    let trace = std::fs::read_to_string(dir.path().join("trace")).unwrap();
    assert_eq!(trace.lines().count(), 400);
    for line in trace.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        assert_eq!(words.len(), 8, "{line}");
        assert_eq!((words[1], words[5], words[6], words[7]), ("nvmlGpuInstanceDestroy", "->", "IN_USE", "(19)"));
    }
}
