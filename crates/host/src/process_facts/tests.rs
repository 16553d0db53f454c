//! Facts about real processes.

use std::process::{Command, Stdio};

use gpush_core::lease::environment::LEASE_VARIABLE;

use super::*;

fn names() -> LeaseNames {
    LeaseNames::new(|_| Ok(false))
}

/// Returns the lease that a process names, if it is lease L7.
fn named(names: &LeaseNames, pid: u32) -> Fact<NamedLease> {
    let found = ProcessFacts::examine(names, pid, |facts| facts.named_lease(&|id| id == LeaseId(7)));
    found.unwrap().unwrap_or(Ok(NamedLease::None))
}

fn inherited(names: &LeaseNames, pid: u32) -> Option<LeaseId> {
    let found = ProcessFacts::examine(names, pid, |facts| facts.inherited_lease(&|id| id == LeaseId(7)));
    found.unwrap().and_then(|inherited| inherited.unwrap())
}

const L7: Fact<NamedLease> = Ok(NamedLease::Named(LeaseId(7)));

#[test]
fn facts_of_a_process_are_those_of_the_kernel() {
    let (names, me) = (names(), std::process::id());
    let decide = |facts: &ProcessFacts<'_>| {
        let cgroups = facts.cgroups().unwrap();
        assert_eq!(facts.uid(), Ok(nix::unistd::geteuid().as_raw()));
        assert_eq!(facts.membership().cloned(), crate::cgroup::of(me));
        assert_eq!(facts.cgroup_kind(), Ok(CgroupKind::of(me)));
        assert_eq!(cgroups.paths.len(), proc::cgroups(me).unwrap().lines().count());
        facts.pid()
    };
    assert_eq!(ProcessFacts::examine(&names, me, decide).unwrap(), Some(me));
    assert_eq!(ProcessFacts::examine(&names, u32::MAX, |_| ()).unwrap(), None);
}

/// `examine` must discard an answer about a process that has ended meanwhile, because its pid may have another process.
#[test]
fn process_that_ends_during_the_decision_has_no_answer() {
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let (names, pid) = (names(), child.id());
    let calls = std::cell::Cell::new(0);
    let child = std::cell::RefCell::new(&mut child);
    let decide = |_: &ProcessFacts<'_>| {
        calls.set(calls.get() + 1);
        let mut child = child.borrow_mut();
        child.kill().and_then(|()| child.wait()).unwrap();
    };
    assert_eq!(ProcessFacts::examine(&names, pid, decide).unwrap(), None);
    assert_eq!(calls.get(), 1);
}

/// Fault: the environment of a process was empty while the process executed a program, and the process did not count
/// for its lease.
#[test]
fn process_names_its_lease_while_it_executes_programs() {
    let script = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(script.path(), "exec sh \"$0\"").unwrap();
    // With many variables, the kernel takes longer to execute the program.
    let variables = (0..5_000).map(|number| (format!("X{number}"), "1"));
    let mut command = Command::new("sh");
    let mut child = command.arg(script.path()).envs(variables).env(LEASE_VARIABLE, "L7").spawn().unwrap();
    let names = names();
    for _ in 0..20 {
        while proc::image(child.id()).is_some() {
            std::hint::spin_loop();
        }
        match named(&names, child.id()) {
            Err(error) => assert!(error.why.ends_with("is executing a program"), "{error}"),
            found => assert_eq!(found, L7),
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(named(&names, child.id()), Ok(NamedLease::None));
}

#[test]
fn process_without_a_readable_environment_names_the_lease_that_it_named_before() {
    let mut child = Command::new("/bin/sleep").arg("600").env_clear().spawn().unwrap();
    let (names, pid) = (names(), child.id());
    assert_eq!(named(&names, pid), Ok(NamedLease::Overwritten));
    names.remember_inherited(pid, proc::start(pid), LeaseId(7));
    assert_eq!((named(&names, pid), inherited(&names, pid)), (Ok(NamedLease::Overwritten), Some(LeaseId(7))));
    names.remember_own(pid, proc::start(pid), LeaseId(7));
    assert_eq!(named(&names, pid), L7);
    names.remember_own(pid, proc::start(pid).map(|start| start + 1), LeaseId(7));
    assert_eq!(named(&names, pid), Ok(NamedLease::Overwritten), "another process had the pid");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn child_with_a_cleared_environment_inherits_the_name_of_its_parent() {
    let script = "/usr/bin/env -i A=b sleep 600 & echo $!; wait";
    let mut command = Command::new("sh");
    command.args(["-c", script]).env(LEASE_VARIABLE, "L7").stdout(Stdio::piped());
    let mut parent = command.spawn().unwrap();
    let mut line = String::new();
    io::BufRead::read_line(&mut io::BufReader::new(parent.stdout.take().unwrap()), &mut line).unwrap();
    let pid: u32 = line.trim().parse().unwrap();
    while std::fs::read(format!("/proc/{pid}/environ")).unwrap() != b"A=b\0" {
        std::thread::yield_now();
    }
    let names = names();
    assert_eq!((named(&names, pid), inherited(&names, pid)), (Ok(NamedLease::None), Some(LeaseId(7))));
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert_eq!(inherited(&names, pid), Some(LeaseId(7)), "gpushd remembers it after the end of the parent");
    let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
}

/// Fault: a user started a setuid program, and its environment named a lease of the program's owner. The process
/// counted for that lease.
#[test]
fn process_with_another_users_uid_names_no_lease() {
    const SCRIPT: &str = "import os, sys\nos.setresuid(65534, 65534, 0)\nprint('up', flush=True)\nsys.stdin.read()";
    let child = Command::new("python3")
        .args(["-c", SCRIPT])
        .env(LEASE_VARIABLE, "L7")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else { return eprintln!("SKIPPED: no python3") };
    let mut line = String::new();
    io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
    if line.is_empty() {
        return eprintln!("SKIPPED: only root can change uids");
    }
    let (names, pid) = (names(), child.id());
    let shown = ProcessFacts::examine(&names, pid, |facts| (facts.owner(), facts.environment_name())).unwrap();
    assert_eq!(shown, Some((65534, EnvironmentName::Lease(LeaseId(7)))));
    assert_eq!((named(&names, pid), inherited(&names, pid)), (Ok(NamedLease::None), None));
    drop(child.stdin.take());
    child.wait().unwrap();
}
