//! `gpushctl slurm task-prolog`: runs as the user of the job, for each task, without gpushd.

use gpush_core::slurm::{
    file::{TaskProlog, fail},
    job_files::Task,
};

use super::{FAILS, directory::Found, settings::Settings, variable};
use crate::{args::HookFiles, exit::Outcome, output::Output};

pub(super) fn run(files: &HookFiles, out: &Output) -> Outcome {
    let TaskProlog { text, fails } = prolog(files);
    // Write nothing to stderr, because Slurm also parses stderr.
    out.verbatim(text.as_bytes())?;
    Ok(if fails { FAILS } else { 0 })
}

fn prolog(files: &HookFiles) -> TaskProlog {
    let nothing = TaskProlog { text: String::new(), fails: false };
    let number = |name: &str| variable(name).and_then(|value| value.trim().parse::<u32>().ok());
    let Some(job) = number("SLURM_JOB_ID") else { return nothing };
    let text = |name: &str| variable(name).filter(|value| !value.is_empty());
    let task = Task { job, cluster: text("SLURM_CLUSTER_NAME"), node: text("SLURMD_NODENAME") };
    match Settings::of_task(files).directory.find(&task) {
        Ok(Found::File(file)) => file.task_prolog(variable("CUDA_VISIBLE_DEVICES").as_deref()),
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
