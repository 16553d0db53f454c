//! How far a Slurm job reaches: whether `scancel` with its number ends more than what runs on this node.
//!
//! `scancel 5` ends all tasks of the array 5, and all parts of the heterogeneous job 5. A job on several nodes can work on
//! another node while its GPUs here are unused.

/// The format for `squeue --Format`, one line for each job. It contains no text of users.
pub const JOB_EXTENT_FORMAT: &str = "JobID:|,ArrayJobID:|,ArrayTaskID:|,HetJobID:|,NumNodes:|";

/// What a job consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobExtent {
    /// The number that names only this job: `5`, or `5_2` for a task of an array.
    pub name: String,
    /// Whether the job is a part of a heterogeneous job.
    pub is_heterogeneous: bool,
    /// Number of nodes.
    pub nodes: u32,
}

impl JobExtent {
    /// Reads the line of a job in the output of squeue; `None` if there is none, or it is not as expected.
    #[must_use]
    pub fn parse(output: &str, job: u32) -> Option<Self> {
        let of_line = |line: &str| {
            let fields: Vec<&str> = line.split('|').map(str::trim).collect();
            let [id, array, task, heterogeneous, nodes, ..] = fields[..] else { return None };
            let number = |text: &str| text.parse::<u32>().ok();
            if number(id) != Some(job) {
                return None;
            }
            let name = match (number(array), number(task)) {
                (Some(array), Some(task)) => format!("{array}_{task}"),
                (Some(_) | None, None) => job.to_string(),
                (None, Some(_)) => return None,
            };
            let is_heterogeneous = number(heterogeneous).is_some_and(|id| id > 0);
            Some(Self { name, is_heterogeneous, nodes: number(nodes)? })
        };
        output.lines().find_map(of_line)
    }

    /// Returns whether all of the job runs on this node.
    #[must_use]
    pub fn is_only_here(&self) -> bool {
        !self.is_heterogeneous && self.nodes == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(output: &str, job: u32) -> Option<(String, bool)> {
        JobExtent::parse(output, job).map(|extent| (extent.name.clone(), extent.is_only_here()))
    }

    #[test]
    fn task_of_an_array_has_a_name_of_its_own() {
        let tasks = "7|5|1|0|1|\n5|5|2|0|1|\n";
        assert_eq!(parse(tasks, 5), Some(("5_2".to_owned(), true)));
        assert_eq!(parse(tasks, 7), Some(("5_1".to_owned(), true)));
        assert_eq!(parse("9|9|N/A|N/A|1|\n", 9), Some(("9".to_owned(), true)));
    }

    #[test]
    fn job_that_reaches_beyond_the_node_is_recognized() {
        assert_eq!(parse("9|9|N/A|0|4|\n", 9), Some(("9".to_owned(), false)), "several nodes");
        assert_eq!(parse("9|9|N/A|9|1|\n", 9), Some(("9".to_owned(), false)), "a heterogeneous job");
        for unknown in ["", "8|8|N/A|0|1|", "9|9|N/A|0|?|", "9|9", "slurm_load_jobs error: Invalid job id specified"] {
            assert_eq!(parse(unknown, 9), None, "{unknown}");
        }
    }
}
