//! The hooks while gpushd is stopped by SIGSTOP.

use std::{
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    thread,
    time::Instant,
};

use gpush_api::LeaseState;
use gpush_tests::{agent::PATIENCE, mps::lease_now};
use nix::sys::signal::Signal;

use super::{Job, Node, WHOLE, failure, silent};

#[test]
fn stopped_gpushd_does_not_block_prolog_or_grant_later() {
    let node = Node::two_gpus(WHOLE);
    node.agent().signal(Signal::SIGSTOP);
    let begun = Instant::now();
    let job = Job::new(1).on("0");
    let mut command = node.command("prolog");
    let output = command.args(["--deadline", "2s"]).envs(job.0.clone()).output().expect("gpushctl can be started");
    // Without a deadline, the hook would wait for gpushd forever.
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    failure(&output);
    assert!(!node.directory().join("ci-1@n1").exists(), "everything is undone");
    node.agent().signal(Signal::SIGCONT);
    // gpushd now first reads the request of the earlier hook, and then answers the new request.
    node.prolog(&Job::new(2).on("1"));
    node.granted(2);
    node.agent().await_that("no lease of the first job", || node.lease(1).is_none());
    node.prolog(&job);
    node.granted(1);
}

/// Passes each connection on to another socket. Calls `before` before it passes on the first byte of an answer.
fn pass_on(from: &Path, to: &Path, before: impl Fn() + Send + 'static) {
    let listener = UnixListener::bind(from).expect("the socket can be created");
    let to = to.to_owned();
    thread::spawn(move || {
        for mut hook in listener.incoming().flatten() {
            let mut gpushd = UnixStream::connect(&to).expect("gpushd listens");
            let (mut requests, mut server) =
                (hook.try_clone().expect("a socket"), gpushd.try_clone().expect("a socket"));
            thread::spawn(move || io::copy(&mut requests, &mut server));
            let mut answer = [0; 65_536];
            let length = gpushd.read(&mut answer).unwrap_or(0);
            before();
            // Ignore an error: the hook may have given up.
            let _passed = hook.write_all(&answer[..length]).and_then(|()| io::copy(&mut gpushd, &mut hook).map(drop));
        }
    });
}

/// gpushd has recorded the grant, and assumes that Prolog has received the answer.
#[test]
fn gpushd_suspended_between_grant_and_answer_leaves_no_lease() {
    for policy in ["fail", "pass"] {
        let node = Node::two_gpus(WHOLE);
        std::fs::write(node.host.scratch("gpushd.toml"), format!("[slurm]\nagent_down = \"{policy}\"\n{WHOLE}"))
            .unwrap();
        let (proxy, pid) = (node.host.scratch("proxy.sock"), node.agent().pid());
        // The hook never gets the answer: this thread suspends gpushd, and then sleeps before it passes on the answer.
        pass_on(&proxy, &node.host.scratch("gpushd.admin.sock"), move || {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), Signal::SIGSTOP)
                .expect("gpushd runs");
            thread::park();
        });
        let job = Job::new(1).on("0");
        let output = node.command_at("prolog", &proxy).args(["--deadline", "2s"]).envs(job.0.clone()).output();
        let output = output.expect("gpushctl can be started");
        match policy {
            "fail" => assert!(failure(&output).contains("agent_down")),
            _ => {
                silent(&output);
                assert!(node.task(&job).expect("the task runs").contains("without a lease"));
            }
        }
        // Epilog does not need gpushd, because Prolog has already recorded in a file that the job ended.
        assert!(node.directory().join("ci-1@n1+ended").exists(), "{policy}");
        if policy == "pass" {
            node.epilog(&job);
        }
        node.agent().signal(Signal::SIGCONT);
        let lease = node.granted(1).id;
        node.prolog(&Job::new(2).on("1"));
        assert_eq!(lease_now(node.agent(), lease).state, LeaseState::Ended, "{policy}");
        assert!(!node.directory().join("ci-1@n1+ended").exists(), "{policy}");
    }
}
