//! Tests of `gpushctl run` and `gpushctl lease` with a program that answers instead of gpushd: requests, output and
//! exit statuses.

mod env;
mod list;
mod run;

use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use gpush_api::{
    Actor, ApiError, Code, EndReason, EnteredLease, IdleAction, IdleReport, Lease, LeaseBinding, LeaseGrant,
    LeaseHolder, LeaseId, LeaseKeep, LeaseKind, LeaseMember, LeaseQueuePosition, LeaseRequest, LeaseRevocation,
    LeaseShare, LeaseState, LeaseWait, MemberShare, Mode, Priority, UnusedLease, UseState,
};
use insta::assert_snapshot;

use crate::support::{Agent, Answer, GPUSHCTL, Host, Request};

/// UUID of GPU 0 of the sample host.
const GPU: &str = "GPU-00000000-0000-0000-0000-000000000000";

/// Returns a time in the future, so that the output always shows an age of 0.
fn at(second: i64) -> jiff::Timestamp {
    let start: jiff::Timestamp = "2999-01-01T00:00:00Z".parse().unwrap();
    start.checked_add(jiff::SignedDuration::from_secs(second)).unwrap()
}

/// Returns the uid of the user who runs the tests.
pub(crate) fn me() -> u32 {
    nix::unistd::getuid().as_raw()
}

/// Returns an active lease of 25 % of GPU 0, bound to a process.
pub(crate) fn lease(id: u64, uid: u32) -> Lease {
    let share = MemberShare::Mps {
        percentage: "25".parse().unwrap(),
        memory_limit_mib: "8G".parse().ok(),
        priority: Priority::Normal,
    };
    let member =
        LeaseMember { target: GPU.into(), gpu_uuid: GPU.into(), share, memory_mib: 8192, gpu_memory_mib: 81_920 };
    Lease {
        id: LeaseId(id),
        holder: LeaseHolder { uid, user: Some("alice".to_owned()) },
        account: None,
        asked_by: Some(Actor { uid, user: Some("alice".to_owned()), pid: Some(4000) }),
        kind: LeaseKind::Mps,
        enforcement: LeaseKind::Mps.enforcement(),
        device_access: None,
        state: LeaseState::Active,
        reason: None,
        request: Some(LeaseRequest::default()),
        members: vec![member],
        binding: LeaseBinding::Process { pid: Some(4055), start: Some(1) },
        operation: None,
        created_at: at(0),
        granted_at: Some(at(1)),
        expires_at: None,
        ended_at: None,
        queue: None,
        waits_for: Vec::new(),
        revocation: None,
        notice: None,
        usage: None,
        keep: None,
        idle: None,
        over_limit: None,
    }
}

pub(crate) fn granted(id: u64, uid: u32) -> LeaseGrant {
    let variables = [
        ("CUDA_VISIBLE_DEVICES", GPU),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("CUDA_MPS_PIPE_DIRECTORY", "/run/gpush-mps/g5d1b03a2/1"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=8192M"),
        ("CUDA_MPS_CLIENT_PRIORITY", "0"),
        ("GPUSH_LEASE", if id == 17 { "L17" } else { "L18" }),
    ];
    let environment = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    LeaseGrant {
        lease: lease(id, uid),
        environment,
        warnings: Vec::new(),
        quota_notes: Vec::new(),
        binding_reason: None,
    }
}

fn gpus() -> Vec<gpush_api::Gpu> {
    let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
    gpus.truncate(2);
    gpus[0].mig = None;
    (gpus[0].mode, gpus[0].rule, gpus[0].uuid) = (Mode::Mps, Some("shared".to_owned()), GPU.into());
    gpus
}

/// Returns a queued lease of this user.
fn queued() -> Lease {
    let queue = LeaseQueuePosition {
        position: 2,
        behind: vec!["L16".to_owned(), "op-7".to_owned()],
        reasons: vec!["10 % of GPU 0 is left".to_owned()],
        reserves: None,
    };
    Lease {
        state: LeaseState::Queued,
        members: Vec::new(),
        granted_at: None,
        queue: Some(queue),
        request: Some(LeaseRequest { share: LeaseShare::Whole {}, count: 2, ..LeaseRequest::default() }),
        ..lease(19, me())
    }
}

/// Returns a report with one unused lease, and one lease of the dry run.
fn unused() -> IdleReport {
    let one = |id, state, warning_count| UnusedLease {
        lease_id: LeaseId(id),
        holder: LeaseHolder { uid: me(), user: Some("alice".to_owned()) },
        state,
        unused_since: at(0),
        action: IdleAction::Release,
        due_at: at(14_400),
        warning_count,
        is_open: true,
    };
    IdleReport {
        from: at(0),
        assumed_action: None,
        unused_now: vec![one(17, UseState::Idle, 1)],
        would_have: vec![one(9, UseState::Empty, 2)],
    }
}

fn revoked() -> Lease {
    let by = Actor { uid: 0, user: Some("root".to_owned()), pid: Some(1) };
    Lease {
        state: LeaseState::Releasing,
        reason: Some(EndReason::Revoked),
        waits_for: vec!["pid 4055 (alice, python train.py)".to_owned()],
        revocation: Some(LeaseRevocation { by, reason: "fan".to_owned(), at: at(2), processes_end_at: None }),
        ..lease(17, me())
    }
}

/// Returns the answer to `lease end --kill` for a lease without processes.
fn revoked_without_processes() -> Lease {
    let revocation = revoked().revocation.map(|one| LeaseRevocation { processes_end_at: Some(at(3)), ..one });
    let (state, waits_for, ended_at) = (LeaseState::Ended, Vec::new(), Some(at(2)));
    Lease { id: LeaseId(20), state, waits_for, ended_at, revocation, ..revoked() }
}

/// Returns the answer for a lease that does not exist.
fn no_lease(id: &str) -> Answer {
    let error = ApiError::new(Code::NotFound, format!("there is no lease {id}"));
    Answer::error(&error.hint("list all leases with `gpushctl lease list`"))
}

/// Starts an agent for tests. It has lease L17 of this user and lease L18 of another user, and answers every request
/// for a lease with L17.
fn agent(host: &Host) -> Agent {
    Agent::listen(&host.path("gpushd.sock"), answer)
}

fn answer(request: &Request) -> Answer {
    let other = me() + 1;
    match (request.method.as_str(), request.path.as_str()) {
        ("POST", "/v1/leases") => Answer::ok(&granted(17, me())),
        ("GET", "/v1/leases") => Answer::ok(&[lease(17, me()), lease(18, other), queued()]),
        ("GET", "/v1/leases?mine=true") => Answer::ok(&[lease(17, me()), queued()]),
        ("GET", "/v1/leases?mine=true&ended=1") => {
            let ended = Lease {
                state: LeaseState::Ended,
                reason: Some(EndReason::Expired),
                ended_at: Some(at(3)),
                ..lease(9, me())
            };
            Answer::ok(&[lease(17, me()), queued(), ended])
        }
        ("GET", "/v1/leases/L17") => Answer::ok(&lease(17, me())),
        ("GET", "/v1/leases/L18") => Answer::ok(&lease(18, other)),
        ("GET", "/v1/leases/L19") => Answer::ok(&queued()),
        ("GET", "/v1/leases/L17/environment") => Answer::ok(&granted(17, me())),
        // Administrators may read the environment of every lease.
        ("GET", "/v1/leases/L18/environment") => Answer::ok(&granted(18, other)),
        ("POST", "/v1/leases/L17/enter") => Answer::ok(&EnteredLease::default()),
        ("POST", "/v1/leases/L17/renew") => {
            let mut renewed = lease(17, me());
            renewed.expires_at = Some(jiff::Timestamp::now() + jiff::SignedDuration::from_secs(7230));
            Answer::ok(&renewed)
        }
        ("POST", "/v1/leases/L17/keep") => {
            let by = Actor { uid: me(), user: Some("alice".to_owned()), pid: None };
            let keep = LeaseKeep { by, reason: "demo".to_owned(), at: at(0), until: at(7200) };
            Answer::ok(&Lease { keep: Some(keep), ..lease(17, me()) })
        }
        ("GET", path) if path.starts_with("/v1/leases/idle?since=") => Answer::ok(&unused()),
        ("POST", "/v1/leases/L17/release") => {
            Answer::ok(&Lease { state: LeaseState::Ended, reason: Some(EndReason::Released), ..lease(17, me()) })
        }
        ("POST", "/v1/leases/L17/revoke") => Answer::ok(&revoked()),
        ("POST", "/v1/leases/L20/revoke") => Answer::ok(&revoked_without_processes()),
        (_, "/v1/gpus") => Answer::ok(&gpus()),
        (_, path) => no_lease(path.split('/').nth(3).unwrap_or_default()),
    }
}

/// Returns the last request for a lease that the agent has got.
fn requested(agent: &Agent) -> LeaseRequest {
    serde_json::from_str(&agent.bodies("/v1/leases").pop().expect("a request")).unwrap()
}

/// Returns a command that runs a shell script in the directory of the host, with the socket of its agent.
fn shell(host: &Host, script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).current_dir(host.dir.path()).env("GPUSH_SOCKET", "gpushd.sock");
    command.env_remove("GPUSH_LEASE");
    command
}

fn stdout(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
