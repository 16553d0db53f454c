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
    job_files::{FileChoice, FileName, HookPlace, PlaceChoice, Task, choose, choose_place},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{super::hook_start::HookStart, Directory, Locked, access};

/// Suffix of the file that records a run. The name of a node never contains a `+`.
const RUN: &str = "+run";

/// The run of a job that a Prolog began. Each file of a job belongs to one run.
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
    /// The cluster and node as Slurm named them. The name of the file contains both in another form.
    cluster: String,
    node: String,
    /// Whether a lease of this or an earlier run may exist.
    may_have_lease: bool,
}

/// Which leases of a job may exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::commands::slurm) enum PossibleLeases {
    /// No lease: gpushd refused this run, and has ended the leases of earlier runs.
    None,
    /// Only leases of earlier runs, because this run did not reach gpushd.
    Earlier,
    /// The lease of this run, and leases of earlier runs.
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
        /// Restart count of that run.
        restart: u32,
        /// Whether a lease of this or an earlier run may exist.
        may_have_lease: bool,
    },
    /// A run before the run that made the file.
    Earlier {
        /// Restart count of the earlier run, or a larger count. `None` if another job had this job
        /// id before, and the run belongs to that job.
        restart: Option<u32>,
    },
    /// The run is not known, because the job has no file.
    NoFile,
}

/// Whether a Prolog could write its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::commands::slurm) enum FileWritten {
    Yes,
    /// Not written, because Slurm runs another Prolog for the same run of the job. That Prolog
    /// writes the result.
    Again,
    /// Not written, because Epilog has run, or a later run of the job has begun. Slurm no longer
    /// waits for this Prolog.
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
    /// Begins a run of a job. Writes the file of this run with the state `begun`, and replaces the
    /// files of earlier runs. `started` is the time at which Slurm started the Prolog. `leases`
    /// says which leases may exist until the file is written.
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
        self.write_record(job, &run, leases)?;
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
                    self.write_record(job, run, leases)?;
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
        let Some(RunRecord { run, may_have_lease, .. }) = self.record_of(&job.file_name()) else {
            return EndedRun::NoFile;
        };
        if job.last_run() < run.restart {
            return EndedRun::Earlier { restart: Some(job.last_run()) };
        }
        let is_earlier = match (epilog, &run.started) {
            (Some(epilog), Some(prolog)) => epilog.is_before(prolog),
            (Some(_) | None, _) => false,
        };
        match is_earlier {
            true => EndedRun::Earlier { restart: run.restart.checked_sub(1) },
            // For the Epilog of a requeued run, Slurm 22.05 sets the restart count of the next run, so use the count of
            // the file.
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

    fn write_record(&self, job: &Job, run: &Run, leases: PossibleLeases) -> io::Result<()> {
        let (cluster, node) = (job.cluster.clone(), job.node.clone());
        let record = RunRecord { run: run.clone(), cluster, node, may_have_lease: leases.of(run) };
        self.write_json(&format!("{}{RUN}", job.file_name()), &record)
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

    /// Finds the cluster and node of an ended job, if the environment does not contain both names.
    pub(in crate::commands::slurm) fn place_of(&self, ended: &Task) -> PlaceChoice {
        let names = self.names().unwrap_or_default();
        let names: Vec<FileName> = names.iter().filter_map(|name| FileName::parse(name)).collect();
        choose_place(ended, &names, &self.places())
    }

    /// Returns the names of the cluster and node of a job as Slurm wrote them. Without a file of the
    /// job, returns them in the form for file names.
    pub(in crate::commands::slurm) fn names_of(&self, place: &HookPlace, job: u32) -> (String, String) {
        let (cluster, node) = (place.cluster(), place.node());
        match self.record_of(&FileName::of_job(cluster, job, node)) {
            Some(record) => (record.cluster, record.node),
            None => (cluster.to_owned(), node.to_owned()),
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
mod tests;
