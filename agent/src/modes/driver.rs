//! Determines whether the driver calls of a step took effect, and reads the GPU afterwards.
//!
//! ```text
//! call ──► ok ───────────────────────────────────────────────► done
//!   ├────► the GPU is lost ──────────────────────────────────► Lost
//!   ├────► refused ──────────────────────────────────────────► Failed, or InUse
//!   └────► no answer in time, or the worker died ─► settle ─► read ─► verify
//!                                        │                    ├─ done:     done
//!                                        │                    └─ not done: Failed, or InUse
//!                                        └─ not settled in time: Unknown
//! ```
//!
//! A call without an answer may still take effect. gpushd waits until the call can no longer change the GPU, and then
//! reads the GPU to see the outcome.

use std::{sync::Arc, time::Duration};

use gpush_api::ApiError;
use gpush_nvml::{DriverError, ErrorKind, Hardware, Reading};

use super::{GpuName, Trouble};
use crate::state::readings::Readings;

/// How long a step waits until a late driver call has ended. gpushd kills the worker much earlier, so a call that still
/// runs after this time hangs in the kernel.
const SETTLE: Duration = Duration::from_secs(45);

/// The driver for the steps of operations: `hardware` changes GPUs, `readings` reads them.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    pub(crate) hardware: Hardware,
    pub(crate) readings: Readings,
}

impl Driver {
    /// Reads a GPU. First waits until no earlier driver call can still change it.
    ///
    /// # Errors
    /// If the GPU is lost or cannot be read, or an earlier call may still change it.
    pub(crate) async fn read(&self, gpu: &GpuName) -> Result<Arc<Reading>, Trouble> {
        let what = format!("{}: cannot read the state of the GPU", gpu.label);
        match self.readings.read_now(&gpu.uuid).await {
            Ok(reading) => Ok(reading),
            Err(error) if error.kind == ErrorKind::GpuIsLost => Err(Trouble::Lost(explain(&what, &error))),
            Err(error) => {
                self.wait_until_settled(gpu, &what, &error).await?;
                // Try again: a new worker may succeed.
                self.read_again(gpu, &what).await
            }
        }
    }

    /// Reads the GPU after a failed driver call, so that the caller can see whether the call took effect. `what` names
    /// the call in errors.
    ///
    /// # Errors
    /// If the call certainly had no effect, the GPU is lost, or the call may still take effect.
    pub(crate) async fn after_failed_call(
        &self,
        gpu: &GpuName,
        what: &str,
        error: &DriverError,
    ) -> Result<Arc<Reading>, Trouble> {
        if error.kind == ErrorKind::GpuIsLost {
            return Err(Trouble::Lost(explain(what, error)));
        }
        if error.may_land() || error.kind == ErrorKind::Unsettled {
            self.wait_until_settled(gpu, what, error).await?;
        } else if !matches!(error.kind, ErrorKind::WorkerDied { may_have_landed: true }) {
            // The driver has refused the call or never got it, so it had no effect.
            return Err(no_effect(error, explain(what, error)));
        }
        self.read_again(gpu, what).await
    }

    async fn read_again(&self, gpu: &GpuName, what: &str) -> Result<Arc<Reading>, Trouble> {
        self.readings.read_now(&gpu.uuid).await.map_err(|error| {
            let explained = explain(what, &error);
            if error.kind == ErrorKind::GpuIsLost { Trouble::Lost(explained) } else { Trouble::Unknown(explained) }
        })
    }

    /// Waits until no earlier driver call can still change the GPU.
    async fn wait_until_settled(&self, gpu: &GpuName, what: &str, error: &DriverError) -> Result<(), Trouble> {
        let settled = tokio::time::timeout(SETTLE, self.hardware.settle(&gpu.uuid)).await;
        settled.map(|_| ()).map_err(|_| {
            let error =
                explain(what, error).cause("the driver call may still take effect, so gpushd rolled nothing back");
            Trouble::Unknown(error)
        })
    }
}

/// Converts a driver error to the error of a step.
pub(super) fn explain(what: &str, error: &DriverError) -> ApiError {
    // If the driver error is retryable, so is the error of the step: the caller may try again after the operation.
    error.to_api().context(what)
}

/// Returns why a step failed. The driver call of the step had no effect. `explained` is the error of the step.
pub(super) fn no_effect(error: &DriverError, explained: ApiError) -> Trouble {
    if error.kind == ErrorKind::InUse { Trouble::InUse(explained) } else { Trouble::Failed(explained) }
}

/// Returns the error of a driver call that has ended without effect.
pub(super) fn without_effect(what: &str, error: &DriverError) -> ApiError {
    // The deadline error says that the call may still take effect. Now the call has ended, so this is no longer true.
    let kind = if matches!(error.kind, ErrorKind::Deadline { .. }) {
        ErrorKind::Deadline { may_land: false }
    } else {
        error.kind.clone()
    };
    let explained = explain(what, &DriverError { kind, ..error.clone() })
        .cause("the driver call has ended, and had no visible effect on the hardware");
    if !error.may_land() && error.kind != ErrorKind::Unsettled {
        return explained;
    }
    explained.hint("look for the cause in the kernel's log: `dmesg | grep -i -e nvrm -e xid`; then apply again")
}
