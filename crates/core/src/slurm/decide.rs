//! Whether a hook fails. A failed Prolog or Epilog drains the node, so no choice of a user may lead to it.
//!
//! | Prolog | exit status | the tasks |
//! |---|---|---|
//! | no request, and no GPU with `owner = "slurm"` | 0 | run |
//! | a lease is granted | 0 | run with its environment |
//! | the request is refused: it is wrong, over a quota, without a free share | 0 | fail with the reason |
//! | slurmd finds the devices itself, in an order that is not known | 0 | fail with the reason |
//! | gpushd does not answer, `agent_down = "pass"` | 0 | run without a lease |
//! | gpushd does not answer, `agent_down = "fail"` | 1 | do not start |
//! | the node cannot serve the job: held, degraded, cordoned, wrong gres.conf, the database fails | 1 | do not start |
//!
//! | Epilog | exit status |
//! |---|---|
//! | the job has no lease, its lease has ended, or the lease belongs to a later run | 0 |
//! | gpushd does not answer | as for Prolog; the end is delivered later |
//! | processes of the job still use a GPU at the deadline | 1 |
//! | only processes outside the job's cgroup use it, `unattributed = "reserve"` | 0; the GPU stays reserved |
//! | only processes outside the job's cgroup use it, `unattributed = "drain"` | 1 |
//! | gpushd cannot record the end | 1 |

use gpush_api::Code;

use crate::config::{AgentDown, Slurm, Unattributed};

/// The result of a job in Prolog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Started {
    /// gpush has nothing to do with the job.
    NotConcerned,
    /// It has a lease.
    Granted,
    /// The job has no lease, and its tasks must fail.
    Refused,
    /// The node cannot serve it.
    Broken,
    /// gpushd did not answer in time.
    NoAnswer,
}

/// The result of a job in Epilog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ended {
    /// The job has no lease on this node any more.
    Clean,
    /// The capacity is not free: something of the job itself is left.
    Left,
    /// The capacity is not free, because of something that the user does outside the job. It stays reserved.
    Unattributed,
    /// The end could not be recorded.
    Broken,
    /// gpushd did not answer in time.
    NoAnswer,
}

/// How Prolog ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The tasks run.
    Pass,
    /// The tasks run with a lease.
    Lease,
    /// The tasks fail, and the node stays in use.
    FailTasks,
    /// The node is drained.
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

/// Returns whether Epilog fails. `had_lease` says whether Prolog left a file of the job.
#[must_use]
pub fn epilog_fails(ended: Ended, had_lease: bool, config: &Slurm) -> bool {
    match ended {
        Ended::Clean => false,
        Ended::Left | Ended::Broken => true,
        Ended::Unattributed => config.unattributed == Unattributed::Drain,
        Ended::NoAnswer => had_lease && config.agent_down == AgentDown::Fail,
    }
}

/// Returns whether an error of a grant concerns the request alone. Other errors mean that the node cannot serve it.
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

/// Returns whether the end of one run of a job ends a lease of another run: a late Epilog must not end a later run's
/// lease.
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
