//! Files of jobs: written by Prolog, read by TaskProlog, removed by Epilog.
//!
//! ```text
//! Prolog: begin ─► file `begun` ─► write ─► file `granted`, `refused`, `passed` ─► Epilog: remove
//!                                   └ another run has begun: nothing is written
//! ```

use std::{io, os::unix::fs::symlink};

use gpush_core::slurm::{
    Job,
    file::{JobFile, JobState},
    job_files::{FileChoice, FileName, HookPlace, Task, choose},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Directory, Locked, access};

/// Suffix of the file that records a run. The name of a node never contains a `+`.
const RUN: &str = "+run";

/// The run of a Prolog, to which a file of a job belongs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::commands::slurm) struct Run {
    /// How often the job was requeued.
    restart: u32,
    /// Job id of the leader of a heterogeneous job.
    leader: Option<u32>,
    /// Process of the Prolog.
    pid: u32,
    /// When the Prolog began, in nanoseconds since the Unix epoch. Together with the pid, this is
    /// unique for each Prolog.
    begun_ns: i64,
}

/// Whether a Prolog could write its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::commands::slurm) enum FileWritten {
    Yes,
    /// No: Slurm runs another Prolog for the same run of the job. That Prolog writes its own
    /// result.
    Again,
    /// No: Epilog has run, or a later run of the job has begun. Slurm no longer waits for this Prolog.
    Late,
}

/// What TaskProlog finds for a task.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::commands::slurm) enum Found {
    /// gpush is not concerned with the job.
    Nothing,
    /// The file of the job.
    File(JobFile),
    /// Several clusters or nodes have a file of this job, and the environment of the task names
    /// none of them.
    Several,
}

impl Directory {
    /// Begins a run of a job: writes its file with the state `begun`. Replaces the files of earlier
    /// runs.
    pub(in crate::commands::slurm) fn begin(&self, job: &Job) -> io::Result<Run> {
        self.create()?;
        let run = Run {
            restart: job.restart,
            leader: job.leader,
            pid: std::process::id(),
            begun_ns: i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX),
        };
        self.keep_place(&HookPlace::new(&job.cluster, &job.node));
        let locked = self.lock()?;
        let name = job.file_name();
        if let Some(earlier) = self.run_of(&name) {
            self.remove_link(&name, &earlier);
        }
        // Write the record first, because a file without a record could not be removed.
        self.write_json(&format!("{name}{RUN}"), &run)?;
        self.put(&locked, job, JobState::Begun)?;
        if let Some(leader) = job.leader {
            match symlink(name.to_string(), self.path.join(name.of_component(leader).to_string())) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(run)
    }

    /// Writes the result of a Prolog.
    pub(in crate::commands::slurm) fn write(&self, job: &Job, run: &Run, state: JobState) -> io::Result<FileWritten> {
        let locked = self.lock()?;
        match self.run_of(&job.file_name()) {
            Some(now) if now == *run => self.put(&locked, job, state).map(|()| FileWritten::Yes),
            Some(now) if now.restart == run.restart => Ok(FileWritten::Again),
            Some(_) | None => Ok(FileWritten::Late),
        }
    }

    fn put(&self, _locked: &Locked, job: &Job, state: JobState) -> io::Result<()> {
        let file =
            JobFile { cluster: job.cluster.clone(), job: job.id, node: job.node.clone(), restart: job.restart, state };
        self.replace(&job.file_name().to_string(), &serde_json::to_vec(&file)?, 0o400, job.uid)
    }

    /// Returns the restart count of the run whose Prolog created the file of a job. Returns `None`
    /// if the file belongs to a later run, or if there is no file.
    pub(in crate::commands::slurm) fn restart(&self, job: &Job) -> Option<u32> {
        self.run_of(&job.file_name()).map(|run| run.restart).filter(|restart| *restart <= job.restart)
    }

    /// Removes the file of a job, unless it belongs to a later run.
    pub(in crate::commands::slurm) fn remove(&self, job: &Job) {
        self.remove_if(job, |run| run.restart <= job.restart);
    }

    /// Removes the file of a run, unless another Prolog of the job has begun in the meantime.
    pub(in crate::commands::slurm) fn remove_run(&self, job: &Job, run: &Run) {
        self.remove_if(job, |now| now == run);
    }

    fn remove_if(&self, job: &Job, is_its: impl FnOnce(&Run) -> bool) {
        let Ok(_locked) = self.lock() else { return };
        let name = job.file_name();
        let Some(run) = self.run_of(&name).filter(is_its) else { return };
        self.remove_link(&name, &run);
        self.remove_file(&name.to_string());
        self.remove_file(&format!("{name}{RUN}"));
    }

    /// Removes the link of a heterogeneous job.
    fn remove_link(&self, name: &FileName, run: &Run) {
        if let Some(leader) = run.leader {
            self.remove_file(&name.of_component(leader).to_string());
        }
    }

    fn run_of(&self, name: &FileName) -> Option<Run> {
        self.read_json(&format!("{name}{RUN}")).ok()
    }

    /// Finds the file of a task of the calling user.
    pub(in crate::commands::slurm) fn find(&self, task: &Task) -> io::Result<Found> {
        let is_own = |name: &FileName| access::is_own(&self.path.join(name.to_string()));
        let names: Vec<FileName> =
            self.names()?.iter().filter_map(|name| FileName::parse(name)).filter(is_own).collect();
        match choose(task, &names, &self.places()) {
            FileChoice::None => Ok(Found::Nothing),
            FileChoice::File(name) => Ok(self.read(&name)?.map_or(Found::Nothing, Found::File)),
            FileChoice::Elsewhere(names) => {
                for name in names {
                    if let Some(file) = self.read(&name)?.filter(|file| matches!(file.state, JobState::Refused { .. }))
                    {
                        return Ok(Found::File(file));
                    }
                }
                Ok(Found::Nothing)
            }
            FileChoice::Several => Ok(Found::Several),
        }
    }

    fn read(&self, name: &FileName) -> io::Result<Option<JobFile>> {
        match self.read_json(&name.to_string()) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::PermissionsExt,
        time::{Duration, Instant},
    };

    use super::*;

    fn directory(dir: &tempfile::TempDir) -> Directory {
        Directory::new(&dir.path().join("jobs"), Instant::now() + Duration::from_secs(600))
    }

    fn run(id: u32, restart: u32, leader: Option<u32>) -> Job {
        let uid = Some(nix::unistd::geteuid().as_raw());
        Job { cluster: "ci".to_owned(), id, node: "n1".to_owned(), uid, restart, leader, ..Job::default() }
    }

    fn task(job: u32) -> Task {
        Task { job, cluster: Some("ci".to_owned()), node: Some("n1".to_owned()) }
    }

    fn refused(why: &str) -> JobState {
        JobState::Refused { reasons: vec![why.to_owned()], hint: None }
    }

    fn state(directory: &Directory, job: u32) -> Option<JobState> {
        match directory.find(&task(job)).unwrap() {
            Found::File(file) => Some(file.state),
            Found::Nothing => None,
            Found::Several => panic!("several files"),
        }
    }

    /// Returns all files except the lock and the list of places.
    fn left(directory: &Directory) -> Vec<String> {
        let mut names = directory.names().unwrap();
        names.retain(|name| name != "lock" && name != "places");
        names.sort();
        names
    }

    #[test]
    fn file_of_a_job_is_its_users_and_is_found_by_the_leader() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        let component = run(42, 0, Some(41));
        directory.begin(&component).unwrap();
        let mode = |name: &str| fs::metadata(dir.path().join("jobs").join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("ci-42@n1"), mode("ci-42@n1+run"), mode("lock"), mode("")), (0o400, 0o600, 0o600, 0o755));
        assert_eq!((state(&directory, 41), state(&directory, 42)), (Some(JobState::Begun), Some(JobState::Begun)));
        // Epilog may know only the job id.
        directory.remove(&run(42, 0, None));
        assert_eq!(left(&directory), [""; 0], "the link is removed as well");
    }

    #[test]
    fn late_epilog_of_an_earlier_run_removes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        directory.begin(&run(42, 0, None)).unwrap();
        let second = directory.begin(&run(42, 1, None)).unwrap();
        directory.write(&run(42, 1, None), &second, refused("second")).unwrap();
        assert_eq!((directory.restart(&run(42, 0, None)), directory.restart(&run(42, 1, None))), (None, Some(1)));
        directory.remove(&run(42, 0, None));
        assert_eq!(state(&directory, 42), Some(refused("second")));
        // Prolog runs twice for the same run.
        let again = directory.begin(&run(42, 1, None)).unwrap();
        assert_eq!(directory.write(&run(42, 1, None), &second, refused("second")).unwrap(), FileWritten::Again);
        assert_eq!(directory.write(&run(42, 1, None), &again, refused("again")).unwrap(), FileWritten::Yes);
        directory.remove(&run(42, 1, None));
        assert_eq!(left(&directory), [""; 0]);
    }

    /// slurmd was killed, but the Prolog of the first run continues without it.
    #[test]
    fn late_prolog_of_an_earlier_run_writes_and_removes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        let first = directory.begin(&run(42, 0, None)).unwrap();
        let second = directory.begin(&run(42, 1, None)).unwrap();
        directory.write(&run(42, 1, None), &second, refused("second")).unwrap();
        assert_eq!(directory.write(&run(42, 0, None), &first, refused("first")).unwrap(), FileWritten::Late);
        directory.remove_run(&run(42, 0, None), &first);
        assert_eq!(state(&directory, 42), Some(refused("second")));
        // Epilog removes the file first.
        directory.remove(&run(42, 1, None));
        assert_eq!(directory.write(&run(42, 1, None), &second, refused("late")).unwrap(), FileWritten::Late);
        assert_eq!(left(&directory), [""; 0]);
    }

    /// Regression test: the leader's file replaced the link. If the leader needed no lease, tasks
    /// then found no file.
    #[test]
    fn leader_and_component_have_files_of_different_names() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        let (component, leader) = (run(42, 0, Some(41)), run(41, 0, None));
        let of_component = directory.begin(&component).unwrap();
        directory.write(&component, &of_component, refused("component")).unwrap();
        let of_leader = directory.begin(&leader).unwrap();
        assert_eq!(state(&directory, 41), Some(JobState::Begun));
        directory.remove_run(&leader, &of_leader);
        assert_eq!(state(&directory, 41), Some(refused("component")));
        // The same in the other order.
        directory.begin(&leader).unwrap();
        directory.remove(&component);
        assert_eq!(state(&directory, 41), Some(JobState::Begun));
        directory.remove(&leader);
        assert_eq!(left(&directory), [""; 0]);
    }

    /// Regression test: hooks read the restart count from the file that belongs to the user.
    #[test]
    fn contents_of_the_users_file_decide_nothing_for_hooks_of_root() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        directory.begin(&run(42, 0, None)).unwrap();
        let path = dir.path().join("jobs/ci-42@n1");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, r#"{"cluster":"ci","job":42,"node":"n1","restart":4294967295,"state":"passed"}"#).unwrap();
        assert_eq!(directory.restart(&run(42, 0, None)), Some(0));
        directory.remove(&run(42, 0, None));
        assert_eq!(left(&directory), [""; 0]);
    }

    /// The Prologs and Epilogs of two runs execute at the same time. At the end, only the file of
    /// the later run exists.
    #[test]
    fn concurrent_hooks_leave_the_file_of_the_last_run() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        for round in 0..200 {
            let old = run(42, 2 * round, Some(41));
            let of_old = directory.begin(&old).unwrap();
            let new = run(42, 2 * round + 1, Some(41));
            std::thread::scope(|scope| {
                scope.spawn(|| directory.remove(&old));
                scope.spawn(|| directory.remove_run(&old, &of_old));
                scope.spawn(|| directory.write(&old, &of_old, refused("old")).map(drop).unwrap());
                let of_new = directory.begin(&new).unwrap();
                directory.write(&new, &of_new, refused("new")).unwrap();
            });
            assert_eq!(state(&directory, 42), Some(refused("new")), "round {round}");
            assert_eq!(left(&directory), ["ci-41+42@n1", "ci-42@n1", "ci-42@n1+run"], "round {round}");
        }
    }
}
