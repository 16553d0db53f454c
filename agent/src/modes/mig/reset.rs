//! Resets GPUs to make their MIG mode effective. During a reset gpushd has no GPU open, so it
//! cannot read any GPU.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code, GpuUuid};
use gpush_host::helper::{End, Job};
use tokio_util::sync::CancellationToken;

use super::{
    MigMode, holders,
    mode_change::ModeChange,
    preflight::{self, NotReset},
};
use crate::{state::redact, system::host_services::HostServices};

/// Name of the helper unit's step that resets GPUs.
pub(crate) const RESET: &str = "reset";

/// Why and for which operation gpushd resets GPUs.
pub(crate) struct Purpose<'a> {
    /// Id of the operation.
    pub(crate) operation: &'a str,
    /// UUIDs of all GPUs whose MIG mode the operation changes.
    pub(crate) changes: &'a [GpuUuid],
    /// How to find out whether the operation was cancelled; `None` during a rollback, which cannot
    /// be cancelled.
    pub(crate) cancel: Option<Cancel<'a>>,
}

/// The cancellation of an operation.
pub(crate) struct Cancel<'a> {
    pub(crate) cancelled: &'a CancellationToken,
    /// Returns the error of the cancelled operation. Call this only after the cancellation.
    pub(crate) why: &'a (dyn Fn() -> ApiError + Send + Sync),
}

/// A pause of driver calls. Dropping this value ends the pause.
struct PauseGuard<'a>(&'a MigMode);

impl Drop for PauseGuard<'_> {
    fn drop(&mut self) {
        self.0.driver.hardware.unpause();
    }
}

/// While a GPU is being reset, refuses a request that must read GPUs.
///
/// # Errors
/// [`Code::Resetting`] during a reset. The client may repeat the request later.
pub(crate) fn not_resetting(host_services: &HostServices) -> Result<(), ApiError> {
    if host_services.driverless.try_read().is_ok() {
        return Ok(());
    }
    Err(ApiError::new(Code::Resetting, "a GPU is being reset: gpushd can read no GPU until the reset has ended")
        .hint("`gpushctl operation list` shows the operation; try again when it has ended")
        .retryable())
}

impl MigMode {
    /// Resets GPUs, together with the GPUs that can only be reset with them. Closes all driver
    /// handles of gpushd during the reset. Does not start the reset if the operation is cancelled.
    pub(super) async fn reset(&self, purpose: &Purpose<'_>, due: &[&ModeChange]) -> Result<(), NotReset> {
        let mut uuids: Vec<GpuUuid> = due.iter().map(|change| change.gpu.uuid.clone()).collect();
        uuids.extend(due.iter().flat_map(|change| change.peers.iter().cloned()));
        uuids.sort();
        uuids.dedup();
        let _gate = match &purpose.cancel {
            None => self.context.host_services.driverless.write().await,
            Some(cancel) => tokio::select! {
                biased;
                () = cancel.cancelled.cancelled() => return Err(NotReset::Cancelled((cancel.why)())),
                gate = self.context.host_services.driverless.write() => gate,
            },
        };
        let is_peer = |uuid: &&GpuUuid| due.iter().all(|change| change.gpu.uuid != **uuid);
        let peers: Vec<GpuUuid> = uuids.iter().filter(is_peer).cloned().collect();
        preflight::must_be_free(&self.driver.readings, &peers, purpose.changes).await?;
        let minors = holders::minors(&self.driver.readings, &uuids)?;
        let _paused = PauseGuard(self);
        self.driver.hardware.pause().await.map_err(|error| {
            ApiError::new(Code::DriverError, "gpushd cannot close its own driver handles of the GPU")
                .cause(error.to_string())
                .hint("a driver call hangs in the kernel: only a reboot of the host ends it")
        })?;
        let found = gpush_core::holders::obstacles(holders::scan(self, &minors).await?, &[]);
        if !found.is_empty() {
            let label = due.iter().map(|change| change.gpu.label.clone()).collect::<Vec<_>>().join(", ");
            let in_full = gpush_core::holders::explain(&label, &found, &[]);
            tracing::error!(operation = purpose.operation, "{in_full}; {}", in_full.causes.join("; "));
            let found: Vec<_> = found.into_iter().map(redact::blank_holder).collect();
            return Err(NotReset::InUse(gpush_core::holders::explain(&label, &found, &[])));
        }
        self.run(purpose.operation, &uuids).await.map_err(NotReset::Failed)
    }

    /// Runs the program that resets GPUs.
    async fn run(&self, operation: &str, uuids: &[GpuUuid]) -> Result<(), ApiError> {
        let config = self.context.state.config();
        let change = &config.mode_change;
        let job = Job {
            operation: operation.to_owned(),
            step: RESET.to_owned(),
            program: self.context.host_services.nvidia_smi(change),
            args: vec!["--gpu-reset".to_owned(), "-i".to_owned(), uuids.join(",")],
            env: BTreeMap::new(),
            input: None,
            deadline: self.context.host_services.constants.reset,
            routine: false,
        };
        let ended = self.context.host_services.helpers.run(job).await?;
        match ended.end {
            End::Exited(0) => Ok(()),
            ref end @ (End::Exited(_)
            | End::Signalled(_)
            | End::TimedOut
            | End::NotStarted(_)
            | End::Lost
            | End::Void
            | End::Hangs) => Err(ApiError::new(Code::DriverError, format!("the reset {end}{}", ended.output_suffix()))
                .hint("look for the cause in the kernel's log: `dmesg | grep -i -e nvrm -e xid`")),
        }
    }
}
