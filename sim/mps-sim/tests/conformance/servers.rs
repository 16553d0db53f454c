//! Queries and settings of servers, and the end of servers.

use std::time::Duration;

use gpush_api::{MemoryLimit, MpsServerState, Percentage};
use gpush_mps::protocol::control::ControlError;
use mps_sim::fault::Kind;

use crate::daemon::{Daemon, LONG, Setup, Trait, is_alive, until};

fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Returns the state of a server, or `None` if the daemon does not report states.
async fn state(daemon: &Daemon, server: i32) -> Option<MpsServerState> {
    match daemon.control.server_state(server, LONG).await {
        Ok(state) => Some(state),
        Err(ControlError::Unknown(_)) if !daemon.has(Trait::KnowsServerStatus).await => None,
        Err(error) => panic!("{error}"),
    }
}

pub(crate) async fn each_command_reports_a_missing_server(setup: Setup) {
    let daemon = setup.start().await;
    let control = &daemon.control;
    let limit = MemoryLimit::of_mib(1024).unwrap();
    let each = [
        ("clients", control.clients(1, LONG).await.err()),
        ("percentage", control.percentage(1, LONG).await.err()),
        ("set percentage", control.set_percentage(1, Percentage::ALL, LONG).await.err()),
        ("limit", control.memory_limit(1, LONG).await.err()),
        ("set limit", control.set_memory_limit(1, limit, LONG).await.err()),
        ("shutdown", control.shutdown_server(1, false, LONG).await.err()),
        ("forced", control.shutdown_server(1, true, LONG).await.err()),
        ("terminate", control.terminate_client(1, 2, LONG).await.err()),
    ];
    for (what, error) in each {
        assert!(matches!(error, Some(ControlError::NoServer)), "{what}: {error:?}");
    }
    assert_eq!(control.processes(LONG).await.unwrap(), []);
    let wanted = "A user id (UID) is required to start a new server";
    for line in ["start_server", "start_server -uid", "start_server -uid abc", "start_server 0"] {
        assert_eq!(daemon.says(line).await, [wanted], "{line}");
    }
}

pub(crate) async fn server_is_started_listed_set_and_shut_down(setup: Setup) {
    let daemon = setup.start().await;
    let control = &daemon.control;
    control.set_default_percentage("40".parse().unwrap(), LONG).await.unwrap();
    control.set_default_memory_limit("2G".parse().ok(), LONG).await.unwrap();
    control.start_server(own_uid(), LONG).await.unwrap();
    let server = daemon.ready_server().await;
    assert!(matches!(state(&daemon, server).await, Some(MpsServerState::Active) | None));
    // A second request to start a server for the same user has no effect.
    control.start_server(own_uid(), LONG).await.unwrap();
    assert_eq!(control.servers(LONG).await.unwrap(), [server]);
    // The server got the default settings when it started. The daemon does not pass later default
    // settings to it.
    control.set_default_percentage("70".parse().unwrap(), LONG).await.unwrap();
    assert_eq!(control.percentage(server, LONG).await.unwrap().tenths(), 400);
    assert_eq!(control.memory_limit(server, LONG).await.unwrap(), "2G".parse().ok());
    control.set_percentage(server, "12.5".parse().unwrap(), LONG).await.unwrap();
    assert_eq!(daemon.says(&format!("set_active_thread_percentage {server} 0")).await, ["12.5"]);
    for limit in ["1536M", "512M", "8G"] {
        control.set_memory_limit(server, limit.parse().unwrap(), LONG).await.unwrap();
    }
    assert_eq!(control.clients(server, LONG).await.unwrap(), [] as [i32; 0]);
    assert_eq!(control.processes(LONG).await.unwrap(), []);
    control.shutdown_server(server, false, LONG).await.unwrap();
    daemon.no_server().await;
    assert!(!is_alive(server));
    daemon.logs(&format!("Server {server} exited with status 0")).await;
}

pub(crate) async fn forced_shutdown_ends_the_server_of_a_client(setup: Setup) {
    let daemon = setup.start().await;
    let mut client = daemon.client(&[]);
    assert!(client.next().starts_with("active "));
    let server = daemon.ready_server().await;
    daemon.control.shutdown_server(server, false, LONG).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(daemon.control.servers(LONG).await.unwrap(), [server], "it waits for its client");
    // The server was asked to end, so the daemon does not query it, and reports no clients.
    assert_eq!(daemon.control.clients(server, LONG).await.unwrap(), [] as [i32; 0]);
    let busy = daemon.control.percentage(server, LONG).await.unwrap_err();
    assert!(matches!(busy, ControlError::ServerBusy), "{busy:?}");
    daemon.control.shutdown_server(server, true, LONG).await.unwrap();
    daemon.no_server().await;
    assert_eq!(client.next(), "lost");
}

pub(crate) async fn server_that_dies_at_start_is_only_logged(setup: Setup) {
    setup.fault(Kind::ServerDies);
    let daemon = setup.start().await;
    daemon.control.start_server(own_uid(), LONG).await.unwrap();
    daemon.logs("exited with status 1").await;
    daemon.no_server().await;
    let mut client = daemon.client(&[]);
    assert_eq!(client.next(), "error 805");
    daemon.no_server().await;
    daemon.setup.faults().clear(None).unwrap();
    let mut client = daemon.client(&[]);
    assert!(client.next().starts_with("active "));
}

pub(crate) async fn starting_server_is_busy(setup: Setup) {
    let fault = setup.fault(Kind::NeverActive);
    let daemon = setup.start().await;
    daemon.control.start_server(own_uid(), LONG).await.unwrap();
    let server = daemon.server().await;
    assert!(matches!(state(&daemon, server).await, Some(MpsServerState::Initializing) | None));
    let busy = daemon.control.percentage(server, LONG).await.unwrap_err();
    assert!(matches!(busy, ControlError::ServerBusy), "{busy:?}");
    assert_eq!(daemon.control.clients(server, LONG).await.unwrap(), [] as [i32; 0]);
    assert_eq!(daemon.control.processes(LONG).await.unwrap(), []);
    let own = i32::try_from(std::process::id()).unwrap();
    let refused = daemon.control.terminate_client(server, own, LONG).await.unwrap_err();
    assert!(matches!(&refused, ControlError::Refused { message, .. } if message.contains("not found!")), "{refused:?}");
    let mut client = daemon.client(&[]);
    daemon.logs("push client to pending list").await;
    daemon.setup.faults().clear(Some(fault)).unwrap();
    assert!(client.next().starts_with(&format!("active server={server} ")));
}

pub(crate) async fn fatal_exception_ends_the_server_after_its_clients(setup: Setup) {
    let daemon = setup.start().await;
    let mut client = daemon.client(&[]);
    assert!(client.next().starts_with("active "));
    let server = daemon.ready_server().await;
    daemon.setup.faults().add(Kind::Fault, None, Some(1), None).unwrap();
    assert_eq!(client.next(), "fault");
    daemon.logs("Server encountered a fatal exception. Shutting down").await;
    assert!(matches!(state(&daemon, server).await, Some(MpsServerState::Fault) | None));
    let mut next = daemon.client(&[]);
    daemon.logs("push client to pending list").await;
    assert_eq!(daemon.control.servers(LONG).await.unwrap(), [server]);
    client.end();
    let other = until("another server", async || {
        daemon.control.servers(LONG).await.unwrap().first().copied().filter(|pid| *pid != server)
    });
    let other = other.await;
    assert!(next.next().starts_with(&format!("active server={other} ")));
}
