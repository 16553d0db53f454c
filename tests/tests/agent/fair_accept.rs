//! If one user opens connections continuously, the responses to other users must not be delayed.

use std::{
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Child, Command, Stdio},
};

use gpush_tests::{
    agent::{Agent, Setup},
    host::{Host, program},
};
use nix::unistd::geteuid;

const CHURNS: u32 = 5;
const ASKS: u32 = 65_534;

/// A Python script that opens and closes connections continuously from four threads.
const CHURN: &str = "
import socket, sys, threading
def churn():
    while True:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        s.setblocking(False)
        try:
            s.connect(sys.argv[1])
        except OSError:
            pass
        s.close()
for _ in range(3):
    threading.Thread(target=churn, daemon=True).start()
print('churning', flush=True)
churn()
";

struct Churn(Child);

impl Drop for Churn {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn connection_churn_of_one_user_does_not_delay_others() {
    if !geteuid().is_root() {
        println!("SKIPPED connection churn: only root can connect as other users");
        return;
    }
    let host = Host::up("a30x4");
    let public = tempfile::Builder::new().prefix("gpush-fair-").tempdir().expect("a directory");
    std::fs::set_permissions(public.path(), std::fs::Permissions::from_mode(0o755)).expect("an open directory");
    let agent: Agent = Setup::on(&host).socket(public.path().join("s")).start();
    // Copy gpushctl to a path at which another user can execute it.
    let gpushctl = public.path().join("gpushctl");
    std::fs::copy(program("gpushctl"), &gpushctl).expect("gpushctl can be copied");
    std::fs::set_permissions(&gpushctl, std::fs::Permissions::from_mode(0o755)).expect("a program");
    let mut churn = Command::new("python3");
    churn.args(["-c", CHURN]).arg(agent.socket()).uid(CHURNS).gid(CHURNS).stdout(Stdio::piped());
    let Ok(mut child) = churn.spawn() else { return println!("SKIPPED connection churn: no python3") };
    let mut line = String::new();
    let stdout = child.stdout.take().expect("a pipe");
    let _churn = Churn(child);
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).expect("it runs");
    let mut failed = Vec::new();
    for _ in 0..60 {
        let output = Command::new(&gpushctl)
            .arg("version")
            .env("GPUSH_SOCKET", agent.socket())
            .current_dir("/")
            .uid(ASKS)
            .gid(ASKS)
            .output()
            .expect("gpushctl can be started");
        if !output.status.success() {
            failed.push(String::from_utf8_lossy(&output.stderr).into_owned());
        }
    }
    assert!(failed.is_empty(), "{} of 60 calls failed: {}", failed.len(), failed[0]);
}
