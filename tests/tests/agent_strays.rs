//! Processes on a shared GPU that belong to nobody who was given a share: shown, warned of, ended; and who
//! never is.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Command, Stdio},
};

use gpush_api::{GpuProcess, GpuProcesses, MpsShareTaken, MpsState, ProcessKind};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{Client, reaches},
};
use nix::unistd::geteuid;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const RULE: &str = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// The user `nobody`.
const NOBODY: u32 = 65534;

fn start(what: &str, processes: &str) -> Option<(Host, Agent)> {
    if !geteuid().is_root() {
        println!("SKIPPED {what}: only root has processes of others");
        return None;
    }
    let host = Host::up(HOST);
    // Others compute on this host: they come to its directory, and note there that they do.
    for (dir, mode) in [(host.dir().parent().expect("a directory"), 0o755), (&host.dir().join("proc"), 0o777)] {
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).expect("it can be opened");
    }
    let agent = Agent::start_public(&host, &format!("{processes}\n{RULE}"));
    reaches(&agent, "0", MpsState::Ready);
    Some((host, agent))
}

/// A share of another user's.
fn share_of(uid: u32, host: &Host, agent: &Agent) -> MpsShareTaken {
    let mut command = host.command(program("gpushctl"));
    command.args(["mps", "env", "0", "--json", "--for", "1h"]).env("GPUSH_SOCKET", agent.socket());
    command.stdin(Stdio::null()).uid(uid).gid(uid).current_dir("/").env("HOME", "/");
    let output = command.output().expect("gpushctl");
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("a share")
}

/// A client of that user that names no share, and one that does.
fn stray_and_guest(host: &Host, agent: &Agent) -> (Client, Client) {
    let taken = share_of(NOBODY, host, agent);
    let bare: Vec<_> = taken.environment.iter().filter(|(name, _)| name != "GPUSH_MPS_SHARE").cloned().collect();
    let guest = Client::begin(host, &taken.environment, Some(NOBODY));
    assert!(guest.says().starts_with("active"));
    let stray = Client::begin(host, &bare, Some(NOBODY));
    assert!(stray.says().starts_with("active"));
    (stray, guest)
}

fn listed(agent: &Agent, pid: i32) -> Option<GpuProcess> {
    let all: GpuProcesses = serde_json::from_value(agent.get("/v1/processes").json()).expect("processes");
    all.processes.into_iter().find(|one| one.process.pid == Some(pid.cast_unsigned()))
}

#[test]
fn whoever_names_no_share_is_a_stray_and_only_shown_unless_the_config_says_more() {
    let Some((host, agent)) = start("strays of another user", "") else { return };
    let (mut stray, mut guest) = stray_and_guest(&host, &agent);
    let seen = agent.until("the stray is seen", || listed(&agent, stray.pid()).filter(|one| one.stray.is_some()));
    assert_eq!(seen.stray.as_deref(), Some("it took none of its user's shares"));
    assert_eq!((seen.process.kind, seen.process.uid, seen.done), (ProcessKind::MpsClient, Some(NOBODY), None));
    let seen = listed(&agent, guest.pid()).expect("the guest is seen");
    assert!(seen.stray.is_none() && seen.share.is_some_and(|share| share.starts_with('s')));
    // Its servers belong there, whoever they run as.
    let all: GpuProcesses = serde_json::from_value(agent.get("/v1/processes").json()).unwrap();
    assert_eq!(all.processes.iter().filter(|one| one.stray.is_some()).count(), 1, "{all:#?}");
    let mut command = host.command(program("gpushctl"));
    command.args(["process", "list", "--stray"]).env("GPUSH_SOCKET", agent.socket());
    let output = command.output().expect("gpushctl");
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(stray.lives() && guest.lives());
}

#[test]
fn a_stray_is_asked_to_end_and_killed_when_it_does_not_and_its_neighbour_computes_on() {
    let config = "[processes]\nstray = \"end\"\ngrace_s = 1\n";
    let Some((host, agent)) = start("strays that are ended", config) else { return };
    let (mut stray, mut guest) = stray_and_guest(&host, &agent);
    // Past MPS, and root's: told, and left.
    let root = host.process("--gpu 0 --kind compute");
    let left = agent.until("what is done about root's is told", || listed(&agent, root.cast_signed())?.done);
    assert_eq!(left, "left: root's processes are never ended");
    agent.until("the stray is ended", || (!stray.lives()).then_some(()));
    assert!(agent.log().contains("asked to end"), "{}", agent.log());
    assert!(guest.lives() && guest.said().is_empty());
    assert!(std::path::Path::new(&format!("/proc/{root}")).exists());
}

#[test]
fn one_that_ignores_the_question_is_killed_and_one_that_the_config_allows_is_left() {
    let config = "[processes]\nstray = \"end\"\ngrace_s = 1\nallow = [{ uid = 65532 }]\n";
    let Some((host, agent)) = start("strays that do not end", config) else { return };
    let stubborn = |uid: u32| {
        // A process that the driver lists and that a shell has made deaf to SIGTERM.
        let child = Command::new("/bin/sh")
            .args(["-c", "trap '' TERM; while :; do sleep 1; done"])
            .stdin(Stdio::null())
            .uid(uid)
            .gid(uid)
            .spawn()
            .expect("a shell");
        host.sim("process", &["add", "--gpu", "0", "--kind", "compute", "--pid", &child.id().to_string()]);
        child
    };
    let (mut deaf, mut allowed) = (stubborn(NOBODY), stubborn(65532));
    let left = agent.until("what is done is told", || listed(&agent, allowed.id().cast_signed())?.done);
    assert_eq!(left, "left: the config allows it");
    agent.until("it is killed", || matches!(deaf.try_wait(), Ok(Some(_))).then_some(()));
    assert!(agent.log().contains("; killed"), "{}", agent.log());
    assert!(matches!(allowed.try_wait(), Ok(None)));
    allowed.kill().unwrap();
    allowed.wait().unwrap();
}
