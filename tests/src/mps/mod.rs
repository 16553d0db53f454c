//! MPS daemons on a simulated host: as gpushd reports them, and as `/proc` shows them.
//!
//! Tests also find daemons without gpushd: the environment of a control daemon, and of each process
//! that the daemon has started, names the pipe directory of the daemon.

mod client;
mod processes;
mod served;

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    time::Instant,
};

pub use client::Client;
use gpush_api::{ApiError, Lease, LeaseGrant, LeaseId, LeaseState, MpsDaemon, MpsState};
use processes::{CONTROL, SERVER};
pub use processes::{Part, Role, controls, parts, signal};
use serde_json::Value;
pub use served::Served;

use crate::{
    agent::{Agent, Answer, PATIENCE},
    host::{Host, program},
};

/// Returns a daemon by any of its names. gpushd polls the daemon for this answer. Waits while gpushd starts the driver.
///
/// # Panics
/// If the daemon does not exist.
#[must_use]
pub fn daemon(agent: &Agent, target: &str) -> MpsDaemon {
    let answer = agent.until("the GPUs are known", || {
        let answer = agent.get(&format!("/v1/mps/{target}"));
        (!is_before_first_reading(&answer)).then_some(answer)
    });
    assert_eq!(answer.status, 200, "{target}: {}", String::from_utf8_lossy(&answer.body));
    serde_json::from_value(answer.json()).expect("a daemon")
}

/// Returns all daemons as gpushd saw them when it last polled them. While gpushd starts the driver,
/// the list is empty.
///
/// # Panics
/// If the request fails.
#[must_use]
pub fn daemons(agent: &Agent) -> Vec<MpsDaemon> {
    let answer = agent.get("/v1/mps");
    if is_before_first_reading(&answer) {
        return Vec::new();
    }
    serde_json::from_value(answer.json()).expect("daemons")
}

/// Returns whether gpushd cannot answer yet, because it starts the driver.
fn is_before_first_reading(answer: &Answer) -> bool {
    answer.status == 503 && answer.error().retryable
}

/// Waits until a daemon is in a state.
///
/// # Panics
/// If the daemon does not reach the state in time.
pub fn reaches(agent: &Agent, target: &str, state: MpsState) -> MpsDaemon {
    becomes(agent, target, state.name(), |daemon| daemon.state == state)
}

/// Waits until `is` returns true for a daemon.
///
/// # Panics
/// If `is` does not return true in time.
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
        // Pause, because requests without a pause would use up gpushd's processor time.
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Sends the request `start`, `stop`, `restart`, `drain` or `settings` with this body.
#[must_use]
pub fn act(agent: &Agent, target: &str, verb: &str, body: &Value) -> Answer {
    agent.post(&format!("/v1/mps/{target}/{verb}"), body)
}

/// Requests a lease on a target. `body` has `percentage`, `memory_limit_mib` and `priority`, and
/// may have other fields of the request, such as `duration_s`.
///
/// # Errors
/// The API error, if gpushd refuses the request.
///
/// # Panics
/// If the response is neither a lease nor an error.
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
/// The API error, if gpushd refuses the request.
///
/// # Panics
/// If the answer is neither a lease nor an error.
pub fn lease_for(agent: &Agent, uid: u32, target: &str, body: &Value) -> Result<LeaseGrant, ApiError> {
    let mut body = body.clone();
    body["holder_uid"] = uid.into();
    lease(agent, target, &body)
}

/// Returns the request body that [`lease`] sends.
///
/// # Panics
/// If the body is not an object.
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

/// Releases a lease. Returns the lease, whose state is now `releasing` or `ended`.
///
/// # Panics
/// If the lease cannot be released.
pub fn release(agent: &Agent, id: LeaseId) -> Lease {
    let answer = agent.post(&format!("/v1/leases/{id}/release"), &serde_json::json!({}));
    assert_eq!(answer.status, 200, "{id}: {}", String::from_utf8_lossy(&answer.body));
    serde_json::from_value(answer.json()).expect("a lease")
}

/// Returns a lease, which may have ended.
///
/// # Panics
/// If the lease does not exist.
#[must_use]
pub fn lease_now(agent: &Agent, id: LeaseId) -> Lease {
    let answer = agent.get(&format!("/v1/leases/{id}"));
    assert_eq!(answer.status, 200, "{id}: {}", String::from_utf8_lossy(&answer.body));
    serde_json::from_value(answer.json()).expect("a lease")
}

/// Waits until a lease is in a state.
///
/// # Panics
/// If the lease does not reach the state in time.
pub fn lease_becomes(agent: &Agent, id: LeaseId, state: LeaseState) -> Lease {
    agent.await_that(&format!("{id} {state}"), || lease_now(agent, id).state == state);
    lease_now(agent, id)
}

/// Releases all leases of a target. Without `force`, gpushd does not stop a daemon with leases.
///
/// # Panics
/// If a lease cannot be released.
pub fn release_all(agent: &Agent, target: &str) {
    for lease in daemon(agent, target).leases {
        release(agent, lease.id);
    }
}

/// Releases all leases on a target, and waits until they have ended. No process of these leases may run.
///
/// On a busy host, a released lease ends only when gpushd has read all processes.
///
/// # Panics
/// If a lease cannot be released, or does not end.
pub fn end_leases(agent: &Agent, target: &str) {
    release_all(agent, target);
    agent.await_that("no lease", || daemon(agent, target).leases.is_empty());
}

/// Returns the directory that contains the pipe directories of a host's daemons.
///
/// # Panics
/// If the host's environment does not name that directory.
#[must_use]
pub fn base(host: &Host) -> PathBuf {
    PathBuf::from(host.env().get("GPUSH_MPS_DIR").expect("a host has a directory for MPS daemons"))
}

/// Adds a fault to the simulated programs. `rule` has the arguments of `gpush-sim mps DIR fault
/// add`. Returns the number of the fault.
///
/// # Panics
/// If the rule is refused.
pub fn fault(host: &Host, rule: &str) -> String {
    let words: Vec<&str> = ["fault", "add"].into_iter().chain(rule.split_whitespace()).collect();
    host.sim("mps", &words).trim().to_owned()
}

/// Returns how often the current faults of the simulated programs have occurred, in total.
///
/// # Panics
/// If the file of faults is invalid.
#[must_use]
pub fn fired(host: &Host) -> u64 {
    let rules = fs::read_to_string(host.dir().join("mps-faults.toml")).unwrap_or_default();
    let counts = rules.lines().filter_map(|line| line.strip_prefix("fired = "));
    counts.map(|count| count.parse::<u64>().expect("a number")).sum()
}

/// Removes all faults of the simulated programs. Programs that a fault had delayed continue.
///
/// # Panics
/// If the faults cannot be removed.
pub fn clear_faults(host: &Host) {
    host.sim("mps", &["fault", "clear"]);
}

/// Creates a directory with NVIDIA's own control daemon and the simulated server, which needs no
/// GPU. If NVIDIA's daemon is not installed, prints a line and returns `None`.
///
/// # Panics
/// If the directory cannot be created.
#[must_use]
pub fn real_programs(host: &Host, what: &str) -> Option<PathBuf> {
    let real = Path::new("/usr/bin").join(CONTROL);
    if !real.is_file() {
        println!("SKIPPED {what}: {CONTROL} is not installed (Debian's package nvidia-cuda-mps)");
        return None;
    }
    // The simulated server finds its host through its own path, so the directory must be next to
    // the host's `bin`.
    let dir = host.dir().join("real");
    fs::create_dir_all(&dir).expect("a directory");
    symlink(real, dir.join(CONTROL)).expect("a link");
    symlink(program("gpush-sim"), dir.join(SERVER)).expect("a link");
    Some(dir)
}

/// Returns the sorted names in a directory. If the directory does not exist, returns no names.
#[must_use]
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Returns whether a user other than the owner has access to a directory. The group bits of the
/// mode show this, because they are the mask of the access list.
#[must_use]
pub fn is_open(dir: &Path) -> bool {
    fs::metadata(dir).is_ok_and(|meta| meta.permissions().mode() & 0o070 != 0)
}

/// Returns the pid of a running daemon.
///
/// # Panics
/// If the daemon has no pid.
#[must_use]
pub fn pid_of(daemon: &MpsDaemon) -> i32 {
    daemon.pid.expect("a pid").cast_signed()
}
