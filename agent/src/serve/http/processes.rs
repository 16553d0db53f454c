//! `/v1/processes`: the processes on the GPUs.

use axum::{Router, extract::State, http::StatusCode, response::Response, routing::get};
use gpush_api::GpuProcesses;

use super::{HttpHandles, failure::Failure, response_limiter::ResponseLimiter, without_parameters};
use crate::{
    processes::{self, Unleased},
    requests::caller::Caller,
    serve::authorization::Authorization,
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(Router::new().route("/v1/processes", get(list)))
}

/// Lists all processes that the driver reports on GPUs, and marks unleased processes.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/processes", operation_id = "listProcesses", tag = "gpus",
    responses((status = 200, description = "The answer", body = GpuProcesses), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn list(
    State(unleased): State<Unleased>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
) -> Result<Response, Failure> {
    let viewer = caller.viewer;
    let list = async move {
        let mut found = processes::list(&unleased, viewer).await?;
        let unnamed = found.processes.iter().map(|one| &one.process).filter(|process| process.user.is_none());
        let owners = authorization.owners(unnamed.filter_map(|process| process.uid).collect()).await;
        for one in found.processes.iter_mut().filter(|one| one.process.user.is_none()) {
            one.account = one.process.uid.and_then(|uid| owners.get(&uid)).cloned();
        }
        Ok::<GpuProcesses, Failure>(found)
    };
    limiter.answer(&caller, StatusCode::OK, list).await
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(list))]
pub(super) struct ProcessPaths;
