//! Calls for what GPUs and leases are used for.

use gpush_api::{HostUsage, LeaseId, LeasePast};

use crate::{client::Client, error::Error};

impl Client {
    /// `GET /v1/usage?watch=true`. While a client repeats the request, gpushd samples the GPUs each second. So the first
    /// answer has few figures.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn watched_usage(&mut self) -> Result<HostUsage, Error> {
        self.get("/v1/usage?watch=true").await
    }

    /// `GET /v1/leases/{id}/usage`. Returns the recent past of a lease that has not ended.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::NotFound`] if the caller may not see the use of the lease.
    pub async fn lease_past(&mut self, id: LeaseId) -> Result<LeasePast, Error> {
        self.get(&format!("/v1/leases/{id}/usage")).await
    }
}
