//! A drain has a deadline for the clients of the daemon. The deadline holds even if the daemon ends, and the API reports
//! the deadline.

use gpush_api::{Code, MpsDaemon, MpsState};
use serde_json::{Value, json};

use super::{kill, shared};
use crate::lifecycle::in_process::{InProcess, daemons::DaemonStart, host::ScriptedHost, programs::UserProgram};

/// Returns a host whose daemon has a client. The client has a lease.
async fn served(host: &InProcess) -> (UserProgram, gpush_api::LeaseGrant) {
    host.host.daemons.start_next(DaemonStart::WithServer);
    host.apply_rules(&["0"]).await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    let client = host.client("0", &granted).await;
    let seen = host.daemon("0").await;
    assert_eq!((seen.clients.len(), seen.servers.len()), (1, 1), "{seen:#?}");
    (client, granted)
}

/// Kills a daemon that has a client, and drains the server that is left. Returns the pid of the server.
async fn orphaned(host: &InProcess, within: Value) -> u32 {
    let before = host.daemon("0").await;
    kill(before.pid.expect("a daemon"));
    host.daemon_becomes("0", "waiting for its leftovers", |daemon| {
        daemon.state == MpsState::BackingOff && daemon.reasons.iter().any(|why| why.contains("still serves 1 client"))
    })
    .await;
    host.act("0", "drain", within).await.expect("it drains");
    let left = host.daemon("0").await;
    assert_eq!((left.state, left.pid, left.clients.len()), (MpsState::Draining, None, 1), "{left:#?}");
    assert!(left.reasons.iter().any(|why| why.contains("which the previous daemon left")), "{left:#?}");
    assert!(!left.reasons.iter().any(|why| why.contains("starts another daemon")), "{left:#?}");
    assert_eq!(host.host.daemons.running(), 0);
    before.servers[0].pid.expect("a server")
}

fn is_alive(pid: u32) -> bool {
    gpush_host::proc::is_alive(pid)
}

async fn host() -> InProcess {
    InProcess::start("dgx-h100", 1, &shared("\"0\"", "")).await
}

/// A program with a lease may not have called cuInit yet. If a drain ended the daemon, this program would run without MPS
/// and report no error.
#[test]
fn drain_waits_for_a_lease_whose_program_has_not_connected_yet() {
    let world = ScriptedHost::new("dgx-h100", 1);
    let config = shared("\"0\"", "");
    world.run_until(&config, async |host| {
        host.apply_rules(&["0"]).await;
        host.share("0", json!({ "percentage": 20 })).await.expect("a lease");
        host.act("0", "drain", json!({})).await.expect("it drains");
        let drained = host.daemon("0").await;
        assert_eq!((drained.state, drained.leases.len()), (MpsState::Draining, 1), "{drained:#?}");
        let reason = "the daemon ends after the leases on its GPU or MIG device";
        assert!(drained.reasons.iter().any(|why| why.contains(reason)), "{drained:#?}");
        let refused = host.share("0", json!({})).await.unwrap_err();
        assert_eq!(refused.code, Code::Conflict, "no new lease is granted");
    });
    // After a restart of gpushd, the drain continues.
    world.run_until(&config, async |host| {
        let drained = host
            .daemon_becomes("0", "draining again", |daemon| daemon.state == MpsState::Draining && daemon.gpu.is_some())
            .await;
        assert!(super::is_open(&drained), "the program of the lease may connect now");
        let lease = &drained.leases[0];
        let granted: gpush_api::LeaseGrant = host.get(&format!("/v1/leases/{}/environment", lease.id)).await;
        let client = host.client("0", &granted).await;
        host.daemon_becomes("0", "with a client", |daemon| daemon.clients.len() == 1).await;
        host.release(&granted).await;
        assert_eq!(host.daemon("0").await.state, MpsState::Draining, "the client may finish");
        host.end_client(0, client).await;
        host.wait_until_ended(&granted).await;
        host.daemon_reaches("0", MpsState::Stopped).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_ends_with_the_last_lease_or_at_its_deadline() {
    let host = InProcess::with_daemon("").await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    host.act("0", "drain", json!({})).await.expect("it drains");
    assert_eq!(host.daemon("0").await.state, MpsState::Draining);
    host.release(&granted).await;
    host.wait_until_ended(&granted).await;
    host.daemon_reaches("0", MpsState::Stopped).await;
    host.act("0", "start", json!({})).await.expect("it is started");
    host.daemon_reaches("0", MpsState::Ready).await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    host.act("0", "drain", json!({ "end_after_s": 1 })).await.expect("it drains");
    host.daemon_reaches("0", MpsState::Stopped).await;
    host.release(&granted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_without_a_deadline_removes_the_earlier_deadline() {
    let host = InProcess::start("dgx-h100", 2, &shared("\"0-1\"", "")).await;
    host.apply_rules(&["0-1"]).await;
    let mut clients = Vec::new();
    for target in ["0", "1"] {
        let granted = host.share(target, json!({})).await.expect("a lease");
        clients.push((host.client(target, &granted).await, granted));
    }
    host.act("0", "drain", json!({ "end_after_s": 1 })).await.expect("it drains");
    host.act("0", "drain", json!({})).await.expect("it drains");
    host.act("1", "drain", json!({ "end_after_s": 2 })).await.expect("it drains");
    host.daemon_reaches("1", MpsState::Stopped).await;
    let patient = host.daemon("0").await;
    assert_eq!((patient.state, patient.clients.len(), patient.clients_end_at), (MpsState::Draining, 1, None));
    let (client, granted) = clients.remove(0);
    host.release(&granted).await;
    host.end_client(0, client).await;
    host.daemon_reaches("0", MpsState::Stopped).await;
}

/// A daemon is killed, and its server still has a client. A drain lets this client finish.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leftover_server_is_drained_without_a_new_daemon() {
    let host = host().await;
    let (mut client, _lease) = served(&host).await;
    let server = orphaned(&host, json!({})).await;
    assert_eq!(host.daemon("0").await.clients_end_at, None);
    assert!(client.lives() && is_alive(server));
    host.end_client(0, client).await;
    // The server has no client any more, so it ends.
    host.daemon_reaches("0", MpsState::Stopped).await;
    assert!(!is_alive(server));
    host.act("0", "start", json!({})).await.expect("it is started");
    host.daemon_reaches("0", MpsState::Ready).await;
}

#[test]
fn drain_deadline_of_leftovers_survives_a_gpushd_restart() {
    let world = ScriptedHost::new("dgx-h100", 1);
    let config = shared("\"0\"", "");
    let (mut kept, mut until, mut server) = (None, None, 0);
    world.run_until(&config, async |host| {
        kept = Some(served(host).await);
        server = orphaned(host, json!({ "end_after_s": 3600 })).await;
        let left = host.daemon("0").await;
        until = left.clients_end_at;
        let reported = left.reasons.concat();
        assert!(reported.contains("may run until") && reported.contains("is then ended"), "{reported}");
    });
    world.run_until(&config, async |host| {
        let is_drained = |daemon: &MpsDaemon| daemon.clients_end_at.is_some();
        let left = host.daemon_becomes("0", "drained until then", is_drained).await;
        let (before, again) = (until.expect("a time"), left.clients_end_at.expect("a time"));
        assert!((again - before).get_seconds().abs() <= 2, "{before} and {again}");
        assert_eq!(left.state, MpsState::Draining);
        assert!(is_alive(server));
        // If several drains are requested, the deadline of the last drain counts.
        host.act("0", "drain", json!({ "end_after_s": 1 })).await.expect("it drains");
        host.daemon_reaches("0", MpsState::Stopped).await;
        assert!(!is_alive(server), "the server ends with its client");
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_stop_ends_leftovers() {
    let host = host().await;
    let (_client, _lease) = served(&host).await;
    let server = orphaned(&host, json!({})).await;
    assert_eq!(host.act("0", "stop", json!({})).await.unwrap_err().code, Code::Blocked);
    host.act("0", "stop", json!({ "force": true })).await.expect("it is stopped");
    let stopped = host.daemon("0").await;
    assert_eq!((stopped.state, stopped.reasons, stopped.clients), (MpsState::Stopped, Vec::new(), Vec::new()));
    assert!(!is_alive(server));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_a_killed_draining_daemon_keep_their_deadline() {
    let host = host().await;
    let (_client, _lease) = served(&host).await;
    let pid = host.daemon("0").await.pid.expect("a daemon");
    host.act("0", "drain", json!({ "end_after_s": 2 })).await.expect("it drains");
    let drained = host.daemon("0").await;
    assert_eq!((drained.state, drained.pid), (MpsState::Draining, Some(pid)));
    let (until, server) = (drained.clients_end_at.expect("a time"), drained.servers[0].pid.expect("a server"));
    kill(pid);
    let left = host.daemon_becomes("0", "without its daemon", |daemon| daemon.pid.is_none()).await;
    assert_eq!(left.state, MpsState::Draining, "{left:#?}");
    assert!((left.clients_end_at.expect("a time") - until).get_seconds().abs() <= 1, "{left:#?}");
    host.until("the server has ended", async || (!is_alive(server)).then_some(())).await;
    assert!(jiff::Timestamp::now() >= until, "the client ends at the deadline, not earlier");
    host.daemon_reaches("0", MpsState::Stopped).await;
}

/// A caller that follows the drain sends many requests. The daemon must not log a command for each of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_sends_few_commands_and_ends_with_the_last_client() {
    let host = InProcess::with_daemon("").await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    let client = host.client("0", &granted).await;
    host.act("0", "drain", json!({})).await.expect("it drains");
    let probes = || host.host.daemons.count("get_default_client_priority");
    let before = probes();
    for _ in 0..20 {
        assert_eq!(host.daemon("0").await.state, MpsState::Draining);
    }
    assert!(probes() - before <= 2, "{} probes for 20 requests", probes() - before);
    host.release(&granted).await;
    host.end_client(0, client).await;
    host.daemon_reaches("0", MpsState::Stopped).await;
}
