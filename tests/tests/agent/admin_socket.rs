//! The admin socket: root and hooks can connect even if the socket for all users is overloaded.

use std::{
    io::{Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
        process::CommandExt,
    },
    process::Command,
};

use gpush_tests::{
    agent::{Agent, Setup},
    host::{Host, program},
};
use nix::{
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::geteuid,
};

/// Number of connections that overload the socket for all users.
const CROWD: usize = 1000;

/// Starts an agent whose sockets have the default paths for a user other than root.
fn users_own(host: &Host) -> (Agent, std::path::PathBuf) {
    let runtime = host.scratch("runtime");
    let socket = runtime.join("gpush/gpushd.sock");
    (Setup::on(host).socket(socket).admin_beside().start(), runtime)
}

/// Opens a connection, sends a request, and keeps the connection open. Returns the connection, and
/// the status of the response (0 without a response).
fn hold(agent: &Agent) -> (UnixStream, u16) {
    let mut stream = agent.connect();
    // Ignore an error: gpushd may close the connection before it has read the request.
    let _ = stream.write_all(b"GET /v1/version HTTP/1.1\r\nhost: x\r\n\r\n");
    let mut head = [0; 12];
    let status = match stream.read_exact(&mut head) {
        Ok(()) => String::from_utf8_lossy(&head[9..]).parse().expect("a status"),
        Err(_) => 0,
    };
    (stream, status)
}

#[test]
fn overloaded_user_socket_does_not_block_root() {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let needed = 2 * CROWD as u64;
    if hard < needed {
        println!("SKIPPED: a process may open {hard} files here, {needed} are needed");
        return;
    }
    // The limit of open files applies to all tests in this program, and to the programs that they
    // start. So raise the limit only as far as necessary.
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(needed), hard).unwrap();
    let host = Host::up("a30x4");
    let (agent, runtime) = users_own(&host);
    // gpushd gives the test's own uid the largest share of the connections. If this uid cannot
    // block root, no other user can.
    let crowd: Vec<(UnixStream, u16)> = (0..CROWD).map(|_| hold(&agent)).collect();
    let with = |status: u16| crowd.iter().filter(|(_, found)| *found == status).count();
    println!("{CROWD} connections: {} served, {} refused, {} closed", with(200), with(503), with(0));
    assert!(with(200) >= 100 && with(503) > 0, "the first socket never was full");
    assert_ne!(hold(&agent).1, 200, "the first socket is full");
    let admin = agent.socket().with_file_name("admin.sock");
    assert_eq!(admin.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    for path in ["/v1/version", "/v1/gpus", "/v1/health"] {
        assert_eq!(agent.get_at(&admin, path).status, 200, "{path}");
    }
    // gpushctl finds the admin socket without an option.
    if std::path::Path::new("/run/gpush/gpushd.sock").exists() {
        println!("SKIPPED: an agent of this machine has the default socket");
        return;
    }
    let gpushctl = |socket: Option<&std::path::Path>| {
        let mut command = host.command(program("gpushctl"));
        command.arg("version").env_remove("GPUSH_SOCKET").env("XDG_RUNTIME_DIR", &runtime);
        command.envs(socket.map(|path| ("GPUSH_SOCKET", path)));
        command.output().unwrap()
    };
    let found = gpushctl(None);
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    assert_eq!(gpushctl(Some(agent.socket())).status.code(), Some(6), "a socket that was named is taken");
    drop(crowd);
    agent.stop();
    assert!(!admin.exists());
}

#[test]
fn other_users_cannot_connect_to_admin_socket() {
    if !geteuid().is_root() {
        println!("SKIPPED: only root can ask as another user");
        return;
    }
    let dir = tempfile::Builder::new().prefix("gpush-socket-").tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let host = Host::up("a30x4");
    let _agent = Setup::on(&host).socket(dir.path().join("gpushd.sock")).admin_beside().start();
    let asks = |socket: &str| {
        let mut curl = Command::new("curl");
        curl.uid(65534).gid(65534).current_dir("/").env("HOME", "/").args(["--silent", "--unix-socket"]);
        curl.arg(dir.path().join(socket)).arg("http://gpush/v1/version").output().map(|output| output.status.success())
    };
    let Ok(public) = asks("gpushd.sock") else {
        println!("SKIPPED: curl is not installed");
        return;
    };
    assert_eq!((public, asks("admin.sock").unwrap()), (true, false));
}

#[test]
fn admin_socket_path_comes_from_config() {
    let host = Host::up("a30x4");
    let elsewhere = host.scratch("elsewhere.sock");
    let config = format!("[api]\nadmin_socket = \"{}\"\n", elsewhere.display());
    let first = Setup::on(&host).config(&config).admin_beside().start();
    assert_eq!(first.get_at(&elsewhere, "/v1/version").status, 200);
    assert!(!first.socket().with_file_name("admin.sock").exists());
    let (_, log) = Setup::on(&host).named("second").config(&config).admin_beside().refused();
    let named = format!("another gpushd (pid {}) has the socket {}", first.pid(), elsewhere.display());
    assert!(log.contains(&named) && log.contains("--admin-socket"), "{log}");
    assert!(!host.scratch("second.sock").exists(), "it leaves nothing behind");
}

#[test]
fn systemd_passes_both_sockets_by_name() {
    let host = Host::up("a30x4");
    let (public, admin) = (host.scratch("handed.sock"), host.scratch("handed-admin.sock"));
    let listeners = [UnixListener::bind(&admin).unwrap(), UnixListener::bind(&public).unwrap()];
    // The test does what systemd does: it passes the sockets as descriptors 3 and 4 with their
    // names, in either order.
    let script = "exec 3<&0 4<&2 </dev/null 2>/dev/null; \
                  export LISTEN_FDS=2 LISTEN_PID=$$ LISTEN_FDNAMES=admin:gpushd.socket; exec \"$@\"";
    let [first, second] = listeners;
    let agent = Setup::on(&host)
        .socket(host.scratch("unused.sock"))
        .admin_beside()
        .through(&["sh", "-c", script, "sh"])
        .stdin(first.into())
        .stderr(second.into())
        .start_at(&public);
    for socket in [&public, &admin] {
        assert_eq!(agent.get_at(socket, "/v1/version").status, 200);
    }
    assert!(!host.scratch("unused.sock").exists() && !host.scratch("admin.sock").exists());
    agent.stop();
    assert!(public.exists() && admin.exists(), "they are systemd's to remove");
}
