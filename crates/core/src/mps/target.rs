//! A target with the last report about its daemon, and the errors that follow from the report.

use gpush_api::{ApiError, Code, GpuUuid, MpsState, TargetUuid};

use super::{not_serving::NotServing, reasons::reasons, report::DaemonReport};
use crate::{sharing::SharingTarget, supervisor::SupervisorState};

/// An MPS target whose daemon gpushd supervises.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsTarget {
    /// UUID of the GPU or MIG device.
    pub uuid: TargetUuid,
    /// Short name.
    pub short: String,
    /// UUID of the GPU that is the target or contains it.
    pub gpu_uuid: GpuUuid,
    /// The target according to the config; `None` if the config no longer has the target, but its daemon still exists.
    pub desired: Option<SharingTarget>,
    /// Number of the supervisor task that reports about the daemon. If a target is removed and added again, it gets
    /// another task.
    pub supervisor: u64,
    /// The last report about the daemon.
    pub report: DaemonReport,
}

impl MpsTarget {
    /// Returns the name in messages, such as `GPU 0`.
    #[must_use]
    pub fn label(&self) -> String {
        self.desired.as_ref().map_or_else(|| self.uuid.to_string(), SharingTarget::label)
    }

    /// Returns the name in commands, such as `0` or `0:2g.20gb@2`.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.desired {
            Some(SharingTarget { gpu, device: None, .. }) => gpu.to_string(),
            Some(SharingTarget { gpu, device: Some(device), .. }) => format!("{gpu}:{device}"),
            None => self.short.clone(),
        }
    }

    /// Returns whether the target is a whole GPU.
    #[must_use]
    pub fn is_whole_gpu(&self) -> bool {
        self.uuid == self.gpu_uuid
    }

    /// Returns the reasons for the state of the daemon, one sentence each.
    #[must_use]
    pub fn reasons(&self) -> Vec<String> {
        reasons(&self.report, &self.name())
    }

    /// Returns the error for a request to a target that is about to be removed.
    #[must_use]
    pub fn removed_error(&self, why: String) -> ApiError {
        let message = format!("the config no longer shares {} through MPS", self.label());
        let error = ApiError::new(Code::Conflict, message).cause(why);
        match self.desired.as_ref().map(|target| target.gpu) {
            Some(gpu) => {
                error.hint(format!("`gpushctl mig apply --dry-run --gpu {gpu}` shows the layout that the config wants"))
            }
            None => error.hint("`gpushctl config show` lists the rules"),
        }
    }

    /// Returns why the target grants no leases. The reason is the state of its daemon. `is_stopped` is whether an
    /// administrator has stopped the daemon.
    #[must_use]
    pub fn not_granting(&self, is_stopped: bool) -> NotServing {
        let state = match self.report.shown_state() {
            MpsState::Fault => "has failed".to_owned(),
            other => format!("is {}", other.name().replace('_', " ")),
        };
        let message = format!("cannot grant a lease on {}: its MPS daemon {state}", self.label());
        let mut error = ApiError::new(Code::Conflict, message);
        error.causes = self.reasons();
        let name = self.name();
        match self.report.state {
            // The daemon runs, but this gpushd has not adopted it yet.
            SupervisorState::Ready { .. } => {
                NotServing::for_now(error.hint("try again in a moment: gpushd is about to adopt the daemon"))
            }
            SupervisorState::Stopped if !is_stopped => {
                NotServing::for_now(error.hint("try again in a moment: gpushd is about to start the daemon"))
            }
            SupervisorState::Stopped | SupervisorState::GivenUp => {
                NotServing::lasting(error.hint(format!("start it with `gpushctl mps start {name}` (administrator)")))
            }
            SupervisorState::Starting { .. }
            | SupervisorState::Found { .. }
            | SupervisorState::Hung { .. }
            | SupervisorState::Fault { .. }
            | SupervisorState::BackingOff { .. }
            | SupervisorState::Draining { .. }
            | SupervisorState::Stopping { .. } => {
                NotServing::for_now(error.hint(format!("see its state with `gpushctl mps show {name}`")))
            }
        }
    }

    /// Returns the reason for a target whose daemon has just ended. gpushd has not handled this end yet.
    #[must_use]
    pub fn just_ended(&self) -> NotServing {
        let message = format!("cannot grant a lease on {}: its MPS daemon has just ended", self.label());
        NotServing::for_now(
            ApiError::new(Code::Unavailable, message)
                .hint("try again in a moment: gpushd is about to start the daemon"),
        )
    }

    /// Returns the error if the daemon should serve clients but does not. A daemon that is starting, draining, or stopped
    /// by an administrator counts as healthy.
    #[must_use]
    pub fn unhealthy_error(&self) -> Option<ApiError> {
        match self.report.state {
            // This includes `BackingOff` without failures: processes of the previous daemon still run.
            SupervisorState::Hung { .. }
            | SupervisorState::Fault { .. }
            | SupervisorState::GivenUp
            | SupervisorState::BackingOff { .. } => Some(self.not_granting(false).into()),
            SupervisorState::Stopped
            | SupervisorState::Starting { .. }
            | SupervisorState::Found { .. }
            | SupervisorState::Ready { .. }
            | SupervisorState::Draining { .. }
            | SupervisorState::Stopping { .. } => None,
        }
    }

    /// Returns one sentence for each use of the target; empty if it is not in use. `leases` describes the leases on the
    /// target. `is_leased` is whether it has a lease, or a grant that is being recorded.
    #[must_use]
    pub fn uses(&self, leases: &[String], is_leased: bool) -> Vec<String> {
        let label = self.label();
        if !self.report.clients_known {
            return vec![format!("it is not known whether {label} has clients")];
        }
        let mut users: Vec<String> = leases.iter().map(|lease| format!("{label} has {lease}")).collect();
        if users.is_empty() && is_leased {
            users.push(format!("a lease on {label} is being granted"));
        }
        match self.report.client_count() {
            0 => {}
            1 => users.push(format!("{label} has 1 client")),
            clients => users.push(format!("{label} has {clients} clients")),
        }
        users
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mps::scene::{READY, gpu_target, report};

    fn target(state: SupervisorState) -> MpsTarget {
        gpu_target(0, report(state))
    }

    #[test]
    fn target_without_a_rule_has_its_short_name() {
        let known = target(READY);
        assert_eq!((known.label().as_str(), known.name().as_str()), ("GPU 0", "0"));
        let unknown = MpsTarget { desired: None, ..known };
        assert_eq!((unknown.label().as_str(), unknown.name().as_str()), ("GPU-0", "g0"));
    }

    #[test]
    fn refusal_is_retryable_unless_daemon_was_stopped() {
        for state in [READY, SupervisorState::Stopped] {
            let why = target(state.clone()).not_granting(false);
            assert!(matches!(why, NotServing::ForNow(_)), "{state:?}");
            assert!(ApiError::from(why).retryable, "{state:?}");
        }
        for (state, is_stopped) in [(SupervisorState::Stopped, true), (SupervisorState::GivenUp, false)] {
            let NotServing::Lasting(error) = target(state).not_granting(is_stopped) else { panic!("is only for now") };
            assert!(!error.retryable);
            assert_eq!(error.hint.as_deref(), Some("start it with `gpushctl mps start 0` (administrator)"));
        }
        let error = target(SupervisorState::Fault { pid: 1 }).not_granting(false);
        assert_eq!(error.error().message, "cannot grant a lease on GPU 0: its MPS daemon has failed");
    }

    #[test]
    fn daemon_that_backs_off_is_unhealthy_and_a_stopped_one_is_not() {
        let backing_off = SupervisorState::BackingOff { until: std::time::Duration::ZERO };
        assert!(target(backing_off).unhealthy_error().is_some());
        assert_eq!(target(SupervisorState::Stopped).unhealthy_error(), None);
        assert_eq!(target(READY).unhealthy_error(), None);
    }

    #[test]
    fn grant_that_is_being_recorded_counts_as_a_use() {
        let lease = "lease L1 of alice".to_owned();
        assert!(target(READY).uses(&[], false).is_empty());
        assert_eq!(target(READY).uses(&[], true), ["a lease on GPU 0 is being granted"]);
        assert_eq!(target(READY).uses(&[lease], true), ["GPU 0 has lease L1 of alice"]);
        let with = |report: DaemonReport| gpu_target(0, report).uses(&[], false);
        let clients = DaemonReport { clients: vec![(1, 2)], waiting: vec![3], ..report(READY) };
        assert_eq!(with(clients), ["GPU 0 has 2 clients"]);
        let unknown = DaemonReport { clients_known: false, ..report(READY) };
        assert_eq!(with(unknown), ["it is not known whether GPU 0 has clients"]);
    }
}
