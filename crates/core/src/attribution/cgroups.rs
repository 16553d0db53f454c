//! The cgroups of a process, as far as they identify its lease.

/// A Slurm job, as the path of its cgroup describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlurmJob {
    /// Job id.
    pub id: u64,
    /// Name of the node. The path contains the name only if Slurm is built for several nodes on one host.
    pub node: Option<String>,
    /// User of the job. Only paths outside the unified hierarchy contain it.
    pub uid: Option<u32>,
}

/// The cgroups of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroups {
    /// Path in each hierarchy.
    pub paths: Vec<String>,
    /// Slurm job that owns one of the cgroups. Present only if root created the cgroup.
    pub slurm_job: Option<SlurmJob>,
}

impl Cgroups {
    /// Returns whether the process is in a cgroup or below it.
    pub(super) fn contains(&self, cgroup: &str) -> bool {
        self.paths.iter().any(|path| is_at_or_below(path, cgroup))
    }
}

/// Returns whether `path` is the path of a cgroup, or of a cgroup below it. Returns `false` for the root cgroup,
/// because all cgroups are below it.
#[must_use]
pub fn is_at_or_below(path: &str, cgroup: &str) -> bool {
    let rest = path.strip_prefix(cgroup).filter(|_| cgroup.len() > 1);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
