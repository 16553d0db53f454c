//! Calls `nvidia-smi compute-policy`, which reads the levels of all GPUs, or sets the level of one GPU. The program
//! runs as a helper unit, like the program that resets GPUs.
//!
//! gpushd does not rely on the exit status: if one GPU of the host is in MIG mode, the whole command fails. So gpushd
//! parses the output for each GPU. A level counts as set only when gpushd has read it back.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{ApiError, Code, Gpu, TimesliceLevel};
use gpush_core::compute_policy::{self, GpuIdentifier, LevelReport};

use super::Timeslice;
use gpush_host::helper::{End, Ended, Job};

use crate::system::tasks::TaskName;

/// Name under which the helper units of these calls are recorded, in place of an operation.
const HELPER_OPERATION: &str = "timeslice";

/// Maximum time of one call. Without persistence mode, the program must first initialize each GPU.
const DEADLINE: Duration = Duration::from_secs(20);

/// Why the level of a GPU was not set.
#[derive(Debug)]
pub(super) enum NotSet {
    /// The driver has no levels for the GPU.
    Unsupported,
    /// Another error.
    Failed(ApiError),
}

/// Waits for calls that a previous gpushd started.
pub(super) async fn adopt(timeslice: &Timeslice) {
    timeslice.context.host_services.helpers.adopt(HELPER_OPERATION).await;
    timeslice.context.host_services.helpers.forget(HELPER_OPERATION);
}

/// Returns the level of each GPU, as nvidia-smi reports it.
///
/// # Errors
/// If the program cannot run, does not exit in time, or reports no GPU.
pub(super) async fn list(timeslice: &Timeslice) -> Result<Vec<(GpuIdentifier, LevelReport)>, ApiError> {
    listed(&run(timeslice, "list", vec!["-l".to_owned()]).await?)
}

/// Returns the levels in the output of a list.
fn listed(ended: &Ended) -> Result<Vec<(GpuIdentifier, LevelReport)>, ApiError> {
    let reported = compute_policy::levels(&ended.output);
    match (&ended.end, reported.is_empty()) {
        (End::Exited(_), false) => Ok(reported),
        (End::Exited(0), true) => Err(failed("its output lists no known GPU", ended)),
        (
            end @ (End::Exited(_)
            | End::Signalled(_)
            | End::TimedOut
            | End::NotStarted(_)
            | End::Lost
            | End::Void
            | End::Hangs),
            _,
        ) => Err(failed(&format!("it {end}"), ended)),
    }
}

/// Sets the level of a GPU. To know whether the level is set, call [`list`] afterwards.
///
/// # Errors
/// If the program reports a failure, or its result is not known.
pub(super) async fn set(timeslice: &Timeslice, gpu: &Gpu, level: TimesliceLevel) -> Result<(), NotSet> {
    let args = vec!["--set-timeslice".to_owned(), level.number().to_string(), "-i".to_owned(), gpu.uuid.to_string()];
    was_set(gpu, &run(timeslice, "set", args).await.map_err(NotSet::Failed)?)
}

/// Returns whether a call that sets the level of a GPU reports success.
fn was_set(gpu: &Gpu, ended: &Ended) -> Result<(), NotSet> {
    match &ended.end {
        End::Exited(0) => Ok(()),
        end @ (End::Exited(_)
        | End::Signalled(_)
        | End::TimedOut
        | End::NotStarted(_)
        | End::Lost
        | End::Void
        | End::Hangs) => {
            let reported = compute_policy::levels(&ended.output);
            match compute_policy::level_of(&reported, gpu.index, &gpu.uuid, &gpu.pci) {
                Some(LevelReport::Unsupported) => Err(NotSet::Unsupported),
                Some(LevelReport::Failed(_) | LevelReport::Level(_)) | None => {
                    Err(NotSet::Failed(failed(&format!("it {end}"), ended)))
                }
            }
        }
    }
}

/// Runs `nvidia-smi compute-policy`. If the caller stops waiting, the program continues, and the locks stay held until
/// it exits. So no reset and no other call can begin before that.
async fn run(timeslice: &Timeslice, step: &'static str, args: Vec<String>) -> Result<Ended, ApiError> {
    let (tasks, timeslice) = (timeslice.context.tasks.clone(), timeslice.clone());
    let run = async move { run_to_its_end(&timeslice, step, args).await };
    tasks.once(TaskName::TimesliceCommand, run).await.unwrap_or_else(|failed| Err(error(&failed.to_string())))
}

async fn run_to_its_end(timeslice: &Timeslice, step: &str, args: Vec<String>) -> Result<Ended, ApiError> {
    // Never run two calls at the same time: the reconciler and operations may need the program concurrently.
    let _alone = timeslice.smi.lock().await;
    let helpers = &timeslice.context.host_services.helpers;
    let program = timeslice.context.host_services.nvidia_smi(&timeslice.context.state.config().mode_change);
    // The program has the driver open. While this lock is held, no reset can begin, and maintenance waits.
    let _open = timeslice.context.host_services.driverless.read().await;
    if let Some(maintenance) = timeslice.context.state.maintenance() {
        return Err(crate::state::words::refusal(&maintenance));
    }
    if !helpers.running(HELPER_OPERATION).is_empty() {
        return Err(error("a previous nvidia-smi hangs and cannot be ended"));
    }
    let job = Job {
        operation: HELPER_OPERATION.to_owned(),
        step: step.to_owned(),
        program,
        args: [vec!["compute-policy".to_owned()], args].concat(),
        env: BTreeMap::new(),
        input: None,
        deadline: DEADLINE,
        routine: true,
    };
    let ended = helpers.run(job).await;
    helpers.forget(HELPER_OPERATION);
    ended.map_err(|refused| {
        let causes = refused.sentences().into_iter().map(str::to_owned).collect();
        ApiError { causes, hint: refused.hint, ..error("") }
    })
}

fn failed(how: &str, ended: &Ended) -> ApiError {
    error(&format!("{how}{}", ended.output_suffix()))
}

/// Returns the error for a call that failed.
fn error(cause: &str) -> ApiError {
    ApiError::new(Code::DriverError, "cannot manage time-slicing: `nvidia-smi compute-policy` failed")
        .cause(cause.to_owned())
        .hint(
            "run `nvidia-smi compute-policy -l` to see the error; gpushd tries again; to try now: `gpushctl config \
            reload` (administrator)",
        )
        .retryable()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modes::scene::whole_gpu;
    use gpush_api::GpuIndex;

    const LEVELS: &str = "| 0 Timeslice Long |\nFailed to get compute policies for GPU 1 : Not Supported\n";

    fn ended(end: End, output: &str) -> Ended {
        Ended { end, output: output.to_owned() }
    }

    /// If one GPU is in MIG mode, the command fails, but lists the levels of the other GPUs.
    #[test]
    fn failed_list_counts_if_it_names_a_gpu() {
        for status in [0, 3] {
            let found = listed(&ended(End::Exited(status), LEVELS)).unwrap();
            let long = LevelReport::Level(TimesliceLevel::Long);
            assert_eq!(
                found,
                [
                    (GpuIdentifier::Index(GpuIndex(0)), long),
                    (GpuIdentifier::Index(GpuIndex(1)), LevelReport::Unsupported)
                ],
                "{status}"
            );
        }
    }

    #[test]
    fn list_without_gpus_or_without_an_end_is_an_error() {
        let cause = |end, output| listed(&ended(end, output)).unwrap_err().causes.remove(0);
        assert_eq!(cause(End::Exited(0), "no devices\n"), "its output lists no known GPU: no devices");
        assert_eq!(cause(End::Exited(9), ""), "it ended with status 9");
        // The output may be incomplete.
        for end in [End::TimedOut, End::Signalled(9), End::Lost, End::Void, End::Hangs] {
            assert!(cause(end.clone(), LEVELS).starts_with(&format!("it {end}")), "{end:?}");
        }
    }

    #[test]
    fn level_is_unsupported_only_if_the_output_says_so_of_the_gpu() {
        let set = |end, output: &str| was_set(&whole_gpu(), &ended(end, output));
        let of = |gpu: u32, why: &str| format!("Failed to set timeslice policy for GPU {gpu} : {why}\n");
        assert!(set(End::Exited(0), "").is_ok());
        assert!(matches!(set(End::Exited(3), &of(0, "Not Supported")), Err(NotSet::Unsupported)));
        for output in [of(1, "Not Supported"), of(0, "Unknown Error"), String::new()] {
            assert!(matches!(set(End::Exited(3), &output), Err(NotSet::Failed(_))), "{output}");
        }
        assert!(matches!(set(End::TimedOut, ""), Err(NotSet::Failed(_))));
    }
}
