//! The environment of Prolog and Epilog.
//!
//! Slurm sets the variables, but some contain text of the user: the comment, and the option of the
//! SPANK plugin. The user can write any text, so gpush stores this text unchanged and parses it
//! later. Reading the environment does not fail because of such text.

use std::fmt;

use super::job_files::FileName;

/// Variable that contains the value of `--gpush`, an option of the SPANK plugin.
pub const SPANK_OPTION: &str = "SPANK__SLURM_SPANK_OPTION_gpush_gpush";

/// Maximum number of indexes in a list. No node has this many GPUs and MIG devices.
const MOST_INDEXES: usize = 1024;

/// A job, as the environment of Prolog and Epilog describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Job {
    /// Cluster name; `slurm` if it is not known.
    pub cluster: String,
    /// Job id. For a heterogeneous job: the id of the component.
    pub id: u32,
    /// Node name; empty if it is not known.
    pub node: String,
    /// User id of the job; not needed for Epilog.
    pub uid: Option<u32>,
    /// Number of times that the job was requeued. Slurm always sets this number. `None` in an
    /// Epilog whose environment contains only the job id.
    pub restart: Option<u32>,
    /// Job id of the leader, if the job is a component of a heterogeneous job but not the leader.
    pub leader: Option<u32>,
    /// Indexes in gres.conf of the devices that Slurm allocated, in Slurm's order.
    pub gres: Vec<u32>,
    /// Entries of `CUDA_VISIBLE_DEVICES`.
    pub visible: Vec<String>,
    /// Thread percentage from gres/mps, unchanged.
    pub thread_percentage: Option<String>,
    /// Comment of the user, unchanged.
    pub comment: Option<String>,
    /// Value of the user's option `--gpush`, unchanged.
    pub option: Option<String>,
    /// Name of the job, if Slurm says it to the hook.
    pub name: Option<String>,
    /// Slurm account of the job, if Slurm says it to the hook.
    pub account: Option<String>,
}

/// Error: the environment is not the environment of a hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotAHook {
    /// Name of the variable that is missing or not a number.
    pub variable: &'static str,
}

impl fmt::Display for NotAHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the environment variable {} is missing or is not a number: only Slurm can start this command",
            self.variable
        )
    }
}

impl std::error::Error for NotAHook {}

impl Job {
    /// Reads the environment. `get` returns the value of a variable.
    ///
    /// # Errors
    /// The job id, which Slurm always sets, is missing or not a number.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, NotAHook> {
        let text = |name: &str| get(name).filter(|value| !value.is_empty());
        let number = |name: &str| text(name).and_then(|value| value.trim().parse::<u32>().ok());
        let id = number("SLURM_JOB_ID").filter(|id| *id > 0).ok_or(NotAHook { variable: "SLURM_JOB_ID" })?;
        let visible = text("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        let visible = visible.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        Ok(Self {
            cluster: text("SLURM_CLUSTER_NAME").unwrap_or_else(|| "slurm".to_owned()),
            id,
            node: text("SLURMD_NODENAME").unwrap_or_default(),
            uid: number("SLURM_JOB_UID"),
            restart: number("SLURM_JOB_RESTART_COUNT"),
            leader: number("SLURM_HET_JOB_ID").filter(|leader| *leader != 0 && *leader != id),
            gres: indexes(&text("SLURM_JOB_GPUS").unwrap_or_default()),
            visible: visible.take(MOST_INDEXES).map(str::to_owned).collect(),
            thread_percentage: text("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
            comment: text("SLURM_JOB_COMMENT"),
            option: text(SPANK_OPTION),
            name: text("SLURM_JOB_NAME").map(|name| shortened(&name)),
            account: text("SLURM_JOB_ACCOUNT").map(|name| shortened(&name)),
        })
    }

    /// Returns the restart count of the run that begins.
    #[must_use]
    pub fn begun_run(&self) -> u32 {
        self.restart.unwrap_or(0)
    }

    /// Returns the largest possible restart count of the run that ends.
    #[must_use]
    pub fn last_run(&self) -> u32 {
        self.restart.unwrap_or(u32::MAX)
    }

    /// Returns whether Slurm allocated a device to the job.
    #[must_use]
    pub fn has_devices(&self) -> bool {
        let is_device = |entry: &String| entry != "NoDevFiles" && entry != "-1";
        !self.gres.is_empty() || self.visible.iter().any(is_device)
    }

    /// Returns the name of the job's file in the directory of the hooks.
    #[must_use]
    pub fn file_name(&self) -> FileName {
        FileName::of_job(&self.cluster, self.id, &self.node)
    }
}

/// Maximum length of the name and of the account of a job in characters.
const LONGEST_NAME: usize = 128;

/// Returns the start of a name that a user can choose.
fn shortened(name: &str) -> String {
    name.chars().filter(|character| !character.is_control()).take(LONGEST_NAME).collect()
}

/// Parses a list such as `0,2-3` to numbers. Ignores other text, which Slurm does not write.
fn indexes(text: &str) -> Vec<u32> {
    let mut indexes = Vec::new();
    for entry in text.split(',') {
        let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
        let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>()) else { continue };
        indexes.extend((first..=last).take(MOST_INDEXES));
    }
    indexes.truncate(MOST_INDEXES);
    indexes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Job, NotAHook> {
        Job::read(|name| variables.iter().find(|(one, _)| *one == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn prolog_environment_is_read() {
        let job = read(&[
            ("SLURM_JOB_ID", "42"),
            ("SLURM_JOB_UID", "1000"),
            ("SLURM_CLUSTER_NAME", "ci"),
            ("SLURMD_NODENAME", "n1"),
            ("SLURM_JOB_RESTART_COUNT", "2"),
            ("SLURM_HET_JOB_ID", "41"),
            ("SLURM_JOB_GPUS", "0,2-3"),
            ("CUDA_VISIBLE_DEVICES", "0,MIG-1"),
        ])
        .unwrap();
        assert_eq!((job.cluster.as_str(), job.id, job.node.as_str(), job.uid), ("ci", 42, "n1", Some(1000)));
        assert_eq!((job.restart, job.leader), (Some(2), Some(41)));
        assert_eq!((job.gres.as_slice(), job.visible.len()), (&[0, 2, 3][..], 2));
        assert!(job.has_devices());
    }

    #[test]
    fn epilog_needs_nothing_but_the_job_id() {
        let job = read(&[("SLURM_JOB_ID", "42")]).unwrap();
        assert_eq!((job.restart, job.leader, job.uid, job.has_devices()), (None, None, None, false));
        assert_eq!(read(&[]), Err(NotAHook { variable: "SLURM_JOB_ID" }));
        assert!(!read(&[("SLURM_JOB_ID", "7"), ("CUDA_VISIBLE_DEVICES", "NoDevFiles")]).unwrap().has_devices());
        // The leader is not a component of another job, so the result has no leader.
        assert_eq!(read(&[("SLURM_JOB_ID", "7"), ("SLURM_HET_JOB_ID", "7")]).unwrap().leader, None);
    }

    proptest! {
        #[test]
        fn any_text_of_the_user_is_read(comment in any::<String>(), option in "(?s).{0,300}", gpus in any::<String>()) {
            let job = read(&[
                ("SLURM_JOB_ID", "1"),
                ("SLURM_JOB_COMMENT", &comment),
                ("SLURM_JOB_NAME", &comment),
                (SPANK_OPTION, &option),
                ("SLURM_JOB_GPUS", &gpus),
                ("SLURM_CLUSTER_NAME", &gpus),
            ]).unwrap();
            prop_assert!(job.gres.len() <= MOST_INDEXES);
            prop_assert!(job.name.unwrap_or_default().chars().count() <= LONGEST_NAME);
        }
    }
}
