//! A second try of a mutation that the driver refuses as in use where nobody uses anything.
//!
//! The driver counts open handles too, and a library may keep one of our own session's. No handle
//! of ours shall block anything, so the worker is ended and the call made once more through a fresh
//! session. What somebody else holds is refused again.

use gpush_api::Placement;

use super::Hardware;
use crate::{
    error::{DriverError, ErrorKind},
    proto::{Answer, Request},
    reading::Reading,
};

/// What a mutation works on.
#[derive(Debug, PartialEq, Eq)]
enum Object {
    Gpu,
    /// A GPU instance, or something in it: its id, its profile and where it stands.
    Instance(u32, u32, Placement),
}

impl Hardware {
    /// Makes a mutation, and once more if our own session may have been in its way.
    pub(super) async fn change(&self, request: Request) -> Result<Answer, DriverError> {
        let error = match self.call(request.clone()).await {
            Err(error) if error.kind == ErrorKind::InUse => error,
            other => return other,
        };
        let Some(object) = self.unused(&request).await else { return Err(error) };
        tracing::warn!(%error, "no process uses it: trying again in a new driver session");
        if let Err(stuck) = self.restart().await {
            tracing::warn!(error = %stuck, "the driver session can't be ended");
            return Err(error);
        }
        // Time has passed: the id may be another's, or somebody may have come in.
        if self.unused(&request).await != Some(object) {
            return Err(error);
        }
        self.call(request).await
    }

    /// What `request` works on, if it is there and nobody uses what would be destroyed.
    async fn unused(&self, request: &Request) -> Option<Object> {
        let reading = self.read(&request.gpu()?.uuid).await.ok()?;
        object(request, &reading)
    }
}

fn object(request: &Request, reading: &Reading) -> Option<Object> {
    let instance = |id: u32| reading.mig.as_ref()?.instances.iter().find(|instance| instance.id == id);
    let (found, free) = match request {
        Request::CreateGpuInstance { .. } => return Some(Object::Gpu),
        Request::CreateComputeInstance { gi, .. } => (instance(*gi)?, true),
        Request::DestroyComputeInstance { gi, ci, .. } => {
            let found = instance(*gi)?;
            let compute = found.compute.iter().find(|compute| compute.id == *ci)?;
            (found, reading.processes_known && found.processes.is_empty() && compute.processes.is_empty())
        }
        Request::DestroyGpuInstance { gi, .. } => {
            let found = instance(*gi)?;
            let idle = found.processes.is_empty() && found.compute.iter().all(|compute| compute.processes.is_empty());
            (found, idle && (reading.processes_known || found.compute.is_empty()))
        }
        Request::List { .. } | Request::Read { .. } | Request::SetMigMode { .. } | Request::SetComputeMode { .. } => {
            return None;
        }
    };
    free.then_some(Object::Instance(found.id, found.profile_id, found.placement))
}
