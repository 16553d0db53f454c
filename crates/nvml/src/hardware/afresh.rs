//! A second reading, in a fresh driver session, if the old session returns stale handles.
//!
//! An NVML session may continue to enumerate the instances from its beginning. If another program has destroyed
//! some of them, every reading of the GPU fails in this session, so the worker is restarted. If that does not
//! help, it is not repeated until a reading of that GPU has succeeded: readings are made each second, and a
//! restart delays all GPUs.

use std::{
    collections::BTreeSet,
    sync::{MutexGuard, PoisonError},
};

use super::{Hardware, mixed_up};
use crate::{
    error::DriverError,
    proto::{Answer, GpuRef, Request},
    reading::Reading,
};

impl Hardware {
    pub(super) async fn read_afresh(&self, uuid: &str) -> Result<Reading, DriverError> {
        let sessions = self.status().started;
        let first = match self.read_once(uuid).await {
            Err(error) if error.kind.is_stale_handle() => error,
            other => {
                self.unmended().remove(uuid);
                return other;
            }
        };
        // Otherwise another call has already begun one.
        if self.status().started == sessions {
            if !self.unmended().insert(uuid.to_owned()) {
                return Err(first);
            }
            tracing::warn!(gpu = uuid, error = %first, "starting a new driver session");
            self.restart().await?;
        }
        let again = self.read_once(uuid).await;
        if again.is_ok() {
            self.unmended().remove(uuid);
        }
        again
    }

    async fn read_once(&self, uuid: &str) -> Result<Reading, DriverError> {
        match self.call(Request::Read { gpu: GpuRef::new(uuid) }).await? {
            Answer::Reading(reading) => Ok(*reading),
            other => Err(mixed_up("reading the GPU", &other)),
        }
    }

    fn unmended(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.unmended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
