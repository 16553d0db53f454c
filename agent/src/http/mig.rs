//! `/v1/mig`: plans, and carrying them out.

use axum::{Json, extract::State, http::StatusCode};
use gpush_api::{ApplyRequest, Operation, PlanRequest, Plans};

use super::{extract::Body, failure::Failure};
use crate::{agent::Shared, apply, auth::Asker};

/// What would be done, one plan a GPU; a GPU that can't have its layout says why. Nothing is changed.
#[cfg_attr(feature = "openapi", utoipa::path(
    post, path = "/v1/mig/plan", operation_id = "planMig", tag = "mig", request_body = PlanRequest,
    responses((status = 200, description = "The answer", body = Plans), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn plan(
    State(agent): State<Shared>,
    asker: Asker,
    Body(request): Body<PlanRequest>,
) -> Result<Json<Plans>, Failure> {
    Ok(Json(apply::plan(&agent, &asker, &request).await?))
}

/// Begins to carry out a plan for each GPU, if every one stands; follow the operation for its end.
#[cfg_attr(feature = "openapi", utoipa::path(
    post, path = "/v1/mig/apply", operation_id = "applyMig", tag = "mig", request_body = ApplyRequest,
    responses((status = 202, description = "It has begun", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn apply(
    State(agent): State<Shared>,
    asker: Asker,
    Body(request): Body<ApplyRequest>,
) -> Result<(StatusCode, Json<Operation>), Failure> {
    if !asker.admin {
        let user = agent.people.user(asker.peer.uid).await;
        return Err(asker.denied("change MIG layouts", user.as_deref(), &agent.settings.config().access).into());
    }
    let request = PlanRequest { gpus: request.gpus, layout: request.layout };
    let operation = apply::begin(&agent, &asker, "mig.apply", &request).await?;
    Ok((StatusCode::ACCEPTED, Json(operation)))
}
