//! `gpushctl slurm task-prolog`: runs as the user of the job, for each task, without gpushd.

use gpush_core::slurm::file::{TaskProlog, fail};

use super::{FAILS, directory::Directory, settings::Settings, variable};
use crate::{args::HookFiles, exit::Outcome, output::Output};

pub(super) fn run(files: &HookFiles, out: &Output) -> Outcome {
    let TaskProlog { text, fails } = prolog(files);
    // Slurm parses stderr as well, so nothing is written there.
    out.verbatim(text.as_bytes())?;
    Ok(if fails { FAILS } else { 0 })
}

fn prolog(files: &HookFiles) -> TaskProlog {
    let nothing = TaskProlog { text: String::new(), fails: false };
    let number = |name: &str| variable(name).and_then(|value| value.trim().parse::<u32>().ok());
    let Some(job) = number("SLURM_JOB_ID") else { return nothing };
    let directory = Directory::new(&Settings::of_task(files).directory);
    let cluster = variable("SLURM_CLUSTER_NAME").filter(|name| !name.is_empty());
    match directory.read(cluster.as_deref(), job) {
        Ok(Some(file)) => file.task_prolog(variable("CUDA_VISIBLE_DEVICES").as_deref()),
        // gpush has nothing to do with the job.
        Ok(None) => nothing,
        Err(error) => fail(&format!("cannot read the file of job {job}: {error}"), None),
    }
}
