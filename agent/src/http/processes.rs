//! `/v1/processes`: who is on the GPUs.

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::GpuProcesses;

use super::{desk, failure::Failure};
use crate::{agent::Shared, caller::Caller, processes};

/// All processes that the driver lists, those that belong to nobody who was given a share marked.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/processes", operation_id = "listProcesses", tag = "gpus",
    responses((status = 200, description = "The answer", body = GpuProcesses), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(State(agent): State<Shared>, caller: Caller) -> Result<Response, Failure> {
    let list = async |agent: Shared, caller: Caller| -> Result<GpuProcesses, Failure> {
        Ok(processes::list(&agent.strays, caller.viewer).await?)
    };
    desk::answer(agent, caller, StatusCode::OK, list).await
}
