//! Names of the files of jobs, and the choice of the file that belongs to a task.
//!
//! ```text
//! ci-42@n1       job 42 of cluster `ci` on node `n1`
//! ci-41+42@n1    link to `ci-42@n1`: job 42 is a component of the heterogeneous job 41
//! ```
//! Slurm sets the job id and the node in the environment of each task. The user can change the
//! cluster in that environment. So the cluster and the node only choose between several files, and
//! do not decide whether a task runs.

use std::fmt;

/// Maximum length of a cluster or node name in a file name, in characters. Slurm limits cluster
/// names to 40.
const LONGEST: usize = 64;

/// A cluster and a node, in the form for file names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct HookPlace {
    cluster: String,
    node: String,
}

impl HookPlace {
    /// Creates the place. Replaces characters that file names must not contain.
    #[must_use]
    pub fn new(cluster: &str, node: &str) -> Self {
        Self { cluster: plain(cluster), node: plain(node) }
    }

    /// Returns the cluster name.
    #[must_use]
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Returns the node name.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }
}

impl fmt::Display for HookPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.cluster.as_str(), self.node.as_str()) {
            (cluster, "") => write!(f, "cluster {cluster}"),
            (cluster, node) => write!(f, "cluster {cluster} and node {node}"),
        }
    }
}

/// Replaces characters that file names must not contain, or that separate their parts.
fn plain(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "_-.".contains(c) { c } else { '_' };
    let text: String = text.chars().take(LONGEST).map(plain).collect();
    // Without leading dots, the file cannot be hidden, and its name cannot be `..`.
    text.trim_start_matches('.').to_owned()
}

/// Name of the file of a job, or of a link to that file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileName {
    place: HookPlace,
    /// Job id in the environment of the tasks. A link contains the job id of the leader.
    job: u32,
    /// For a link: the job id of the component.
    component: Option<u32>,
}

impl FileName {
    /// Returns the name of the file of a job.
    #[must_use]
    pub fn of_job(cluster: &str, job: u32, node: &str) -> Self {
        Self { place: HookPlace::new(cluster, node), job, component: None }
    }

    /// Returns the name of the link through which the tasks of a heterogeneous job find the file of
    /// this component.
    #[must_use]
    pub fn of_component(&self, leader: u32) -> Self {
        Self { place: self.place.clone(), job: leader, component: Some(self.job) }
    }

    /// Returns the job id. For a link, this is the id of the leader.
    #[must_use]
    pub fn job(&self) -> u32 {
        self.job
    }

    /// Parses a file name; `None` if the name belongs to another kind of file.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let (job, node) = name.rsplit_once('@')?;
        let (cluster, job) = job.rsplit_once('-')?;
        let (job, component) = match job.split_once('+') {
            Some((leader, component)) => (leader, Some(component.parse().ok()?)),
            None => (job, None),
        };
        let parsed = Self { place: HookPlace::new(cluster, node), job: job.parse().ok()?, component };
        // Refuse other files: their names have a suffix, or characters that no job file name has.
        (parsed.to_string() == name).then_some(parsed)
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.place.cluster, self.job)?;
        if let Some(component) = self.component {
            write!(f, "+{component}")?;
        }
        write!(f, "@{}", self.place.node)
    }
}

/// A task, as its environment describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// Job id, which Slurm sets for each task.
    pub job: u32,
    /// Value of `SLURM_CLUSTER_NAME`.
    pub cluster: Option<String>,
    /// Value of `SLURMD_NODENAME`.
    pub node: Option<String>,
}

/// The file that belongs to a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileChoice {
    /// No file: the job does not use gpush.
    None,
    /// This file.
    File(FileName),
    /// No file for this cluster and node, but jobs with the same id and user have files for other
    /// clusters or nodes. The task gets none of their leases. If one of these jobs was refused, the
    /// task fails, because its user may have changed the cluster or node in the environment.
    Elsewhere(Vec<FileName>),
    /// Several clusters or nodes of this host have a file for a job with this id and user. The
    /// environment names none of these clusters and nodes.
    Several,
}

/// Chooses the file of a task among the `files` of its user. `known` contains the clusters and
/// nodes whose hooks run on this host.
#[must_use]
pub fn choose(task: &Task, files: &[FileName], known: &[HookPlace]) -> FileChoice {
    let mut found: Vec<&FileName> = files.iter().filter(|file| file.job == task.job).collect();
    // The job's own file comes first, followed by the files of the components, lowest id first.
    found.sort_by_key(|file| file.component);
    let named = HookPlace::new(task.cluster.as_deref().unwrap_or_default(), task.node.as_deref().unwrap_or_default());
    if let Some(file) = found.iter().find(|file| file.place == named) {
        return FileChoice::File((*file).clone());
    }
    if known.contains(&named) {
        return match found.is_empty() {
            true => FileChoice::None,
            false => FileChoice::Elsewhere(found.into_iter().cloned().collect()),
        };
    }
    let same_node: Vec<&FileName> = found.iter().copied().filter(|file| file.place.node == named.node).collect();
    let found = if same_node.is_empty() { found } else { same_node };
    let same_cluster: Vec<&FileName> =
        found.iter().copied().filter(|file| file.place.cluster == named.cluster).collect();
    let found = if same_cluster.is_empty() { found } else { same_cluster };
    match found.split_first() {
        None => FileChoice::None,
        Some((first, others)) if others.iter().all(|other| other.place == first.place) => {
            FileChoice::File((*first).clone())
        }
        Some(_) => FileChoice::Several,
    }
}

/// The cluster and node of a job, for an Epilog that knows at most one of the two names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlaceChoice {
    /// The job has no file, and the number of known places that fit is not exactly one.
    None,
    /// This cluster and node.
    Place(HookPlace),
    /// Jobs with this id have files for several clusters or nodes.
    Several(Vec<HookPlace>),
}

/// Chooses the cluster and node of a job that has ended. The environment contains the job id, and
/// at most one of the two names. `files` contains the files of all jobs. `known` contains the
/// clusters and nodes whose hooks run on this host.
#[must_use]
pub fn choose_place(ended: &Task, files: &[FileName], known: &[HookPlace]) -> PlaceChoice {
    let (cluster, node) = (ended.cluster.as_deref().map(plain), ended.node.as_deref().map(plain));
    let fits = |place: &&HookPlace| {
        cluster.as_ref().is_none_or(|cluster| *cluster == place.cluster)
            && node.as_ref().is_none_or(|node| *node == place.node)
    };
    let of_job = files.iter().filter(|file| file.job == ended.job && file.component.is_none());
    let mut found: Vec<HookPlace> = of_job.map(|file| &file.place).filter(fits).cloned().collect();
    // A job without a file has no lease, so its place does not matter.
    let has_file = !found.is_empty();
    // Even if there is only one file, it may belong to another job, which has the same id on
    // another cluster or node. So all known places that fit are candidates.
    found.extend(known.iter().filter(fits).cloned());
    found.sort_unstable();
    found.dedup();
    match found.as_slice() {
        [place] => PlaceChoice::Place(place.clone()),
        [_, _, ..] if has_file => PlaceChoice::Several(found),
        [] | [_, ..] => PlaceChoice::None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(cluster: &str, job: u32, node: &str) -> FileName {
        FileName::of_job(cluster, job, node)
    }

    fn task(job: u32, cluster: &str, node: &str) -> Task {
        Task { job, cluster: Some(cluster.to_owned()), node: Some(node.to_owned()) }
    }

    #[test]
    fn file_name_has_no_separator_and_is_not_hidden() {
        for (cluster, job, node, expected) in [
            ("ci", 42, "n1", "ci-42@n1"),
            ("a-b", 1, "", "a-b-1@"),
            ("../a b", 1, "x@y", "_a_b-1@x_y"),
            ("..", 1, "..", "-1@"),
        ] {
            let name = file(cluster, job, node);
            assert_eq!(name.to_string(), expected);
            assert_eq!(FileName::parse(expected), Some(name), "{expected}");
        }
        let link = file("ci", 42, "n1").of_component(41);
        assert_eq!(link.to_string(), "ci-41+42@n1");
        assert_eq!(FileName::parse("ci-41+42@n1"), Some(link));
        for other in
            ["owned", "ci-42", "ci-42@n1+ended", "ci-42@n1+run", "ci-042@n1", "ci-x@n1", "ci-1+@n1", "ci-1@n 1"]
        {
            assert_eq!(FileName::parse(other), None, "{other}");
        }
    }

    #[test]
    fn environment_of_the_task_only_chooses_between_several_files() {
        let known = [HookPlace::new("ci", "n1")];
        let one = [file("ci", 5, "n1"), file("ci", 6, "n1")];
        let nothing = Task { job: 5, cluster: None, node: None };
        for task in [task(5, "ci", "n1"), task(5, "nonsense", "n1"), task(5, "nonsense", "x"), nothing] {
            assert_eq!(choose(&task, &one, &known), FileChoice::File(one[0].clone()), "{task:?}");
        }
        assert_eq!(choose(&task(7, "ci", "n1"), &one, &known), FileChoice::None);
    }

    #[test]
    fn other_cluster_or_node_of_the_host_gets_no_lease_of_the_job() {
        let known = [HookPlace::new("a", "n1"), HookPlace::new("b", "n1"), HookPlace::new("a", "n2")];
        let of_a = [file("a", 5, "n1")];
        for other in [task(5, "b", "n1"), task(5, "a", "n2")] {
            assert_eq!(choose(&other, &of_a, &known), FileChoice::Elsewhere(of_a.to_vec()), "{other:?}");
        }
        let both = [file("a", 5, "n1"), file("b", 5, "n1")];
        assert_eq!(choose(&task(5, "b", "n1"), &both, &known), FileChoice::File(both[1].clone()));
        assert_eq!(choose(&task(5, "x", "n1"), &both, &known), FileChoice::Several);
        // The cluster is unknown, so only the node decides.
        let nodes = [file("a", 5, "n1"), file("a", 5, "n2")];
        assert_eq!(choose(&task(5, "x", "n2"), &nodes, &known), FileChoice::File(nodes[1].clone()));
    }

    #[test]
    fn file_of_the_leader_precedes_those_of_its_components() {
        let links = [file("ci", 43, "n1").of_component(41), file("ci", 42, "n1").of_component(41)];
        assert_eq!(choose(&task(41, "ci", "n1"), &links, &[]), FileChoice::File(links[1].clone()));
        assert_eq!(choose(&task(41, "x", "n1"), &links, &[]), FileChoice::File(links[1].clone()));
        let all = [links[0].clone(), file("ci", 41, "n1"), links[1].clone()];
        assert_eq!(choose(&task(41, "ci", "n1"), &all, &[]), FileChoice::File(all[1].clone()));
    }

    /// Fault: if Epilog knew only the job id, it assumed that the job belonged to the cluster `slurm` and to a node
    /// without a name. No such job existed.
    #[test]
    fn place_of_an_ended_job_is_that_of_its_file() {
        let known = [HookPlace::new("a", "n1"), HookPlace::new("b", "n1")];
        let ended = |cluster: Option<&str>, node: Option<&str>| Task {
            job: 5,
            cluster: cluster.map(str::to_owned),
            node: node.map(str::to_owned),
        };
        let place = |place: &HookPlace| PlaceChoice::Place(place.clone());
        let one = [file("a", 5, "n1"), file("b", 6, "n1"), file("b", 7, "n1").of_component(5)];
        assert_eq!(choose_place(&ended(None, None), &one, &known[..1]), place(&known[0]));
        // Fault: the Epilog of a job of one cluster ended the running job of another cluster with the same id.
        assert_eq!(choose_place(&ended(None, None), &one, &known), PlaceChoice::Several(known.to_vec()));
        assert_eq!(choose_place(&ended(Some("a"), None), &one, &known), place(&known[0]));
        let both = [file("b", 5, "n1"), file("a", 5, "n1")];
        assert_eq!(choose_place(&ended(None, None), &both, &known), PlaceChoice::Several(known.to_vec()));
        assert_eq!(choose_place(&ended(None, Some("n1")), &both, &known), PlaceChoice::Several(known.to_vec()));
        assert_eq!(choose_place(&ended(Some("b"), None), &both, &known), place(&known[1]));
        // If the job has no file, a place is chosen only if exactly one place is known.
        assert_eq!(choose_place(&ended(None, None), &[], &known[..1]), place(&known[0]));
        assert_eq!(choose_place(&ended(None, None), &[], &known), PlaceChoice::None);
        assert_eq!(known[0].to_string(), "cluster a and node n1");
    }

    proptest! {
        #[test]
        fn every_name_is_a_plain_file_name(cluster in any::<String>(), job: u32, node in any::<String>()) {
            let name = file(&cluster, job, &node);
            let text = name.to_string();
            prop_assert!(!text.contains(['/', '\0']) && !text.starts_with('.'));
            prop_assert_eq!(FileName::parse(&text), Some(name));
        }
    }
}
