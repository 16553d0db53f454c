//! Daemons that do not start, do not answer, or lose their servers. A fault must not lead to a second daemon on a target,
//! and must not end clients that could continue.

use gpush_api::{Architecture, Code, Event, EventPayload, Gpu, GpuIndex, Health, MpsDaemon, MpsState};
use serde_json::{Value, json};

use super::{is_open, kill, shared};
use crate::lifecycle::in_process::{
    InProcess,
    daemons::{DaemonStart, Silence},
    host::ScriptedHost,
    listener::EventListener,
    programs::UserProgram,
};

impl InProcess {
    /// Waits until the daemon is in this state, with a reason that contains these words. Checks that access is closed and
    /// no lease is granted, unless the state is `ready`.
    async fn reported_as(&self, state: MpsState, words: &str) -> MpsDaemon {
        let is = |daemon: &MpsDaemon| daemon.state == state && daemon.reasons.iter().any(|one| one.contains(words));
        let daemon = self.daemon_becomes("0", &format!("{} for {words:?}", state.name()), is).await;
        assert!(self.host.daemons.running() <= 1);
        let health: Health = self.get("/v1/health").await;
        let ill = format!("{:?}", health.errors);
        assert!(ill.contains("cannot grant a lease on GPU 0"), "{state:?}: {ill}");
        let refused = self.share("0", json!({})).await.expect_err("no lease is granted");
        assert_eq!(refused.code, Code::Conflict, "{refused:?}");
        assert!(!is_open(&daemon), "{daemon:#?}");
        daemon
    }
}

/// If a daemon does not answer and has clients, gpushd must not end it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_daemon_is_replaced_after_its_last_client_ended() {
    for (silence, words) in [(Silence::Hello, "sends no greeting"), (Silence::EmptyReply, "answered")] {
        let host = InProcess::with_daemon("").await;
        let granted = host.share("0", json!({})).await.expect("a lease");
        let client = host.client("0", &granted).await;
        let first = host.daemon("0").await;
        host.host.daemons.silence(silence);
        let hung = host.reported_as(MpsState::Hung, words).await;
        assert_eq!((hung.clients.len(), hung.pid), (1, first.pid), "{silence:?}: {hung:#?}");
        assert!(hung.reasons.iter().any(|reason| reason.contains("gpushd does not restart the daemon, because")));
        // A request does not wait for the hung daemon.
        assert_eq!(host.act("0", "stop", json!({})).await.unwrap_err().code, Code::Blocked);
        // The daemon answers again, and continues to serve.
        host.host.daemons.clear_faults();
        assert_eq!(host.daemon_reaches("0", MpsState::Ready).await.pid, first.pid, "{silence:?}");
        // Let the daemon hang again, and then end its last client.
        host.host.daemons.silence(silence);
        host.reported_as(MpsState::Hung, words).await;
        host.end_client(0, client).await;
        host.daemon_becomes("0", "replaced", |now| now.pid.is_some_and(|pid| Some(pid) != first.pid)).await;
        host.host.daemons.clear_faults();
        let next = host.daemon_reaches("0", MpsState::Ready).await;
        assert_eq!((next.leases.len(), host.host.daemons.running()), (1, 1));
        assert!(is_open(&next), "the holder is admitted again");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_daemon_with_clients_is_restarted_when_configured() {
    let config =
        shared("\"0\"", "").replace("health = \"3600s\"", "health = \"3600s\"\nrestart_hung_with_clients = true");
    let host = InProcess::start("dgx-h100", 1, &config).await;
    host.apply_rules(&["0"]).await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    let _client = host.client("0", &granted).await;
    let first = host.daemon("0").await;
    host.host.daemons.silence(Silence::Hello);
    host.daemon_becomes("0", "replaced", |now| now.pid.is_some_and(|pid| Some(pid) != first.pid)).await;
    host.host.daemons.clear_faults();
    host.daemon_reaches("0", MpsState::Ready).await;
    assert_eq!(host.host.daemons.running(), 1);
}

/// The daemon hangs, and the driver cannot list processes. So the daemon may have clients.
#[test]
fn daemon_with_unknown_clients_is_not_ended() {
    let world = ScriptedHost::new("dgx-h100", 1);
    let config = shared("\"0\"", "");
    let client = UserProgram::sleep(super::own_uid());
    let mut pid = None;
    let unknown = async |host: &InProcess| {
        let is = |daemon: &MpsDaemon| daemon.state == MpsState::Hung && !daemon.clients_known;
        let hung = host.daemon_becomes("0", "hung", is).await;
        assert!(hung.reasons.iter().any(|reason| reason.contains("not known")), "{hung:#?}");
        let refused = host.act("0", "stop", json!({})).await.unwrap_err();
        assert!(refused.code == Code::Blocked && refused.message.contains("cannot tell"), "{refused:?}");
        let refused = host.act("0", "restart", json!({})).await.unwrap_err();
        assert_eq!(refused.code, Code::Blocked, "{refused:?}");
        hung.pid
    };
    world.run_until(&config, async |host| {
        host.apply_rules(&["0"]).await;
        // The last probe has found no client.
        pid = host.daemon("0").await.pid;
        host.connect("0", &client).await;
        host.gpus.alter(0, |reading| (reading.processes_known, reading.processes) = (false, Vec::new()));
        host.host.daemons.silence(Silence::Hello);
        assert_eq!(unknown(host).await, pid);
    });
    // After a restart, gpushd does not know the clients.
    world.run_until(&config, async |host| {
        host.daemon_becomes("0", "known", |daemon| daemon.gpu.is_some()).await;
        assert_eq!(unknown(host).await, pid);
        // A drain waits for the clients that may be there.
        host.act("0", "drain", json!({})).await.expect("it drains");
        host.host.daemons.clear_faults();
        let well = host.daemon_becomes("0", "with its client", |now| now.clients_known && now.clients.len() == 1).await;
        assert_eq!((well.pid, well.state), (pid, MpsState::Draining));
        host.host.daemons.disconnect(&client);
        host.daemon_reaches("0", MpsState::Stopped).await;
    });
}

/// A daemon that starts or stops slowly is killed at the time limit, and gpushd records this.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_daemon_is_killed_and_recorded() {
    let config = shared("\"0\"", "").replace("mps.stop=2s", "mps.stop=1s,mps.start=1s");
    let host = InProcess::start("dgx-h100", 1, &config).await;
    host.apply_rules(&["0"]).await;
    host.host.daemons.ignore_quit();
    host.act("0", "stop", json!({})).await.expect("it is stopped");
    host.daemon_reaches("0", MpsState::Stopping).await;
    // The daemon does not end within the time limit for a stop, so gpushd kills it.
    host.daemon_reaches("0", MpsState::Stopped).await;
    assert_eq!(host.host.daemons.running(), 0);
    host.host.daemons.clear_faults();
    host.host.daemons.start_next(DaemonStart::Slow);
    host.act("0", "start", json!({})).await.expect("it is started");
    let slow = host.daemon_reaches("0", MpsState::Starting).await;
    host.daemon_becomes("0", "killed", |now| now.pid != slow.pid).await;
    host.host.daemons.clear_faults();
    let second = host.daemon_reaches("0", MpsState::Ready).await;
    assert!(second.pid != slow.pid && host.host.daemons.running() == 1, "{second:#?}");
    let trail: Vec<gpush_api::AuditRecord> = host.get("/v1/audit").await;
    assert_eq!(trail.iter().filter(|record| record.action == "mps.kill").count(), 2, "{trail:#?}");
}

/// gpushd reports the exit status, and the command that starts the daemon again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_daemon_is_given_up_and_can_be_started_manually() {
    let config = shared("\"0\"", "").replace("mps.stop=2s", "mps.stop=2s,mps.failures=2");
    let host = InProcess::start("dgx-h100", 1, &config).await;
    host.apply_rules(&["0"]).await;
    host.host.daemons.start_next(DaemonStart::Ends);
    kill(host.daemon("0").await.pid.expect("a daemon"));
    let given_up = host.daemon_reaches("0", MpsState::GivenUp).await;
    assert!(given_up.reasons.iter().any(|reason| reason.contains("ended with status 3")), "{given_up:#?}");
    assert!(given_up.reasons.iter().any(|reason| reason.contains("gpushctl mps start 0")), "{given_up:#?}");
    host.host.daemons.clear_faults();
    host.act("0", "start", json!({})).await.expect("it is started");
    host.daemon_reaches("0", MpsState::Ready).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_server_is_reported_with_its_number_of_clients() {
    let host = InProcess::with_daemon("").await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    let client = host.client("0", &granted).await;
    let before = host.daemon("0").await;
    let server = before.servers[0].pid.expect("a server");
    let mut listener = host.listen("?kinds=mps", None).await;
    host.host.daemons.kill_servers(before.pid.expect("a daemon"));
    host.gpus.end_process(0, client.pid());
    let reported = host.daemon_becomes("0", "reported", |daemon| !daemon.findings.is_empty()).await;
    let finding = &reported.findings[0];
    assert!(
        finding.starts_with("an MPS server ended ") && finding.ends_with("1 client ended with it"),
        "{reported:#?}"
    );
    assert!(!finding.contains(&server.to_string()), "every user may read it: {finding}");
    let has_reason = |event: &Event| matches!(&event.what, EventPayload::Mps(change) if change.reasons.concat().contains("an MPS server ended"));
    listener.until(has_reason).await;
    // The daemon still serves.
    host.connect("0", &client).await;
    let now = host.daemon("0").await;
    assert_eq!((now.pid, now.clients.len(), now.state), (before.pid, 1, MpsState::Ready));
}

/// Returns the state and the reasons in the next event of the daemon of GPU 0.
async fn next(listener: &mut EventListener) -> (MpsState, String) {
    let EventPayload::Mps(change) = listener.event().await.expect("an event").what else {
        panic!("an event of another kind")
    };
    assert_eq!((change.gpu, change.uuid.as_str()), (Some(GpuIndex(0)), change.gpu_uuid.as_str()));
    (change.state, change.reasons.join("; "))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemon_state_changes_are_events() {
    let host = InProcess::with_daemon("").await;
    host.host.daemons.start_next(DaemonStart::WithServer);
    let mut listener = host.listen("?kinds=mps", None).await;
    host.act("0", "stop", json!({})).await.expect("it is stopped");
    assert_eq!([next(&mut listener).await.0, next(&mut listener).await.0], [MpsState::Stopping, MpsState::Stopped]);
    host.act("0", "start", json!({})).await.expect("it is started");
    assert_eq!([next(&mut listener).await.0, next(&mut listener).await.0], [MpsState::Starting, MpsState::Ready]);
    let granted = host.share("0", json!({})).await.expect("a lease");
    let client = host.client("0", &granted).await;
    let daemon = host.daemon("0").await;
    kill(daemon.pid.expect("a daemon"));
    // The server still has a client, so gpushd cannot restart the daemon yet. The event says how the daemon ended.
    let (state, why) = next(&mut listener).await;
    assert_eq!(state, MpsState::BackingOff, "{why}");
    assert!(why.contains("was ended by signal 9"), "{why}");
    host.end_client(0, client).await;
    while next(&mut listener).await.0 != MpsState::Ready {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_with_fatal_fault_grants_no_lease() {
    let host = InProcess::with_daemon("").await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    let client = host.client("0", &granted).await;
    let pid = host.daemon("0").await.pid.expect("a daemon");
    host.host.daemons.set_server_state(pid, "FAULT");
    let faulty = host.reported_as(MpsState::Fault, "caused a fatal fault").await;
    assert_eq!((faulty.clients.len(), faulty.pid), (1, Some(pid)));
    let refused = host.act("0", "stop", json!({})).await.unwrap_err();
    assert!(refused.causes.iter().any(|cause| cause.contains(&client.pid().to_string())), "{refused:?}");
    host.end_client(0, client).await;
    host.host.daemons.set_server_state(pid, "ACTIVE");
    assert_eq!(host.daemon_reaches("0", MpsState::Ready).await.pid, Some(pid));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_clients_are_reported() {
    let host = InProcess::with_daemon("mps = { max_clients = 1 }\n").await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    let first = host.client("0", &granted).await;
    assert_eq!(host.daemon("0").await.findings, [] as [String; 0]);
    // Two programs use the environment of one lease. Both can connect, because the daemon does not limit the number of
    // clients. So gpushd only reports that there are too many.
    let second = host.client("0", &granted).await;
    let reported = host.daemon("0").await;
    assert_eq!(reported.findings, ["2 clients are connected, but only 1 is allowed"]);
    let pids: Vec<_> = reported.clients.iter().map(|client| client.pid.expect("a pid")).collect();
    assert!([first.pid(), second.pid()].iter().all(|pid| pids.contains(pid)), "{reported:#?}");
    assert!(reported.clients.iter().all(|client| client.uid.is_some() && client.command.is_some()), "{reported:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_changed_by_another_program_are_restored() {
    let host = InProcess::with_daemon("").await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    let _client = host.client("0", &granted).await;
    let pid = host.daemon("0").await.pid.expect("a daemon");
    let reported = async |words: &str| {
        let is = |daemon: &MpsDaemon| daemon.findings.iter().any(|finding| finding.contains(words));
        let daemon = host.daemon_becomes("0", words, is).await;
        assert_eq!((daemon.state, daemon.in_force), (MpsState::Ready, Some(daemon.wanted.settings)), "{words}");
    };
    host.host.daemons.change_settings(pid, "5", None);
    reported("percentage 5 instead of 100").await;
    host.host.daemons.change_server_percentage(pid, "7");
    reported("a server has percentage 7 instead of 100").await;
    host.host.daemons.change_settings(pid, "100", Some("2G"));
    reported("memory limit 2048M instead of none").await;
}

#[test]
fn gpu_without_mps_is_reported_and_gets_no_daemon() {
    let mut gpus = gpush_core::preset::gpus("mixed").expect("a preset");
    let is_l4 = |gpu: &Gpu| gpu.name.contains("L4");
    let l4 = gpus.iter().position(is_l4).expect("an L4");
    let mut old = gpus.swap_remove(l4);
    (old.index, old.minor, old.architecture) = (GpuIndex(0), 0, Architecture::Volta);
    ScriptedHost::with(&[old.clone()]).run_until(&shared("\"0\"", ""), async |host| {
        host.apply_rules(&["0"]).await;
        assert_eq!(host.daemon("0").await.state, MpsState::Ready, "a Volta GPU supports MPS");
    });
    // MIG mode is on until an operation applies the rule.
    ScriptedHost::new("dgx-h100", 1).run_until(&shared("\"0\"", ""), async |host| {
        host.gpus().await;
        let missing = host.get_as::<Value>(crate::lifecycle::in_process::user(0), "/v1/mps/0").await.unwrap_err();
        let is_named = missing.causes.iter().any(|cause| cause.contains("MIG mode is on"));
        assert!(missing.code == Code::NotFound && is_named, "{missing:?}");
        assert_eq!((host.daemons().await.len(), host.host.daemons.running()), (0, 0));
    });
    old.architecture = Architecture::Legacy;
    let world = ScriptedHost::with(&[old]);
    let why = "is older than Volta, so MPS cannot limit its clients";
    let reported = async |host: &InProcess| {
        host.until("health", async || {
            let health: Health = host.get("/v1/health").await;
            format!("{:?}", health.errors).contains("can't be shared").then_some(())
        })
        .await;
        let missing = host.get_as::<Value>(crate::lifecycle::in_process::user(0), "/v1/mps/0").await.unwrap_err();
        assert!(
            missing.code == Code::NotFound && missing.causes.iter().any(|cause| cause.contains(why)),
            "{missing:?}"
        );
        assert!(host.gpus().await[0].drift[0].contains(why));
        assert_eq!((host.daemons().await.len(), host.host.daemons.running()), (0, 0));
    };
    world.run_until(&shared("\"0\"", ""), async |host| {
        host.gpus().await;
        let refused = host.begin_rules(&["0"], None).await.expect_err("the GPU does not support MPS");
        assert_eq!(refused.code, Code::Unsupported, "{refused:?}");
        assert_eq!(host.get::<Value>("/v1/operations").await, json!([]), "no operation is tried");
        reported(host).await;
    });
    world.run_until(&shared("\"0\"", ""), async |host| {
        host.gpus().await;
        reported(host).await;
    });
}
