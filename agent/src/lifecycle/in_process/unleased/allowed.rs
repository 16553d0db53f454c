//! Processes that the config allows, from the start or after a reload.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::Command,
};

use gpush_api::{Health, ProcessKind};

use super::{HOLDER, OTHER, ends, start};
use crate::lifecycle::in_process::programs::UserProgram;

/// A reload adds the user of a process to `allow` after the process got SIGTERM. The next reload removes the user again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_allowed_after_sigterm_is_not_killed_until_disallowed() {
    let Some(host) = start("unleased processes that are allowed later", &ends(0, "")).await else { return };
    let mut deaf = host.deaf(HOLDER);
    host.check().await;
    assert_eq!(host.steps(&deaf).await, ["asked to end"]);
    host.reload(&ends(0, "{ uid = 3000 }")).await;
    host.check().await;
    let seen = host.listed(&deaf).await;
    assert!(deaf.lives() && seen.allowed && seen.unleased.is_none(), "{seen:?}");
    host.reload(&ends(0, "")).await;
    host.check().await;
    host.check().await;
    host.ended_by_gpushd(&mut deaf).await;
    assert_eq!(host.steps(&deaf).await, ["asked to end", "asked to end", "killed"]);
}

/// Returns a directory that all users can enter, with copies of a program that waits.
fn copies(names: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::Builder::new().prefix("gpush-allowed-").tempdir().expect("a directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("an open directory");
    for name in names {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        fs::copy("/bin/sleep", path).expect("a program");
    }
    dir
}

/// gpushd compares program files. A process that started before an upgrade runs the old file. gpushd does not end it,
/// because the old file may have been an allowed program.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn program_is_allowed_by_file_and_not_ended_if_replaced() {
    let dir = copies(&["kept", "replaced"]);
    let path = |name: &str| dir.path().join(name);
    let allow = ["kept", "replaced"].map(|name| format!("{{ exe = \"{}\" }}", path(name).display())).join(", ");
    let hidden = "/home/of-another-host/agent";
    let config = ends(0, &format!("{allow}, {{ exe = \"{hidden}\" }}, {{ exe = \"/opt/not-installed-here\" }}"));
    let Some(host) = start("programs that are allowed", &config).await else { return };
    let job = |name: &str| {
        let job = UserProgram::start(Command::new(path(name)).arg("1000"), OTHER);
        host.gpus.use_as(0, job.pid(), ProcessKind::Compute);
        job
    };
    let (mut same, mut before) = (job("kept"), job("replaced"));
    // An upgrade replaces the program with another file of the same name.
    fs::copy("/bin/sleep", path("new")).and_then(|_| fs::rename(path("new"), path("replaced"))).expect("an upgrade");
    host.check().await;
    let seen = host.listed(&same).await;
    assert!(seen.allowed && seen.unleased.is_none(), "{seen:?}");
    let why = host.action(&before).await;
    assert!(why.starts_with("not ended: the config may allow it, because it was started before"), "{why}");
    assert!(same.lives() && before.lives());
    // If gpushd cannot access a path in `allow`, health reports this. If the path does not exist, health does not report
    // it.
    let health: Health = host.get("/v1/health").await;
    let messages: Vec<&str> = health.errors.iter().map(|cause| cause.message.as_str()).collect();
    assert_eq!(messages, [format!("processes.allow: gpushd cannot see {hidden}")]);
}

/// gpushd compares the file and the user, because the kernel reports both. A process can choose its name and its
/// arguments. Any user can load code into a program that they may execute. So an entry with a user allows its file only
/// for that user.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_is_allowed_by_file_and_user_and_not_by_its_name() {
    let dir = copies(&["agent", "other/agent"]);
    let (allowed, other) = (dir.path().join("agent"), dir.path().join("other/agent"));
    let config = ends(0, &format!("{{ exe = \"{}\", uid = {HOLDER} }}", allowed.display()));
    let Some(host) = start("programs that pretend to be allowed", &config).await else { return };
    let job = |command: &mut Command, uid| {
        let job = UserProgram::start(command.arg("1000"), uid);
        host.gpus.use_as(0, job.pid(), ProcessKind::Compute);
        job
    };
    let mut same = job(&mut Command::new(&allowed), HOLDER);
    // This process has the same name and the same first argument, but another program file.
    let mut named = job(Command::new(&other).arg0(&allowed), HOLDER);
    // Another user executes the allowed file twice: once as it is, and once with code that this user loads into it.
    let mut plain = job(&mut Command::new(&allowed), OTHER);
    let mut preloaded = job(Command::new(&allowed).env("LD_PRELOAD", "libm.so.6"), OTHER);
    host.check().await;
    for one in [&mut named, &mut plain, &mut preloaded] {
        host.ended_by_gpushd(one).await;
    }
    assert!(same.lives() && host.listed(&same).await.allowed);
}
