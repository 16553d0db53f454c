//! What the task of a lease tells the holder: before the lease expires, and when it ends without the holder's request.

use gpush_api::{EndReason, LeaseBinding, NoticeKind};
use gpush_core::lease::{
    machine::State,
    notice::{LeaseTerm, NoticeCause},
};
use jiff::Timestamp;
use tokio::time::Instant;

use super::{
    Actor,
    inbox::{HolderNews, Warning},
};
use crate::{leases::processes, notices::DeliveredNotice};

impl Actor {
    /// Returns the time of the next warning before the lease expires.
    pub(super) fn next_warning(&self) -> Option<Instant> {
        let at = self.warnings.next(self.term()?, &self.leases.handles.context.state.config().notify.before)?;
        let left = std::time::Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default();
        Some(Instant::now() + left)
    }

    /// If a warning is due, tells the holder that the lease expires soon.
    pub(super) async fn warn_of_expiry(&mut self) {
        let (State::Active, Some(term)) = (self.state, self.term()) else { return };
        let before = self.leases.handles.context.state.config().notify.before.clone();
        if self.warnings.take_due(term, &before, Timestamp::now()) {
            let is_renewable = !self.is_of_job();
            self.tell(&NoticeCause::EndsSoon { expires_at: term.expires_at, is_renewable }).await;
        }
    }

    fn term(&self) -> Option<LeaseTerm> {
        let record = &self.lease.as_ref()?.record;
        Some(LeaseTerm { granted_at: record.granted_at?, expires_at: record.expires_at? })
    }

    /// Returns whether the lease belongs to a Slurm job.
    fn is_of_job(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| matches!(lease.record.binding, LeaseBinding::Job { .. }))
    }

    /// Tells the holder why the lease ends.
    pub(super) async fn tell_end(&mut self, reason: EndReason) {
        let Some(lease) = &self.lease else { return };
        match reason {
            EndReason::Expired => {
                let ends_processes = self.leases.rule_ends_processes(&lease.record);
                self.tell(&NoticeCause::Expired { ends_processes }).await;
            }
            EndReason::Revoked => self.tell_revocation().await,
            EndReason::GpuLost => {
                self.tell(&NoticeCause::GpuLost).await;
            }
            EndReason::Released
            | EndReason::Cancelled
            | EndReason::TimedOut
            | EndReason::Rebooted
            | EndReason::Failed => {}
        }
    }

    /// Tells the holder about the revocation of the lease, unless the holder knows it.
    pub(super) async fn tell_revocation(&mut self) {
        let Some(lease) = &self.lease else { return };
        let Some(revocation) = lease.record.revocation.clone() else { return };
        let cause = NoticeCause::Revoked(&revocation);
        // A notice that was read from the file has whole seconds.
        let second = |at: Option<Timestamp>| at.map(Timestamp::as_second);
        let is_noticed = |last: &gpush_api::LeaseNotice| {
            last.kind == NoticeKind::Revoked
                && last.at.as_second() >= revocation.at.as_second()
                && second(last.ends_at) == second(cause.ends_at())
        };
        if !lease.notice.as_ref().is_some_and(is_noticed) {
            self.tell(&cause).await;
        }
    }

    /// Tells the holder about a change of a GPU or MPS daemon that does not end the lease.
    pub(super) async fn warn(&mut self, warning: Warning) {
        if self.state != State::Active {
            return;
        }
        match &warning {
            Warning::Cordoned { gpu, reason, by } => {
                self.tell(&NoticeCause::Cordoned { gpu, reason, by: by.as_deref() }).await;
            }
            Warning::MpsFault { target, reason } => {
                self.tell(&NoticeCause::MpsFault { target, reason }).await;
            }
        }
    }

    /// Tells the holder what a policy does with the lease. Returns whether the notice has reached the holder: see [`crate::notices::DeliveredNotice::has_reached`].
    pub(super) async fn tell_policy(&mut self, news: HolderNews) -> bool {
        if self.state != State::Active {
            return false;
        }
        let cause = match news {
            HolderNews::Unused(warning) => NoticeCause::Unused(warning),
            HolderNews::UnusedNoMore(end) => NoticeCause::UnusedNoMore(end),
            HolderNews::OverLimit(warning) => NoticeCause::OverLimit(warning),
            HolderNews::OverLimitNoMore(end) => NoticeCause::OverLimitNoMore(end),
        };
        self.tell(&cause).await
    }

    /// Tells the holder something. Returns whether it has reached the holder.
    async fn tell(&mut self, cause: &NoticeCause<'_>) -> bool {
        let Some(lease) = &self.lease else { return false };
        let notices = &self.leases.handles.notices;
        let processes = async {
            let mut receivers = processes::notice_receivers(&self.leases, lease).await;
            receivers.own.extend(&self.ending.left_own());
            receivers
        };
        let delivered = notices.deliver(&lease.record, cause, processes).await;
        let has_reached = delivered.as_ref().is_some_and(DeliveredNotice::has_reached);
        if let (Some(delivered), Some(lease)) = (delivered, &mut self.lease) {
            lease.notice = Some(delivered.notice);
            self.publish();
        }
        has_reached
    }
}
