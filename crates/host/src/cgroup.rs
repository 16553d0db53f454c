//! The systemd unit and the Slurm job of a process, by its cgroup.
//!
//! A user can create cgroups with any name below a unit that systemd delegated to that user, such
//! as `user@1000.service`. So this module evaluates only the part of a path that belongs to the
//! system manager:
//!
//! ```text
//! /user.slice/user-1000.slice/user@1000.service/app.slice/slurmstepd.scope/job_42
//!  └──── slices ────────────┘ └─── unit ──────┘ └── the user's: ignored ────────┘
//! /system.slice/slurmstepd.scope/job_42/step_0       Slurm, unified hierarchy; also NODE_slurmstepd.scope
//! /slurm/uid_1000/job_42/step_0                      Slurm, other hierarchies; also slurm_NODE
//! ```
//!
//! In addition, root must own the directory in which the unit or the job was created.

mod kind;
mod members;
mod slurm;
mod walk;

use std::{fs, io, os::unix::fs::MetadataExt, path::Path};

use gpush_api::text;
use gpush_core::attribution::SlurmJob;

pub use self::{
    kind::{BindRequest, BindTarget, CgroupKind, UnitOwner, is_in_container},
    members::{children, contains, is_at, processes, wait_until_empty},
    slurm::job_processes,
    walk::Members,
};
use crate::proc;

/// Where cgroup hierarchies are mounted.
const MOUNTS: &str = "/sys/fs/cgroup";

/// Kinds of units that have processes.
const KINDS: [&str; 5] = [".service", ".scope", ".socket", ".mount", ".swap"];

/// The unit and the job of a process, from its cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// Path of the cgroup, cleaned for display.
    pub path: String,
    /// Unit of the system manager, cleaned for display.
    pub unit: Option<String>,
    /// Slurm job.
    pub slurm_job: Option<SlurmJob>,
}

impl Membership {
    /// Returns the unit's name without `.service`; `None` for units that are not services, and for
    /// the service managers of users.
    pub fn service(&self) -> Option<&str> {
        self.unit.as_deref()?.strip_suffix(".service").filter(|name| !name.starts_with("user@"))
    }

    /// Parses the text of a `/proc/PID/cgroup`; `None` when it has no path.
    pub fn parse(cgroups: &str) -> Option<Self> {
        Self::parse_with(cgroups, created_by)
    }

    /// Parses the text; `created_by` returns the owner of the parent directory of a cgroup, or `None` when gpushd cannot
    /// see that directory.
    fn parse_with(cgroups: &str, created_by: impl Fn(Hierarchy<'_>, &str) -> Option<u32>) -> Option<Self> {
        let lines = || cgroups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let is_roots = |hierarchy: &str, path: &str| matches!(created_by(Hierarchy(hierarchy), path), Some(0) | None);
        let of = |wanted: &str| lines().find(|(hierarchy, path)| *hierarchy == wanted && *path != "/");
        // systemd manages the unified hierarchy, or the hierarchy named `systemd`.
        let (hierarchy, path) = of("").or_else(|| of("name=systemd")).or_else(|| lines().next())?;
        let unit = unit_path(path).filter(|unit| is_roots(hierarchy, unit));
        let job = |(hierarchy, path): (&str, &str)| {
            let (job_path, job) = slurm_job(path)?;
            is_roots(hierarchy, job_path).then_some(job)
        };
        Some(Self {
            path: text::plain(path),
            unit: unit.and_then(|unit| unit.rsplit('/').next()).map(|name| text::plain(unescaped(name))),
            slurm_job: lines().find_map(job),
        })
    }
}

/// Returns the membership of a process; `None` when its cgroup cannot be read.
pub fn of(pid: impl proc::AnyPid) -> Option<Membership> {
    try_of(pid).ok().flatten()
}

/// Returns the membership of a process; `None` when there is no such process, or the process is in no cgroup.
///
/// # Errors
/// The cgroup cannot be read, for example because of too many open files.
pub fn try_of(pid: impl proc::AnyPid) -> io::Result<Option<Membership>> {
    Ok(proc::try_cgroups(pid)?.and_then(|text| Membership::parse(&text)))
}

/// A hierarchy as `/proc/PID/cgroup` names it: its controllers, or an empty string for the unified
/// hierarchy.
#[derive(Debug, Clone, Copy)]
struct Hierarchy<'a>(&'a str);

/// Returns the owner of the directory in which a cgroup was created. Only that user can have
/// created the cgroup.
fn created_by(hierarchy: Hierarchy<'_>, path: &str) -> Option<u32> {
    let parent = Path::new(path.strip_prefix('/')?).parent()?;
    let mounts = match hierarchy.0.strip_prefix("name=").unwrap_or(hierarchy.0) {
        "" => [Path::new(MOUNTS).join("unified"), MOUNTS.into()],
        name => [Path::new(MOUNTS).join(name), Path::new(MOUNTS).join(name)],
    };
    mounts.iter().find_map(|mount| fs::metadata(mount.join(parent)).ok()).map(|meta| meta.uid())
}

/// Returns the beginning of a path up to the unit of the system manager: slices, then the unit.
fn unit_path(path: &str) -> Option<&str> {
    let mut end = 0;
    for name in path.strip_prefix('/')?.split('/') {
        end += 1 + name.len();
        let is_unit = KINDS.iter().any(|kind| name.strip_suffix(kind).is_some_and(|name| !name.is_empty()));
        if is_unit {
            return Some(&path[..end]);
        }
        if !name.ends_with(".slice") {
            return None;
        }
    }
    None
}

/// Removes the `_` that systemd puts before names that would collide with files of the kernel.
fn unescaped(name: &str) -> &str {
    name.strip_prefix('_').unwrap_or(name)
}

/// Returns the beginning of a path up to the cgroup of the Slurm job, and the job.
fn slurm_job(path: &str) -> Option<(&str, SlurmJob)> {
    let mut names = path.strip_prefix('/')?.split('/');
    let (first, second, third) = (names.next()?, names.next()?, names.next()?);
    let (node, uid) = if first == "system.slice" {
        let node = second.strip_suffix("slurmstepd.scope")?;
        (if node.is_empty() { None } else { Some(node.strip_suffix('_')?) }, None)
    } else {
        let node = first.strip_prefix("slurm")?;
        let uid = second.strip_prefix("uid_")?.parse().ok()?;
        (if node.is_empty() { None } else { Some(node.strip_prefix('_')?) }, Some(uid))
    };
    let id = third.strip_prefix("job_")?.parse().ok()?;
    let job = SlurmJob { id, node: node.map(str::to_owned), uid };
    Some((&path[..first.len() + second.len() + third.len() + 3], job))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(cgroups: &str, owner: u32) -> (Option<String>, Option<u64>) {
        let found = Membership::parse_with(cgroups, |_, _| Some(owner)).unwrap();
        (found.unit, found.slurm_job.map(|job| job.id))
    }

    fn unit(name: &str) -> Option<String> {
        Some(name.to_owned())
    }

    #[test]
    fn unit_of_the_system_manager_is_found_in_either_hierarchy() {
        for (cgroups, expected) in [
            ("0::/user.slice/user-1000.slice/session-4.scope\n", unit("session-4.scope")),
            ("0::/system.slice/nvidia-dcgm.service\n", unit("nvidia-dcgm.service")),
            ("0::/system.slice/system-gpushd\\x2dmps.slice/gpushd-mps@g1.service\n", unit("gpushd-mps@g1.service")),
            ("5:devices:/a\n1:name=systemd:/system.slice/slurmd.service\n0::/\n", unit("slurmd.service")),
            ("0::/system.slice/_memory.service\n", unit("memory.service")),
            ("0::/docker/4711/x.service\n", None),
            ("0::/../../x.service\n", None),
            ("0::/\n", None),
        ] {
            assert_eq!(parsed(cgroups, 0).0, expected, "{cgroups}");
        }
        assert_eq!(Membership::parse(""), None);
    }

    #[test]
    fn slurm_job_is_found_at_the_paths_that_slurm_creates() {
        for (cgroups, expected) in [
            ("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n", Some(42)),
            ("0::/system.slice/node1_slurmstepd.scope/job_42\n", Some(42)),
            ("5:devices:/slurm/uid_1000/job_7/step_0\n0::/\n", Some(7)),
            ("5:devices:/slurm_node1/uid_1000/job_7\n0::/\n", Some(7)),
            ("0::/slurm/job_9\n", None),
            ("0::/home/job_9\n", None),
            ("0::/system.slice/slurmstepd.scope/system\n", None),
        ] {
            assert_eq!(parsed(cgroups, 0).1, expected, "{cgroups}");
        }
    }

    #[test]
    fn node_and_user_of_a_slurm_job_are_in_some_paths() {
        let job = |path| slurm_job(path).map(|(_, job)| (job.id, job.node, job.uid));
        let node = |name: &str| Some(name.to_owned());
        assert_eq!(job("/system.slice/slurmstepd.scope/job_42/step_0"), Some((42, None, None)));
        assert_eq!(job("/system.slice/n_1_slurmstepd.scope/job_42"), Some((42, node("n_1"), None)));
        assert_eq!(job("/slurm/uid_1000/job_7"), Some((7, None, Some(1000))));
        assert_eq!(job("/slurm_n1/uid_1000/job_7"), Some((7, node("n1"), Some(1000))));
        for other in ["/system.slice/xslurmstepd.scope/job_1", "/slurmx/uid_1/job_1", "/slurm/uid_x/job_1"] {
            assert_eq!(job(other), None, "{other}");
        }
    }

    /// A user can create cgroups with all of these names below the part that systemd delegated.
    #[test]
    fn names_below_a_delegated_unit_are_ignored() {
        const HOME: &str = "0::/user.slice/user-1000.slice/user@1000.service";
        for below in [
            "/app.slice/slurmstepd.scope/job_42",
            "/system.slice/slurmstepd.scope/job_42/step_0",
            "/slurm/uid_1000/job_42",
            "/nvidia-dcgm.service",
        ] {
            assert_eq!(parsed(&format!("{HOME}{below}\n"), 0), (unit("user@1000.service"), None), "{below}");
        }
        let payload = Membership::parse_with("0::/system.slice/docker.service/nvidia-dcgm.service\n", |_, _| None);
        assert_eq!(payload.unwrap().service(), Some("docker"));
    }

    #[test]
    fn cgroup_in_a_users_directory_is_ignored() {
        for cgroups in ["0::/system.slice/slurmstepd.scope/job_42\n", "3:devices:/slurm/uid_1000/job_42\n"] {
            assert_eq!(parsed(cgroups, 1000), (None, None), "{cgroups}");
        }
        // The owner check applies to the job's own directory, and not only to the unit.
        let is_jobs = |_: Hierarchy<'_>, path: &str| Some(if path.contains("job") { 1000 } else { 0 });
        let found = Membership::parse_with("0::/system.slice/slurmstepd.scope/job_42\n", is_jobs).unwrap();
        assert_eq!((found.unit.as_deref(), found.slurm_job), (Some("slurmstepd.scope"), None));
    }

    #[test]
    fn services_of_users_are_not_services_of_the_host() {
        let service = |cgroups: &str| Membership::parse_with(cgroups, |_, _| None)?.service().map(str::to_owned);
        assert_eq!(service("0::/system.slice/nvidia-dcgm.service\n"), unit("nvidia-dcgm"));
        assert_eq!(service("12:name=systemd:/system.slice/kubelet.service\n0::/\n"), unit("kubelet"));
        assert_eq!(service("0::/user.slice/user-1000.slice/user@1000.service/app.slice/foo.service\n"), None);
        assert_eq!(service("0::/system.slice/slurmstepd.scope/job_7\n"), None);
    }

    #[test]
    fn deceptive_characters_are_replaced() {
        let found = Membership::parse_with("0::/system.slice/a\u{202e}b.service/\u{1b}[2J\n", |_, _| None).unwrap();
        assert_eq!((found.path.as_str(), found.unit), ("/system.slice/a?b.service/?[2J", unit("a?b.service")));
    }

    #[test]
    fn owner_of_the_parent_directory_is_read_from_the_mounted_hierarchy() {
        assert!(matches!(created_by(Hierarchy(""), "/anything.service"), Some(0) | None));
        assert_eq!(created_by(Hierarchy("no-such-hierarchy"), "/a/b"), None);
    }
}
