//! Ends the leases that a drain with `--end-after` has waited for.
//!
//! ```text
//! cordon ──── leases and processes run on ────► notice: each lease ends, ────► SIGTERM, later SIGKILL
//!                                               the holder sees the reason
//!   0                                              end-after − notice            end-after
//! ```
//!
//! The drain ends no process that belongs to no lease. It waits for such a process, like every drain.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use gpush_api::{Gpu, GpuIndex, Lease, LeaseId, LeaseRevokeRequest, LeaseState};
use gpush_client::Client;

use crate::{output::Output, render::cordon};

/// Time from the end of a lease to SIGTERM if the user gives none.
pub(super) const USUAL_NOTICE: Duration = Duration::from_secs(60);

/// The leases that a drain ends, and when.
#[derive(Debug)]
pub(super) struct LeaseEnd {
    due: Instant,
    request: LeaseRevokeRequest,
    ended: BTreeSet<LeaseId>,
    /// Leases that cannot be ended. The command has printed why.
    failed: BTreeSet<LeaseId>,
}

impl LeaseEnd {
    /// Creates the end of the leases of a drain that begins now. Their processes get SIGTERM `after` from now.
    pub(super) fn new(after: Duration, notice: Option<Duration>, reason: String) -> Self {
        let notice = notice.unwrap_or(USUAL_NOTICE).min(after);
        let request = LeaseRevokeRequest { reason, end: true, notice_s: Some(notice.as_secs()), grace_s: None };
        Self { due: Instant::now() + (after - notice), request, ended: BTreeSet::new(), failed: BTreeSet::new() }
    }

    /// Ends the leases on the GPUs if their time has come. Tries again at the next call if a lease cannot be ended.
    pub(super) async fn end(&mut self, client: &mut Client, gpus: &[Gpu], leases: &[Lease], quiet: bool, out: &Output) {
        for (gpu, lease) in self.due_leases(gpus, leases, Instant::now()) {
            let text = match client.lease_revoke(lease.id, &self.request).await {
                Ok(_) => {
                    self.ended.insert(lease.id);
                    let notice = Duration::from_secs(self.request.notice_s.unwrap_or_default());
                    cordon::lease_ended(gpu, lease, notice, &out.look)
                }
                Err(_) if !self.failed.insert(lease.id) => continue,
                Err(error) => cordon::lease_not_ended(gpu, lease.id, &error.error, &out.look),
            };
            if !quiet {
                out.remark(&text);
            }
        }
    }

    /// Returns the leases that the drain has to end, each with one of the GPUs.
    fn due_leases<'a>(&self, gpus: &[Gpu], leases: &'a [Lease], now: Instant) -> Vec<(GpuIndex, &'a Lease)> {
        if now < self.due {
            return Vec::new();
        }
        let gpu_of = |lease: &Lease| {
            let is_on = |gpu: &&Gpu| lease.members.iter().any(|member| member.gpu_uuid == gpu.uuid);
            gpus.iter().find(is_on).map(|gpu| gpu.index)
        };
        let holds = |lease: &&Lease| match lease.state {
            LeaseState::Granting | LeaseState::Active | LeaseState::Releasing => true,
            LeaseState::Queued | LeaseState::Ended => false,
        };
        let open = leases.iter().filter(holds).filter(|lease| !self.ended.contains(&lease.id));
        open.filter_map(|lease| Some((gpu_of(lease)?, lease))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::fixtures;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn drain_ends_leases_on_its_gpus_before_their_processes() {
        let lease = fixtures::lease::mps();
        let here = Gpu { uuid: lease.members[0].gpu_uuid.clone(), ..fixtures::gpu(3, "A100", 40_960, None) };
        let elsewhere = fixtures::gpu(4, "A100", 40_960, None);
        let end = LeaseEnd::new(HOUR, Some(HOUR / 6), "new fan".to_owned());
        let due = |gpu: &Gpu, lease: &Lease, after: Duration| {
            let at = end.due - (HOUR - HOUR / 6) + after;
            end.due_leases(std::slice::from_ref(gpu), std::slice::from_ref(lease), at).len()
        };
        assert_eq!(due(&here, &lease, HOUR / 6 * 5 - Duration::from_secs(1)), 0, "too early");
        assert_eq!(due(&here, &lease, HOUR / 6 * 5), 1);
        assert_eq!(due(&elsewhere, &lease, HOUR), 0, "another GPU");
        let queued = Lease { state: LeaseState::Queued, ..lease.clone() };
        assert_eq!(due(&here, &queued, HOUR), 0, "it has no share yet");
        assert_eq!(end.request.notice_s, Some(600));
    }

    #[test]
    fn lease_is_ended_once() {
        let lease = fixtures::lease::mps();
        let gpu = Gpu { uuid: lease.members[0].gpu_uuid.clone(), ..fixtures::gpu(3, "A100", 40_960, None) };
        let mut end = LeaseEnd::new(Duration::ZERO, None, "new fan".to_owned());
        let due = |end: &LeaseEnd| {
            end.due_leases(std::slice::from_ref(&gpu), std::slice::from_ref(&lease), Instant::now()).len()
        };
        assert_eq!(
            (due(&end), end.request.notice_s),
            (1, Some(0)),
            "the notice is not longer than the time to the end"
        );
        end.ended.insert(lease.id);
        assert_eq!(due(&end), 0);
    }
}
