//! Decides whether a hook fails. A Prolog or Epilog that fails drains the node, so no user must be
//! able to cause a failure.
//!
//! | Prolog | exit status | the tasks of the job |
//! |---|---|---|
//! | the job has no request, and no GPU with `owner = "slurm"` | 0 | run |
//! | gpushd grants a lease | 0 | run with the environment of the lease |
//! | gpushd refuses the request: it is wrong, exceeds a quota, or no share is free | 0 | fail with the reason |
//! | gpushd does not answer, `agent_down = "pass"` | 0 | run without a lease |
//! | gpushd does not answer, `agent_down = "fail"` | 1 | do not start |
//! | the node cannot serve the job: held, degraded, cordoned, wrong gres.conf, database failure | 1 | do not start |
//!
//! | Epilog | exit status |
//! |---|---|
//! | the job has no lease, its lease has ended, or the lease belongs to a later run | 0 |
//! | gpushd does not answer | as for Prolog; a later hook reports the end |
//! | processes of the job still use a GPU at the deadline | 1 |
//! | only processes outside the job's cgroup use a GPU, `unattributed = "reserve"` | 0; the GPU remains reserved |
//! | only processes outside the job's cgroup use a GPU, `unattributed = "drain"` | 1 |
//! | gpushd cannot record the end | 1 |

use gpush_api::Code;

use crate::config::{AgentDown, Slurm, Unattributed};

/// What Prolog found out about a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Started {
    /// The job requests no share, and has no GPU with `owner = "slurm"`.
    NotConcerned,
    /// The job has a lease.
    Granted,
    /// The job has no lease, and its tasks must fail.
    Refused,
    /// The node cannot serve the job.
    Broken,
    /// gpushd did not answer in time.
    NoAnswer,
}

/// What Epilog found out about a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ended {
    /// The job no longer has a lease on this node.
    Clean,
    /// The capacity is not free: something of the job itself still uses it.
    Left,
    /// The capacity is not free: something outside the job, which its user may control, uses it.
    /// The capacity remains reserved.
    Unattributed,
    /// gpushd could not record the end of the lease.
    Broken,
    /// gpushd did not answer in time.
    NoAnswer,
}

/// How Prolog ends, and what the tasks do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The tasks run without a lease.
    Pass,
    /// The tasks run with a lease.
    Lease,
    /// The tasks fail, and the node remains in use.
    FailTasks,
    /// Prolog fails, and Slurm drains the node.
    FailNode,
}

/// Decides how Prolog ends. `concerned` says whether the job has a request or GPUs with `owner = "slurm"`.
#[must_use]
pub fn prolog(started: Started, concerned: bool, agent_down: AgentDown) -> Verdict {
    match (started, concerned, agent_down) {
        (Started::NotConcerned, _, _) => Verdict::Pass,
        (Started::Granted, _, _) => Verdict::Lease,
        (Started::Refused, _, _) => Verdict::FailTasks,
        (Started::Broken | Started::NoAnswer, false, _) => Verdict::Pass,
        (Started::Broken, true, _) => Verdict::FailNode,
        (Started::NoAnswer, true, AgentDown::Fail) => Verdict::FailNode,
        (Started::NoAnswer, true, AgentDown::Pass) => Verdict::Pass,
    }
}

/// Returns whether Epilog fails. `had_lease` says whether Prolog left a file for the job.
#[must_use]
pub fn epilog_fails(ended: Ended, had_lease: bool, config: &Slurm) -> bool {
    match ended {
        Ended::Clean => false,
        Ended::Left | Ended::Broken => true,
        Ended::Unattributed => config.unattributed == Unattributed::Drain,
        Ended::NoAnswer => had_lease && config.agent_down == AgentDown::Fail,
    }
}

/// Returns whether an error of a grant concerns only the request. Any other error means that the
/// node cannot serve the job.
#[must_use]
pub fn is_refusal(code: Code) -> bool {
    match code {
        Code::BadRequest
        | Code::NotFound
        | Code::Denied
        | Code::UnknownProfile
        | Code::LayoutImpossible
        | Code::Blocked
        | Code::Unsupported => true,
        Code::Conflict
        | Code::Resetting
        | Code::Cancelled
        | Code::DriverUnavailable
        | Code::DriverError
        | Code::DriverTimeout
        | Code::GpuLost
        | Code::ConfigInvalid
        | Code::Unavailable
        | Code::Stopping
        | Code::Unreachable
        | Code::TimedOut
        | Code::Internal => false,
    }
}

/// Returns whether the end of one run of a job also ends the lease of another run. An Epilog that
/// comes late must not end the lease of a later run.
#[must_use]
pub fn ends(epilog_restart: u32, lease_restart: u32) -> bool {
    lease_restart <= epilog_restart
}

#[cfg(test)]
mod tests {
    use super::*;

    const STARTED: [Started; 5] =
        [Started::NotConcerned, Started::Granted, Started::Refused, Started::Broken, Started::NoAnswer];
    const POLICIES: [AgentDown; 2] = [AgentDown::Fail, AgentDown::Pass];

    #[test]
    fn only_a_broken_node_fails_prolog_and_only_for_its_jobs() {
        for started in STARTED {
            for policy in POLICIES {
                assert_ne!(prolog(started, false, policy), Verdict::FailNode, "{started:?} {policy:?}");
                let fails = prolog(started, true, policy) == Verdict::FailNode;
                let expected = started == Started::Broken || started == Started::NoAnswer && policy == AgentDown::Fail;
                assert_eq!(fails, expected, "{started:?} {policy:?}");
            }
        }
        assert_eq!(prolog(Started::Refused, true, AgentDown::Fail), Verdict::FailTasks);
        assert_eq!(prolog(Started::Granted, true, AgentDown::Fail), Verdict::Lease);
    }

    #[test]
    fn epilog_fails_when_a_gpu_is_not_clean() {
        for had_lease in [false, true] {
            for policy in POLICIES {
                let config = Slurm { agent_down: policy, ..Slurm::default() };
                assert!(!epilog_fails(Ended::Clean, had_lease, &config));
                assert!(epilog_fails(Ended::Left, had_lease, &config));
                let expected = had_lease && policy == AgentDown::Fail;
                assert_eq!(epilog_fails(Ended::NoAnswer, had_lease, &config), expected);
            }
        }
    }

    #[test]
    fn what_a_user_does_outside_the_job_fails_epilog_by_policy_alone() {
        assert!(!epilog_fails(Ended::Unattributed, true, &Slurm::default()));
        let drain = Slurm { unattributed: Unattributed::Drain, ..Slurm::default() };
        assert!(epilog_fails(Ended::Unattributed, true, &drain));
    }

    #[test]
    fn what_a_user_can_cause_is_a_refusal() {
        for code in [Code::BadRequest, Code::Denied, Code::UnknownProfile, Code::Blocked, Code::Unsupported] {
            assert!(is_refusal(code), "{code:?}");
        }
        for code in [Code::Internal, Code::Unavailable, Code::DriverError, Code::GpuLost] {
            assert!(!is_refusal(code), "{code:?}");
        }
    }

    #[test]
    fn late_epilog_does_not_end_a_later_run() {
        assert!(ends(0, 0) && ends(1, 0) && ends(1, 1));
        assert!(!ends(0, 1));
    }
}
