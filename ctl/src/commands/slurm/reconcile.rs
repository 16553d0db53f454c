//! `gpushctl slurm reconcile`: ends leases of jobs that Slurm no longer knows, and removes the files of these jobs.
//!
//! The command lists the files and the leases before it lists the jobs. So if a Prolog creates a file and a lease in
//! between, the command does not know them and does not remove them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::Stdio,
    time::Duration,
};

use gpush_api::{ApiError, Code, Lease, LeaseBinding, SlurmJobEnd};
use gpush_core::slurm::SlurmConf;
use gpush_slurm_hook::{
    BegunRun, Calls, Options, Settings, Unanswered, read_slurm_conf, sentence, slurm_conf_path, variable,
};
use jiff::Timestamp;

use crate::{
    exit::{self, Outcome},
    output::Output,
    program,
};

/// States of a job without processes on a node, as squeue prints them. Instead of the state, squeue may print a flag
/// such as `COMPLETING`, and later versions may have more flags. So a job with any other word may run.
const NOT_RUNNING: [&str; 10] = [
    "PENDING",
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
];

/// Maximum number of leases that this command ends at the same time.
const MOST_AT_ONCE: usize = 16;

/// The lease of a Slurm job.
struct OfJob {
    lease: Lease,
    end: SlurmJobEnd,
}

pub(super) fn run(options: &Options, squeue: &Path, cluster: Option<&str>, out: &Output) -> Outcome {
    let settings = Settings::of_root(options);
    let named = cluster.map(str::to_owned).or_else(|| variable("SLURM_CLUSTER_NAME"));
    let cluster = named.or_else(|| cluster_of(&read_slurm_conf(&slurm_conf_path())));
    let mut calls = Calls::new(&settings);
    calls.deliver_ends(&settings.directory);
    let mut begun = settings.directory.begun_runs();
    let all = calls.leases().map_err(Unanswered::into_error)?;
    let mut of_jobs: Vec<OfJob> = all.into_iter().filter_map(of_job).collect();
    let clusters = of_jobs.iter().map(|one| one.end.cluster.as_str()).chain(begun.iter().map(BegunRun::cluster));
    if let Some(cluster) = the_cluster(cluster, clusters)? {
        of_jobs.retain(|one| one.end.cluster == cluster);
        begun.retain(|one| one.cluster() == cluster);
    }
    let nodes = of_jobs.iter().map(|one| one.end.node.as_str()).chain(begun.iter().map(BegunRun::node));
    let nodes: BTreeSet<String> = nodes.map(str::to_owned).collect();
    let mut known: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    let runtime = super::super::runtime()?;
    for node in nodes {
        let jobs = runtime.block_on(jobs_on(squeue, &node, settings.deadline))?;
        known.insert(node, jobs);
    }
    let is_known = |node: &str, job| known.get(node).is_some_and(|jobs| jobs.contains(&job));
    let gone: Vec<OfJob> = of_jobs.into_iter().filter(|one| !is_known(&one.end.node, one.end.job)).collect();
    begun.retain(|one| !is_known(one.node(), one.job()));
    let mut first_error = None;
    // End several leases at the same time: gpushd waits for their processes, and each may take until the deadline.
    for some in gone.chunks(MOST_AT_ONCE) {
        let answers = std::thread::scope(|scope| {
            let end = |one: &OfJob| {
                let ended = Calls::of_one_job(&settings).end(&one.end);
                ended.map_err(|error| Box::new(error.into_error()))
            };
            let ending: Vec<_> = some.iter().map(|one| scope.spawn(move || end(one))).collect();
            ending.into_iter().map(|ending| ending.join().unwrap_or_else(|_| Err(stopped()))).collect::<Vec<_>>()
        });
        for (OfJob { lease, end }, ended) in some.iter().zip(answers) {
            match ended {
                Ok(answer) => {
                    let result = if answer.left.is_empty() { "ended" } else { "releasing" };
                    out.text(&format!("{}: {result}, job {} is not on this node any more\n", lease.id, end.job))?;
                }
                Err(error) => {
                    let error = *error;
                    let (id, job, why) = (lease.id, end.job, sentence(&error));
                    out.text(&format!(
                        "{id}: cannot end this lease of job {job}, which is no longer on this node: {why}\n"
                    ))?;
                    first_error.get_or_insert(error);
                    // Keep the file of this job: only the file shows that the job may have a lease.
                    begun.retain(|one| (one.node(), one.job()) != (end.node.as_str(), end.job));
                }
            }
        }
    }
    begun.iter().for_each(|one| settings.directory.remove_begun(one));
    first_error.map_or(Ok(0), |error| Err(error.into()))
}

/// Returns the error for a request whose thread has failed.
fn stopped() -> Box<ApiError> {
    Box::new(ApiError::new(Code::Internal, "the request was not carried out"))
}

fn of_job(lease: Lease) -> Option<OfJob> {
    let LeaseBinding::Job { cluster, job, node, restart, .. } = &lease.binding else { return None };
    let (cluster, job, node, restart) = (cluster.clone(), *job, node.clone(), *restart);
    // This value of `until_ms` has no effect, because [`Calls::end`] replaces it by its own deadline. So gpushd treats
    // the remaining processes of the job as after an Epilog, which is right because Slurm no longer knows the job.
    let until_ms = Timestamp::now().as_millisecond();
    Some(OfJob { lease, end: SlurmJobEnd { cluster, job, node, restart, until_ms } })
}

/// Returns the cluster whose jobs squeue lists. Slurm writes the names of clusters in lower case.
fn cluster_of(slurm_conf: &SlurmConf) -> Option<String> {
    slurm_conf.get("ClusterName").map(str::to_lowercase).filter(|name| !name.is_empty())
}

/// Returns `named`, or else the only cluster in `all`; `None` if `all` is empty.
///
/// # Errors
/// If `named` is `None`, and `all` has several clusters.
fn the_cluster<'c>(named: Option<String>, all: impl Iterator<Item = &'c str>) -> Result<Option<String>, ApiError> {
    if named.is_some() {
        return Ok(named);
    }
    let all: BTreeSet<&str> = all.collect();
    if all.len() > 1 {
        let names = all.into_iter().collect::<Vec<_>>().join(", ");
        return Err(ApiError::new(
            Code::BadRequest,
            format!("cannot choose the cluster: there are leases or files for jobs of several clusters: {names}"),
        )
        .hint("name one cluster: `gpushctl slurm reconcile --cluster NAME`"));
    }
    Ok(all.first().map(|only| (*only).to_owned()))
}

/// Returns the ids of the jobs that may run on a node. `limit` is the time limit for squeue.
async fn jobs_on(squeue: &Path, node: &str, limit: Duration) -> Result<BTreeSet<u32>, ApiError> {
    let mut command = tokio::process::Command::from(program::command(squeue)?);
    // Request all states. If this argument named single states, squeue would leave out jobs with an unknown flag.
    command.args(["--noheader", "--all", "--states=all", "--format=%A %T"]).stdin(Stdio::null()).kill_on_drop(true);
    // Remove variables such as SQUEUE_PARTITION. With them, squeue would leave out jobs, and this command would end
    // their leases.
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"SQUEUE_") || name == "SLURM_CLUSTERS" {
            command.env_remove(name);
        }
    }
    if !node.is_empty() {
        command.arg(format!("--nodelist={node}"));
    }
    let failed = |why: &str| {
        ApiError::new(
            Code::Unavailable,
            format!("{} cannot list the jobs, so this command ends no lease", squeue.display()),
        )
        .cause(why.trim().to_owned())
        .hint("check with `scontrol ping` whether slurmctld answers, then try again")
    };
    let output = tokio::time::timeout(limit, command.output()).await;
    let output = output.map_err(|_| failed(&format!("squeue did not end within {limit:?}")))?.map_err(|error| {
        exit::io(format!("cannot run {}", squeue.display()), &error)
            .hint("give the path of the program squeue: `--squeue FILE`")
    })?;
    if !output.status.success() {
        return Err(failed(&String::from_utf8_lossy(&output.stderr)));
    }
    may_run(&String::from_utf8_lossy(&output.stdout)).map_err(|line| failed(&format!("it prints {line:?}")))
}

/// Returns the ids of the jobs that may run. Each line is `ID STATE`.
///
/// # Errors
/// If a line is not valid; returns the line.
fn may_run(lines: &str) -> Result<BTreeSet<u32>, &str> {
    let mut jobs = BTreeSet::new();
    for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (id, state) = line.split_once(' ').unwrap_or((line, ""));
        let id = id.parse().map_err(|_| line)?;
        if !NOT_RUNNING.contains(&state.trim()) {
            jobs.insert(id);
        }
    }
    Ok(jobs)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    /// Fault: squeue did not list jobs with flags such as `SIGNALING`, and gpushd ended the leases of these jobs
    /// although the jobs ran.
    #[test]
    fn job_with_an_unusual_flag_may_run() {
        let flags = "1 RUNNING\n2 SIGNALING\n3 RESIZING\n 4 STAGE_OUT \n5 COMPLETING\n6 STOPPED\n7 NEW_FLAG\n8\n";
        assert_eq!(may_run(flags), Ok((1..=8).collect()));
        assert_eq!(may_run("1 PENDING\n2 COMPLETED\n3 CANCELLED\n\n4 NODE_FAIL\n"), Ok(BTreeSet::new()));
        assert_eq!(may_run("1 RUNNING\nslurm_load_jobs error\n"), Err("slurm_load_jobs error"));
    }

    /// Fault: without `--cluster`, the command ended the leases of another cluster's jobs.
    #[test]
    fn cluster_of_slurm_conf_is_the_default() {
        let cluster = |text| cluster_of(&SlurmConf::parse(text, |_| None));
        assert_eq!(cluster("ClusterName=CI\nNodeName=n1\n").as_deref(), Some("ci"));
        assert_eq!(cluster("NodeName=n1\n"), None);
    }

    /// Fault: if squeue waited for slurmctld, the command never ended.
    #[test]
    fn squeue_has_a_time_limit() {
        let dir = tempfile::tempdir().unwrap();
        let squeue = dir.path().join("squeue");
        fs::write(&squeue, "#!/bin/sh\nexec sleep 600\n").unwrap();
        fs::set_permissions(&squeue, fs::Permissions::from_mode(0o755)).unwrap();
        let runtime = crate::commands::runtime().unwrap();
        let error = runtime.block_on(jobs_on(&squeue, "n1", Duration::from_millis(100))).unwrap_err();
        assert!(error.code == Code::Unavailable && error.causes[0].contains("did not end within"), "{error:?}");
    }
}
