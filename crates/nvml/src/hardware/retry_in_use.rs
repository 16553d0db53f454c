//! A second attempt at a mutation that the driver refused as "in use" although no process uses the object.
//!
//! For this refusal, an open handle to the object is enough, and a library may keep such a handle
//! in gpush's own session. gpush's handles must not block a mutation. So the worker is ended, and
//! the call is repeated once in a fresh session. If another process holds a handle, the driver
//! refuses the call again.

use gpush_api::Placement;

use super::Hardware;
use crate::{
    error::{DriverError, ErrorKind},
    proto::{Answer, Request},
    reading::Reading,
};

/// The object of a mutation.
#[derive(Debug, PartialEq, Eq)]
enum Object {
    Gpu,
    /// A GPU instance, or an object in it: its id, profile and placement.
    Instance(u32, u32, Placement),
}

impl Hardware {
    /// Makes a mutation. Repeats it once if gpush's own session may have blocked it.
    pub(super) async fn change(&self, request: Request) -> Result<Answer, DriverError> {
        let error = match self.call(request.clone()).await {
            Err(error) if error.kind == ErrorKind::InUse => error,
            other => return other,
        };
        let Some(object) = self.unused(&request).await else { return Err(error) };
        tracing::warn!(
            %error,
            "no process uses the object that the driver reports as in use: trying again in a new driver session"
        );
        // The session of the samples also must not have a handle, until the second attempt has ended.
        let _held = self.sampler.hold().await;
        if let Err(stuck) = self.restart().await {
            tracing::warn!(error = %stuck, "the driver session can't be ended");
            return Err(error);
        }
        // Check again: the id may now belong to another instance, or a process may use the object.
        if self.unused(&request).await != Some(object) {
            return Err(error);
        }
        self.call(request).await
    }

    /// Returns the object of `request`; `None` if the object does not exist or is in use.
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
        Request::List { .. }
        | Request::Read { .. }
        | Request::Sample { .. }
        | Request::SetMigMode { .. }
        | Request::SetComputeMode { .. } => return None,
    };
    free.then_some(Object::Instance(found.id, found.profile_id, found.placement))
}
