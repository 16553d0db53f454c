//! A second check of a mutation, if the driver reports success but reading back does not show the
//! change.
//!
//! An NVML session may return outdated state. So gpushd first restarts the worker, which opens a
//! fresh session, and reads the GPU again. If this second reading does not show the change either,
//! the mutation is reported as failed.

use gpush_api::{ComputeInstance, ComputeMode, GpuInstance, GpuUuid, Mig, Placement};

use super::Hardware;
use crate::{
    error::{DriverError, ErrorKind},
    reading::Reading,
};

impl Hardware {
    /// If `error` is [`ErrorKind::NotReflected`], reads the GPU in a fresh session and returns what `find` finds.
    /// Otherwise returns the error.
    pub(super) async fn confirm_in_fresh_session<T>(
        &self,
        uuid: &GpuUuid,
        error: DriverError,
        find: impl Fn(&Mig) -> Option<T>,
    ) -> Result<T, DriverError> {
        self.confirm_reading_in_fresh_session(uuid, error, |reading| reading.mig.as_ref().and_then(&find)).await
    }

    /// Like `confirm_in_fresh_session`, but passes the whole reading to `find`.
    pub(super) async fn confirm_reading_in_fresh_session<T>(
        &self,
        uuid: &GpuUuid,
        error: DriverError,
        find: impl Fn(&Reading) -> Option<T>,
    ) -> Result<T, DriverError> {
        if error.kind != ErrorKind::NotReflected {
            return Err(error);
        }
        self.restart().await?;
        let reading = self.read(uuid).await?;
        match find(&reading) {
            Some(found) => {
                tracing::warn!(gpu = uuid.as_str(), %error, "the change is visible only in a new driver session");
                Ok(found)
            }
            None => Err(error),
        }
    }
}

pub(super) fn gpu_instance(mig: &Mig, profile_id: u32, at: Placement) -> Option<GpuInstance> {
    mig.instances.iter().find(|gi| gi.profile_id == profile_id && gi.placement == at).cloned()
}

pub(super) fn compute_instance(mig: &Mig, gi: u32, profile_id: u32, at: Option<Placement>) -> Option<ComputeInstance> {
    let instance = mig.instances.iter().find(|instance| instance.id == gi)?;
    let mut found = instance.compute.iter().filter(|ci| {
        ci.profile_id == profile_id && at.is_none_or(|at| ci.placement.is_none_or(|p| p.start == at.start))
    });
    // If two instances match, it is not known which of them is new, so the result is `None`.
    found.next().filter(|_| found.next().is_none()).cloned()
}

pub(super) fn no_gpu_instance(mig: &Mig, gi: u32) -> Option<()> {
    mig.instances.iter().all(|instance| instance.id != gi).then_some(())
}

pub(super) fn no_compute_instance(mig: &Mig, gi: u32, ci: u32) -> Option<()> {
    let there = mig.instances.iter().any(|instance| instance.id == gi && instance.compute.iter().any(|c| c.id == ci));
    (!there).then_some(())
}

pub(super) fn compute_mode(reading: &Reading, wanted: ComputeMode) -> Option<()> {
    (reading.compute_mode == Some(wanted)).then_some(())
}
