//! `/v1/operations`: what is being done, and what was.

use std::{sync::Arc, time::Duration};

use axum::{Json, extract::State, http::StatusCode, response::Response};
use gpush_api::{ApiError, Code, Operation, OperationSummary};
use gpush_core::quote::Quoted;
use serde::Deserialize;

use super::{
    desk,
    extract::{Parameters, Part},
    failure::Failure,
    requests,
};
use crate::{agent::Shared, caller::Caller, idempotency::Header, operation, state::redact};

/// Longest wait of one request.
const LONGEST: Duration = Duration::from_secs(60);

/// Operations in one answer: usually, and at most.
const PAGE: (usize, usize) = (100, 200);

/// Parameters of `GET /v1/operations`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct ListParameters {
    /// How many at most, 1 to 200; 100 without it.
    limit: Option<usize>,
    /// Only those that were begun before the one of this id: the first of the page after this one.
    before: Option<String>,
}

/// Parameters of `GET /v1/operations/{id}`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct OneParameters {
    /// Answer once the revision is past this one, or the operation has ended.
    #[serde(default)]
    after: Option<u64>,
    /// How long to wait for that, in milliseconds; at most 60000. Without it the answer comes at once.
    #[serde(default)]
    wait_ms: u64,
}

/// The last operations, those that go on and those that ended; oldest first, without their plans. With `before` the page before that one.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/operations", operation_id = "listOperations", tag = "operations", params(ListParameters),
    responses((status = 200, description = "The answer", body = Vec<OperationSummary>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(
    State(agent): State<Shared>,
    caller: Caller,
    Parameters(parameters): Parameters<ListParameters>,
) -> Result<Response, Failure> {
    let limit = parameters.limit.unwrap_or(PAGE.0);
    if !(1..=PAGE.1).contains(&limit) {
        let message = format!("`limit` is {limit}, and an answer holds 1 to {} operations", PAGE.1);
        return Err(Failure::bad_request(StatusCode::BAD_REQUEST, message)
            .hint("ask for the others page by page: `before` takes the id of the first operation of a page"));
    }
    let list = async move |agent: Shared, caller: Caller| -> Result<Vec<OperationSummary>, Failure> {
        let before = match &parameters.before {
            None => None,
            Some(id) => Some(operation::id(id).ok_or_else(|| no_such(id))?),
        };
        let mut page = agent.operations.list(before, limit).await?;
        page.reverse();
        page.iter_mut().for_each(|operation| redact::actor(&mut operation.by, caller.viewer));
        Ok(page)
    };
    desk::answer(agent, caller, StatusCode::OK, list).await
}

fn no_such(id: &str) -> ApiError {
    ApiError::new(Code::BadRequest, format!("`before` takes the id of an operation, and {} is none", Quoted(id)))
        .hint("GET /v1/operations lists those that are known")
}

/// One operation, at once or when it has changed.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/operations/{id}", operation_id = "getOperation", tag = "operations",
    params(("id" = String, Path, description = "`op-<number>`"), OneParameters),
    responses((status = 200, description = "The answer", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn one(
    State(agent): State<Shared>,
    caller: Caller,
    Part(id): Part,
    Parameters(parameters): Parameters<OneParameters>,
) -> Result<Response, Failure> {
    // Waited for here: a long poll is no work, and takes no place from it.
    let mut operation = match parameters.after {
        Some(after) => {
            let wait = Duration::from_millis(parameters.wait_ms).min(LONGEST);
            agent.operations.wait(&id, after, wait).await?
        }
        None => agent.operations.get(&id).await?,
    };
    redact::actor(&mut operation.by, caller.viewer);
    desk::answer(agent, caller, StatusCode::OK, async move |_, _| -> Result<Operation, Failure> { Ok(operation) }).await
}

/// Wants an operation taken back: one that waits ends at once, one that runs goes back to what stood
/// before. Follow it for its end; one that is done by then stays done.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/operations/{id}/cancel", operation_id = "cancelOperation", tag = "operations",
    params(("id" = String, Path, description = "`op-<number>`")),
    responses((status = 202, description = "It is being taken back", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn cancel(
    State(agent): State<Shared>,
    caller: Caller,
    header: Header,
    Part(id): Part,
) -> Result<(StatusCode, Json<Operation>), Failure> {
    if !caller.viewer.is_admin() {
        let user = agent.users.user(caller.peer.uid).await;
        return Err(caller.denied("cancel operations", user.as_deref(), &agent.settings.config().access).into());
    }
    let by = caller.actor(agent.users.user(caller.peer.uid).await);
    let key = header.of(caller.peer.uid, &format!("/v1/operations/{id}/cancel"), &());
    let shared = Arc::clone(&agent);
    // On record and in memory, whether or not the caller is still there.
    let cancelling = requests::to_the_end(&agent, async move {
        let _turn = match &key {
            Some(key) => Some(shared.idempotency.lock(key).await),
            None => None,
        };
        let answered = match &key {
            Some(key) => shared.idempotency.operation(key).await?,
            None => None,
        };
        let operation = match answered {
            Some(operation) => shared.operations.get(&operation.to_string()).await?,
            None => shared.operations.cancel(&id, by, key).await?,
        };
        shared.queue.wake();
        Ok(operation)
    });
    let mut operation = cancelling.await?;
    redact::actor(&mut operation.by, caller.viewer);
    Ok((StatusCode::ACCEPTED, Json(operation)))
}
