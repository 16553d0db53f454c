//! `/v1/mig`: plans, and carrying them out.

use std::time::Duration;

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::{ApiError, ApplyRequest, Code, Operation, PlanRequest, Plans};
use jiff::Timestamp;

use super::{desk, extract::Body, failure::Failure, if_match::IfMatch};
use crate::{
    agent::Shared,
    apply::{self, Order},
    caller::Caller,
    idempotency::Header,
    request::reason,
    state::redact,
};

/// Longest `wait_s`.
const LONGEST_WAIT: u64 = 30 * 24 * 3600;

/// What would be done, one plan a GPU; a GPU that can't have its layout says why. Nothing is changed.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/mig/plan", operation_id = "planMig", tag = "mig", request_body = PlanRequest,
    responses((status = 200, description = "The answer", body = Plans), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn plan(
    State(agent): State<Shared>,
    caller: Caller,
    Body(request): Body<PlanRequest>,
) -> Result<Response, Failure> {
    let plan = async move |agent: Shared, caller: Caller| -> Result<Plans, Failure> {
        Ok(agent.planner.plan(caller.viewer, &request).await?)
    };
    desk::answer(agent, caller, StatusCode::OK, plan).await
}

/// Begins to carry out a plan for each GPU, if every one stands; follow the operation for its end.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/mig/apply", operation_id = "applyMig", tag = "mig", request_body = ApplyRequest,
    params(("If-Match" = Option<u64>, Header, description = "Generation; another one is answered with 412")),
    responses((status = 202, description = "It has begun", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn apply(
    State(agent): State<Shared>,
    caller: Caller,
    header: Header,
    if_match: IfMatch,
    Body(request): Body<ApplyRequest>,
) -> Result<Response, Failure> {
    if !caller.viewer.is_admin() {
        let user = agent.users.user(caller.peer.uid).await;
        return Err(caller.denied("change MIG layouts", user.as_deref(), &agent.settings.config().access).into());
    }
    let key = header.of(caller.peer.uid, "/v1/mig/apply", &request);
    let wait = match request.wait_s {
        Some(seconds) if seconds > LONGEST_WAIT => {
            let message = format!("wait_s is {seconds}; at most {LONGEST_WAIT} (30 days) are allowed");
            return Err(ApiError::new(Code::BadRequest, message).into());
        }
        seconds => seconds.map(Duration::from_secs),
    };
    let reason = request.reason.as_deref().map(reason).transpose()?;
    let (once, expires_at) = (request.once, request.expires_at);
    let request = PlanRequest { gpus: request.gpus, layout: request.layout };
    let expected = if_match.0;
    let order = Order { reason, wait, once, expires_at, expected, key, ..Order::new("mig.apply", request) };
    let begin = async move |agent: Shared, caller: Caller| -> Result<Operation, Failure> {
        check_expiry(once, expires_at)?;
        let begun = apply::begin(&agent, &caller, order).await;
        let mut operation = begun.map_err(|error| if_match.failure(&agent, error))?;
        redact::actor(&mut operation.by, caller.viewer);
        Ok(operation)
    };
    desk::answer(agent, caller, StatusCode::ACCEPTED, begin).await
}

/// Refuses an expiry that means nothing.
fn check_expiry(once: bool, expires_at: Option<Timestamp>) -> Result<(), ApiError> {
    let Some(at) = expires_at else { return Ok(()) };
    let bad = |message: String| ApiError::new(Code::BadRequest, message);
    if once {
        let error = bad("a layout that is applied once makes no override that could expire".to_owned());
        return Err(error.hint("leave one of `once` and `expires_at` out"));
    }
    if at <= Timestamp::now() {
        return Err(bad(format!("the override would expire at {at}, which has passed"))
            .hint("name a time to come; `date -u` shows the host's"));
    }
    Ok(())
}
