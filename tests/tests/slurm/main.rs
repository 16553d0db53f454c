//! Tests on a real Slurm with simulated GPUs. `gpush_tests::slurm` describes the cluster. Only the
//! module `hooks` does not need Slurm: it calls the hooks with the environment that Slurm would
//! set.

mod autodetect;
mod cgroups;
mod channels;
mod failures;
mod fuzz;
mod held_prologs;
mod hetjob;
mod hooks;
mod life;
mod load;
mod mapping;
mod nodes;
mod requeue;
mod rig;
mod spank;

use gpush_tests::slurm::{Ended, JobId, Site};

/// Four GPUs without MIG.
const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 4\n";

/// A config in which only jobs use the GPUs, as whole GPUs.
const WHOLE: &str = "[[gpu]]\nmatch = [\"0-3\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";

/// A config in which only jobs use the GPUs, through MPS.
const MPS: &str =
    "[slurm]\nbusy = \"fail\"\n[mps]\nhealth = \"1s\"\n[[gpu]]\nmatch = [\"0-3\"]\nmode = \"mps\"\nowner = \"slurm\"\n";

/// A config in which two jobs time-share each GPU.
const TIMESLICE: &str =
    "[[gpu]]\nmatch = [\"0-3\"]\nmode = \"timeslice\"\nowner = \"slurm\"\ntimeslice = { replicas = 2 }\n";

/// Checks that a job succeeded.
#[track_caller]
fn completed(ended: Ended) -> Ended {
    assert_eq!(ended.state, "COMPLETED", "{}", ended.output);
    ended
}

/// Checks that gpush has refused a request: the tasks of the job fail, and the user sees the reason.
#[track_caller]
fn refused(ended: &Ended, why: &str) {
    assert_eq!(ended.state, "FAILED", "{}", ended.output);
    assert!(ended.output.contains("gpush: ") && ended.output.contains(why), "{}", ended.output);
}

/// Waits until the script of a job has written `text`. The state of the job is not enough, because
/// Slurm reports a job as running while its Prolog runs.
fn wait_for_output(site: &Site, job: JobId, text: &str) {
    site.cluster.until("output", || site.cluster.output_of(job).contains(text).then_some(()));
}
