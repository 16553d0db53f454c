//! The session of this process with the simulated driver. The session counts its users: the parts
//! of the process that have called nvmlInit and not yet nvmlShutdown.
//!
//! ```text
//!  closed ──nvmlInit──▶ open (1 user) ──nvmlInit──▶ open (2) ──nvmlShutdown──▶ open (1) ──nvmlShutdown──▶ closed
//! ```
//!
//! `nvmlInit` reads `$NVML_SIM_STATE` when it opens the session, so a process can change to another
//! simulated host between sessions. A forked child is a separate client, and registers at its first
//! call.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use silicon::description::DEFAULT_DRIVER;
use silicon::{Host, Machine, Return};

use crate::caller::Outcome;

/// CUDA release with which the library's version begins.
const CUDA_RELEASE: u32 = 12;

/// An open session.
pub(crate) struct Session {
    /// The simulated host.
    pub(crate) host: Host,
    /// The state when the session began. If a fault makes the session stale, its lists continue to
    /// show this state.
    pub(crate) at_init: Arc<Machine>,
    /// Pid of the process that is registered as a client.
    registered: AtomicU32,
}

struct Users {
    count: u32,
    session: Option<Arc<Session>>,
}

static USERS: Mutex<Users> = Mutex::new(Users { count: 0, session: None });

fn users() -> MutexGuard<'static, Users> {
    USERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the session, or adds one user to the open session.
pub(crate) fn open(function: &'static str) -> Outcome {
    let mut users = users();
    if users.session.is_none() {
        let host = Host::from_environment()?;
        let decision = host.before(&silicon::Call::new(function))?;
        if let Some(rc) = decision.rc {
            host.after(decision);
            return Err(rc);
        }
        host.connect()?;
        let at_init = host.read()?;
        host.after(decision);
        let registered = AtomicU32::new(std::process::id());
        users.session = Some(Arc::new(Session { host, at_init, registered }));
    }
    users.count += 1;
    Ok(())
}

/// Removes one user from the session. Ends the session if that was the last user. Does nothing
/// without a session.
pub(crate) fn close() -> Outcome {
    let mut users = users();
    users.count = users.count.saturating_sub(1);
    if users.count > 0 {
        return Ok(());
    }
    let ended = users.session.take();
    drop(users);
    if let Some(session) = ended {
        crate::events::forget_all();
        crate::gpm::forget_all();
        session.host.disconnect()?;
    }
    Ok(())
}

/// Returns the session, or `UNINITIALIZED` if no session is open.
pub(crate) fn current() -> Outcome<Arc<Session>> {
    let session = users().session.clone().ok_or(Return::Uninitialized)?;
    let pid = std::process::id();
    if session.registered.swap(pid, Ordering::AcqRel) != pid {
        session.host.connect()?;
    }
    Ok(session)
}

/// Returns `12.<driver version>`. In a session, this is the driver version of the host. Without a
/// session, it is the version that this library simulates.
pub(crate) fn library_version() -> String {
    let of_session = users().session.as_ref().map(|session| session.host.hardware().driver);
    let driver = of_session
        .or_else(|| Host::from_environment().ok().map(|host| host.hardware().driver))
        .unwrap_or(DEFAULT_DRIVER);
    format!("{CUDA_RELEASE}.{driver}")
}
