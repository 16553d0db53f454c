//! A second reading in a fresh driver session, if the old session returns stale handles.
//!
//! An NVML session may continue to list the instances that existed when the session started. If
//! another program has destroyed some of them, every reading of the GPU fails in this session. So
//! the worker is restarted, which opens a fresh session. If the second reading also fails, no
//! further restart follows until a reading of that GPU has succeeded: gpushd reads each second, and
//! each restart delays the calls to all GPUs.

use gpush_api::GpuUuid;
use std::{collections::BTreeSet, sync::MutexGuard};

use super::{Hardware, mixed_up};
use crate::{
    error::DriverError,
    proto::{Answer, GpuRef, Request},
    reading::Reading,
};

impl Hardware {
    pub(super) async fn read_with_fresh_session(&self, uuid: &GpuUuid) -> Result<Reading, DriverError> {
        let sessions = self.status().started;
        let first = match self.read_once(uuid).await {
            Err(error) if error.kind.is_stale_handle() => error,
            other => {
                self.still_stale().remove(uuid);
                return other;
            }
        };
        // If `started` has changed, another call has already restarted the worker.
        if self.status().started == sessions {
            if !self.still_stale().insert(uuid.clone()) {
                return Err(first);
            }
            tracing::warn!(gpu = uuid.as_str(), error = %first, "starting a new driver session");
            self.restart().await?;
        }
        let again = self.read_once(uuid).await;
        if again.is_ok() {
            self.still_stale().remove(uuid);
        }
        again
    }

    async fn read_once(&self, uuid: &GpuUuid) -> Result<Reading, DriverError> {
        match self.call(Request::Read { gpu: GpuRef::new(uuid) }).await? {
            Answer::Reading(reading) => Ok(*reading),
            other => Err(mixed_up("reading the GPU", &other)),
        }
    }

    fn still_stale(&self) -> MutexGuard<'_, BTreeSet<GpuUuid>> {
        self.unmended.lock()
    }
}
