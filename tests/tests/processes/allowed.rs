//! Processes that the config allows, at the start of gpushd or after a change of the config.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::Command,
};

use gpush_api::{EventKind, Health, UnleasedStep};
use gpush_tests::agent::Agent;
use nix::sys::signal::Signal;

use super::{FAST, Job, NOBODY, OTHER, RULE, done, listed, start, step_event, witness};

/// Time from SIGTERM to SIGKILL in seconds, in which a test can reload the config.
const GRACE: u32 = 10;

fn processes(grace: u32, allow: &str) -> String {
    format!("[processes]\nunleased = \"end\"\ngrace_s = {grace}\nallow = [{allow}]\n")
}

/// Writes a config and waits until gpushd has read it.
fn reload(agent: &Agent, processes: &str) {
    let mut listener = agent.listen("?kinds=config", None);
    agent.write_config(format!("{processes}\n{FAST}{RULE}"));
    agent.signal(Signal::SIGHUP);
    listener.next_of(EventKind::Config);
}

/// Two processes get SIGTERM one after the other. A reload then adds the user of the first process to `allow`. Without
/// this reload, gpushd would kill the first process before the second one. So when gpushd has killed the second
/// process, the test checks that the first process lives. The next reload removes the user again.
#[test]
fn process_allowed_after_sigterm_is_not_killed_until_disallowed() {
    let Some((host, agent)) = start("unleased processes that are allowed later", &processes(GRACE, "")) else { return };
    let mut listener = agent.listen("?kinds=unleased", None);
    let mut deaf = Job::deaf(NOBODY).on(&host, "--gpu 0 --kind compute");
    step_event(&mut listener, deaf.pid(), UnleasedStep::Asked);
    let later = Job::deaf(OTHER).on(&host, "--gpu 0 --kind compute");
    step_event(&mut listener, later.pid(), UnleasedStep::Asked);
    reload(&agent, &processes(GRACE, "{ uid = 65534 }"));
    agent.until("the process is no longer an unleased process", || {
        listed(&agent, deaf.pid()).filter(|one| one.allowed && one.unleased.is_none())
    });
    step_event(&mut listener, later.pid(), UnleasedStep::Killed);
    assert!(deaf.lives());
    reload(&agent, &processes(0, ""));
    step_event(&mut listener, deaf.pid(), UnleasedStep::Asked);
    step_event(&mut listener, deaf.pid(), UnleasedStep::Killed);
    agent.until("the process is killed", || (!deaf.lives()).then_some(()));
}

/// gpushd compares program files. A process that started before an upgrade runs the old file.
/// gpushd does not end it, because the old file may have been an allowed program.
#[test]
fn program_is_allowed_by_file_and_not_ended_if_replaced() {
    let dir = tempfile::Builder::new().prefix("gpush-allowed-").tempdir().expect("a directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("an open directory");
    let (kept, replaced) = (dir.path().join("kept"), dir.path().join("replaced"));
    for file in [&kept, &replaced] {
        fs::copy("/bin/sleep", file).expect("a program");
    }
    let hidden = "/home/of-nobody-at-all/agent";
    let allow = [kept.display(), replaced.display()].map(|exe| format!("{{ exe = \"{exe}\" }}")).join(", ");
    let config = processes(1, &format!("{allow}, {{ exe = \"{hidden}\" }}, {{ exe = \"/opt/not-installed-here\" }}"));
    let Some((host, agent)) = start("programs that are allowed", &config) else { return };
    let job = |file| Job::start(Command::new(file).arg("1000"), OTHER).on(&host, "--gpu 0 --kind compute");
    let (mut same, mut before) = (job(&kept), job(&replaced));
    // An upgrade replaces the program with another file of the same name.
    let new = dir.path().join("new");
    fs::copy("/bin/sleep", &new).and_then(|_| fs::rename(&new, &replaced)).expect("an upgrade");
    agent.until("the process is not an unleased process", || {
        listed(&agent, same.pid()).filter(|one| one.allowed && one.unleased.is_none())
    });
    let why = done(&agent, before.pid());
    assert!(why.starts_with("not ended: the config may allow it, because it was started before"), "{why}");
    witness(&host, &agent, "--gpu 0 --kind compute");
    assert!(same.lives() && before.lives());
    // If gpushd cannot access a path in `allow`, health reports this. If the path does not exist,
    // health does not report it.
    let health: Health = serde_json::from_value(agent.get("/v1/health").json()).expect("health");
    let messages: Vec<&str> = health.errors.iter().map(|cause| cause.message.as_str()).collect();
    assert_eq!(messages, [format!("processes.allow: gpushd cannot see {hidden}")]);
}

/// gpushd compares the file and the user, because the kernel reports both. A process can choose its name and its
/// arguments. Any user can load code into a program that they may execute. So an entry with a user allows its file only
/// for that user.
#[test]
fn process_is_allowed_by_file_and_user_and_not_by_its_name() {
    let dir = tempfile::Builder::new().prefix("gpush-allowed-").tempdir().expect("a directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("an open directory");
    let (allowed, other) = (dir.path().join("agent"), dir.path().join("other/agent"));
    fs::create_dir(dir.path().join("other")).expect("a directory");
    for file in [&allowed, &other] {
        fs::copy("/bin/sleep", file).expect("a program");
    }
    let config = processes(1, &format!("{{ exe = \"{}\", uid = {NOBODY} }}", allowed.display()));
    let Some((host, agent)) = start("programs that pretend to be allowed", &config) else { return };
    let mut listener = agent.listen("?kinds=unleased", None);
    let mut same = Job::start(Command::new(&allowed).arg("1000"), NOBODY).on(&host, "--gpu 0 --kind compute");
    // This process has the same name and the same first argument, but another program file.
    let named = Job::start(Command::new(&other).arg0(&allowed).arg("1000"), NOBODY).on(&host, "--gpu 0 --kind compute");
    step_event(&mut listener, named.pid(), UnleasedStep::Asked);
    // Another user executes the allowed file twice: once as it is, and once with code that this user loads into the
    // process.
    let plain = Job::start(Command::new(&allowed).arg("1000"), OTHER).on(&host, "--gpu 0 --kind compute");
    step_event(&mut listener, plain.pid(), UnleasedStep::Asked);
    let mut preloaded = Command::new(&allowed);
    let preloaded = Job::start(preloaded.arg("1000").env("LD_PRELOAD", "libm.so.6"), OTHER);
    let maps = format!("/proc/{}/maps", preloaded.pid());
    agent.until("the code is loaded", || fs::read_to_string(&maps).ok()?.contains("libm.so").then_some(()));
    let preloaded = preloaded.on(&host, "--gpu 0 --kind compute");
    step_event(&mut listener, preloaded.pid(), UnleasedStep::Asked);
    assert!(same.lives() && listed(&agent, same.pid()).is_some_and(|one| one.allowed));
}
