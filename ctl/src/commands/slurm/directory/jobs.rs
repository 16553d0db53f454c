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

use super::{super::hook_start::HookStart, Directory, Locked, access};

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
    /// When Slurm started the Prolog; `None` if that is not known.
    started: Option<HookStart>,
    /// Whether a lease of an earlier run may exist.
    earlier_lease: bool,
}

/// The record of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct RunRecord {
    #[serde(flatten)]
    run: Run,
    /// Whether a lease of this or an earlier run may exist.
    may_have_lease: bool,
}

/// Which leases of a job may exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::commands::slurm) enum PossibleLeases {
    /// None: gpushd refused this run, and has ended the leases of earlier runs.
    None,
    /// Only those of earlier runs: this run did not reach gpushd.
    Earlier,
    /// That of this run, and those of earlier runs.
    All,
}

impl PossibleLeases {
    fn of(self, run: &Run) -> bool {
        match self {
            Self::None => false,
            Self::Earlier => run.earlier_lease,
            Self::All => true,
        }
    }
}

/// The run of a job that an Epilog ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::commands::slurm) enum EndedRun {
    /// The run whose Prolog made the file of the job.
    OfFile {
        /// Its restart count.
        restart: u32,
        /// Whether a lease of this or an earlier run may exist.
        may_have_lease: bool,
    },
    /// A run before that of the file.
    Earlier {
        /// Its restart count or a larger one; `None` if it was a run of another job, which had the id before.
        restart: Option<u32>,
    },
    /// Not known: there is no file of the job.
    NoFile,
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
    /// Begins a run of a job: writes its file with the state `begun`, and replaces those of earlier runs.
    /// `started` says when Slurm started the Prolog, and `leases` which leases may exist until the file is written.
    pub(in crate::commands::slurm) fn begin(
        &self,
        job: &Job,
        started: Option<HookStart>,
        leases: PossibleLeases,
    ) -> io::Result<Run> {
        self.create()?;
        self.keep_place(&HookPlace::new(&job.cluster, &job.node));
        let locked = self.lock()?;
        let name = job.file_name();
        let earlier = self.record_of(&name);
        let run = Run {
            restart: job.begun_run(),
            leader: job.leader,
            pid: std::process::id(),
            begun_ns: i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX),
            started,
            earlier_lease: earlier.as_ref().is_some_and(|earlier| earlier.may_have_lease) || self.has_noted_end(&name),
        };
        if let Some(earlier) = earlier {
            self.remove_link(&name, &earlier.run);
        }
        // The record comes first: a file without a record could not be removed.
        self.write_record(&name, &run, leases)?;
        self.put(&locked, job, JobState::Begun)?;
        if let Some(leader) = job.leader {
            match symlink(name.to_string(), self.path.join(name.of_component(leader).to_string())) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(run)
    }

    /// Writes what a Prolog did, and which leases may exist now.
    pub(in crate::commands::slurm) fn write(
        &self,
        job: &Job,
        run: &Run,
        state: JobState,
        leases: PossibleLeases,
    ) -> io::Result<FileWritten> {
        let locked = self.lock()?;
        match self.record_of(&job.file_name()) {
            Some(now) if now.run == *run => {
                self.put(&locked, job, state)?;
                if now.may_have_lease != leases.of(run) {
                    self.write_record(&job.file_name(), run, leases)?;
                }
                Ok(FileWritten::Yes)
            }
            Some(now) if now.run.restart == run.restart => Ok(FileWritten::Again),
            Some(_) | None => Ok(FileWritten::Late),
        }
    }

    fn put(&self, _locked: &Locked, job: &Job, state: JobState) -> io::Result<()> {
        let file = JobFile {
            cluster: job.cluster.clone(),
            job: job.id,
            node: job.node.clone(),
            restart: job.begun_run(),
            state,
        };
        self.replace(&job.file_name().to_string(), &serde_json::to_vec(&file)?, 0o400, job.uid)
    }

    /// Finds the run that an Epilog ends. `epilog` says when Slurm started the Epilog.
    pub(in crate::commands::slurm) fn ended_run(&self, job: &Job, epilog: Option<&HookStart>) -> EndedRun {
        let Some(RunRecord { run, may_have_lease }) = self.record_of(&job.file_name()) else { return EndedRun::NoFile };
        if job.last_run() < run.restart {
            return EndedRun::Earlier { restart: Some(job.last_run()) };
        }
        let is_earlier = match (epilog, &run.started) {
            (Some(epilog), Some(prolog)) => epilog.is_before(prolog),
            (Some(_) | None, _) => false,
        };
        match is_earlier {
            true => EndedRun::Earlier { restart: run.restart.checked_sub(1) },
            // When a job was requeued, Slurm 22.05 gives this Epilog the restart count of the next run.
            false => EndedRun::OfFile { restart: run.restart, may_have_lease },
        }
    }

    /// Removes the file of a job, unless it belongs to a later run than `restart`.
    pub(in crate::commands::slurm) fn remove(&self, job: &Job, restart: u32) {
        self.remove_if(job, |run| run.restart <= restart);
    }

    /// Removes the file of a run, unless another Prolog of the job has begun in the meantime.
    pub(in crate::commands::slurm) fn remove_run(&self, job: &Job, run: &Run) {
        self.remove_if(job, |now| now == run);
    }

    fn remove_if(&self, job: &Job, is_its: impl FnOnce(&Run) -> bool) {
        let Ok(_locked) = self.lock() else { return };
        let name = job.file_name();
        let Some(record) = self.record_of(&name).filter(|record| is_its(&record.run)) else { return };
        self.remove_link(&name, &record.run);
        self.remove_file(&name.to_string());
        self.remove_file(&format!("{name}{RUN}"));
    }

    /// Removes the link of a heterogeneous job.
    fn remove_link(&self, name: &FileName, run: &Run) {
        if let Some(leader) = run.leader {
            self.remove_file(&name.of_component(leader).to_string());
        }
    }

    fn record_of(&self, name: &FileName) -> Option<RunRecord> {
        self.read_json(&format!("{name}{RUN}")).ok()
    }

    fn write_record(&self, name: &FileName, run: &Run, leases: PossibleLeases) -> io::Result<()> {
        self.write_json(&format!("{name}{RUN}"), &RunRecord { run: run.clone(), may_have_lease: leases.of(run) })
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

    use gpush_api::SlurmJobEnd;

    use super::*;

    fn directory(dir: &tempfile::TempDir) -> Directory {
        Directory::new(&dir.path().join("jobs"), Instant::now() + Duration::from_secs(600))
    }

    fn run(id: u32, restart: u32, leader: Option<u32>) -> Job {
        let uid = Some(nix::unistd::geteuid().as_raw());
        Job {
            cluster: "ci".to_owned(),
            id,
            node: "n1".to_owned(),
            uid,
            restart: Some(restart),
            leader,
            ..Job::default()
        }
    }

    fn task(job: u32) -> Task {
        Task { job, cluster: Some("ci".to_owned()), node: Some("n1".to_owned()) }
    }

    fn of_file(restart: u32) -> EndedRun {
        EndedRun::OfFile { restart, may_have_lease: true }
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
        directory.begin(&component, None, PossibleLeases::All).unwrap();
        let mode = |name: &str| fs::metadata(dir.path().join("jobs").join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("ci-42@n1"), mode("ci-42@n1+run"), mode("lock"), mode("")), (0o400, 0o600, 0o600, 0o755));
        assert_eq!((state(&directory, 41), state(&directory, 42)), (Some(JobState::Begun), Some(JobState::Begun)));
        // Epilog may know nothing but the job id.
        directory.remove(&run(42, 0, None), 0);
        assert_eq!(left(&directory), [""; 0], "the link is removed as well");
    }

    #[test]
    fn late_epilog_of_an_earlier_run_removes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        directory.begin(&run(42, 0, None), None, PossibleLeases::All).unwrap();
        let second = directory.begin(&run(42, 1, None), None, PossibleLeases::All).unwrap();
        directory.write(&run(42, 1, None), &second, refused("second"), PossibleLeases::All).unwrap();
        let ended = |restart| directory.ended_run(&run(42, restart, None), None);
        assert_eq!((ended(0), ended(1)), (EndedRun::Earlier { restart: Some(0) }, of_file(1)));
        directory.remove(&run(42, 0, None), 0);
        assert_eq!(state(&directory, 42), Some(refused("second")));
        // Prolog runs twice for one run.
        let again = directory.begin(&run(42, 1, None), None, PossibleLeases::All).unwrap();
        assert_eq!(
            directory.write(&run(42, 1, None), &second, refused("second"), PossibleLeases::All).unwrap(),
            FileWritten::Again
        );
        assert_eq!(
            directory.write(&run(42, 1, None), &again, refused("again"), PossibleLeases::All).unwrap(),
            FileWritten::Yes
        );
        directory.remove(&run(42, 1, None), 1);
        assert_eq!(left(&directory), [""; 0]);
    }

    /// Slurm 22.05 gives both Epilogs the restart count of the second run.
    #[test]
    fn epilog_that_started_before_the_prolog_ends_an_earlier_run() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        let ended = |job: &Job, ticks| directory.ended_run(job, Some(&HookStart::at(ticks)));
        let (first, second) = (run(42, 0, None), run(42, 1, None));
        assert_eq!(ended(&first, 1), EndedRun::NoFile);
        directory.begin(&first, Some(HookStart::at(10)), PossibleLeases::All).unwrap();
        assert_eq!(ended(&second, 20), of_file(0));
        assert_eq!(ended(&first, 9), EndedRun::Earlier { restart: None }, "of a job that had this id before");
        directory.begin(&second, Some(HookStart::at(30)), PossibleLeases::All).unwrap();
        assert_eq!(ended(&second, 20), EndedRun::Earlier { restart: Some(0) });
        assert_eq!(ended(&second, 40), of_file(1));
        assert_eq!(directory.ended_run(&second, None), of_file(1), "/proc cannot be read");
    }

    #[test]
    fn refused_run_has_no_lease_but_an_earlier_run_may_have_one() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        let may_have_lease = |job: &Job| match directory.ended_run(job, None) {
            EndedRun::OfFile { may_have_lease, .. } => may_have_lease,
            other => panic!("{other:?}"),
        };
        let refuse = |job: &Job, asked, leases| {
            let run = directory.begin(job, None, asked).unwrap();
            directory.write(job, &run, refused("why"), leases).unwrap();
            may_have_lease(job)
        };
        let (first, second) = (run(42, 0, None), run(42, 1, None));
        assert!(!refuse(&first, PossibleLeases::Earlier, PossibleLeases::Earlier), "refused without gpushd");
        directory.begin(&first, None, PossibleLeases::All).unwrap();
        assert!(may_have_lease(&first));
        assert!(refuse(&second, PossibleLeases::Earlier, PossibleLeases::Earlier), "gpushd does not know it yet");
        assert!(!refuse(&second, PossibleLeases::All, PossibleLeases::None), "gpushd refused it");
        // Epilog removed the file of a run, but could not tell gpushd.
        directory.remove(&second, 1);
        let end = SlurmJobEnd { cluster: "ci".to_owned(), job: 42, node: "n1".to_owned(), restart: 1, until_ms: 0 };
        directory.note_end(&end).unwrap();
        assert!(refuse(&run(42, 2, None), PossibleLeases::Earlier, PossibleLeases::Earlier));
    }

    /// slurmd was killed, and the Prolog of the first run continues without it.
    #[test]
    fn late_prolog_of_an_earlier_run_writes_and_removes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        let first = directory.begin(&run(42, 0, None), None, PossibleLeases::All).unwrap();
        let second = directory.begin(&run(42, 1, None), None, PossibleLeases::All).unwrap();
        directory.write(&run(42, 1, None), &second, refused("second"), PossibleLeases::All).unwrap();
        assert_eq!(
            directory.write(&run(42, 0, None), &first, refused("first"), PossibleLeases::All).unwrap(),
            FileWritten::Late
        );
        directory.remove_run(&run(42, 0, None), &first);
        assert_eq!(state(&directory, 42), Some(refused("second")));
        // Epilog has removed the file.
        directory.remove(&run(42, 1, None), 1);
        assert_eq!(
            directory.write(&run(42, 1, None), &second, refused("late"), PossibleLeases::All).unwrap(),
            FileWritten::Late
        );
        assert_eq!(left(&directory), [""; 0]);
    }

    /// Regression test: the leader's file replaced the link. If the leader needed no lease, tasks
    /// then found no file.
    #[test]
    fn leader_and_component_have_files_of_different_names() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        let (component, leader) = (run(42, 0, Some(41)), run(41, 0, None));
        let of_component = directory.begin(&component, None, PossibleLeases::All).unwrap();
        directory.write(&component, &of_component, refused("component"), PossibleLeases::All).unwrap();
        let of_leader = directory.begin(&leader, None, PossibleLeases::All).unwrap();
        assert_eq!(state(&directory, 41), Some(JobState::Begun));
        directory.remove_run(&leader, &of_leader);
        assert_eq!(state(&directory, 41), Some(refused("component")));
        // In the other order.
        directory.begin(&leader, None, PossibleLeases::All).unwrap();
        directory.remove(&component, 0);
        assert_eq!(state(&directory, 41), Some(JobState::Begun));
        directory.remove(&leader, 0);
        assert_eq!(left(&directory), [""; 0]);
    }

    /// Regression test: hooks read the restart count from the file that belongs to the user.
    #[test]
    fn contents_of_the_users_file_decide_nothing_for_hooks_of_root() {
        let dir = tempfile::tempdir().unwrap();
        let directory = directory(&dir);
        directory.begin(&run(42, 0, None), None, PossibleLeases::All).unwrap();
        let path = dir.path().join("jobs/ci-42@n1");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, r#"{"cluster":"ci","job":42,"node":"n1","restart":4294967295,"state":"passed"}"#).unwrap();
        assert_eq!(directory.ended_run(&run(42, 0, None), None), of_file(0));
        directory.remove(&run(42, 0, None), 0);
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
            let of_old = directory.begin(&old, None, PossibleLeases::All).unwrap();
            let new = run(42, 2 * round + 1, Some(41));
            std::thread::scope(|scope| {
                scope.spawn(|| directory.remove(&old, 2 * round));
                scope.spawn(|| directory.remove_run(&old, &of_old));
                scope.spawn(|| directory.write(&old, &of_old, refused("old"), PossibleLeases::All).map(drop).unwrap());
                let of_new = directory.begin(&new, None, PossibleLeases::All).unwrap();
                directory.write(&new, &of_new, refused("new"), PossibleLeases::All).unwrap();
            });
            assert_eq!(state(&directory, 42), Some(refused("new")), "round {round}");
            assert_eq!(left(&directory), ["ci-41+42@n1", "ci-42@n1", "ci-42@n1+run"], "round {round}");
        }
    }
}
