//! To which unit and Slurm job a process belongs: by its cgroup, which it can't choose.

use std::fs;

/// Where a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Path of its cgroup.
    pub path: String,
    /// The innermost systemd unit that it is in.
    pub unit: Option<String>,
    /// Slurm job that it belongs to.
    pub slurm_job: Option<u64>,
}

/// Where a process is; `None` when that can't be read.
pub fn of(pid: u32) -> Option<Place> {
    parse(&fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)
}

/// `0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0`, or one such line a hierarchy where there
/// are several: then that of systemd or of the unified one counts, and jobs are looked for in all.
fn parse(text: &str) -> Option<Place> {
    let lines = || {
        text.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            rest.split_once(':')
        })
    };
    let own = |wanted: &str| lines().find(|(controllers, path)| *controllers == wanted && *path != "/");
    let path = own("").or_else(|| own("name=systemd")).or_else(|| lines().next())?.1;
    let unit = path.rsplit('/').find(|part| [".service", ".scope"].iter().any(|kind| part.ends_with(kind)));
    let job = |path: &str| path.split('/').find_map(|part| part.strip_prefix("job_")?.parse().ok());
    let in_slurm = |path: &str| path.contains("slurm");
    let slurm_job = lines().filter(|(_, path)| in_slurm(path)).find_map(|(_, path)| job(path));
    Some(Place { path: path.to_owned(), unit: unit.map(str::to_owned), slurm_job })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_and_jobs_are_read_from_either_hierarchy() {
        let place = |text: &str| parse(text).map(|place| (place.unit, place.slurm_job));
        let unit = |name: &str| Some(name.to_owned());
        assert_eq!(place("0::/user.slice/user-1000.slice/session-4.scope\n"), Some((unit("session-4.scope"), None)));
        assert_eq!(
            place("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n"),
            Some((unit("slurmstepd.scope"), Some(42)))
        );
        assert_eq!(
            place("5:devices:/slurm/uid_1000/job_7/step_0\n1:name=systemd:/system.slice/slurmd.service\n0::/\n"),
            Some((unit("slurmd.service"), Some(7)))
        );
        // A directory that only looks like a job's.
        assert_eq!(place("0::/home/job_9\n"), Some((None, None)));
        assert_eq!((place("0::/\n"), place("")), (Some((None, None)), None));
    }
}
