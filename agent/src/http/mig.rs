//! `/v1/mig`: plans, and carrying them out.

use std::time::Duration;

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::{ApiError, ApplyRequest, Code, Operation, PlanRequest, Plans};

use super::{desk, extract::Body, failure::Failure};
use crate::{
    agent::Shared,
    answers::Header,
    apply::{self, Order},
    auth::Asker,
    redact,
    request::reason,
};

/// Longest `wait_s`.
const LONGEST_WAIT: u64 = 30 * 24 * 3600;

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
    header: Header,
    Body(request): Body<ApplyRequest>,
) -> Result<Response, Failure> {
    if !asker.admin {
        let user = agent.people.user(asker.peer.uid).await;
        return Err(asker.denied("change MIG layouts", user.as_deref(), &agent.settings.config().access).into());
    }
    let key = header.of(asker.peer.uid, "/v1/mig/apply", &request);
    let wait = match request.wait_s {
        Some(seconds) if seconds > LONGEST_WAIT => {
            let message = format!("wait_s is {seconds}; at most {LONGEST_WAIT} (30 days) are allowed");
            return Err(ApiError::new(Code::BadRequest, message).into());
        }
        seconds => seconds.map(Duration::from_secs),
    };
    let reason = request.reason.as_deref().map(reason).transpose()?;
    let request = PlanRequest { gpus: request.gpus, layout: request.layout };
    let order = Order { reason, wait, key, ..Order::new("mig.apply", request) };
    let begin = async move |agent: Shared, asker: Asker| -> Result<Operation, Failure> {
        let answered = match &order.key {
            Some(key) => key.answered(&agent).await?,
            None => None,
        };
        let mut operation = match answered {
            Some(operation) => operation,
            None => apply::begin(&agent, &asker, order).await?,
        };
        redact::actor(&mut operation.by, &asker);
        Ok(operation)
    };
    desk::answer(agent, asker, StatusCode::ACCEPTED, begin).await
}
