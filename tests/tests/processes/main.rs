//! Processes on a shared GPU that belong to nobody who was given a share: shown, warned of, ended; and who
//! never is.
//!
//! | file | subject |
//! |---|---|
//! | `ends` | what is done about strays, and who is told |
//! | `servers` | MPS servers are none |
//! | `unseen` | GPUs that are not seen as they are, and a database that was lost |
//! | `long` | processes with command lines of any length |
//! | `jobs` | jobs of people who have a share, however they are started |
//! | `allowed` | those that the config allows, now and later |
//!
//! That somebody is not ended is seen by another who is, in the same round: the witness.

mod allowed;
mod ends;
mod jobs;
mod long;
mod servers;
mod unseen;

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Child, Command, Stdio},
};

use gpush_api::{EventKind, GpuProcess, GpuProcesses, Happening, LeaseGrant, MpsState, StrayChange, StrayStep};
use gpush_tests::{
    agent::{Agent, Listener},
    host::Host,
    mps::{Client, lease_for, reaches},
};
use nix::unistd::geteuid;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const RULE: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";
const FAST: &str = "[mps]\nhealth_s = 1\n";
const END: &str = "[processes]\nstray = \"end\"\ngrace_s = 1\n";

/// The user `nobody`.
const NOBODY: u32 = 65534;
/// A user without a lease.
const OTHER: u32 = 65532;

fn start(what: &str, processes: &str) -> Option<(Host, Agent)> {
    start_on(what, HOST, &format!("{processes}\n{FAST}{RULE}"))
}

fn start_on(what: &str, host: &str, config: &str) -> Option<(Host, Agent)> {
    if !geteuid().is_root() {
        println!("SKIPPED {what}: only root has processes of others");
        return None;
    }
    let host = Host::up(host);
    // Others compute on this host: they come to its directory, and note there that they do.
    for (dir, mode) in [(host.dir().parent().expect("a directory"), 0o755), (&host.dir().join("proc"), 0o777)] {
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).expect("it can be opened");
    }
    let agent = Agent::start_public(&host, config);
    reaches(&agent, "0", MpsState::Ready);
    Some((host, agent))
}

/// A lease of another user.
fn lease_of(uid: u32, agent: &Agent) -> LeaseGrant {
    lease_for(agent, uid, "0", &serde_json::json!({ "duration_s": 3600 })).expect("a lease")
}

/// A client of that user that names no share, and one that does.
fn stray_and_guest(host: &Host, agent: &Agent) -> (Client, Client) {
    let taken = lease_of(NOBODY, agent);
    let bare: Vec<_> = taken.environment.iter().filter(|(name, _)| name != "GPUSH_LEASE").cloned().collect();
    let guest = Client::begin(host, &taken.environment, Some(NOBODY));
    assert!(guest.says().starts_with("active"));
    let stray = Client::begin(host, &bare, Some(NOBODY));
    assert!(stray.says().starts_with("active"));
    (stray, guest)
}

fn all(agent: &Agent) -> GpuProcesses {
    serde_json::from_value(agent.get("/v1/processes").json()).expect("processes")
}

fn listed(agent: &Agent, pid: u32) -> Option<GpuProcess> {
    all(agent).processes.into_iter().find(|one| one.process.pid == Some(pid))
}

/// The share that a process is shown with, once it is listed.
fn lease_shown(agent: &Agent, pid: u32) -> Option<String> {
    agent.until("it is listed", || listed(agent, pid)).lease
}

/// What is done about a process, once something is.
fn done(agent: &Agent, pid: u32) -> String {
    agent.until("what is done about it is told", || listed(agent, pid)?.stray_action)
}

/// A program of some user that the driver lists on a GPU; killed when dropped.
struct Job(Child);

impl Job {
    fn start(command: &mut Command, uid: u32) -> Self {
        Self(command.stdin(Stdio::piped()).uid(uid).gid(uid).current_dir("/").spawn().expect("a program"))
    }

    /// The same, deaf to SIGTERM.
    fn deaf(uid: u32) -> Self {
        Self::start(Command::new("/bin/sh").args(["-c", "trap '' TERM; while :; do sleep 1; done"]), uid)
    }

    fn on(self, host: &Host, place: &str) -> Self {
        let pid = self.pid().to_string();
        let words: Vec<&str> = ["add"].into_iter().chain(place.split_whitespace()).chain(["--pid", &pid]).collect();
        host.sim("process", &words);
        self
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn lives(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _waited = self.0.wait();
    }
}

/// The next event of a stray that says so of this process.
fn told(listener: &mut Listener, pid: u32, step: StrayStep) -> StrayChange {
    loop {
        let Happening::Stray(change) = listener.next_of(EventKind::Stray).what else { panic!("another kind") };
        if change.pid == Some(pid) && change.step == step {
            return *change;
        }
    }
}

/// Waits until a stray of a user without a share was ended: whoever was to be ended beside it was.
fn witness(host: &Host, agent: &Agent, place: &str) {
    let mut listener = agent.listen("?kinds=stray", None);
    let job = Job::start(Command::new("/bin/sleep").arg("1000"), OTHER).on(host, place);
    told(&mut listener, job.pid(), StrayStep::Asked);
}
