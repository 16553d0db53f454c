//! Steps of mode `mps`: MPS daemons that an operation stops and starts.
//!
//! A daemon that a step stopped stays stopped until the operation ends ([`Mps::forget_operation`]). Then the config
//! decides again whether the daemon runs.

use gpush_api::{ApiError, MpsStep};

use crate::mps::{self, Mps};

pub(crate) use crate::mps::start_device_daemons;

/// Executes an MPS step of `operation` on the GPU `uuid`, and waits until it has taken effect.
///
/// # Errors
/// If a daemon to stop is in use or does not exit, or if a daemon to start does not serve clients.
pub(crate) async fn execute(mps: &Mps, operation: &str, uuid: &str, step: &MpsStep) -> Result<(), ApiError> {
    match step {
        MpsStep::StopDaemon { uuid: target, label } => {
            mps::stop_for_operation(mps, operation, uuid, target, label).await
        }
        MpsStep::StartDaemon { device: None } => mps::start_and_wait(mps, operation, uuid).await,
        // The daemons of MIG devices are started together: see [`start_device_daemons`].
        MpsStep::StartDaemon { device: Some(_) } => Ok(()),
    }
}
