//! Transient scopes, into which systemd moves running processes.
//!
//! ```text
//! start_scope ─► match rule for the end of the job ─► StartTransientUnit ─► systemd 255: the process of the pidfd
//!                                                                         └ before: the process that has the pid then
//! ```

use std::os::fd::{AsFd, BorrowedFd};

use gpush_core::lease::access::AllowedDevice;
use tokio::time::timeout;
use zbus::{
    proxy::CacheProperties,
    zvariant::{Fd, Value},
};

use super::{
    Error, JOB_TIMEOUT, Manager, call,
    devices::{limits, version_number},
    ends_of_jobs, job_ends,
    proxies::{Property, SystemManagerProxy},
    subscribe,
};
use crate::pidfd::PidFd;

/// First version of systemd in which the scope property `PIDFDs` exists.
const FIRST_WITH_PIDFDS: u32 = 255;

/// A transient scope for a process that is already running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransientScope {
    /// Name of the unit, with `.scope`.
    pub name: String,
    /// What `systemctl status` shows.
    pub description: String,
    /// The slice that contains it.
    pub slice: String,
    /// The devices that its processes may open; `None` for those of its slice.
    pub devices: Option<Vec<AllowedDevice>>,
}

/// Proxy of systemd's manager. Its connection is subscribed to systemd's signals.
pub(super) struct Subscribed {
    pub(super) manager: SystemManagerProxy<'static>,
    takes_pidfds: bool,
}

impl Manager {
    /// Creates a transient scope and moves a process into it. systemd unloads the scope when its
    /// last process has ended.
    ///
    /// This takes two round trips: a match rule on the bus, which also checks the connection, and
    /// the call. The end of the job arrives as a signal.
    ///
    /// Before systemd 255, only the pid names the process. If the process ends and its pid is
    /// reused before systemd handles the call, systemd moves the other process. The caller must then not kill the
    /// processes of the scope.
    ///
    /// # Errors
    /// When the bus cannot be reached, or systemd refuses. If systemd did not answer, it may have moved the process.
    /// [`Error::Misplaced`] if systemd may have moved another process.
    pub async fn start_scope(&self, scope: &TransientScope, process: &PidFd) -> Result<(), Error> {
        let what = format!("start {}", scope.name);
        let mut systemd = self.subscribed(&what).await?;
        let mut ends = ends_of_jobs(&systemd.manager, &scope.name).await;
        if ends.is_err() {
            // The bus was restarted. gpushd has not sent the call to systemd yet, so it can connect
            // again.
            self.disconnect().await;
            systemd = self.subscribed(&what).await?;
            ends = ends_of_jobs(&systemd.manager, &scope.name).await;
        }
        let ends = ends?;
        let mut properties: Vec<Property<'_>> = vec![
            ("Description", Value::from(scope.description.as_str())),
            ("Slice", Value::from(scope.slice.as_str())),
            ("CollectMode", Value::from("inactive-or-failed")),
            member(process.pid().cast_unsigned(), process.as_fd(), systemd.takes_pidfds),
        ];
        if let Some(devices) = &scope.devices {
            properties.extend(limits(devices));
        }
        let run = job_ends(&what, ends, systemd.manager.start_transient_unit(&scope.name, "fail", &properties, &[]));
        let moved = timeout(JOB_TIMEOUT, run).await;
        let moved = moved.unwrap_or_else(|_| Err(Error::Deadline { what: what.clone(), after: JOB_TIMEOUT }));
        check_identity(moved, what, process, systemd.takes_pidfds)
    }

    /// Checks that systemd can be reached, and connects if needed.
    ///
    /// # Errors
    /// When the bus cannot be reached, or systemd refuses.
    pub async fn check(&self) -> Result<(), Error> {
        self.subscribed("answer a connection").await.map(drop)
    }

    /// Forgets the connection, so that the next call connects again.
    pub(super) async fn disconnect(&self) {
        *self.connection.lock().await = None;
    }

    /// Returns a proxy on the connection, or on a new connection if there is none. systemd sends
    /// its signals to this connection. Does not check whether the connection is still alive.
    pub(super) async fn subscribed(&self, what: &str) -> Result<Subscribed, Error> {
        let mut slot = self.connection.lock().await;
        let link = match slot.as_mut() {
            Some(link) => link,
            None => slot.insert(self.new_link().await?),
        };
        let builder = SystemManagerProxy::builder(&link.connection).cache_properties(CacheProperties::No);
        let manager = builder.build().await.map_err(Error::Bus)?;
        if !link.is_subscribed {
            let version = match subscribe(&manager, what).await {
                Ok(()) => call(what, manager.version()).await,
                Err(error) => Err(error),
            };
            match version {
                Ok(version) => (link.is_subscribed, link.takes_pidfds) = (true, takes_pidfds(&version)),
                Err(error) => {
                    // Drop the connection, so that the next call connects again.
                    *slot = None;
                    return Err(error);
                }
            }
        }
        Ok(Subscribed { manager, takes_pidfds: link.takes_pidfds })
    }
}

/// Checks that systemd has moved this process, and no later process with the same pid. As long as a process has not
/// ended, no other process has its pid.
fn check_identity(moved: Result<(), Error>, what: String, process: &PidFd, takes_pidfds: bool) -> Result<(), Error> {
    if !takes_pidfds && process.has_ended() { Err(Error::Misplaced { what }) } else { moved }
}

/// Returns the property that names the process of a scope.
fn member(pid: u32, process: BorrowedFd<'_>, takes_pidfds: bool) -> Property<'_> {
    if takes_pidfds { ("PIDFDs", Value::from(vec![Fd::from(process)])) } else { ("PIDs", Value::from(vec![pid])) }
}

/// Returns whether a version of systemd takes the process of a scope as a pidfd.
fn takes_pidfds(version: &str) -> bool {
    version_number(version).is_some_and(|number| number >= FIRST_WITH_PIDFDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pidfd_is_used_from_version_255() {
        for version in ["255", "255.4-1ubuntu8", "257.13-1~deb13u1", "257-13.el10", "v256-rc3", "1000"] {
            assert!(takes_pidfds(version), "{version}");
        }
        for version in ["", "v", "254.26", "252.39-1~deb12u2", "247 (257)", "deb257", "99999999999"] {
            assert!(!takes_pidfds(version), "{version}");
        }
    }

    /// Fault: if the caller had ended and another process had its pid, systemd before version 255 moved the other process
    /// into the scope, and gpushd killed it at the end of the lease.
    #[test]
    fn scope_of_ended_process_may_hold_another_process() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = PidFd::open(child.id()).unwrap().unwrap();
        let check = |takes_pidfds| check_identity(Ok(()), "start a.scope".to_owned(), &process, takes_pidfds);
        assert!(check(false).is_ok() && check(true).is_ok());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(check(false).unwrap_err().may_move_another_process());
        assert!(check(true).is_ok(), "the pidfd names no other process");
    }

    #[test]
    fn property_has_the_type_that_systemd_reads() {
        let own = PidFd::open(std::process::id()).unwrap().unwrap();
        let of = |takes_pidfds| member(7, own.as_fd(), takes_pidfds);
        assert_eq!((of(true).0, of(true).1.value_signature().to_string()), ("PIDFDs", "ah".to_owned()));
        assert_eq!((of(false).0, of(false).1.value_signature().to_string()), ("PIDs", "au".to_owned()));
    }
}
