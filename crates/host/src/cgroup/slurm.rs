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

use std::{
    io,
    path::{Path, PathBuf},
};

use procfs::process::MountInfo;

use super::walk::{MOST_CGROUPS, Walk, directories};

/// Returns the pids in the cgroups of all Slurm jobs with this id and user. Returns `None` if the search may miss
/// processes of the job: no hierarchy is mounted, the root of a hierarchy is not visible, a cgroup cannot be read, or
/// the search exceeds the limits of a walk. Blocks, so call it on a blocking thread.
#[must_use]
pub fn job_processes(job: u64, uid: u32) -> Option<Vec<u32>> {
    let mounts = procfs::process::Process::myself().and_then(|me| me.mountinfo()).ok()?;
    below(&hierarchies(&mounts.0)?, job, uid).ok()
}

/// Returns the directories where cgroup hierarchies are mounted. Slurm's cgroups can be in any of them, because Slurm
/// has a setting for the directory (`CgroupMountpoint`). Returns `None` if no hierarchy is mounted, or if the root of a
/// mounted hierarchy is not visible.
fn hierarchies(mounts: &[MountInfo]) -> Option<Vec<PathBuf>> {
    let cgroups = || mounts.iter().filter(|mount| matches!(mount.fs_type.as_str(), "cgroup" | "cgroup2"));
    let roots: Vec<&MountInfo> = cgroups().filter(|mount| mount.root == "/").collect();
    let has_root = |mount: &MountInfo| roots.iter().any(|root| root.majmin == mount.majmin);
    let is_complete = !roots.is_empty() && cgroups().all(has_root);
    is_complete.then(|| roots.iter().map(|mount| mount.mount_point.clone()).collect())
}

/// Returns the pids of a job in the hierarchies that are mounted at these directories.
fn below(mounts: &[PathBuf], job: u64, uid: u32) -> io::Result<Vec<u32>> {
    let mut walk = Walk::default();
    for mount in mounts {
        let scopes = directories(&mount.join("system.slice"), MOST_CGROUPS)?.into_iter();
        let scopes = scopes.filter(|dir| name(dir).is_some_and(|name| name.ends_with("slurmstepd.scope")));
        let others = directories(mount, MOST_CGROUPS)?.into_iter();
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
        let names = ["", "unified", "devices", "freezer", "cpu,cpuacct", "systemd", "none"];
        let all = names.map(|name| mounts.path().join(name));
        assert_eq!(below(&all, 42, 1000).unwrap(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(below(&all, 7, 1000).unwrap(), [] as [u32; 0]);
        let unreadable = mounts.path().join("system.slice/slurmstepd.scope/job_43/cgroup.procs");
        fs::create_dir_all(unreadable).unwrap();
        assert!(below(&all, 43, 1000).is_err(), "a cgroup that cannot be read is not empty");
    }

    /// Fault: with `CgroupMountpoint=/cgroup`, gpushd read all processes of the host. A user who started short-lived
    /// processes during Epilog prevented gpushd from completing this scan.
    #[test]
    fn hierarchies_at_any_mount_point_are_searched() {
        let found = |mounts: &str| {
            let mounts: Vec<MountInfo> = mounts.lines().map(|line| MountInfo::from_line(line).unwrap()).collect();
            hierarchies(&mounts)
        };
        let freezer = "37 31 0:34 / /cgroup/freezer rw - cgroup cgroup rw,freezer";
        let unified = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw";
        let part = "52 31 0:34 /lxc/a /srv/a/freezer rw - cgroup cgroup rw,freezer";
        let tmpfs = "31 23 0:28 / /sys rw - tmpfs tmpfs rw";
        let both = Some(vec![PathBuf::from("/cgroup/freezer"), PathBuf::from("/sys/fs/cgroup")]);
        assert_eq!(found(&[tmpfs, freezer, unified].join("\n")), both);
        assert_eq!(found(&[part, freezer, unified].join("\n")), both, "another mount shows the whole hierarchy");
        for incomplete in [vec![tmpfs], vec![part], vec![part, unified]] {
            assert_eq!(found(&incomplete.join("\n")), None, "{incomplete:?}");
        }
    }
}
