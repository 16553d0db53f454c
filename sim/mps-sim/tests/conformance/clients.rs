//! Clients of a control daemon: which server serves a client, and for how long.

use std::time::{Duration, Instant};

use gpush_mps::protocol::control::ControlError;
use nix::sys::signal::Signal;

use crate::daemon::{LONG, Setup, another_uid, is_alive, signal, until};

pub(crate) async fn client_starts_its_server_and_is_listed(setup: Setup) {
    let daemon = setup.start().await;
    let (mut one, mut two) = (daemon.client(&[]), daemon.client(&[]));
    let (message, other_printed) = (one.next(), two.next());
    let server = daemon.ready_server().await;
    for message in [&message, &other_printed] {
        let wanted = format!("active server={server} percentage=100.0 device=GPU-01020304");
        assert!(message.starts_with(&wanted), "{message}");
    }
    let mut listed = daemon.control.clients(server, LONG).await.unwrap();
    listed.sort_unstable();
    let mut wanted = [one.pid(), two.pid()];
    wanted.sort_unstable();
    assert_eq!(listed, wanted);
    let table = daemon.control.processes(LONG).await.unwrap();
    let row = table.iter().find(|row| row.pid == one.pid()).unwrap();
    assert_eq!((table.len(), row.server, row.device.as_str()), (2, server, "GPU-01020304-0506-0708"));
    assert!(row.command.ends_with("mps-sim"), "{row:?}");
    one.end();
    until("it is gone", async || (daemon.control.clients(server, LONG).await.unwrap() == [two.pid()]).then_some(()))
        .await;
    two.end();
    until("none is left", async || daemon.control.clients(server, LONG).await.unwrap().is_empty().then_some(())).await;
    assert_eq!(daemon.control.servers(LONG).await.unwrap(), [server], "a server without clients stays");
}

pub(crate) async fn client_percentage_can_only_lower_the_default(setup: Setup) {
    let daemon = setup.start().await;
    daemon.control.set_default_percentage("50".parse().unwrap(), LONG).await.unwrap();
    for (own, gets) in [("25", "25.0"), ("80", "50.0"), ("abc", "50.0")] {
        let mut client = daemon.client(&[("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", own)]);
        let message = client.next();
        assert!(message.contains(&format!(" percentage={gets} ")), "{own}: {message}");
    }
}

pub(crate) async fn only_clients_can_be_terminated(setup: Setup) {
    let daemon = setup.start().await;
    let mut client = daemon.client(&[]);
    assert!(client.next().starts_with("active "));
    let server = daemon.ready_server().await;
    let control = &daemon.control;
    control.terminate_client(server, client.pid(), LONG).await.unwrap();
    assert_eq!(client.next(), "terminated");
    let own = i32::try_from(std::process::id()).unwrap();
    for (what, pid, words) in [("no process", 4_194_303, "Invalid process 4194303!"), ("no client", own, "1")] {
        match control.terminate_client(server, pid, LONG).await {
            Err(ControlError::Refused { message, .. }) => assert!(message.contains(words), "{what}: {message}"),
            other => panic!("{what}: {other:?}"),
        }
    }
}

pub(crate) async fn quit_waits_for_clients_then_interrupts(setup: Setup) {
    let mut daemon = setup.start().await;
    let mut client = daemon.client(&[]);
    assert!(client.next().starts_with("active "));
    let server = daemon.ready_server().await;
    let started = Instant::now();
    daemon.control.quit(Some(1), LONG).await.unwrap();
    daemon.child.wait().unwrap();
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(!is_alive(server));
    assert_eq!(client.next(), "lost");
    daemon.logs("quit command issued with timeout of 1").await;
}

pub(crate) async fn killed_server_loses_clients_and_is_replaced(setup: Setup) {
    let daemon = setup.start().await;
    let mut client = daemon.client(&[]);
    assert!(client.next().starts_with("active "));
    let server = daemon.ready_server().await;
    signal(server, Signal::SIGKILL);
    assert_eq!(client.next(), "lost");
    daemon.no_server().await;
    let mut next = daemon.client(&[]);
    assert!(next.next().starts_with("active "));
    assert_ne!(daemon.ready_server().await, server);
}

pub(crate) async fn server_and_clients_survive_a_killed_daemon(setup: Setup) {
    let mut daemon = setup.start().await;
    let mut client = daemon.client(&[]);
    assert!(client.next().starts_with("active "));
    let server = daemon.ready_server().await;
    daemon.kill();
    let mut left_out = daemon.client(&[]);
    assert_eq!(left_out.next(), "without MPS", "stale sockets are no error");
    daemon.child = daemon.setup.spawn();
    until("the next answers", async || daemon.control.daemon(LONG).await.ok()).await;
    assert!(is_alive(server) && !client.has_ended(), "both live on");
    assert_eq!(daemon.control.servers(LONG).await.unwrap(), [] as [i32; 0], "the next does not know it");
    let mut next = daemon.client(&[]);
    assert!(next.next().starts_with("active "));
    assert_ne!(daemon.ready_server().await, server, "and starts a second one");
    signal(server, Signal::SIGKILL);
}

/// If several clients wait, the daemon first serves the client that connected last. So a client
/// that connected earlier may have to wait several times.
pub(crate) async fn client_of_another_uid_waits_for_the_first(setup: Setup) {
    let Some(uid) = another_uid("client_of_another_uid_waits_for_the_first") else { return };
    let daemon = setup.start().await;
    let mut first = daemon.client(&[]);
    assert!(first.next().starts_with("active "));
    let server = daemon.ready_server().await;
    let mut other = daemon.client_of(Some(uid), &[]);
    daemon.logs(&format!("from user {uid}: Server is not ready, push client to pending list")).await;
    let mut late = daemon.client(&[]);
    daemon.logs(&format!("NEW CLIENT {} from user 0: Server is not ready", late.pid())).await;
    assert_eq!(daemon.control.servers(LONG).await.unwrap(), [server]);
    first.end();
    let message = late.next();
    assert!(message.starts_with("active "), "{message}: {}", daemon.log());
    let second = daemon.server().await;
    assert_ne!(second, server);
    late.end();
    let message = other.next();
    let third = daemon.ready_server().await;
    assert!(message.starts_with(&format!("active server={third} ")), "{message}");
    assert_ne!(third, second);
    assert_eq!(daemon.control.clients(third, LONG).await.unwrap(), [other.pid()]);
    daemon.logs(&format!("Starting new server {third} for user {uid}")).await;
}
