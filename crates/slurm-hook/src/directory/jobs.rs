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

use super::{Directory, Locked, access};
use crate::hook_start::HookStart;

/// Suffix of the file that records a run. A node name in a file name never contains a `+`, so no other job file ends
/// with this suffix.
const RUN: &str = "+run";

/// How many ids after the id of its leader a component of a heterogeneous job can have. A job has at most 128 components,
/// with consecutive ids. Slurm skips ids that are in use.
const COMPONENT_IDS: u32 = 1024;

/// One run of a job, which a Prolog has begun. Each file of a job belongs to one run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// How often the job was requeued.
    restart: u32,
    /// Job id of the leader of a heterogeneous job.
    leader: Option<u32>,
    /// Pid of the Prolog.
    pid: u32,
    /// Time at which the Prolog began, in nanoseconds since the Unix epoch. Together with the pid, this time identifies
    /// the Prolog.
    begun_ns: i64,
    /// Time at which Slurm started the Prolog; `None` if the time is not known.
    started: Option<HookStart>,
    /// Whether a lease of an earlier run may still exist.
    earlier_lease: bool,
}

/// What the file `+run` contains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct RunRecord {
    #[serde(flatten)]
    run: Run,
    /// The names of the cluster and the node as Slurm writes them. The file name contains both names in another form.
    cluster: String,
    node: String,
    /// Whether a lease of this run or of an earlier run may exist.
    may_have_lease: bool,
}

/// A run of a job that has a file.
#[derive(Debug, Clone)]
pub struct BegunRun {
    name: FileName,
    record: RunRecord,
}

impl BegunRun {
    /// Returns the job id.
    #[must_use]
    pub fn job(&self) -> u32 {
        self.name.job()
    }

    /// Returns the cluster as Slurm writes it.
    #[must_use]
    pub fn cluster(&self) -> &str {
        &self.record.cluster
    }

    /// Returns the node as Slurm writes it.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.record.node
    }
}

/// Which leases of a job may exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PossibleLeases {
    /// No lease: gpushd has refused this run and has ended the leases of earlier runs.
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

/// Which run of a job an Epilog ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndedRun {
    /// The run whose Prolog has written the file of the job.
    OfFile {
        /// Restart count of that run.
        restart: u32,
        /// Whether a lease of that run or of an earlier run may exist.
        may_have_lease: bool,
    },
    /// A run before the run whose Prolog has written the file of the job: an earlier run of the same job, or a run of
    /// an earlier job with the same id.
    Earlier {
        /// A restart count that is at least that of the earlier run, and lower than that of the run of the file. `None`
        /// if the earlier run belongs to an earlier job with the same id.
        restart: Option<u32>,
    },
    /// The job has no file, so the run is not known.
    NoFile,
}

/// Whether a Prolog has written its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileWritten {
    Yes,
    /// Not written: Slurm runs another Prolog for the same run of the job, and that Prolog writes the result.
    Again,
    /// Not written: an Epilog has run, or a later run of the job has begun. Slurm no longer waits for this Prolog.
    Late,
}

/// What TaskProlog finds for a task.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The job does not need gpush.
    Nothing,
    /// The file of the job.
    File(JobFile),
    /// There are files of this job for several clusters or nodes, and the environment of the task does not say which
    /// one to use.
    Several,
}

impl Directory {
    /// Begins a run of a job: replaces the files of earlier runs by a file with the state `begun`. `started` is when
    /// Slurm started the Prolog. `leases` says which leases may exist until the Prolog writes its result.
    pub(crate) fn begin(&self, job: &Job, started: Option<HookStart>, leases: PossibleLeases) -> io::Result<Run> {
        self.create()?;
        let locked = self.lock()?;
        // Tasks find their files only in recorded places.
        self.add_place(&locked, &HookPlace::new(&job.cluster, &job.node))?;
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
        // Write the record first, because a file without a record could not be removed.
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

    /// Writes the result of a Prolog. Also records which leases of the job possibly exist now.
    pub(crate) fn write(
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

    /// Returns whether `run` is still the current run: no later Prolog has replaced its file, and no Epilog or
    /// `reconcile` has removed it. A file that cannot be read counts as the file of this run.
    pub(crate) fn is_current(&self, job: &Job, run: &Run) -> bool {
        match self.read_json::<RunRecord>(&format!("{}{RUN}", job.file_name())) {
            Ok(now) => now.run == *run,
            Err(error) => error.kind() != io::ErrorKind::NotFound,
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

    /// Finds out which run an Epilog ends. `epilog` is when Slurm started the Epilog.
    pub(crate) fn ended_run(&self, job: &Job, epilog: Option<&HookStart>) -> EndedRun {
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
            // Use the restart count in the file: Slurm 22.05 gives the Epilog of a requeued run the count of the next
            // run.
            false => EndedRun::OfFile { restart: run.restart, may_have_lease },
        }
    }

    /// Removes the file of a job. Keeps the file if it belongs to a later run than `restart`.
    pub(crate) fn remove(&self, job: &Job, restart: u32) {
        self.remove_if(&job.file_name(), |run| run.restart <= restart);
    }

    /// Removes the file of a run, unless a later Prolog of the job has replaced the file.
    pub(crate) fn remove_run(&self, job: &Job, run: &Run) {
        self.remove_if(&job.file_name(), |now| now == run);
    }

    /// Returns the runs of all jobs that have a file.
    #[must_use]
    pub fn begun_runs(&self) -> Vec<BegunRun> {
        let names = self.names().unwrap_or_default();
        let names = names.iter().filter_map(|name| FileName::parse(name.strip_suffix(RUN)?));
        names.filter_map(|name| self.record_of(&name).map(|record| BegunRun { name, record })).collect()
    }

    /// Removes the file of a run, unless a later Prolog of the job has replaced the file.
    pub fn remove_begun(&self, begun: &BegunRun) {
        self.remove_if(&begun.name, |now| *now == begun.record.run);
    }

    fn remove_if(&self, name: &FileName, is_its: impl FnOnce(&Run) -> bool) {
        let Ok(_locked) = self.lock() else { return };
        let Some(record) = self.record_of(name).filter(|record| is_its(&record.run)) else { return };
        self.remove_link(name, &record.run);
        self.remove_file(&name.to_string());
        self.remove_file(&format!("{name}{RUN}"));
    }

    /// Removes the link to the file of a component of a heterogeneous job.
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

    /// Finds the file of the job to which a task of the calling user belongs.
    pub(crate) fn find(&self, task: &Task) -> io::Result<Found> {
        let is_own = |name: &FileName| access::is_own(&self.path.join(name.to_string()));
        let places = self.places();
        let names: Vec<FileName> = possible_names(task.job, &places).filter(is_own).collect();
        match choose(task, &names, &places) {
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

    /// Finds the cluster and the node of an ended job if the environment does not contain both.
    pub(crate) fn place_of(&self, ended: &Task) -> PlaceChoice {
        let names = self.names().unwrap_or_default();
        let names: Vec<FileName> = names.iter().filter_map(|name| FileName::parse(name)).collect();
        choose_place(ended, &names, &self.places())
    }

    /// Returns the names of the cluster and the node as Slurm writes them. If the job has no file, returns the names in
    /// the form for file names.
    pub(crate) fn names_of(&self, place: &HookPlace, job: u32) -> (String, String) {
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

/// Returns the names that the file of a task's job, or a link to the file of a component, can have. A user cannot list the
/// directory. Slurm gives the components of a heterogeneous job the ids after the id of the leader.
fn possible_names(job: u32, places: &[HookPlace]) -> impl Iterator<Item = FileName> {
    places.iter().flat_map(move |place| {
        let file = |job| FileName::of_job(place.cluster(), job, place.node());
        let links =
            (1..=COMPONENT_IDS).filter_map(move |offset| Some(file(job.checked_add(offset)?).of_component(job)));
        std::iter::once(file(job)).chain(links)
    })
}

#[cfg(test)]
mod tests;
