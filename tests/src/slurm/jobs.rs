//! Jobs of a cluster.

use std::{fmt, fs, io::Write, process::Stdio};

use super::{Cluster, User, cluster::describe};

/// The id of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u32);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A job that has ended. Its Epilog has also ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// State, such as `COMPLETED`, `FAILED`, `CANCELLED` or `TIMEOUT`.
    pub state: String,
    /// The output of the batch script, and the `print` lines of TaskProlog.
    pub output: String,
}

impl Ended {
    /// Returns the value of `NAME=VALUE` in the output, as `env` prints it.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
    }
}

impl Cluster {
    /// Submits a batch job.
    ///
    /// # Panics
    /// If sbatch refuses the job.
    #[must_use]
    pub fn sbatch(&self, user: User, arguments: &[&str], script: &str) -> JobId {
        self.try_sbatch(user, arguments, script).unwrap_or_else(|error| panic!("sbatch {arguments:?}: {error}"))
    }

    /// Submits a batch job.
    ///
    /// # Errors
    /// The output of sbatch, if sbatch refuses the job.
    ///
    /// # Panics
    /// If sbatch cannot be started.
    pub fn try_sbatch(&self, user: User, arguments: &[&str], script: &str) -> Result<JobId, String> {
        let out = self.dir().join("out/%j");
        let mut command = self.command_of(user, "sbatch");
        command.arg("--parsable").arg(format!("--output={}", out.display())).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("sbatch can be started");
        let mut stdin = child.stdin.take().expect("piped");
        // Ignore an error: sbatch may refuse the job before it has read the script.
        let _ = stdin.write_all(format!("#!/bin/sh\n{script}\n").as_bytes());
        drop(stdin);
        let output = child.wait_with_output().expect("sbatch ends");
        let id = String::from_utf8_lossy(&output.stdout).trim().parse().ok();
        match id {
            Some(id) if output.status.success() => Ok(JobId(id)),
            _ => Err(describe(&output)),
        }
    }

    /// Waits until a job and its Epilog have ended.
    ///
    /// # Panics
    /// If the job or its Epilog does not end in time.
    #[must_use]
    pub fn ended(&self, job: JobId) -> Ended {
        let state = self.until(&format!("end of job {job}"), || {
            let state = self.job_state(job)?;
            let ended = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"];
            ended.contains(&state.as_str()).then_some(state)
        });
        Ended { state, output: self.output_of(job) }
    }

    /// Waits until a job is in a state.
    ///
    /// # Panics
    /// If the job does not reach the state in time.
    pub fn wait_for_state(&self, job: JobId, wanted: &str) {
        self.until(&format!("job {job} in state {wanted}"), || (self.job_state(job)? == wanted).then_some(()));
    }

    /// Returns the state of a job. `COMPLETING` means that the job's Epilog is still running.
    #[must_use]
    pub fn job_state(&self, job: JobId) -> Option<String> {
        self.job_field(job, "JobState")
    }

    /// Returns a field of `scontrol show job`, such as `Restarts`.
    ///
    /// # Panics
    /// If scontrol cannot be started.
    #[must_use]
    pub fn job_field(&self, job: JobId, field: &str) -> Option<String> {
        let output = self.command("scontrol").args(["-o", "show", "job", &job.to_string()]).output();
        let output = String::from_utf8_lossy(&output.expect("scontrol can be started").stdout).into_owned();
        output.split_whitespace().find_map(|word| word.strip_prefix(field)?.strip_prefix('=').map(str::to_owned))
    }

    /// Returns the output of a job's batch script so far.
    #[must_use]
    pub fn output_of(&self, job: JobId) -> String {
        let bytes = fs::read(self.dir().join("out").join(job.to_string())).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Submits a job and waits until the job and its Epilog have ended.
    #[must_use]
    pub fn run_job(&self, user: User, arguments: &[&str], script: &str) -> Ended {
        self.ended(self.sbatch(user, arguments, script))
    }
}
