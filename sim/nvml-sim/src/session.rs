//! The session of this process with the simulated driver. Several parts of the process can use the session. A part that
//! has called nvmlInit and not yet nvmlShutdown is a user. The session counts its users.
//!
//! ```text
//!  closed ──nvmlInit──▶ open (1 user) ──nvmlInit──▶ open (2) ──nvmlShutdown──▶ open (1) ──nvmlShutdown──▶ closed
//! ```
//!
//! `nvmlInit` reads `$NVML_SIM_STATE` when it opens the session. So a process can change to another simulated host
//! between two sessions. A forked child is a separate client of the driver, and registers at its first call.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard};

use gpush_locked::Locked;
use silicon::description::DEFAULT_DRIVER;
use silicon::{Host, Machine, Return};

use crate::caller::Outcome;

/// An open session.
pub(crate) struct Session {
    pub(crate) host: Host,
    /// The state when the session began. If a fault rule makes the session stale, calls that list objects return this
    /// state.
    pub(crate) at_init: Arc<Machine>,
    /// Pid of the process that this session has registered as a client of the driver.
    registered: AtomicU32,
}

struct Users {
    count: u32,
    session: Option<Arc<Session>>,
}

static USERS: Locked<Users> = Locked::new(Users { count: 0, session: None });

fn users() -> MutexGuard<'static, Users> {
    USERS.lock()
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

/// Removes one user from the session. If that was the last user, ends the session, after `forget` has dropped the objects
/// of the session. If no session is open, does nothing.
pub(crate) fn close(forget: impl FnOnce()) -> Outcome {
    let mut users = users();
    users.count = users.count.saturating_sub(1);
    if users.count > 0 {
        return Ok(());
    }
    let ended = users.session.take();
    drop(users);
    if let Some(session) = ended {
        forget();
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

/// Returns the CUDA release of the driver's branch and the driver version, such as `12.550.163.01` or `13.580.159.04`.
/// In a session, this is the driver version of the simulated host. Otherwise, it is the version that this library
/// simulates.
pub(crate) fn library_version() -> String {
    let of_session = users().session.as_ref().map(|session| session.host.hardware().driver);
    let driver = of_session
        .or_else(|| Host::from_environment().ok().map(|host| host.hardware().driver))
        .unwrap_or(DEFAULT_DRIVER);
    format!("{}.{driver}", driver.cuda() / 1000)
}
