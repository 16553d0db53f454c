//! Daemons that do not answer, and processes that keep a daemon from answering.

use std::{
    io::Write,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    time::Instant,
};

use gpush_api::{Code, MpsState};
use gpush_tests::{
    agent::PATIENCE,
    host::Host,
    mps::{Served, act, becomes, clear_faults, daemon, fault, pid_of, real_programs, signal},
};
use nix::sys::signal::Signal;
use serde_json::json;

use super::{reported_as, serves};

/// If a daemon does not answer and has clients, gpushd must not end it. With this fault, the daemon
/// hangs at the first command, and does not greet the next connection.
#[test]
fn hung_daemon_is_replaced_after_its_last_client_ended() {
    let (kind, words) = ("unread-pipe", "does not respond");
    let served = Served::up();
    let mut client = served.client();
    fault(&served.host, kind);
    let hung = reported_as(&served, MpsState::Hung, words);
    assert_eq!(hung.clients.len(), 1, "{hung:#?}");
    assert!(hung.reasons.iter().any(|reason| reason.contains("gpushd does not restart the daemon, because")));
    assert!(client.lives() && client.printed().is_empty());
    assert_eq!(served.controls(), [served.pid]);
    // The daemon answers again, and continues to serve.
    clear_faults(&served.host);
    assert!(serves(&served));
    // Let the daemon hang again, and then end its last client.
    fault(&served.host, kind);
    reported_as(&served, MpsState::Hung, words);
    client.end();
    clear_faults(&served.host);
    served.another();
}

#[test]
fn stopped_daemon_process_is_reported_as_hung() {
    for real in [false, true] {
        let host = Host::up(Served::HOST);
        let programs = if real { real_programs(&host, "NVIDIA's own daemon, stopped") } else { None };
        if real && programs.is_none() {
            return;
        }
        let served = Served::on(host, programs.as_deref());
        let mut client = served.client();
        assert!(signal(served.pid, Signal::SIGSTOP));
        reported_as(&served, MpsState::Hung, "sends no greeting");
        // A request does not wait for the hung daemon.
        let refused = act(&served.agent, "0", "stop", &json!({})).error();
        assert_eq!(refused.code, Code::Blocked);
        assert!(signal(served.pid, Signal::SIGCONT));
        assert!(serves(&served) && client.lives());
        // A forced restart ends the daemon, although the daemon reads no commands.
        assert!(signal(served.pid, Signal::SIGSTOP));
        assert_eq!(act(&served.agent, "0", "restart", &json!({ "force": true })).status, 200);
        served.another();
    }
}

/// Starts a front-end that holds the control connection until its standard input is closed.
/// NVIDIA's front-end prints nothing until it ends, so its output does not show whether it has the
/// connection. Therefore, this function waits until gpushd reports that the daemon hangs.
fn holds_the_control_connection(front: &Path, served: &Served) -> (Child, ChildStdin) {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        let mut command = Command::new(front);
        command.env("CUDA_MPS_PIPE_DIRECTORY", served.pipe()).stdin(Stdio::piped());
        let mut prompt = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a front-end");
        let mut typed = prompt.stdin.take().expect("piped");
        let _hung_up_on = typed.write_all(b"get_default_client_priority\n");
        let patience = Instant::now() + PATIENCE / 6;
        while Instant::now() < patience && matches!(prompt.try_wait(), Ok(None)) {
            if daemon(&served.agent, "0").state == MpsState::Hung {
                return (prompt, typed);
            }
        }
        // gpushd held the control connection when the front-end started, so the front-end did not
        // get it. Try again.
        drop(typed);
        prompt.wait().expect("the front-end ends");
    }
    panic!("the front-end never got the control connection:\n{}", served.agent.log());
}

/// A front-end waits for input and holds the control connection. So the daemon answers no other
/// process.
#[test]
fn daemon_with_a_busy_control_connection_is_not_killed() {
    for real in [false, true] {
        let host = Host::up(Served::HOST);
        let programs =
            if real { real_programs(&host, "a busy control connection of NVIDIA's own daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        let front = programs.clone().unwrap_or_else(|| host.dir().join("bin")).join("nvidia-cuda-mps-control");
        let served = Served::on(host, programs.as_deref());
        let (mut prompt, typed) = holds_the_control_connection(&front, &served);
        // The daemon has no client, but gpushd still does not end it.
        let busy =
            reported_as(&served, MpsState::Hung, "another process holds the control connection of the MPS daemon");
        assert_eq!((busy.clients.len(), busy.clients_known, served.controls()), (0, true, vec![served.pid]));
        assert!(!busy.reasons.concat().contains("client"), "the front-end is not a client: {busy:#?}");
        drop(typed);
        prompt.wait().expect("the front-end ends");
        assert!(serves(&served));
    }
    let served = Served::up();
    fault(&served.host, "busy-ui");
    reported_as(&served, MpsState::Hung, "another process holds");
    clear_faults(&served.host);
    assert!(serves(&served));
}

/// The first probe that sets the new values fails. The next probe follows within 2 s.
#[test]
fn changed_settings_are_effective_when_gpushd_answers() {
    for (kind, percentage) in [("empty-reply", 30), ("busy-ui", 40)] {
        let served = Served::of(
            Host::up(Served::HOST),
            "0",
            &Served::CONFIG.replace("health = \"1s\"", "health = \"2s\""),
            None,
        );
        fault(&served.host, &format!("{kind} --times 1"));
        let set = act(&served.agent, "0", "settings", &json!({ "percentage": percentage })).json();
        assert_eq!(set["daemon"]["effective_settings"]["percentage"], percentage, "{kind}: {set:#}");
        assert_eq!(set["reaches"][0], "the change applies to clients that start from now on", "{kind}");
        assert!(served.host.sim("mps", &["fault", "list"]).contains("[happened 1]"), "{kind}");
    }
}

/// A config without periodic probes: gpushd probes a daemon only on events and requests.
const PROBED_ON_REQUEST: &str =
    "[mps]\nhealth = \"3600s\"\n# --constants mps.stop=1s\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// gpushd replaces a daemon that is suspended by SIGSTOP. The commands that gpushd has sent to the
/// suspended daemon must not end the new daemon.
#[test]
fn command_for_a_replaced_daemon_does_not_reach_the_next_one() {
    for real in [false, true] {
        let host = Host::up(Served::HOST);
        let programs = if real { real_programs(&host, "a command for a replaced daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        let served = Served::of(host, "0", PROBED_ON_REQUEST, programs.as_deref());
        let (agent, client) = (&served.agent, served.client());
        let before = pid_of(&daemon(agent, "0"));
        assert!(signal(before, Signal::SIGSTOP));
        assert_eq!(act(agent, "0", "restart", &json!({ "force": true })).status, 200);
        let next = becomes(agent, "0", "ready with another pid", |now| {
            now.state == MpsState::Ready && now.pid != u32::try_from(before).ok()
        });
        assert_eq!(client.says(), "lost");
        let new = served.client();
        for _ in 0..40 {
            let now = daemon(agent, "0");
            assert_eq!((now.state, now.pid, now.failures), (MpsState::Ready, next.pid, 0), "{now:#?}\n{}", agent.log());
        }
        assert!(new.printed().is_empty());
        new.end();
    }
}
