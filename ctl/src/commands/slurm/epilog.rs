//! `gpushctl slurm epilog`. It needs only the job id, and can run twice.

use gpush_api::{SlurmJobEnd, SlurmJobEnded, SlurmLeftover};
use gpush_core::slurm::{
    Job,
    decide::{Ended, epilog_fails},
    request::requested,
};

use super::{
    call::{Calls, Unanswered, end_of},
    directory::{Directory, EndedRun},
    fail,
    hook_start::HookStart,
    sentence,
    settings::Settings,
    variable,
};
use crate::args::{Global, HookFiles, HookLimits};

pub(super) fn run(global: &Global, files: &HookFiles, limits: &HookLimits) -> u8 {
    let job = match Job::read(variable) {
        Ok(job) => job,
        Err(error) => return fail(0, &error.to_string()),
    };
    let settings = Settings::of_root(files, limits);
    let directory = &settings.directory;
    let (restart, had_lease) = match directory.ended_run(&job, HookStart::of_this_process(job.id).as_ref()) {
        EndedRun::OfFile { restart, may_have_lease: true } => (restart, true),
        EndedRun::OfFile { restart, may_have_lease: false } => {
            directory.remove(&job, restart);
            return 0;
        }
        EndedRun::Earlier { restart: Some(restart) } => (restart, false),
        EndedRun::Earlier { restart: None } => return 0,
        EndedRun::NoFile => (job.last_run(), false),
    };
    // After a change of gres.conf, Slurm sets no GPU variables here. The file of the job then shows that it had GPUs.
    let shows_gpus = had_lease || job.has_devices() || !matches!(requested(&job), Ok(None));
    // Slurm always sets the restart count. Without it, nothing but the job id is known.
    if !shows_gpus && job.restart.is_some() {
        return 0;
    }
    let end = end_of(&job, restart);
    let answer = super::super::runtime().map_err(Unanswered::Error).and_then(|runtime| {
        runtime.block_on(async {
            let calls = Calls::new(global, &settings);
            let mut calls = if shows_gpus { calls } else { calls.without_waiting() };
            let ended = calls.end(&end).await;
            if ended.is_ok() {
                calls.deliver_ends(directory).await;
            }
            ended
        })
    });
    let (ended, why) = match answer {
        Ok(SlurmJobEnded { left, .. }) if left.is_empty() => (Ended::Clean, String::new()),
        Ok(SlurmJobEnded { left, .. }) if left.iter().all(|left| left.unattributed) => {
            (Ended::Unattributed, left.iter().map(words).collect::<Vec<_>>().join("; "))
        }
        Ok(SlurmJobEnded { left, .. }) => (Ended::Left, left.iter().map(words).collect::<Vec<_>>().join("; ")),
        Err(Unanswered::Error(error)) => (Ended::Broken, sentence(&error)),
        Err(Unanswered::NotSent(error) | Unanswered::NoAnswer(error)) => (Ended::NoAnswer, sentence(&error)),
    };
    finish(directory, &job, &end, ended, had_lease);
    if epilog_fails(ended, had_lease, &settings.slurm) { fail(job.id, &why) } else { 0 }
}

/// Removes the file of a job, and notes an end that gpushd did not receive. Without a note, the file must stay: it shows
/// that the job may have a lease.
fn finish(directory: &Directory, job: &Job, end: &SlurmJobEnd, ended: Ended, had_lease: bool) {
    match ended {
        Ended::Clean | Ended::Left | Ended::Unattributed | Ended::Broken => directory.end_delivered(end),
        // The next hook delivers the end.
        Ended::NoAnswer if had_lease && directory.note_end(end).is_err() => return,
        Ended::NoAnswer => {}
    }
    directory.remove(job, end.restart);
}

/// Describes the remaining processes of a lease in one sentence.
fn words(left: &SlurmLeftover) -> String {
    let gpus: Vec<String> = left.gpus.iter().map(u32::to_string).collect();
    let gpus = match gpus.as_slice() {
        [] => "its GPUs are".to_owned(),
        [one] => format!("GPU {one} is"),
        several => format!("GPUs {} are", several.join(", ")),
    };
    format!("{gpus} not free after the job, lease {}: {}", left.lease, left.waits_for.join(", "))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::commands::slurm::directory::PossibleLeases;

    /// Fault: Epilog removed the file although the end was not noted, and nothing showed that the job had a lease.
    #[test]
    fn file_of_the_job_stays_until_its_end_is_noted() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::new(dir.path(), Instant::now() + Duration::from_secs(600));
        let uid = Some(nix::unistd::geteuid().as_raw());
        let job = Job { cluster: "ci".to_owned(), id: 42, node: "n1".to_owned(), uid, ..Job::default() };
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
}
