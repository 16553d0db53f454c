//! Decides whether a hook fails. A Prolog or Epilog that fails drains the node, so no user must be
//! able to cause a failure.
//!
//! | Prolog | exit status | the tasks of the job |
//! |---|---|---|
//! | no request, and no GPU with `owner = "slurm"` | 0 | run |
//! | a lease is granted | 0 | run with the environment of the lease |
//! | the request is refused: it is wrong, it exceeds a quota, or no share is free | 0 | fail with the reason |
//! | the MPS daemon does not serve clients, or does not admit the job's user in time | 0 | fail with the reason |
//! | the order in which slurmd numbers the devices is not known | 0 | fail with the reason |
//! | gpushd does not answer, `agent_down = "pass"` | 0 | run without a lease |
//! | gpushd does not answer, `agent_down = "fail"`, Slurm allocated no GPU | 0 | fail with the reason |
//! | gpushd does not answer, `agent_down = "fail"`, Slurm allocated GPUs | 1 | do not start |
//! | the node cannot serve the job: the database fails; Slurm allocated no GPU | 0 | fail with the reason |
//! | the node cannot serve the job: held, degraded, cordoned, wrong gres.conf, the database fails | 1 | do not start |
//!
//! gpush does not manage a node that has no config of gpushd and on which gpushd has never
//! answered. If a job requests a share on such a node, its tasks fail, even if Slurm allocated
//! GPUs.
//!
//! | Epilog | exit status |
//! |---|---|
//! | the job has no lease, its lease has ended, or the lease belongs to a later run | 0 |
//! | the request of the job was refused | 0, without asking gpushd |
//! | gpushd does not answer | as for Prolog; the end is reported to gpushd later |
//! | processes of the job still use a GPU at the deadline | 1 |
//! | only processes outside the job's cgroup use a GPU, `unattributed = "reserve"` | 0; the GPU remains reserved |
//! | only processes outside the job's cgroup use a GPU, `unattributed = "drain"` | 1 |
//! | gpushd cannot record the end | 1 |

use gpush_api::{ApiError, Code};

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
    /// The capacity is not free: the job itself still uses the capacity.
    Left,
    /// The capacity is not free: something outside the job uses the capacity, and the user of the
    /// job may control it. The capacity remains reserved.
    Unattributed,
    /// gpushd could not record the end of the lease.
    Broken,
    /// gpushd did not answer in time.
    NoAnswer,
}

/// Why a job needs gpushd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Concern {
    /// The job does not need gpushd: the job has no request, and no GPU with `owner = "slurm"`.
    Nothing,
    /// The user requests a share, but Slurm allocated no GPU, or the node has no gpushd. Any user can submit such a job
    /// to any node, so such a job must not fail the node.
    Request,
    /// Slurm allocated GPUs to the job, and the job has a request or a GPU with `owner = "slurm"`.
    Gpus,
}

impl Concern {
    /// Returns why a job needs gpushd. `owned` says whether a GPU of the job has `owner = "slurm"`. `has_request` says
    /// whether the user of the job requests a share. `has_gpus` says whether Slurm allocated GPUs and the node has a
    /// gpushd.
    #[must_use]
    pub fn of(owned: bool, has_request: bool, has_gpus: bool) -> Self {
        match (owned, has_request, has_gpus) {
            (true, _, _) | (false, true, true) => Self::Gpus,
            (false, true, false) => Self::Request,
            (false, false, _) => Self::Nothing,
        }
    }
}

/// How Prolog ends.
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

/// Decides how Prolog ends.
#[must_use]
pub fn prolog(started: Started, concern: Concern, agent_down: AgentDown) -> Verdict {
    match (started, concern, agent_down) {
        (Started::NotConcerned, _, _) => Verdict::Pass,
        (Started::Granted, _, _) => Verdict::Lease,
        (Started::Refused, _, _) => Verdict::FailTasks,
        (Started::Broken | Started::NoAnswer, Concern::Nothing, _) => Verdict::Pass,
        (Started::NoAnswer, Concern::Request | Concern::Gpus, AgentDown::Pass) => Verdict::Pass,
        (Started::Broken, Concern::Request, _) | (Started::NoAnswer, Concern::Request, AgentDown::Fail) => {
            Verdict::FailTasks
        }
        (Started::Broken, Concern::Gpus, _) | (Started::NoAnswer, Concern::Gpus, AgentDown::Fail) => Verdict::FailNode,
    }
}

/// Returns whether Prolog must note that the job has ended. The note is necessary if gpushd may have granted, or may
/// still grant, a lease that no task will use. `is_sent` says whether gpushd may have received the request.
#[must_use]
pub fn must_note_end(started: Started, concern: Concern, is_sent: bool) -> bool {
    match (started, concern) {
        (_, Concern::Nothing) => false,
        (Started::NoAnswer, Concern::Request | Concern::Gpus) => is_sent,
        // gpushd may have granted a lease to an earlier attempt of this Prolog, and the answer was lost. A Prolog that
        // fails removes the file of the job, so Epilog does not know of the lease.
        (Started::Broken, Concern::Request | Concern::Gpus) => true,
        (Started::NotConcerned | Started::Granted | Started::Refused, Concern::Request | Concern::Gpus) => false,
    }
}

/// Returns whether Epilog fails. `had_lease` says whether the job can have a lease, according to
/// the file that Prolog wrote.
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

/// Returns whether a refusal is for lack of capacity only: the same request can be granted later.
#[must_use]
pub fn is_busy(error: &ApiError) -> bool {
    error.code == Code::Blocked && error.retryable
}

/// Returns whether the MPS daemon of the job's GPU may have caused an error of a grant. The caller has checked that the
/// node itself can serve jobs. A user can make a daemon slow, and can prevent the daemon from changing to the next
/// user. `retryable` says whether the error is temporary.
#[must_use]
pub fn may_be_of_mps(code: Code, retryable: bool) -> bool {
    match code {
        Code::Conflict | Code::Unavailable => retryable,
        // The daemon had not answered at the deadline of the hook.
        Code::TimedOut => true,
        Code::BadRequest
        | Code::NotFound
        | Code::Denied
        | Code::UnknownProfile
        | Code::LayoutImpossible
        | Code::Blocked
        | Code::Unsupported
        | Code::Resetting
        | Code::Cancelled
        | Code::DriverUnavailable
        | Code::DriverError
        | Code::DriverTimeout
        | Code::GpuLost
        | Code::ConfigInvalid
        | Code::Stopping
        | Code::Unreachable
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
    fn only_a_broken_node_fails_prolog_and_only_for_jobs_with_gpus() {
        for started in STARTED {
            for policy in POLICIES {
                for concern in [Concern::Nothing, Concern::Request] {
                    assert_ne!(prolog(started, concern, policy), Verdict::FailNode, "{started:?} {policy:?}");
                }
                let fails = prolog(started, Concern::Gpus, policy) == Verdict::FailNode;
                let expected = started == Started::Broken || started == Started::NoAnswer && policy == AgentDown::Fail;
                assert_eq!(fails, expected, "{started:?} {policy:?}");
            }
        }
        assert_eq!(prolog(Started::Refused, Concern::Gpus, AgentDown::Fail), Verdict::FailTasks);
        assert_eq!(prolog(Started::Granted, Concern::Gpus, AgentDown::Fail), Verdict::Lease);
        assert_eq!(prolog(Started::NoAnswer, Concern::Request, AgentDown::Fail), Verdict::FailTasks);
        assert_eq!(prolog(Started::NoAnswer, Concern::Request, AgentDown::Pass), Verdict::Pass);
    }

    #[test]
    fn end_is_noted_when_gpushd_may_have_granted_a_lease() {
        for concern in [Concern::Request, Concern::Gpus] {
            assert!(must_note_end(Started::NoAnswer, concern, true), "{concern:?}");
            assert!(!must_note_end(Started::NoAnswer, concern, false), "{concern:?}");
            assert!(!must_note_end(Started::Granted, concern, true), "{concern:?}");
        }
        // Fault: gpushd granted a lease, but its answer was lost, and gpushd answered the next attempt with an error.
        // If gpushd did not answer Epilog, the lease never ended.
        assert!(must_note_end(Started::Broken, Concern::Request, true));
        assert!(must_note_end(Started::Broken, Concern::Gpus, true));
        assert!(!must_note_end(Started::Broken, Concern::Nothing, true));
    }

    #[test]
    fn request_of_a_user_concerns_the_node_only_with_its_gpus() {
        assert_eq!(Concern::of(false, true, false), Concern::Request);
        assert_eq!(Concern::of(false, true, true), Concern::Gpus);
        assert_eq!(Concern::of(true, false, false), Concern::Gpus);
        assert_eq!(Concern::of(false, false, true), Concern::Nothing);
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

    /// A lost GPU is blocked too, but only a reboot brings it back.
    #[test]
    fn job_waits_only_for_capacity() {
        let error = |code| ApiError::new(code, "cannot grant a whole GPU");
        assert!(is_busy(&error(Code::Blocked).retryable()));
        assert!(!is_busy(&error(Code::Blocked)));
        for code in [Code::BadRequest, Code::Denied, Code::Unsupported, Code::Unavailable] {
            assert!(!is_busy(&error(code).retryable()), "{code:?}");
        }
    }

    #[test]
    fn temporary_errors_of_a_daemon_are_refusals() {
        // `Conflict`: clients of another user are connected. `Unavailable`: the daemon did not restart in time.
        for code in [Code::Conflict, Code::Unavailable] {
            assert!(may_be_of_mps(code, true) && !may_be_of_mps(code, false), "{code:?}");
        }
        assert!(may_be_of_mps(Code::TimedOut, false));
        for code in [Code::Internal, Code::DriverError, Code::Stopping] {
            assert!(!may_be_of_mps(code, true), "{code:?}");
        }
    }

    #[test]
    fn late_epilog_does_not_end_a_later_run() {
        assert!(ends(0, 0) && ends(1, 0) && ends(1, 1));
        assert!(!ends(0, 1));
    }
}
