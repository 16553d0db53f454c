//! Unleased processes ("strays") on a shared GPU: shown, warned about, ended. Also processes that gpushd never ends.
//!
//! | file | subject |
//! |---|---|
//! | `ends` | actions on unleased processes, and the reports of these actions |
//! | `servers` | MPS servers, which are not unleased processes |
//! | `unseen` | unreadable GPUs, and a lost database |
//! | `long` | processes with command lines of any length |
//! | `jobs` | jobs of users who hold a lease |
//! | `allowed` | processes that the config allows, now or after a change |
//! | `tenants` | processes of earlier holders on a device that another user's lease has for itself |
//!
//! To check that gpushd does not end a process, a test starts a witness: another process, which gpushd ends in the
//! same round.

mod allowed;
mod ends;
mod jobs;
mod long;
mod servers;
mod tenants;
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
    let (host, agent) = start_without_mps(what, host, config)?;
    reaches(&agent, "0", MpsState::Ready);
    Some((host, agent))
}

/// Starts an agent on a host on which processes of any user can register.
fn start_without_mps(what: &str, host: &str, config: &str) -> Option<(Host, Agent)> {
    if !geteuid().is_root() {
        println!("SKIPPED {what}: only root has processes of others");
        return None;
    }
    let host = Host::up(host);
    // Programs of other users open the host's directory, and register there.
    for (dir, mode) in [(host.dir().parent().expect("a directory"), 0o755), (&host.dir().join("proc"), 0o777)] {
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).expect("its mode can be changed");
    }
    let agent = Agent::start_public(&host, config);
    Some((host, agent))
}

/// Requests a lease for another user.
fn lease_of(uid: u32, agent: &Agent) -> LeaseGrant {
    lease_for(agent, uid, "0", &serde_json::json!({ "duration_s": 3600 })).expect("a lease")
}

/// Starts two clients of one user: one without `GPUSH_LEASE` in its environment, and one with it.
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

/// Waits until a process is listed. Returns the lease that it is shown with.
fn lease_shown(agent: &Agent, pid: u32) -> Option<String> {
    agent.until("the process is listed", || listed(agent, pid)).lease
}

/// Waits until gpushd has acted on a process. Returns the reported action.
fn done(agent: &Agent, pid: u32) -> String {
    agent.until("the action on the process is reported", || listed(agent, pid)?.stray_action)
}

/// A program of a user that the driver lists on a GPU. It is killed when dropped.
struct Job(Child);

impl Job {
    fn start(command: &mut Command, uid: u32) -> Self {
        Self(command.stdin(Stdio::piped()).uid(uid).gid(uid).current_dir("/").spawn().expect("a program"))
    }

    /// Starts a program that ignores SIGTERM.
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

/// Returns the next event about this process with this step.
fn told(listener: &mut Listener, pid: u32, step: StrayStep) -> StrayChange {
    loop {
        let Happening::Stray(change) = listener.next_of(EventKind::Stray).what else {
            panic!("an event of another kind")
        };
        if change.pid == Some(pid) && change.step == step {
            return *change;
        }
    }
}

/// Starts an unleased process, and waits until gpushd asks it to end. gpushd has then checked other processes in the
/// same round.
fn witness(host: &Host, agent: &Agent, place: &str) {
    let mut listener = agent.listen("?kinds=stray", None);
    let job = Job::start(Command::new("/bin/sleep").arg("1000"), OTHER).on(host, place);
    told(&mut listener, job.pid(), StrayStep::Asked);
}
