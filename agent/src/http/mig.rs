//! `/v1/mig`: plans, and carrying them out.

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::{ApplyRequest, Operation, PlanRequest, Plans};

use super::{desk, extract::Body, failure::Failure};
use crate::{agent::Shared, apply, auth::Asker};

/// What would be done, one plan a GPU; a GPU that can't have its layout says why. Nothing is changed.
#[cfg_attr(feature = "openapi", utoipa::path(
    post, path = "/v1/mig/plan", operation_id = "planMig", tag = "mig", request_body = PlanRequest,
    responses((status = 200, description = "The answer", body = Plans), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn plan(
    State(agent): State<Shared>,
    asker: Asker,
    Body(request): Body<PlanRequest>,
) -> Result<Response, Failure> {
    let plan = async move |agent: Shared, asker: Asker| -> Result<Plans, Failure> {
        Ok(apply::plan(&agent, &asker, &request).await?)
    };
    desk::answer(agent, asker, StatusCode::OK, plan).await
}

/// Begins to carry out a plan for each GPU, if every one stands; follow the operation for its end.
#[cfg_attr(feature = "openapi", utoipa::path(
    post, path = "/v1/mig/apply", operation_id = "applyMig", tag = "mig", request_body = ApplyRequest,
    responses((status = 202, description = "It has begun", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn apply(
    State(agent): State<Shared>,
    asker: Asker,
    Body(request): Body<ApplyRequest>,
) -> Result<Response, Failure> {
    asker.must_be_admin("change MIG layouts", &agent.settings.config().access)?;
    let request = PlanRequest { gpus: request.gpus, layout: request.layout };
    let begin = async move |agent: Shared, asker: Asker| -> Result<Operation, Failure> {
        Ok(apply::begin(&agent, &asker, "mig.apply", &request).await?)
    };
    desk::answer(agent, asker, StatusCode::ACCEPTED, begin).await
}
