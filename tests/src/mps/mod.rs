//! MPS on a simulated host: its daemons as gpushd tells of them and as the kernel does.
//!
//! Which daemons there are is never asked of gpushd alone: every process has an environment, and that
//! of a control daemon and all that it started names the pipe directory.

mod client;
mod served;

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    time::Instant,
};

pub use client::Client;
use gpush_api::{ApiError, Lease, LeaseGrant, LeaseId, LeaseState, MpsDaemon, MpsState};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
pub use served::Served;

use crate::{
    agent::{Agent, Answer, PATIENCE},
    host::{Host, program},
};

/// File names of NVIDIA's programs.
const CONTROL: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";

/// A daemon by any of its names, looked at now.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn daemon(agent: &Agent, target: &str) -> MpsDaemon {
    let answer = agent.get(&format!("/v1/mps/{target}"));
    assert_eq!(answer.status, 200, "{target}: {}", String::from_utf8_lossy(&answer.body));
    serde_json::from_value(answer.json()).expect("a daemon")
}

/// All daemons, as they were seen last.
///
/// # Panics
/// When they can't be had.
#[must_use]
pub fn daemons(agent: &Agent) -> Vec<MpsDaemon> {
    let answer = agent.get("/v1/mps");
    // The driver still starts.
    if answer.status == 503 {
        return Vec::new();
    }
    serde_json::from_value(answer.json()).expect("daemons")
}

/// Waits until a daemon is in a state.
///
/// # Panics
/// When it does not come to it.
pub fn reaches(agent: &Agent, target: &str, state: MpsState) -> MpsDaemon {
    becomes(agent, target, state.name(), |daemon| daemon.state == state)
}

/// Waits until a daemon is as `is` says.
///
/// # Panics
/// When it does not become so.
pub fn becomes(agent: &Agent, target: &str, what: &str, is: impl Fn(&MpsDaemon) -> bool) -> MpsDaemon {
    let until = Instant::now() + PATIENCE;
    let mut last = None;
    loop {
        let answer = agent.get(&format!("/v1/mps/{target}"));
        let now: Option<MpsDaemon> =
            (answer.status == 200).then(|| serde_json::from_value(answer.json()).ok()).flatten();
        match now {
            Some(daemon) if is(&daemon) => return daemon,
            other => last = other.or(last),
        }
        assert!(Instant::now() < until, "{target} is not {what}: {last:#?}\n{}", agent.log());
        // To ask all the time would take the agent's processor.
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// `start`, `stop`, `restart` or `drain`, with what the body says.
#[must_use]
pub fn act(agent: &Agent, target: &str, verb: &str, body: &Value) -> Answer {
    agent.post(&format!("/v1/mps/{target}/{verb}"), body)
}

/// Requests a lease on a target. The body has `percentage`, `memory_limit_mib`, `priority`, and fields of the request
/// besides its share, such as `duration_s`.
///
/// # Errors
/// The refusal.
///
/// # Panics
/// When the answer is neither.
pub fn lease(agent: &Agent, target: &str, body: &Value) -> Result<LeaseGrant, ApiError> {
    let answer = agent.post("/v1/leases", &request(target, body));
    if answer.status >= 400 {
        return Err(answer.error());
    }
    Ok(serde_json::from_value(answer.json()).expect("a lease"))
}

/// Requests a lease for a user, as root.
///
/// # Errors
/// The refusal.
///
/// # Panics
/// When the answer is neither.
pub fn lease_for(agent: &Agent, uid: u32, target: &str, body: &Value) -> Result<LeaseGrant, ApiError> {
    let mut body = body.clone();
    body["holder_uid"] = uid.into();
    lease(agent, target, &body)
}

/// The request of [`lease`].
///
/// # Panics
/// When the body is not an object.
#[must_use]
pub fn request(target: &str, body: &Value) -> Value {
    let mut request = body.as_object().expect("an object").clone();
    let mut share = serde_json::Map::from_iter([("kind".to_owned(), "mps".into())]);
    for name in ["percentage", "memory_limit_mib", "priority"] {
        share.extend(request.remove(name).map(|value| (name.to_owned(), value)));
    }
    request.insert("share".to_owned(), share.into());
    request.insert("target".to_owned(), target.into());
    request.into()
}

/// Releases a lease: the lease, releasing or ended.
///
/// # Panics
/// When it cannot be released.
pub fn release(agent: &Agent, id: LeaseId) -> Lease {
    let answer = agent.post(&format!("/v1/leases/{id}/release"), &serde_json::json!({}));
    assert_eq!(answer.status, 200, "{id}: {}", String::from_utf8_lossy(&answer.body));
    serde_json::from_value(answer.json()).expect("a lease")
}

/// A lease, ended or not.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn lease_now(agent: &Agent, id: LeaseId) -> Lease {
    let answer = agent.get(&format!("/v1/leases/{id}"));
    assert_eq!(answer.status, 200, "{id}: {}", String::from_utf8_lossy(&answer.body));
    serde_json::from_value(answer.json()).expect("a lease")
}

/// Waits until a lease is in a state.
///
/// # Panics
/// When it does not come to it.
pub fn lease_becomes(agent: &Agent, id: LeaseId, state: LeaseState) -> Lease {
    agent.await_that(&format!("{id} {state}"), || lease_now(agent, id).state == state);
    lease_now(agent, id)
}

/// Releases all leases of a target: without `force` a daemon with leases is not stopped.
///
/// # Panics
/// When one cannot be released.
pub fn release_all(agent: &Agent, target: &str) {
    for lease in daemon(agent, target).leases {
        release(agent, lease.id);
    }
}

/// Where a host's daemons have their directories.
///
/// # Panics
/// When the host names none.
#[must_use]
pub fn base(host: &Host) -> PathBuf {
    PathBuf::from(host.env().get("GPUSH_MPS_DIR").expect("a host has a directory for MPS daemons"))
}

/// A fault of the stand-ins: the words after `gpush-sim mps DIR fault add`; its number.
///
/// # Panics
/// When it is refused.
pub fn fault(host: &Host, rule: &str) -> String {
    let words: Vec<&str> = ["fault", "add"].into_iter().chain(rule.split_whitespace()).collect();
    host.sim("mps", &words).trim().to_owned()
}

/// How often faults of the stand-ins that are there went wrong, all together.
///
/// # Panics
/// When the simulated host does not tell.
#[must_use]
pub fn fired(host: &Host) -> u64 {
    let rules = fs::read_to_string(host.dir().join("mps-faults.toml")).unwrap_or_default();
    let counts = rules.lines().filter_map(|line| line.strip_prefix("fired = "));
    counts.map(|count| count.parse::<u64>().expect("a number")).sum()
}

/// Ends all faults of the stand-ins; what they held up goes on.
///
/// # Panics
/// When they can't be ended.
pub fn clear_faults(host: &Host) {
    host.sim("mps", &["fault", "clear"]);
}

/// A directory with NVIDIA's own control daemon and the stand-in of its server, which needs no GPU;
/// `None`, said, where it is not installed.
///
/// # Panics
/// When it can't be made.
#[must_use]
pub fn real_programs(host: &Host, what: &str) -> Option<PathBuf> {
    let real = Path::new("/usr/bin").join(CONTROL);
    if !real.is_file() {
        println!("SKIPPED {what}: {CONTROL} is not installed (Debian's package nvidia-cuda-mps)");
        return None;
    }
    // Beside the host's own `bin`: the stand-in of the server knows its host by where it lies.
    let dir = host.dir().join("real");
    fs::create_dir_all(&dir).expect("a directory");
    symlink(real, dir.join(CONTROL)).expect("a link");
    symlink(program("gpush-sim"), dir.join(SERVER)).expect("a link");
    Some(dir)
}

/// A process that belongs to a pipe directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part {
    /// Its pid.
    pub pid: i32,
    /// What it is.
    pub role: Role,
    /// Its pipe directory.
    pub pipe: PathBuf,
}

/// What a process that names a pipe directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The control daemon.
    Control,
    /// A server of one.
    Server,
    /// Anything else, such as a client.
    Other,
}

/// Processes that live and name a pipe directory below `base`, by the kernel's word.
///
/// # Panics
/// When there is no `/proc`.
#[must_use]
pub fn parts(base: &Path) -> Vec<Part> {
    let mut parts = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // Empty of a zombie, which is no process any more.
        let Ok(environment) = fs::read(entry.path().join("environ")) else { continue };
        let named =
            environment.split(|byte| *byte == 0).find_map(|word| word.strip_prefix(b"CUDA_MPS_PIPE_DIRECTORY="));
        let Some(pipe) = named.map(|path| PathBuf::from(String::from_utf8_lossy(path).into_owned())) else { continue };
        if !pipe.starts_with(base) {
            continue;
        }
        let called = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = called.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        let (name, argument) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let role = match Path::new(name.as_ref()).file_name().and_then(|name| name.to_str()) {
            // Without it, it is a front-end.
            Some(CONTROL) if argument == "-f" => Role::Control,
            Some(SERVER) => Role::Server,
            Some(_) | None => Role::Other,
        };
        parts.push(Part { pid, role, pipe });
    }
    parts.sort();
    parts
}

/// Pids of the control daemons that live below `base`.
#[must_use]
pub fn controls(base: &Path) -> Vec<i32> {
    let all = parts(base);
    all.into_iter().filter(|part| part.role == Role::Control).map(|part| part.pid).collect()
}

/// Names in a directory, sorted; none where it is not there.
#[must_use]
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Whether anybody but its owner is let into a directory: what the group may do is then what the access
/// list gives at most.
#[must_use]
pub fn is_open(dir: &Path) -> bool {
    fs::metadata(dir).is_ok_and(|meta| meta.permissions().mode() & 0o070 != 0)
}

/// The pid of a daemon that has one.
///
/// # Panics
/// When it has none.
#[must_use]
pub fn pid_of(daemon: &MpsDaemon) -> i32 {
    daemon.pid.expect("a pid").cast_signed()
}

/// Sends a process a signal; whether it was there.
#[must_use]
pub fn signal(pid: i32, signal: Signal) -> bool {
    kill(Pid::from_raw(pid), signal).is_ok()
}
