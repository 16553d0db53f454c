//! Daemons whose directory, spec or program was removed or replaced, and clients that are zombies.

use std::fs;

use gpush_api::{LeaseGrant, MpsDaemon, MpsState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{Role, Served, act, base, becomes, daemon, parts, pid_of, reaches, release_all, signal},
};
use nix::{
    sys::{
        signal::Signal,
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::Pid,
};
use serde_json::json;

const MIG: &str = "[[gpu]]\nmodel = \"a100-40\"\n";
const LAYOUT: &str = "[mps]\nhealth = \"1s\"\n# --constants mps.stop=2s\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\n\
                      layout = [\"3g.20gb@0:mps\", \"1g.5gb@4\"]\n";
const DEVICE: &str = "0:3g.20gb@0";

/// Returns whether health reports a problem of an MPS daemon.
fn is_unhealthy(agent: &Agent) -> bool {
    let health = agent.get("/v1/health").json();
    health["status"] == "degraded" && health["errors"].to_string().contains("its MPS daemon is backing off")
}

/// Runs a test on a whole GPU, and then on a MIG device.
fn both(test: impl Fn(Served)) {
    test(Served::up());
    test(Served::of(Host::up(MIG), DEVICE, LAYOUT, None));
}

fn says(daemon: &MpsDaemon, words: &str) -> bool {
    daemon.reasons.iter().any(|reason| reason.contains(words))
}

/// While a client runs, gpushd must not end the daemon, and must not start another one.
#[test]
fn daemon_without_directory_is_ended_when_idle_or_by_force() {
    both(|mut served| {
        let mut client = served.client();
        served.restart(|served| fs::remove_dir_all(served.place()).expect("the directory can be deleted"));
        let target = served.target.clone();
        let reported =
            becomes(&served.agent, &target, "reported", |daemon| says(daemon, "whose directory was deleted"));
        assert!(
            says(&reported, &format!("daemon {}", served.pid)) && says(&reported, "still serves 1 client"),
            "{reported:#?}"
        );
        assert_eq!((reported.state, reported.pid, reported.failures), (MpsState::BackingOff, None, 0));
        assert!(is_unhealthy(&served.agent), "the target grants nothing");
        assert!(client.lives() && client.printed().is_empty());
        assert_eq!(served.controls(), [served.pid]);
        // Even a start request must not start another daemon.
        let refused = act(&served.agent, &target, "start", &json!({}));
        assert_eq!((refused.status >= 400, served.controls()), (true, vec![served.pid]));
        client.end();
        served.pid = pid_of(&served.another());
        assert_eq!(parts(&base(&served.host)).len(), 1);

        // Without clients, gpushd ends such a daemon at its start.
        served.restart(|served| fs::remove_dir_all(served.place()).expect("the directory can be deleted"));
        let ended = served.pid;
        served.pid = pid_of(&served.another());
        served.agent.wait_for_log(&format!("daemon {ended}, whose directory was deleted"));

        // If the directory was renamed, gpushd treats it as deleted. A forced restart ends the daemon and its client.
        served.environment = environment(&served);
        let client = served.client();
        served.restart(|served| fs::rename(served.place(), served.place().with_extension("away")).expect("a rename"));
        becomes(&served.agent, &target, "reported", |daemon| says(daemon, "still serves 1 client"));
        assert_eq!(act(&served.agent, &target, "restart", &json!({ "force": true })).status, 200);
        assert_eq!(client.says(), "lost");
        served.another();
    });
}

/// Returns the present environment of the lease.
fn environment(served: &Served) -> Vec<(String, String)> {
    let id = daemon(&served.agent, &served.target).leases[0].id;
    let granted = served.agent.get(&format!("/v1/leases/{id}/environment")).json();
    serde_json::from_value::<LeaseGrant>(granted).expect("an environment").environment
}

#[test]
fn daemon_with_a_damaged_spec_is_adopted() {
    both(|mut served| {
        let mut client = served.client();
        let before = daemon(&served.agent, &served.target);
        let user = fs::read_to_string(served.place().join("spec.json")).expect("a spec");
        served.restart(|served| fs::write(served.place().join("spec.json"), "{").expect("the spec can be written"));
        let ready = reaches(&served.agent, &served.target, MpsState::Ready);
        assert_eq!((pid_of(&ready), ready.in_force, ready.uid), (served.pid, before.in_force, before.uid));
        assert_eq!((ready.clients.len(), ready.pipe_directory), (1, before.pipe_directory));
        assert!(client.lives());
        served.agent.wait_for_log("cannot read spec.json");
        // gpushd has written a new spec, which also names the user. So the next gpushd can read the
        // user from this spec.
        let again: serde_json::Value =
            serde_json::from_slice(&fs::read(served.place().join("spec.json")).expect("a spec")).expect("JSON");
        let user: serde_json::Value = serde_json::from_str(&user).expect("JSON");
        for name in ["user", "uuid", "tenure", "control", "name", "servers", "logs"] {
            assert_eq!(again[name], user[name], "{name}");
        }
        served.restart(|_| {});
        assert_eq!(pid_of(&reaches(&served.agent, &served.target, MpsState::Ready)), served.pid);
        client.end();
        // gpushd knows the desired state only when the driver has reported the GPU. So retry the
        // restart.
        release_all(&served.agent, &served.target);
        let restarts = || act(&served.agent, &served.target, "restart", &json!({})).status == 200;
        served.agent.await_that("a restart", restarts);
        served.another();
    });
}

#[test]
fn daemon_with_a_replaced_program_or_lock_is_adopted() {
    let host = Host::up(Served::HOST);
    let own = host.dir().join("own");
    fs::create_dir(&own).expect("a directory");
    let control = own.join("nvidia-cuda-mps-control");
    for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
        fs::copy(program("gpush-sim"), own.join(name)).expect("the program can be copied");
    }
    let mut served = Served::on(host, Some(&own));
    let mut client = served.client();
    served.restart(|_| {
        fs::copy(&control, own.join("new")).expect("the program can be copied");
        fs::rename(own.join("new"), &control).expect("the program can be replaced");
    });
    let runs = fs::read_link(format!("/proc/{}/exe", served.pid)).expect("a program");
    assert!(runs.to_string_lossy().ends_with("nvidia-cuda-mps-control (deleted)"), "{}", runs.display());
    assert_eq!(pid_of(&reaches(&served.agent, "0", MpsState::Ready)), served.pid);
    served.restart(|served| fs::remove_file(served.place().join("lock")).expect("the lock can be deleted"));
    assert_eq!(pid_of(&reaches(&served.agent, "0", MpsState::Ready)), served.pid);
    assert!(client.lives());
    // All processes of the daemon end, although none of them holds the lock of the present file.
    assert_eq!(act(&served.agent, "0", "restart", &json!({ "force": true })).status, 200);
    served.another();
    assert_eq!(parts(&base(&served.host)).len(), 1);
}

/// The client has ended, but its parent has not waited for it. So it is a zombie.
#[test]
fn zombie_client_does_not_delay_the_next_daemon() {
    let served = Served::up();
    let client = served.client();
    let server = parts(&base(&served.host)).into_iter().find(|part| part.role == Role::Server).expect("a server").pid;
    // The server is stopped, so it does not notice that its client has ended.
    assert!(signal(server, Signal::SIGSTOP) && signal(client.pid(), Signal::SIGKILL));
    let ended = Id::Pid(Pid::from_raw(client.pid()));
    waitid(ended, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).expect("the client is a zombie");
    assert!(signal(served.pid, Signal::SIGKILL));
    served.another();
    assert_eq!(parts(&base(&served.host)).len(), 1);
    drop(client);
}
