//! Tests of commands that start, stop or drain MPS daemons, or wait for such a change.

use super::*;

/// Starts an agent for tests. Until the first POST, its daemon is as in `before`. Then each GET
/// returns the next one of `states`.
pub(super) fn agent_with_states(host: &Host, before: MpsDaemon, accepted: Answer, states: Vec<MpsDaemon>) -> Agent {
    let asked = AtomicUsize::new(0);
    let accepted = std::sync::Mutex::new(Some(accepted));
    let posted = std::sync::atomic::AtomicBool::new(false);
    Agent::listen(&host.path("gpushd.sock"), move |request: &Request| {
        if request.method == "POST" {
            posted.store(true, Ordering::SeqCst);
            return accepted.lock().unwrap().take().unwrap_or(Answer::HangUp);
        }
        if !posted.load(Ordering::SeqCst) {
            return Answer::ok(&before);
        }
        let at = asked.fetch_add(1, Ordering::SeqCst).min(states.len() - 1);
        Answer::ok(&states[at])
    })
}

#[test]
fn daemon_change_is_watched_to_its_end() {
    let (stopped, ready) = (daemon(MpsState::Stopped, 1, &[]), daemon(MpsState::Ready, 4, &[]));
    let (starting, stopping) = (daemon(MpsState::Starting, 2, &[]), daemon(MpsState::Stopping, 2, &[]));
    let draining = |clients: &[MpsClient]| daemon(MpsState::Draining, 2, clients);
    let mut given_up = daemon(MpsState::GivenUp, 3, &[]);
    given_up.reasons = vec!["its control daemon ended with status 1, 5 times in 10 minutes".into()];
    let two = [client(5120), client(5121)];
    let old = busy();
    let cases: [(&[&str], &MpsDaemon, &MpsDaemon, Vec<MpsDaemon>); 8] = [
        (&["start", "0"], &stopped, &starting, vec![starting.clone(), ready.clone()]),
        (&["start", "0"], &ready, &ready, vec![]),
        (&["start", "0"], &stopped, &starting, vec![starting.clone(), given_up]),
        (&["start", "0", "--detach"], &stopped, &starting, vec![]),
        (&["start", "0", "--timeout", "1s"], &stopped, &starting, vec![starting.clone()]),
        (&["restart", "0", "--force"], &old, &old, vec![stopping.clone(), starting.clone(), ready.clone()]),
        (
            &["stop", "0", "--wait", "--end-after", "30m"],
            &old,
            &draining(&two),
            vec![draining(&two), draining(&two[1..]), stopping, stopped.clone()],
        ),
        (&["stop", "0", "--wait", "-q"], &old, &draining(&two), vec![draining(&two), ready.clone()]),
    ];
    let mut text = Vec::new();
    for (args, before, accepted, states) in cases {
        let host = Host::new();
        let agent = agent_with_states(&host, before.clone(), Answer::ok(accepted), states);
        text.push(host.run(&[&["mps"], args].concat()));
        let action = if args.contains(&"--wait") { "drain" } else { args[0] };
        let body = agent.bodies(&format!("/v1/mps/g5d1b03a2/{action}")).pop().unwrap();
        text.push(format!("[body {body}]\n"));
    }
    assert_snapshot!(text.concat());
}

#[test]
fn stop_with_clients_is_refused() {
    let host = Host::new();
    let blocked = ApiError::new(Code::Blocked, "MPS on GPU 0 (GPU-00000000) has 2 clients")
        .cause("pid 5120 of alice (python train.py), and one of another user")
        .hint("`gpushctl mps stop 0 --wait` lets them finish, `gpushctl mps stop 0 --force` ends them");
    agent_with_states(&host, busy(), Answer::error(&blocked), vec![busy()]);
    assert_snapshot!(host.run(&["mps", "stop", "0"]), @"
    $ gpushctl mps stop 0
    [stderr]
    error: MPS on GPU 0 (GPU-00000000) has 2 clients
      cause: pid 5120 of alice (python train.py), and one of another user
      hint: `gpushctl mps stop 0 --wait` lets them finish,
            `gpushctl mps stop 0 --force` ends them
    [exit 4]
    ");
}

#[test]
fn ctrl_c_leaves_a_drain_to_the_agent() {
    let host = Host::new();
    let draining = daemon(MpsState::Draining, 2, &[client(5120)]);
    agent_with_states(&host, busy(), Answer::ok(&draining), vec![draining.clone()]);
    let mut child =
        host.command(&["mps", "stop", "0", "--wait"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    // gpushctl prints this line to name the clients that it waits for. From then on, gpushctl
    // handles Ctrl-C.
    stderr.read_line(&mut line).unwrap();
    assert_eq!(line, "GPU 0: draining; still connected: alice 5120\n");
    signal(child.id(), nix::sys::signal::Signal::SIGINT);
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(rest.contains("gpushctl no longer waits. gpushd continues: see `gpushctl mps show 0`"), "{rest}");
}
