//! `gpushctl slurm usage`: what the leases of a job were used for on this node.

use gpush_api::{ApiError, Code, Lease, LeaseBinding};
use gpush_client::{Client, LeaseSelection};
use gpush_core::quote::Quoted;

use crate::{exit::Outcome, output::Output, render::lease};

/// Maximum number of ended leases of one job. A job has one for each run.
const MOST: usize = 100;

pub(super) async fn run(client: &mut Client, job: &str, out: &Output) -> Outcome {
    let (cluster, id) = parsed(job)?;
    let selection = LeaseSelection { job: Some(id), ended: MOST, ..LeaseSelection::default() };
    let mut leases = client.leases_of(&selection).await?;
    leases.retain(|lease| is_of(lease, cluster, id));
    if leases.is_empty() {
        let error =
            ApiError::new(Code::NotFound, format!("gpushd knows no lease of job {} that you may see", Quoted(job)));
        return Err(error.hint("list the jobs with `gpushctl lease list --ended -o wide`").into());
    }
    // In order of the runs.
    leases.sort_by_key(|lease| lease.id);
    out.list(&leases, |look| lease::of_job(&leases, look))?;
    Ok(0)
}

/// Parses `812` or `ci/812`.
fn parsed(job: &str) -> Result<(Option<&str>, u32), ApiError> {
    let (cluster, id) = job.rsplit_once('/').map_or((None, job), |(cluster, id)| (Some(cluster), id));
    match id.parse() {
        Ok(id) if id > 0 && cluster != Some("") => Ok((cluster, id)),
        Ok(_) | Err(_) => {
            let error = ApiError::new(Code::BadRequest, format!("{} is not the id of a job", Quoted(job)));
            Err(error.hint("write the id as in squeue, such as 812, or with the cluster, such as ci/812"))
        }
    }
}

/// Returns whether a lease is of this job. An older gpushd returns the leases of all jobs.
fn is_of(lease: &Lease, wanted: Option<&str>, id: u32) -> bool {
    match &lease.binding {
        LeaseBinding::Job { cluster, job, .. } => *job == id && wanted.is_none_or(|wanted| wanted == cluster),
        LeaseBinding::None
        | LeaseBinding::Scope { .. }
        | LeaseBinding::Cgroup { .. }
        | LeaseBinding::Process { .. }
        | LeaseBinding::Time => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_is_an_id_with_or_without_its_cluster() {
        assert_eq!(parsed("812").unwrap(), (None, 812));
        assert_eq!(parsed("ci/812").unwrap(), (Some("ci"), 812));
        for wrong in ["", "0", "/812", "ci/", "812_3", "L17", "-1"] {
            let error = parsed(wrong).unwrap_err();
            assert!(error.message.ends_with("is not the id of a job") && error.hint.is_some(), "{wrong}: {error:?}");
        }
    }
}
