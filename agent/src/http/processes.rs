//! `/v1/processes`: the processes on the GPUs.

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::GpuProcesses;

use super::{failure::Failure, response_limiter::ResponseLimiter};
use crate::{
    caller::Caller,
    processes::{self, Unleased},
};

/// Lists all processes that the driver reports on GPUs, and marks unleased processes.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/processes", operation_id = "listProcesses", tag = "gpus",
    responses((status = 200, description = "The answer", body = GpuProcesses), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(
    State(unleased): State<Unleased>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
) -> Result<Response, Failure> {
    let viewer = caller.viewer;
    let list = async move { Ok::<GpuProcesses, Failure>(processes::list(&unleased, viewer).await?) };
    limiter.answer(&caller, StatusCode::OK, list).await
}
