//! The processes of a Slurm job, from the cgroups that Slurm creates for the job.
//!
//! ```text
//! MOUNT/system.slice/[NODE_]slurmstepd.scope/job_42/…    unified hierarchy
//! MOUNT/slurm[_NODE]/uid_1000/job_42/…                   other hierarchies, one for each controller
//! ```
//!
//! The cost of the search does not depend on the number of processes on the host. The search is not
//! evidence that a process belongs to the job: [`super::of`] decides this, because only cgroups
//! that root created are valid evidence.

use std::{io, path::Path};

use super::{
    MOUNTS,
    walk::{MOST_CGROUPS, Walk, directories},
};

/// Returns the pids in the cgroups of all Slurm jobs with this id and user. Returns `None` if any process may belong to
/// the job: a hierarchy is mounted at a path where gpushd does not search, a cgroup cannot be read, or the search exceeds
/// the limits of a walk. Blocks, so call it on a blocking thread.
#[must_use]
pub fn job_processes(job: u64, uid: u32) -> Option<Vec<u32>> {
    let mounts = procfs::process::Process::myself().and_then(|me| me.mountinfo()).ok()?;
    let mut hierarchies = mounts.0.iter().filter(|mount| matches!(mount.fs_type.as_str(), "cgroup" | "cgroup2"));
    let first = hierarchies.next()?;
    let is_known = |mount: &Path| mount.starts_with(MOUNTS);
    let all_known = is_known(&first.mount_point) && hierarchies.all(|mount| is_known(&mount.mount_point));
    if all_known { below(Path::new(MOUNTS), job, uid).ok() } else { None }
}

/// Returns the pids of a job in the hierarchies that are mounted at or directly below a directory.
fn below(mounts: &Path, job: u64, uid: u32) -> io::Result<Vec<u32>> {
    let mut walk = Walk::default();
    for mount in std::iter::once(mounts.to_owned()).chain(directories(mounts, MOST_CGROUPS)?) {
        let scopes = directories(&mount.join("system.slice"), MOST_CGROUPS)?.into_iter();
        let scopes = scopes.filter(|dir| name(dir).is_some_and(|name| name.ends_with("slurmstepd.scope")));
        let others = directories(&mount, MOST_CGROUPS)?.into_iter();
        let others = others.filter(|dir| name(dir).is_some_and(|name| name.starts_with("slurm")));
        let jobs = scopes.chain(others.map(|dir| dir.join(format!("uid_{uid}"))));
        for dir in jobs.map(|dir| dir.join(format!("job_{job}"))) {
            walk.collect_all(&dir)?;
        }
    }
    walk.pids.sort_unstable();
    walk.pids.dedup();
    Ok(walk.pids)
}

fn name(dir: &Path) -> Option<&str> {
    dir.file_name()?.to_str()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cgroup::slurm_job;

    /// Cgroups that [`slurm_job`] attributes to job 42 of user 1000, in each kind of hierarchy.
    const OF_THE_JOB: [(&str, &str); 6] = [
        ("", "/system.slice/slurmstepd.scope/job_42/step_0/user/task_0"),
        ("unified", "/system.slice/n1_slurmstepd.scope/job_42"),
        ("devices", "/slurm/uid_1000/job_42/step_batch"),
        ("freezer", "/slurm_n1/uid_1000/job_42/step_0"),
        ("cpu,cpuacct", "/slurm/uid_1000/job_42"),
        ("systemd", "/system.slice/slurmstepd.scope/job_42/step_extern"),
    ];

    /// Cgroups of other jobs, other users, and of users' own units.
    const OF_OTHERS: [(&str, &str); 4] = [
        ("", "/system.slice/slurmstepd.scope/job_421/step_0"),
        ("devices", "/slurm/uid_1001/job_42/step_0"),
        ("", "/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_42"),
        ("", "/system.slice/slurmd.service"),
    ];

    #[test]
    fn processes_of_a_job_are_found_in_every_hierarchy() {
        let mounts = tempfile::tempdir().unwrap();
        let put = |pid: usize, (hierarchy, path): (&str, &str)| {
            let dir = mounts.path().join(hierarchy).join(&path[1..]);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("cgroup.procs"), format!("{pid}\n")).unwrap();
        };
        for (pid, cgroup) in (1..).zip(OF_THE_JOB) {
            assert_eq!(slurm_job(cgroup.1).map(|(_, job)| job.id), Some(42), "{cgroup:?}");
            put(pid, cgroup);
        }
        for (pid, cgroup) in (100..).zip(OF_OTHERS) {
            put(pid, cgroup);
        }
        assert_eq!(below(mounts.path(), 42, 1000).unwrap(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(below(mounts.path(), 7, 1000).unwrap(), [] as [u32; 0]);
        assert_eq!(below(&mounts.path().join("none"), 42, 1000).unwrap(), [] as [u32; 0]);
        let unreadable = mounts.path().join("system.slice/slurmstepd.scope/job_43/cgroup.procs");
        fs::create_dir_all(unreadable).unwrap();
        assert!(below(mounts.path(), 43, 1000).is_err(), "a cgroup that cannot be read is not empty");
    }
}
