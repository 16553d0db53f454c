//! Clients of several users on one server, which runs as root: `-multiuser-server`, in version 555
//! and later.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use gpush_mps::daemon::multi_user::{Support, support};

use crate::daemon::{LONG, MULTI_USER, Setup, Trait, another_uid};

/// gpushd runs a program only if no other user can replace it. So the test calls the daemon through
/// a script in a directory that belongs to root.
pub(crate) async fn support_of_several_users_is_detected(setup: Setup) {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED support_of_several_users_is_detected: only root may use the option");
        return;
    }
    let dir = tempfile::tempdir_in("/usr/local/share").unwrap();
    let script = dir.path().join("nvidia-cuda-mps-control");
    let program = setup.control_program();
    let text = format!("#!/bin/sh\nMPS_SIM_VERSION={} exec {} \"$@\"\n", setup.version(), program.display());
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    let expected = if setup.serves_several_users() { Support::Supported } else { Support::Unsupported };
    assert_eq!(support(&script).await, expected);
}

pub(crate) async fn clients_of_several_users_share_a_server_of_root(setup: Setup) {
    let Some(uid) = another_uid("clients_of_several_users_share_a_server_of_root") else { return };
    if !setup.serves_several_users() {
        // The program does not know the argument, so it starts the front-end. The front-end finds
        // no daemon.
        let status = setup.argument(MULTI_USER).spawn().wait().unwrap();
        assert_eq!(status.code(), Some(1));
        return;
    }
    let daemon = setup.argument(MULTI_USER).start().await;
    assert!(daemon.has(Trait::ServesSeveralUsers).await);
    let mut other = daemon.client_of(Some(uid), &[]);
    assert!(other.next().starts_with("active "));
    let server = daemon.ready_server().await;
    let mut own = daemon.client(&[]);
    assert!(own.next().starts_with(&format!("active server={server} ")));
    assert_eq!(std::fs::metadata(format!("/proc/{server}")).unwrap().uid(), 0, "the server is root's");
    assert_eq!(daemon.control.servers(LONG).await.unwrap(), [server]);
    let mut clients = daemon.control.clients(server, LONG).await.unwrap();
    clients.sort_unstable();
    let mut expected = [own.pid(), other.pid()];
    expected.sort_unstable();
    assert_eq!(clients, expected);
    daemon.logs(&format!("NEW CLIENT {} from user 0", other.pid())).await;
    own.end();
    other.end();
}
