//! The kind of cgroup that a process is in, which decides what a lease of the process can be bound
//! to.
//!
//! ```text
//! /user.slice/user-1000.slice/session-4.scope                  a login session
//! /user.slice/user-1000.slice/user@1000.service/…              the user's own manager: delegated
//! /system.slice/jupyter.service                                a unit of the system manager
//! /system.slice/docker-0123….scope, /docker/0123…              a container
//! /system.slice/slurmstepd.scope/job_42/…                      a Slurm job
//! /gpulease.slice/gpulease-1000.slice/gpulease-….scope         the scope of a lease
//! /, /anything/else                                            none of these
//! ```
//!
//! As in [`super`], this module evaluates only cgroups that root created: root must own the
//! directory in which the cgroup was created. A cgroup below a delegated unit belongs to that unit,
//! regardless of its name.

use super::{Hierarchy, slurm_job, unit_path};

/// The slice above the scopes of all leases. This slice is not below `gpush.slice`, because a stop
/// of `gpush.slice` ends all units below `gpush.slice`.
const LEASES: &str = "/gpulease.slice/";

/// Prefixes of the names of container scopes.
const CONTAINER_SCOPES: [&str; 6] = ["docker-", "libpod-", "crio-", "cri-containerd-", "nerdctl-", "machine-"];

const CONTAINER_DIRS: [&str; 7] =
    ["docker", "libpod_parent", "kubepods", "kubepods.slice", "machine.slice", "lxc", "machine"];

/// The kind of cgroup that a process is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CgroupKind {
    /// The scope of a login session.
    Session {
        /// Path of the session's scope.
        cgroup: String,
        /// Uid in the name of the session's slice.
        uid: u32,
        /// Whether the process is in a cgroup below the scope.
        is_below: bool,
    },
    /// A cgroup below a user's service manager. The user may create and name cgroups there.
    UserManager {
        /// The user.
        uid: u32,
    },
    /// A service or scope of the system manager.
    Unit {
        /// Path of the unit's cgroup.
        cgroup: String,
    },
    /// A container.
    Container {
        /// Path of the container's cgroup.
        cgroup: String,
    },
    /// A Slurm job.
    SlurmJob {
        /// Path of the job's cgroup.
        cgroup: String,
        /// Id of the job.
        job: u64,
    },
    /// The scope of a lease.
    Lease {
        /// Path of the scope.
        cgroup: String,
    },
    /// A cgroup of none of the other kinds.
    Other,
}

/// The cgroup to which a request would bind a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindRequest {
    /// A new scope for the calling process, which becomes the program that uses the lease.
    NewScope,
    /// The cgroup that the calling process is already in. No process is moved.
    Present,
}

/// The owner of the processes in a service or scope of the system manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitOwner {
    /// The user of the calling process.
    Caller,
    /// root, and the service starts sessions of users: for example cron or sshd.
    SessionService,
    /// Another user, or several users.
    Others,
}

/// What a lease is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BindTarget {
    /// A new scope, into which the calling process is moved.
    NewScope,
    /// This cgroup. No process is moved.
    Cgroup(String),
    /// The lease cannot be bound to a cgroup, for this reason.
    None(&'static str),
}

impl CgroupKind {
    /// Returns the kind of the cgroup of a process; [`CgroupKind::Other`] when there is no process.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        crate::proc::cgroups(pid).map_or(Self::Other, |text| Self::parse(&text))
    }

    /// Parses the text of a `/proc/PID/cgroup`.
    #[must_use]
    pub fn parse(cgroups: &str) -> Self {
        Self::parse_with(cgroups, super::created_by)
    }

    /// Parses the text; `created_by` returns the owner of the directory in which a cgroup was
    /// created. A directory that gpushd cannot see is treated as not owned by root.
    pub(super) fn parse_with(cgroups: &str, created_by: impl Fn(Hierarchy<'_>, &str) -> Option<u32>) -> Self {
        let lines: Vec<(&str, &str)> =
            cgroups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':')).collect();
        let is_roots = |hierarchy: &str, path: &str| created_by(Hierarchy(hierarchy), path) == Some(0);
        let of = |wanted: &str| lines.iter().find(|(hierarchy, path)| *hierarchy == wanted && *path != "/").copied();
        let main = of("").or_else(|| of("name=systemd"));
        for (hierarchy, path) in &lines {
            if let Some((job_path, job)) = slurm_job(path)
                && is_roots(hierarchy, job_path)
            {
                return Self::SlurmJob { cgroup: job_path.to_owned(), job: job.id };
            }
        }
        let unit = main.and_then(|(hierarchy, path)| unit_path(path).filter(|unit| is_roots(hierarchy, unit)));
        if let Some(uid) = unit.and_then(user_manager) {
            return Self::UserManager { uid };
        }
        for (hierarchy, path) in &lines {
            if let Some(cgroup) = container(path)
                && is_roots(hierarchy, cgroup)
            {
                return Self::Container { cgroup: cgroup.to_owned() };
            }
        }
        match unit {
            Some(cgroup) if cgroup.starts_with(LEASES) => Self::Lease { cgroup: cgroup.to_owned() },
            Some(cgroup) => match session(cgroup) {
                Some(uid) => {
                    let is_below = !super::is_at(cgroup, cgroups);
                    Self::Session { cgroup: cgroup.to_owned(), uid, is_below }
                }
                None if cgroup == "/init.scope" => Self::Other,
                None => Self::Unit { cgroup: cgroup.to_owned() },
            },
            None => Self::Other,
        }
    }

    /// Chooses what a lease of a process in this cgroup is bound to.
    ///
    /// `uid` is the process's user. `is_on_this_host` is true if the process is in gpushd's own
    /// namespaces. `owner` is the owner of the unit, if the process is in a [`CgroupKind::Unit`].
    #[must_use]
    pub fn choose(self, wish: BindRequest, uid: u32, is_on_this_host: bool, owner: UnitOwner) -> BindTarget {
        let scope = |otherwise: &'static str| match wish {
            // The process may be in a container that was not recognized. Moving the process out of the container would
            // remove the container's limits.
            BindRequest::NewScope if !is_on_this_host => {
                BindTarget::None("the calling process and gpushd are in different namespaces")
            }
            BindRequest::NewScope => BindTarget::NewScope,
            BindRequest::Present => BindTarget::None(otherwise),
        };
        match self {
            // Do not move the process, so that it keeps the limits and devices of its job or
            // container.
            Self::SlurmJob { cgroup, .. } | Self::Container { cgroup } => BindTarget::Cgroup(cgroup),
            Self::Session { cgroup, uid: of, is_below } => match wish {
                BindRequest::Present if of == uid => BindTarget::Cgroup(cgroup),
                // Only root creates cgroups below a session. Such a cgroup can limit its processes. In a new scope, the
                // process would not have these limits.
                BindRequest::NewScope if is_below => {
                    BindTarget::None("the calling process is in a cgroup below its login session")
                }
                BindRequest::Present | BindRequest::NewScope => scope("the login session belongs to another user"),
            },
            Self::Unit { cgroup } => match owner {
                UnitOwner::Caller => BindTarget::Cgroup(cgroup),
                UnitOwner::SessionService => scope("other users have processes in the unit of the calling process"),
                // A unit can limit its processes. Do not bind to a new scope, because the process would lose these
                // limits there. Do not bind to the unit: any user can start a setuid program, so the uids of a unit's
                // processes do not show which user the unit is for.
                UnitOwner::Others => BindTarget::None("the unit of the calling process is not only for its user"),
            },
            Self::UserManager { .. } => scope("the user's own service manager started the calling process"),
            Self::Lease { .. } => BindTarget::None("the calling process is in the scope of another lease"),
            Self::Other => BindTarget::None("the calling process is not in a systemd unit"),
        }
    }
}

/// Returns the uid of a login session's scope: `/user.slice/user-1000.slice/session-4.scope`.
fn session(unit: &str) -> Option<u32> {
    let (slice, scope) = unit.strip_prefix("/user.slice/user-")?.split_once(".slice/")?;
    let is_session = scope.starts_with("session-") && scope.ends_with(".scope") && !scope.contains('/');
    slice.parse().ok().filter(|_| is_session)
}

/// Returns the uid of a user's service manager: `user@1000.service`, in the slice of that user.
fn user_manager(unit: &str) -> Option<u32> {
    let name = unit.rsplit('/').next()?;
    name.strip_prefix("user@")?.strip_suffix(".service")?.parse().ok()
}

/// Returns whether this is the path of a cgroup of a container, or of a cgroup below it.
#[must_use]
pub fn is_in_container(path: &str) -> bool {
    container(path).is_some()
}

/// Returns the beginning of a path up to the cgroup of a container.
fn container(path: &str) -> Option<&str> {
    let mut end = 0;
    let mut is_below = false;
    let mut deepest = None;
    for name in path.strip_prefix('/')?.split('/') {
        end += 1 + name.len();
        let is_scope = name.ends_with(".scope") && CONTAINER_SCOPES.iter().any(|prefix| name.starts_with(prefix));
        let is_id = name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_lxc = name.starts_with("lxc.payload.");
        if is_scope || is_lxc || is_below && (is_id || !CONTAINER_DIRS.contains(&name) && !is_intermediate(name)) {
            deepest.get_or_insert(end);
        }
        is_below |= CONTAINER_DIRS.contains(&name) || name.starts_with("kubepods");
    }
    deepest.map(|end| &path[..end])
}

/// Returns whether Kubernetes puts a cgroup with this name between its slice and a container: a
/// service class or a pod.
fn is_intermediate(name: &str) -> bool {
    name.starts_with("kubepods") || name.starts_with("pod") || ["besteffort", "burstable", "guaranteed"].contains(&name)
}

#[cfg(test)]
mod tests;
