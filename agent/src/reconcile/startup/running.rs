//! The attempts that are running. Each GPU has its own attempts, one at a time. So if the change of one GPU hangs, the
//! layouts of other GPUs are not delayed.

use std::collections::BTreeMap;

use gpush_api::{Gpu, GpuUuid};
use gpush_host::subtask;
use tokio::task::JoinSet;

use super::attempt::LayoutResult;

/// Why gpushd applies a layout that no user requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttemptPurpose {
    /// The GPU must get its layout on this boot.
    Boot,
    /// The GPU did not get its layout on this boot, because it was in use.
    Waiting,
    /// The GPU differs from its desired state, and `auto_reconcile` is on.
    Drift,
}

/// An attempt that has ended.
#[derive(Debug)]
pub(super) struct EndedAttempt {
    pub(super) purpose: AttemptPurpose,
    /// The GPU as it was before the attempt.
    pub(super) gpu: Gpu,
    pub(super) result: LayoutResult,
}

/// The running attempts.
#[derive(Debug, Default)]
pub(super) struct RunningAttempts {
    tasks: JoinSet<EndedAttempt>,
    /// The purpose of each running attempt, by UUID of the GPU.
    running: BTreeMap<GpuUuid, AttemptPurpose>,
}

impl RunningAttempts {
    /// Returns whether an attempt is running on a GPU.
    pub(super) fn is_running(&self, uuid: &GpuUuid) -> bool {
        self.running.contains_key(uuid)
    }

    /// Returns whether an attempt with this purpose is running on any GPU.
    pub(super) fn has(&self, purpose: AttemptPurpose) -> bool {
        self.running.values().any(|running| *running == purpose)
    }

    /// Returns whether no attempt is running.
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Starts an attempt. No attempt may be running on the GPU.
    pub(super) fn start(
        &mut self,
        purpose: AttemptPurpose,
        gpu: Gpu,
        attempt: impl Future<Output = LayoutResult> + Send + 'static,
    ) {
        self.running.insert(gpu.uuid.clone(), purpose);
        self.tasks.spawn(async move { EndedAttempt { purpose, gpu, result: attempt.await } });
    }

    /// Waits for the end of the next attempt; returns `None` if no attempt is running. If the future is dropped, no
    /// attempt is lost.
    ///
    /// # Panics
    /// If the attempt panicked.
    pub(super) async fn next(&mut self) -> Option<EndedAttempt> {
        let ended = subtask::next(&mut self.tasks).await?;
        self.running.remove(&ended.gpu.uuid);
        Some(ended)
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{ApiError, Code, GpuIndex};

    use super::*;
    use crate::state::{State, tests::list};

    #[tokio::test]
    async fn hanging_attempt_delays_no_other() {
        let state = State::empty();
        list(&state, &[0, 1]);
        let gpu = |index: usize| state.now().gpus[index].gpu.clone();
        let mut attempts = RunningAttempts::default();
        attempts.start(AttemptPurpose::Boot, gpu(0), std::future::pending());
        for round in 0..3 {
            let error = ApiError::new(Code::DriverError, format!("attempt {round}"));
            attempts.start(AttemptPurpose::Drift, gpu(1), async { LayoutResult::Failed(error) });
            assert!(attempts.is_running(&"GPU-1".into()) && attempts.has(AttemptPurpose::Drift));
            let ended = attempts.next().await.unwrap();
            assert_eq!((ended.purpose, ended.gpu.index), (AttemptPurpose::Drift, GpuIndex(1)));
            assert!(matches!(ended.result, LayoutResult::Failed(_)));
        }
        assert!(attempts.is_running(&"GPU-0".into()) && attempts.has(AttemptPurpose::Boot));
        assert!(!attempts.is_running(&"GPU-1".into()) && !attempts.has(AttemptPurpose::Drift));
    }
}
