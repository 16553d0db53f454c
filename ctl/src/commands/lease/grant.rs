//! Requests a lease, and waits in the queue until it is granted.
//!
//! gpushd responds when the lease is granted. Meanwhile this process shows the position in the queue, which it reads
//! over a second connection. If this process exits early, its connection closes, and gpushd removes the request from
//! the queue.

use std::{io::IsTerminal, time::Duration};

use gpush_api::{ApiError, BindTo, Code, Lease, LeaseGrant, LeaseRequest, LeaseState, LeaseWait};
use gpush_client::Client;
use nix::{
    errno::Errno,
    sys::signal::kill,
    unistd::{Pid, User, getsid},
};

use crate::{
    args::{Global, LeaseBindingFlags, RequestFlags},
    exit::Failure,
    output::Output,
    render::lease,
};

/// Pause before each read of the queue.
const POLL: Duration = Duration::from_secs(1);

/// A request, and how to send it.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) request: LeaseRequest,
    /// Whether to hide the place in the queue and the warnings.
    pub(super) quiet: bool,
}

/// Creates the request of `lease request` and `lease env`. If no end is given, the lease ends with the login session.
pub(super) fn bound(flags: &RequestFlags, held: &LeaseBindingFlags) -> Result<LeaseRequest, ApiError> {
    let mut request = flags.request()?;
    request.holder = held.user.as_deref().map(uid).transpose()?;
    (request.process, request.bind_to) = match (held.with, request.duration_s) {
        // gpushd binds the lease to the cgroup of the login session or container. If it finds none,
        // it binds the lease to the session leader, and refuses a request without one.
        (None, None) => (session()?, BindTo::Cgroup),
        (with, _) => (with, BindTo::Process),
    };
    Ok(request)
}

/// Requests the lease and waits for the grant.
///
/// # Errors
/// If the lease is refused, or not granted in time.
pub(super) async fn granted(
    client: &mut Client,
    global: &Global,
    asked: &Asked,
    out: &Output,
) -> Result<LeaseGrant, Failure> {
    if asked.request.wait == LeaseWait::No || asked.quiet || out.json {
        return Ok(client.lease(&asked.request).await?);
    }
    let mut granted = std::pin::pin!(client.lease(&asked.request));
    let mut watcher = Client::new(super::super::socket(global)).deadline(global.request_timeout);
    let mut shown = String::new();
    loop {
        tokio::select! {
            granted = &mut granted => return Ok(granted?),
            () = tokio::time::sleep(POLL) => {}
        }
        let leases = tokio::select! {
            granted = &mut granted => return Ok(granted?),
            leases = watcher.leases(0) => leases,
        };
        // If a read fails, it is repeated later. The failure does not affect the request, which has
        // a separate connection.
        let Some(queued) = leases.iter().flatten().find(|lease| is_own(lease)) else { continue };
        let text = lease::waits(queued, &out.look);
        if text != shown {
            out.remark(&text);
            shown = text;
        }
    }
}

/// Returns whether a lease is the pending request of this process.
fn is_own(lease: &Lease) -> bool {
    let pid = lease.asked_by.as_ref().and_then(|actor| actor.pid);
    matches!(lease.state, LeaseState::Queued | LeaseState::Granting) && pid == Some(std::process::id())
}

/// Prints the warnings of a grant. On a terminal, also prints why the lease has no cgroup. Prints
/// nothing if `quiet` is set.
pub(super) fn warn(granted: &LeaseGrant, quiet: bool, out: &Output) {
    if quiet {
        return;
    }
    let remark = |label: &str, text: &str| out.remark(&(out.look.wrap(label, &out.look.clean(text)).join("\n") + "\n"));
    for warning in &granted.warnings {
        remark("warning: ", warning);
    }
    if let Some(reason) = granted.binding_reason.as_ref().filter(|_| std::io::stderr().is_terminal()) {
        remark("note: ", &format!("lease {} is not bound to a cgroup, because {reason}", granted.lease.id));
    }
}

/// Converts a user name or a uid to a uid.
fn uid(user: &str) -> Result<u32, ApiError> {
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    match User::from_name(user) {
        Ok(Some(found)) => Ok(found.uid.as_raw()),
        Ok(None) => Err(ApiError::new(Code::BadRequest, format!("this host has no user {user:?}"))
            .hint("write a user name or a uid")),
        Err(errno) => {
            Err(ApiError::new(Code::Internal, format!("cannot look up user {user:?}")).cause(errno.to_string()))
        }
    }
}

/// Returns the pid of the session leader of this command. A lease without another end ends when the
/// session leader exits. Returns `None` if no leader is suitable, as in many containers.
fn session() -> Result<Option<u32>, ApiError> {
    let no_end = |cause: String| {
        let error =
            ApiError::new(Code::BadRequest, "the lease cannot end with your login session, so it needs another end")
                .cause(cause);
        error.hint("add `--for 2h`, or add `--with $$` to end the lease with the shell")
    };
    let leader = getsid(None).map_err(|errno| no_end(format!("cannot find the session of this command: {errno}")))?;
    // 0 means a process outside of this container. Process 1 never exits, so it is not a valid end.
    let pid = u32::try_from(leader.as_raw()).ok().filter(|pid| *pid > 1);
    let Some(pid) = pid else { return Ok(None) };
    match kill(Pid::from_raw(leader.as_raw()), None) {
        Ok(()) => Ok(Some(pid)),
        Err(Errno::ESRCH) => Err(no_end(format!("the leader of this session, pid {pid}, has ended"))),
        Err(Errno::EPERM) => Err(no_end(format!("the leader of this session, pid {pid}, belongs to another user"))),
        Err(errno) => Err(no_end(format!("cannot check the leader of this session, pid {pid}: {errno}"))),
    }
}
