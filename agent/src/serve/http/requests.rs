//! Admits requests that change something, and executes them completely even if the caller disconnects.

use std::sync::Arc;

use gpush_api::{Actor, ApiError};

use crate::{
    operations::operation::Operations,
    requests::{
        idempotency::{Idempotency, Key},
        request::{Request, reason},
    },
    state::context::HostContext,
    system::tasks::TaskName,
};

/// Admits and executes requests that change something. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Requests {
    pub(crate) context: Arc<HostContext>,
    /// Recognizes requests that were already executed.
    pub(crate) idempotency: Idempotency,
    /// Provides the error for new requests while gpushd is stopping.
    pub(crate) operations: Operations,
}

impl Requests {
    /// Admits a request of the administrator `by`.
    ///
    /// # Errors
    /// If the reason is too long, or nothing can be recorded.
    pub(super) fn admit(&self, by: Actor, key: Option<Key>, why: Option<&str>) -> Result<Request, ApiError> {
        self.can_record()?;
        let reason = why.map(reason).transpose()?.filter(|reason| !reason.is_empty());
        Ok(Request { by, reason, key })
    }

    /// Checks that the store can record changes.
    ///
    /// # Errors
    /// If the store cannot record anything.
    pub(super) fn can_record(&self) -> Result<(), ApiError> {
        self.context.read_only.clone().map_or(Ok(()), Err)
    }

    /// Executes a request. Returns `None` if an earlier request with the same idempotency key was executed. If the
    /// earlier request still runs, waits for it.
    ///
    /// # Errors
    /// If the key was used for another request, or if `work` fails.
    pub(super) async fn once<T, F>(
        &self,
        request: Request,
        work: impl FnOnce(Request) -> F + Send + 'static,
    ) -> Result<Option<T>, ApiError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, ApiError>> + Send,
    {
        let idempotency = self.idempotency.clone();
        let once = async move {
            let Some(key) = request.key.clone() else { return work(request).await.map(Some) };
            let _lock = idempotency.lock(&key).await?;
            if idempotency.is_done(&key).await? {
                return Ok(None);
            }
            work(request).await.map(Some)
        };
        self.carry_out(once).await
    }

    /// Executes `work` completely, even if the caller disconnects.
    ///
    /// # Errors
    /// If gpushd is stopping, or if `work` fails.
    pub(super) async fn carry_out<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.operations.not_stopping(&self.context.stopping)?;
        self.carry_out_while_stopping(work).await
    }

    /// Executes `work` completely, even while gpushd is stopping. For requests that end an
    /// operation or a lease.
    ///
    /// # Errors
    /// If `work` fails.
    pub(super) async fn carry_out_while_stopping<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.context.tasks.once_before_exit(TaskName::Request, work).await.unwrap_or_else(|error| {
            Err(ApiError::internal("the request failed because of an internal error of gpushd")
                .cause(error.to_string()))
        })
    }
}
