//! Requests a lease, and waits in the queue until it is granted.
//!
//! gpushd answers a request when the lease is granted. Until then, this process reads the request's place in the queue
//! over a second connection, and shows this place. If this process exits earlier, the request's connection closes, and
//! gpushd removes the request from the queue.

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
    socket,
};

/// Interval at which gpushctl reads the queue.
const POLL: Duration = Duration::from_secs(1);

/// A request for a lease, and how to send it.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) request: LeaseRequest,
    /// Whether to hide the place in the queue and the warnings.
    pub(super) quiet: bool,
}

/// Creates the request of `lease request` and `lease env`. If the flags set no end, the lease ends with the login
/// session.
pub(super) fn bound(flags: &RequestFlags, held: &LeaseBindingFlags) -> Result<LeaseRequest, ApiError> {
    let mut request = flags.request()?;
    request.holder = held.user.as_deref().map(uid_of).transpose()?;
    (request.process, request.bind_to) = match (held.with, request.duration_s) {
        // gpushd binds the lease to the cgroup of the login session or container. If there is no such cgroup, gpushd
        // binds the lease to the session leader; if there is no session leader either, gpushd refuses the request.
        (None, None) => (session()?, BindTo::Cgroup),
        (with, _) => (with, BindTo::Process),
    };
    Ok(request)
}

/// Requests a lease and waits until it is granted.
///
/// # Errors
/// If the request is refused, or not granted in time.
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
    let mut watcher = Client::new(socket::chosen(global)).deadline(global.request_timeout);
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
        // If the queue cannot be read, try again later. This does not affect the request, which has its own connection.
        let Some(queued) = leases.iter().flatten().find(|lease| is_own(lease)) else { continue };
        let text = lease::waits(queued, &out.look);
        if text != shown {
            out.remark(&text);
            shown = text;
        }
    }
}

/// Returns whether a lease belongs to the request that this process is waiting for.
fn is_own(lease: &Lease) -> bool {
    let pid = lease.asked_by.as_ref().and_then(|actor| actor.pid);
    matches!(lease.state, LeaseState::Queued | LeaseState::Granting) && pid == Some(std::process::id())
}

/// Prints the warnings of a granted lease, and what the quota has added to the request. On a terminal, also prints why the lease is not bound to a cgroup.
pub(super) fn warn(granted: &LeaseGrant, quiet: bool, out: &Output) {
    if quiet {
        return;
    }
    let remark = |label: &str, text: &str| out.remark(&(out.look.wrap(label, &out.look.clean(text)).join("\n") + "\n"));
    for warning in &granted.warnings {
        remark("warning: ", warning);
    }
    for note in &granted.quota_notes {
        remark("note: ", note);
    }
    if let Some(reason) = granted.binding_reason.as_ref().filter(|_| std::io::stderr().is_terminal()) {
        remark("note: ", &format!("lease {} is not bound to a cgroup, because {reason}", granted.lease.id));
    }
}

/// Converts a user name or a uid to a uid.
pub(in crate::commands) fn uid_of(user: &str) -> Result<u32, ApiError> {
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

/// Returns the pid of the session leader of this command. If the flags set no end, the lease ends when the session
/// leader exits. Returns `None` if there is no suitable session leader, as in many containers.
fn session() -> Result<Option<u32>, ApiError> {
    let leader = getsid(None).map_err(|errno| no_end(format!("cannot find the session of this command: {errno}")))?;
    // Pid 0 means that the leader is outside this container. Process 1 never exits, so it cannot end a lease.
    let pid = u32::try_from(leader.as_raw()).ok().filter(|pid| *pid > 1);
    let Some(pid) = pid else { return Ok(None) };
    Ok(can_end_with(kill(Pid::from_raw(leader.as_raw()), None)).then_some(pid))
}

/// Returns whether a lease can end with the session leader: it has not ended, and belongs to the user. `signalled` is the
/// result of signal 0 to the leader.
fn can_end_with(signalled: Result<(), Errno>) -> bool {
    signalled.is_ok()
}

fn no_end(cause: String) -> ApiError {
    let error = ApiError::new(Code::BadRequest, "the lease needs an end").cause(cause);
    error.hint("add `--for 2h`, or `--with $$` to end it with the shell")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: a lease whose end the quota sets was refused after `su`, because its session leader belongs to another user.
    #[test]
    fn lease_does_not_end_with_the_session_leader_of_another_user() {
        assert!(can_end_with(Ok(())));
        assert!(!can_end_with(Err(Errno::ESRCH)) && !can_end_with(Err(Errno::EPERM)));
    }
}
