//! Epilog. It needs only the job id, and can run more than once for a job.

use gpush_api::{GpuIndex, SlurmJobEnd, SlurmJobEnded, SlurmLeftover};
use gpush_core::slurm::{
    Job,
    decide::{Concern, Ended, epilog_fails},
    job_files::{PlaceChoice, Task},
    request::requested,
};

use crate::{
    admin_comment,
    call::{Calls, Unanswered, end_of},
    directory::{Directory, EndedRun},
    hook_start::HookStart,
    options::Options,
    report::{fail, sentence},
    settings::Settings,
    variable,
};

/// Runs Epilog. Returns its exit status.
#[must_use]
pub fn run(options: &Options) -> u8 {
    let job = match Job::read(variable) {
        Ok(job) => job,
        Err(error) => return fail(0, &error.to_string()),
    };
    let settings = Settings::of_root(options);
    let directory = &settings.directory;
    let job = match with_place(directory, job) {
        Ok(job) => job,
        Err((job, why)) => return fail(job, &why),
    };
    let started = HookStart::of_this_process(job.id);
    let run = directory.ended_run(&job, started.as_ref());
    let had_lease = match run {
        EndedRun::OfFile { may_have_lease: true, .. } => true,
        EndedRun::OfFile { restart, may_have_lease: false } => {
            directory.remove(&job, restart);
            return 0;
        }
        EndedRun::Earlier { restart: None } => return 0,
        EndedRun::Earlier { restart: Some(_) } | EndedRun::NoFile => false,
    };
    let has_request = !matches!(requested(&job), Ok(None));
    // If gres.conf has changed, Slurm may set no GPU variables for Epilog. The file of the job then shows that the job
    // had GPUs.
    let shows_gpus = had_lease || job.has_devices() || has_request;
    // Slurm always sets the restart count. If it is missing, this command knows only the job id, so it must not skip
    // the job.
    if !shows_gpus && job.restart.is_some() {
        return 0;
    }
    let end = || end_now(directory, &job, run, started.as_ref());
    let concern = Concern::of(had_lease, has_request, job.has_devices());
    let mut calls = Calls::new(&settings).for_concern(concern);
    let answer = calls.end_run(end);
    if let Ok(ended) = &answer {
        calls.deliver_ends(directory);
        comment(&mut calls, &settings, &job, ended);
    }
    let (ended, why) = match answer {
        Ok(SlurmJobEnded { left, .. }) if left.is_empty() => (Ended::Clean, String::new()),
        Ok(SlurmJobEnded { left, .. }) if left.iter().all(|left| left.unattributed) => {
            (Ended::Unattributed, left.iter().map(words).collect::<Vec<_>>().join("; "))
        }
        Ok(SlurmJobEnded { left, .. }) => (Ended::Left, left.iter().map(words).collect::<Vec<_>>().join("; ")),
        Err(Unanswered::Error(error)) => (Ended::Broken, sentence(&error)),
        Err(Unanswered::NotSent(error) | Unanswered::NoAnswer(error)) => (Ended::NoAnswer, sentence(&error)),
    };
    if let Some(end) = end() {
        finish(directory, &job, &end, ended, had_lease);
    }
    if epilog_fails(ended, had_lease, &settings.slurm) { fail(job.id, &why) } else { 0 }
}

/// Writes what the job used into its comment for administrators, if the config says so and the job had a lease.
fn comment(calls: &mut Calls, settings: &Settings, job: &Job, ended: &SlurmJobEnded) {
    let Some(scontrol) = settings.slurm.admin_comment.as_deref() else { return };
    if ended.ended.is_empty() {
        return;
    }
    let leases = calls.ended_leases(job.id, &ended.ended);
    if let Some(text) = admin_comment::text(&leases) {
        admin_comment::write(scontrol, job.id, &text, settings.until);
    }
}

/// Returns the job with its cluster and node. If Slurm did not set both, takes them from the files of earlier hooks.
///
/// # Errors
/// If jobs of several clusters or nodes have this id. The error has the job id and the reason.
fn with_place(directory: &Directory, job: Job) -> Result<Job, (u32, String)> {
    let text = |name: &str| variable(name).filter(|value| !value.is_empty());
    let ended = Task { job: job.id, cluster: text("SLURM_CLUSTER_NAME"), node: text("SLURMD_NODENAME") };
    if ended.cluster.is_some() && ended.node.is_some() {
        return Ok(job);
    }
    match directory.place_of(&ended) {
        PlaceChoice::None => Ok(job),
        PlaceChoice::Place(place) => {
            let (cluster, node) = directory.names_of(&place, job.id);
            Ok(Job { cluster: ended.cluster.unwrap_or(cluster), node: ended.node.unwrap_or(node), ..job })
        }
        PlaceChoice::Several(places) => {
            let places: Vec<String> = places.iter().map(ToString::to_string).collect();
            let places = places.join("; ");
            let what = "set SLURM_CLUSTER_NAME and SLURMD_NODENAME to choose one";
            Err((job.id, format!("several jobs on this host have the id {} ({places}): {what}", job.id)))
        }
    }
}

/// Returns the request that ends the run, according to the current files. `run` is the run that the files showed when
/// this Epilog began, and `started` is when Slurm started this Epilog. For `NoFile`, reads the file of the job again,
/// because the Prolog of the next run may have written it since then.
fn end_now(directory: &Directory, job: &Job, run: EndedRun, started: Option<&HookStart>) -> Option<SlurmJobEnd> {
    let run = match run {
        EndedRun::NoFile => directory.ended_run(job, started),
        EndedRun::OfFile { .. } | EndedRun::Earlier { .. } => run,
    };
    let restart = match run {
        EndedRun::OfFile { restart, .. } => restart,
        EndedRun::Earlier { restart } => restart?,
        EndedRun::NoFile => job.last_run(),
    };
    Some(end_of(job, restart))
}

/// Removes the file of a job. If gpushd did not get the request or could not execute it, first records the end. If the
/// end cannot be recorded, keeps the file, because only the file shows that the job may have a lease.
fn finish(directory: &Directory, job: &Job, end: &SlurmJobEnd, ended: Ended, had_lease: bool) {
    match ended {
        Ended::Clean | Ended::Left | Ended::Unattributed => directory.end_delivered(end),
        // Record the end, so that the next hook reports it.
        Ended::Broken | Ended::NoAnswer if had_lease && directory.note_end(end).is_err() => return,
        Ended::Broken | Ended::NoAnswer => {}
    }
    directory.remove(job, end.restart);
}

/// Describes in one sentence what remains of a lease.
fn words(left: &SlurmLeftover) -> String {
    let gpus: Vec<String> = left.gpus.iter().map(GpuIndex::to_string).collect();
    let gpus = match gpus.as_slice() {
        [] => "its GPUs are".to_owned(),
        [one] => format!("GPU {one} is"),
        several => format!("GPUs {} are", several.join(", ")),
    };
    format!("{gpus} not free after the job, because lease {} waits: {}", left.lease, left.waits_for.join(", "))
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc,
        time::{Duration, Instant},
    };

    use gpush_api::{ApiError, Code};

    use super::*;
    use crate::{call::tests as gpushd, directory::PossibleLeases};

    /// A run of a job.
    fn job(restart: u32) -> Job {
        let uid = Some(nix::unistd::geteuid().as_raw());
        let (cluster, node) = ("ci".to_owned(), "n1".to_owned());
        Job { cluster, id: 42, node, uid, restart: Some(restart), ..Job::default() }
    }

    /// Fault: the end of a job could not be recorded, but Epilog still removed the file. Then nothing showed that the
    /// job had a lease.
    #[test]
    fn file_of_the_job_stays_until_its_end_is_noted() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::new(dir.path(), Instant::now() + Duration::from_secs(600));
        let job = job(0);
        directory.begin(&job, None, PossibleLeases::All).unwrap();
        let obstacle = dir.path().join("ci-42@n1+ended");
        std::fs::create_dir(&obstacle).unwrap();
        let finish = || finish(&directory, &job, &end_of(&job, 0), Ended::NoAnswer, true);
        finish();
        assert!(matches!(directory.ended_run(&job, None), EndedRun::OfFile { .. }));
        std::fs::remove_dir(&obstacle).unwrap();
        finish();
        assert_eq!((directory.ended_run(&job, None), directory.undelivered_ends().len()), (EndedRun::NoFile, 1));
    }

    /// Fault: gpushd could not record an end, because its disk was full. Epilog removed the file of the job and recorded
    /// nothing. When the disk had space again, no hook ended the lease.
    #[test]
    fn end_that_gpushd_cannot_record_is_noted() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::new(dir.path(), Instant::now() + Duration::from_secs(600));
        let job = job(0);
        directory.begin(&job, None, PossibleLeases::All).unwrap();
        finish(&directory, &job, &end_of(&job, 0), Ended::Broken, true);
        assert_eq!((directory.ended_run(&job, None), directory.undelivered_ends().len()), (EndedRun::NoFile, 1));
    }

    /// Fault: the Epilog of a job without a file waited for gpushd. Meanwhile the next run of the job began, and the
    /// Epilog ended the lease of that run. In Slurm 22.05, this Epilog has the restart count of the next run.
    #[test]
    fn run_that_begins_while_epilog_waits_is_not_ended() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::new(&dir.path().join("jobs"), Instant::now() + Duration::from_secs(600));
        let (job, started) = (job(1), HookStart::at(5));
        let (seen, requests) = mpsc::channel();
        let (socket, prolog, next) = (dir.path().join("socket"), directory.clone(), job.clone());
        gpushd::serve(&socket, move |body| {
            let end: SlurmJobEnd = serde_json::from_str(body).unwrap();
            seen.send(end.restart).unwrap();
            match prolog.begin(&next, Some(HookStart::at(9)), PossibleLeases::All) {
                Ok(_) if end.restart == 1 => gpushd::error(&ApiError::new(Code::Stopping, "it stops").retryable()),
                Ok(_) => Some((200, "{}".to_owned())),
                Err(_) => None,
            }
        });
        let run = directory.ended_run(&job, Some(&started));
        assert_eq!(run, EndedRun::NoFile);
        let end = || end_now(&directory, &job, run, Some(&started));
        let mut calls = Calls::to(&socket, Duration::from_secs(5), Duration::ZERO);
        calls.end_run(end).unwrap();
        assert_eq!(requests.try_iter().collect::<Vec<_>>(), [1, 0]);
        finish(&directory, &job, &end().unwrap(), Ended::Clean, false);
        assert!(matches!(directory.ended_run(&job, None), EndedRun::OfFile { restart: 1, .. }), "its file stays");
    }
}
