//! The file of a job, which Prolog writes and TaskProlog reads, and the output of TaskProlog.
//!
//! TaskProlog runs for each task, as the user of the job, and needs no socket. It prints lines of
//! Slurm's protocol: `export NAME=value`, `unset NAME`, `print TEXT`. The lines are built from
//! typed values only.

use std::fmt::Write as _;

use gpush_api::LeaseId;
use serde::{Deserialize, Serialize};

use crate::lease::environment::{Environment, Format};

/// Maximum length of a printed reason, in characters.
const LONGEST_REASON: usize = 500;

/// The file of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFile {
    /// Cluster name.
    pub cluster: String,
    /// Job id.
    pub job: u32,
    /// Node name.
    pub node: String,
    /// Number of times that the job was requeued before this run.
    pub restart: u32,
    /// What Prolog has done for the job.
    #[serde(flatten)]
    pub state: JobState,
}

/// What Prolog has done for a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum JobState {
    /// Prolog has begun: a lease may exist.
    Begun,
    /// The job has a lease.
    Granted {
        /// The lease.
        lease: LeaseId,
        /// Environment of the lease's processes, in order.
        environment: Vec<(String, String)>,
        /// Number of devices that Slurm allocated to a job without a request; `None` for a job with
        /// a request. The lease can have fewer devices, because it contains only devices of rules
        /// with `owner = "slurm"`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allocated: Option<usize>,
        /// Whether Slurm allocated devices to the job. If so, a step without devices (`--gres=none`) gets none.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        has_gres: bool,
    },
    /// The job has no lease, and its tasks must fail.
    Refused {
        /// What was refused and why.
        reasons: Vec<String>,
        /// What the user can do.
        hint: Option<String>,
    },
    /// gpushd did not answer, and the config allows the job to run without a lease.
    Passed,
}

/// The output of TaskProlog, and whether TaskProlog fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskProlog {
    /// Lines of Slurm's protocol, each with a newline.
    pub text: String,
    /// Whether TaskProlog makes the task fail.
    pub fails: bool,
}

impl JobFile {
    /// Returns the output of TaskProlog. `visible` is the task's `CUDA_VISIBLE_DEVICES`.
    ///
    /// In two cases, the output does not set `CUDA_VISIBLE_DEVICES`, so that the task keeps Slurm's
    /// value: Slurm gave the task fewer devices than the job has (`--gpus-per-task`), or the lease
    /// has fewer devices than the job. The output for an MPS lease always sets the variable.
    #[must_use]
    pub fn task_prolog(&self, visible: Option<&str>) -> TaskProlog {
        match &self.state {
            JobState::Granted { lease, environment, allocated, has_gres: _ } => {
                match Environment::from_variables(environment) {
                    Ok(environment) => TaskProlog { text: lines(&environment, visible, *allocated), fails: false },
                    Err(error) => fail(&format!("the environment of lease {lease} cannot be used: {error}"), None),
                }
            }
            JobState::Refused { reasons, hint } => fail(&reasons.join("; "), hint.as_deref()),
            JobState::Passed => TaskProlog {
                text: "print gpush: gpushd did not answer, so this task runs without a lease\n".to_owned(),
                fails: false,
            },
            // Tasks start only after Prolog has ended. The file still says that Prolog has begun,
            // so Prolog ended without completing.
            JobState::Begun => fail("Prolog of this job began on this node, but did not complete", None),
        }
    }
}

impl JobFile {
    /// Returns the output of TaskProlog for a task of a step to which Slurm gave no devices, although the job has some:
    /// the task gets the name of the lease, and no device of it. Returns `None` if the job has no devices of Slurm or no
    /// lease.
    #[must_use]
    pub fn task_prolog_without_devices(&self) -> Option<TaskProlog> {
        let JobState::Granted { lease, has_gres: true, .. } = &self.state else { return None };
        let unset: String = MPS_VARIABLES.iter().map(|name| format!("unset {name}\n")).collect();
        // Without the variable, CUDA would use all devices that the task can open.
        let text = format!("export GPUSH_LEASE={lease}\nexport CUDA_VISIBLE_DEVICES=\n{unset}");
        Some(TaskProlog { text, fails: false })
    }
}

/// Variables of MPS that a task can inherit from the batch script of its job.
const MPS_VARIABLES: [&str; 4] = [
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_CLIENT_PRIORITY",
];

/// Returns the output of TaskProlog if the file of the job cannot be used.
#[must_use]
pub fn fail(reason: &str, hint: Option<&str>) -> TaskProlog {
    let mut text = String::new();
    _ = writeln!(text, "print gpush: {}", line(reason));
    if let Some(hint) = hint {
        _ = writeln!(text, "print gpush: hint: {}", line(hint));
    }
    TaskProlog { text, fails: true }
}

fn lines(environment: &Environment, visible: Option<&str>, allocated: Option<usize>) -> String {
    let all = environment.text(Format::Slurm);
    let given = visible.map_or(0, |list| list.split(',').filter(|entry| !entry.trim().is_empty()).count());
    let leased = environment.devices.len();
    let is_partial = allocated.is_some_and(|allocated| leased < allocated);
    if environment.mps.is_some() || !is_partial && (given == 0 || given >= leased) {
        return all;
    }
    let is_devices = |line: &&str| {
        ["export CUDA_VISIBLE_DEVICES=", "export CUDA_DEVICE_ORDER="].iter().all(|start| !line.starts_with(start))
    };
    all.split_inclusive('\n').filter(is_devices).collect()
}

/// Returns the text on one line, without control characters.
fn line(text: &str) -> String {
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(LONGEST_REASON).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(state: JobState) -> JobFile {
        JobFile { cluster: "ci".to_owned(), job: 42, node: "n1".to_owned(), restart: 0, state }
    }

    fn granted(devices: usize) -> JobFile {
        let uuids: Vec<String> =
            (0..devices).map(|one| format!("GPU-00000000-0000-0000-0000-00000000000{one}")).collect();
        let environment = [
            ("CUDA_VISIBLE_DEVICES", uuids.join(",")),
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
            ("GPUSH_LEASE", "L5".to_owned()),
        ];
        let environment = environment.map(|(name, value)| (name.to_owned(), value)).to_vec();
        file(JobState::Granted { lease: LeaseId(5), environment, allocated: None, has_gres: false })
    }

    fn without_request(leased: usize, allocated: usize) -> JobFile {
        let JobFile { state: JobState::Granted { lease, environment, .. }, .. } = granted(leased) else { panic!() };
        file(JobState::Granted { lease, environment, allocated: Some(allocated), has_gres: true })
    }

    #[test]
    fn task_gets_the_environment_of_the_lease() {
        let printed = granted(1).task_prolog(Some("0"));
        assert!(!printed.fails && printed.text.ends_with('\n'));
        assert!(printed.text.contains("export CUDA_VISIBLE_DEVICES=GPU-"), "{}", printed.text);
        assert!(
            printed.text.contains("export GPUSH_LEASE=L5\n")
                && printed.text.contains("unset CUDA_MPS_PIPE_DIRECTORY\n")
        );
        // The task has all devices of the job, or the number of the task's devices is unknown.
        for visible in [Some("0,1"), None, Some("")] {
            assert!(granted(2).task_prolog(visible).text.contains("export CUDA_VISIBLE_DEVICES="), "{visible:?}");
        }
        let one_of_two = granted(2).task_prolog(Some("1")).text;
        assert!(!one_of_two.contains("CUDA_VISIBLE_DEVICES") && one_of_two.contains("export GPUSH_LEASE=L5\n"));
    }

    /// Fault: a job had one GPU of a rule with `owner = "slurm"` and one other GPU, but saw only
    /// the first GPU.
    #[test]
    fn lease_of_some_devices_does_not_hide_the_others() {
        for visible in [Some("0,1"), Some("0"), None] {
            let printed = without_request(1, 2).task_prolog(visible);
            assert!(!printed.text.contains("export CUDA_"), "{visible:?}: {}", printed.text);
            assert!(printed.text.contains("export GPUSH_LEASE=L5\n"));
        }
        assert!(without_request(2, 2).task_prolog(Some("0,1")).text.contains("export CUDA_VISIBLE_DEVICES=GPU-"));
        assert!(!without_request(2, 2).task_prolog(Some("0")).text.contains("export CUDA_VISIBLE_DEVICES="));
        let file = without_request(1, 2);
        assert_eq!(serde_json::from_str::<JobFile>(&serde_json::to_string(&file).unwrap()).unwrap(), file);
    }

    /// Fault: a step with `--gres=none` got the GPUs of its job.
    #[test]
    fn step_without_devices_gets_no_device_of_the_lease() {
        let printed = without_request(2, 2).task_prolog_without_devices().unwrap();
        assert!(printed.text.starts_with("export GPUSH_LEASE=L5\nexport CUDA_VISIBLE_DEVICES=\n"), "{}", printed.text);
        assert!(!printed.fails && !printed.text.contains("GPU-"));
        // Slurm knows no devices of this job, so all of its steps use the lease.
        assert_eq!(granted(1).task_prolog_without_devices(), None);
        assert_eq!(file(JobState::Passed).task_prolog_without_devices(), None);
    }

    #[test]
    fn refused_task_fails_with_the_reason() {
        let reasons = vec!["cannot grant 90 %".to_owned(), "10 % left".to_owned()];
        let printed = file(JobState::Refused { reasons, hint: Some("request less".to_owned()) }).task_prolog(None);
        assert!(printed.fails);
        assert_eq!(printed.text, "print gpush: cannot grant 90 %; 10 % left\nprint gpush: hint: request less\n");
        assert!(file(JobState::Begun).task_prolog(None).fails);
        assert!(!file(JobState::Passed).task_prolog(None).fails);
    }

    #[test]
    fn environment_that_is_not_of_a_lease_is_not_printed() {
        let environment = vec![("LD_PRELOAD".to_owned(), "/tmp/x".to_owned())];
        let printed = file(JobState::Granted { lease: LeaseId(5), environment, allocated: None, has_gres: false })
            .task_prolog(None);
        assert!(printed.fails && !printed.text.contains("/tmp/x"));
    }

    proptest! {
        #[test]
        fn every_line_is_one_of_the_protocol(reason in any::<String>(), hint in proptest::option::of(any::<String>())) {
            let printed = file(JobState::Refused { reasons: vec![reason], hint }).task_prolog(None);
            prop_assert!(printed.text.ends_with('\n'));
            prop_assert!(printed.text.lines().all(|line| line.starts_with("print gpush: ")));
        }

        #[test]
        fn file_round_trips(restart: u32, reason in any::<String>()) {
            let file = JobFile { restart, ..file(JobState::Refused { reasons: vec![reason], hint: None }) };
            prop_assert_eq!(serde_json::from_str::<JobFile>(&serde_json::to_string(&file).unwrap()).unwrap(), file);
        }
    }
}
