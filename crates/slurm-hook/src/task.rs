//! TaskProlog: runs as the user of the job, for each task, without gpushd.

use gpush_core::slurm::{
    file::{TaskProlog, fail},
    job_files::Task,
};

use crate::{directory::Found, options::Options, settings::Settings, variable};

/// Runs TaskProlog. Returns its output, and whether it fails. The caller must write nothing to stderr, because Slurm also
/// parses stderr.
#[must_use]
pub fn run(options: &Options) -> TaskProlog {
    let nothing = TaskProlog { text: String::new(), fails: false };
    let number = |name: &str| variable(name).and_then(|value| value.trim().parse::<u32>().ok());
    let Some(job) = number("SLURM_JOB_ID") else { return nothing };
    let text = |name: &str| variable(name).filter(|value| !value.is_empty());
    let task = Task { job, cluster: text("SLURM_CLUSTER_NAME"), node: text("SLURMD_NODENAME") };
    match Settings::of_task(options).directory.find(&task) {
        Ok(Found::File(file)) => {
            let visible = variable("CUDA_VISIBLE_DEVICES");
            let is_without = visible.is_none() && is_numbered_step(number("SLURM_STEP_ID"));
            let without = if is_without { file.task_prolog_without_devices() } else { None };
            without.unwrap_or_else(|| file.task_prolog(visible.as_deref()))
        }
        // The job does not need gpush.
        Ok(Found::Nothing) => nothing,
        Ok(Found::Several) => {
            let why = format!(
                "several clusters or nodes of this host have a job {job}, and the environment of the task does not say \
                which"
            );
            fail(&why, Some("do not change SLURM_CLUSTER_NAME and SLURMD_NODENAME"))
        }
        Err(error) => fail(&format!("cannot read the file of job {job}: {error}"), None),
    }
}

/// Ids from this one on are special steps, such as the batch script and an interactive step.
const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

/// Returns whether the task belongs to a step of srun. Slurm sets `CUDA_VISIBLE_DEVICES` for each task of such a step that
/// has devices (observed with Slurm 22.05, inside and outside a batch script).
fn is_numbered_step(step: Option<u32>) -> bool {
    step.is_some_and(|step| step < FIRST_SPECIAL_STEP)
}
