//! The task of one probe, and the callers that wait for the probe.

use gpush_host::subtask;
use tokio::task::JoinHandle;

use super::{Reply, health::Health, settings::AppliedSettings};
use crate::protocol::control::ControlError;

/// A probe in progress.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) task: JoinHandle<Result<ProbeResult, ControlError>>,
    pub(super) callers: Vec<Reply>,
}

impl Probe {
    /// Returns the callers that wait for the probe.
    pub(super) fn callers(mut self) -> Vec<Reply> {
        std::mem::take(&mut self.callers)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The result of a probe.
#[derive(Debug)]
pub(super) struct ProbeResult {
    pub(super) health: Health,
    pub(super) settings: AppliedSettings,
}

/// Waits until a probe has finished. Never returns if there is no probe.
pub(super) async fn finished(probe: Option<&mut Probe>) -> Result<ProbeResult, ControlError> {
    match probe {
        Some(probe) => subtask::output((&mut probe.task).await).unwrap_or(Err(ControlError::Busy)),
        None => std::future::pending().await,
    }
}
