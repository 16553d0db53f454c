//! gpushd shows unleased processes on a shared GPU, warns about them, and ends them. Some tests
//! check that gpushd does not end certain processes. `agent/src/lifecycle/in_process/unleased` has
//! the tests of the policy.
//!
//! | file | subject |
//! |---|---|
//! | `ends` | the actions of gpushd on unleased processes, and the reports about these actions |
//! | `servers` | MPS servers, which are not unleased processes |
//! | `long` | processes with command lines of any length |
//!
//! A test may have to show that gpushd does not end a process. It then starts another unleased
//! process, the witness. When gpushd has ended the witness, it has also checked the first process.

mod ends;
mod long;
mod servers;

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Child, Command, Stdio},
};

use gpush_api::{
    EventKind, EventPayload, GpuProcess, GpuProcesses, LeaseGrant, MpsState, UnleasedChange, UnleasedStep,
};
use gpush_tests::{
    agent::{Agent, Listener},
    host::Host,
    mps::{lease_for, reaches},
};
use nix::unistd::geteuid;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
/// Keeps the compute mode: in EXCLUSIVE_PROCESS, the driver would refuse programs that bypass MPS, so the tests would have
/// no unleased process.
const RULE: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nmps = { compute_mode = \"keep\" }\n";
const FAST: &str = "[mps]\nhealth = \"1s\"\n";
const END: &str = "[processes]\nunleased = \"end\"\ngrace = \"1s\"\n";

/// The uid of `nobody`.
const NOBODY: u32 = 65534;
/// Uid of a user without a lease.
const OTHER: u32 = 65532;

fn start(what: &str, processes: &str) -> Option<(Host, Agent)> {
    start_on(what, HOST, &format!("{processes}\n{FAST}{RULE}"))
}

fn start_on(what: &str, host: &str, config: &str) -> Option<(Host, Agent)> {
    let host = host_for_all_users(what, host)?;
    let agent = Agent::start_public(&host, config);
    reaches(&agent, "0", MpsState::Ready);
    Some((host, agent))
}

/// Makes a host on which processes of all users can register.
fn host_for_all_users(what: &str, host: &str) -> Option<Host> {
    if !geteuid().is_root() {
        println!("SKIPPED {what}: only root has processes of others");
        return None;
    }
    let host = Host::up(host);
    // Let programs of other users enter the host's directory and register in `proc`.
    for (dir, mode) in [(host.dir().parent().expect("a directory"), 0o755), (&host.dir().join("proc"), 0o777)] {
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).expect("its mode can be changed");
    }
    Some(host)
}

/// Requests a lease for another user.
fn lease_of(uid: u32, agent: &Agent) -> LeaseGrant {
    lease_for(agent, uid, "0", &serde_json::json!({ "duration_s": 3600 })).expect("a lease")
}

fn all(agent: &Agent) -> GpuProcesses {
    serde_json::from_value(agent.get("/v1/processes").json()).expect("processes")
}

fn listed(agent: &Agent, pid: u32) -> Option<GpuProcess> {
    all(agent).processes.into_iter().find(|one| one.process.pid == Some(pid))
}

/// Waits until gpushd reports what it did about a process. Returns this action.
fn done(agent: &Agent, pid: u32) -> String {
    agent.until("the action on the process is reported", || listed(agent, pid)?.unleased_action)
}

/// A program of a user, which the driver lists on a GPU. Dropping this value kills the program.
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

/// Returns the next event with this step for a process.
fn step_event(listener: &mut Listener, pid: u32, step: UnleasedStep) -> UnleasedChange {
    loop {
        let EventPayload::Unleased(change) = listener.next_of(EventKind::Unleased).what else {
            panic!("an event of another kind")
        };
        if change.pid == Some(pid) && change.step == step {
            return *change;
        }
    }
}

/// Starts an unleased process, and waits until gpushd sends it SIGTERM. gpushd has then also
/// checked all other processes.
fn witness(host: &Host, agent: &Agent, place: &str) {
    let mut listener = agent.listen("?kinds=unleased", None);
    let job = Job::start(Command::new("/bin/sleep").arg("1000"), OTHER).on(host, place);
    step_event(&mut listener, job.pid(), UnleasedStep::Asked);
}
