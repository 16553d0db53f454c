//! `/v1/operations`: running and finished operations.

use std::time::Duration;

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::Response,
    routing::{get, post},
};
use gpush_api::{ApiError, Code, Operation, OperationState, OperationSummary};
use gpush_core::quote::Quoted;
use serde::Deserialize;

use super::{
    HttpHandles,
    admin::{Admin, CancelOperations},
    extract::{Parameters, PathPart},
    failure::Failure,
    requests::Requests,
    response_limiter::ResponseLimiter,
    without_parameters,
};
use crate::{
    operations::operation::{self, Operations},
    requests::{caller::Caller, idempotency::Header},
    state::redact,
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(Router::new().route("/v1/operations/{id}/cancel", post(cancel)))
        .route("/v1/operations", get(list))
        .route("/v1/operations/{id}", get(one))
}

/// Maximum time that one request waits for a change of the operation.
const LONGEST: Duration = Duration::from_secs(60);

/// Default and maximum number of operations in one response.
const PAGE: (usize, usize) = (100, 200);

/// Parameters of `GET /v1/operations`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct ListParameters {
    /// Maximum number of operations, 1 to 200; 100 by default.
    limit: Option<usize>,
    /// Only operations before the operation with this id. For the previous page, use the first id of a page.
    before: Option<String>,
}

/// Parameters of `GET /v1/operations/{id}`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct OneParameters {
    /// Revision to wait for: gpushd answers when the revision is greater than this, or when the operation has ended.
    #[serde(default)]
    after: Option<u64>,
    /// Maximum wait in milliseconds, at most 60000; 0 by default.
    #[serde(default)]
    wait_ms: u64,
}

/// Lists the last operations, oldest first, without their plans.
///
/// The list has running and ended operations. `before` selects the previous page.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/operations", operation_id = "listOperations", tag = "operations", params(ListParameters),
    responses((status = 200, description = "The answer", body = Vec<OperationSummary>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn list(
    State(operations): State<Operations>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(parameters): Parameters<ListParameters>,
) -> Result<Response, Failure> {
    let limit = parameters.limit.unwrap_or(PAGE.0);
    if !(1..=PAGE.1).contains(&limit) {
        let message = format!("`limit` must be 1 to {} operations, not {limit}", PAGE.1);
        return Err(Failure::bad_request(StatusCode::BAD_REQUEST, message)
            .hint("request page by page: set `before` to the id of the first operation of the previous page"));
    }
    let viewer = caller.viewer;
    let list = async move {
        let before = match &parameters.before {
            None => None,
            Some(id) => Some(operation::id(id).ok_or_else(|| no_such(id))?),
        };
        let mut page = operations.list(before, limit).await?;
        page.reverse();
        page.iter_mut().for_each(|operation| redact::actor(&mut operation.by, viewer));
        Ok::<Vec<OperationSummary>, Failure>(page)
    };
    limiter.answer(&caller, StatusCode::OK, list).await
}

fn no_such(id: &str) -> ApiError {
    ApiError::new(Code::BadRequest, format!("`before` takes the id of an operation, not {}", Quoted(id)))
        .hint("GET /v1/operations lists the known operations")
}

/// Returns one operation, at once or after its next change.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/operations/{id}", operation_id = "getOperation", tag = "operations",
    params(("id" = String, Path, description = "`op-<number>`"), OneParameters),
    responses((status = 200, description = "The answer", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn one(
    State(operations): State<Operations>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    PathPart(id): PathPart,
    Parameters(parameters): Parameters<OneParameters>,
) -> Result<Response, Failure> {
    // A waiting request needs no permit, so it waits before it uses the limiter.
    let mut operation = match parameters.after {
        Some(after) => {
            let wait = Duration::from_millis(parameters.wait_ms).min(LONGEST);
            operations.wait(&id, after, wait).await?
        }
        None => operations.get(&id).await?,
    };
    show_to(&operations, &mut operation, &caller).await?;
    limiter.answer(&caller, StatusCode::OK, async move { Ok::<Operation, Failure>(operation) }).await
}

/// Removes what the caller may not see. For an administrator, adds the details that only administrators may see.
async fn show_to(operations: &Operations, operation: &mut Operation, caller: &Caller) -> Result<(), Failure> {
    redact::actor(&mut operation.by, caller.viewer);
    if caller.viewer.is_admin()
        && let Some(in_full) = operations.error_in_full(&operation.id).await?
    {
        report_in_full(operation, in_full);
    }
    Ok(())
}

/// Replaces the reasons why an operation waits, did not start or failed. `in_full` has the same reasons with all details.
fn report_in_full(operation: &mut Operation, in_full: ApiError) {
    match operation.state {
        OperationState::Waiting => {
            operation.waits_for = in_full.sentences().into_iter().map(str::to_owned).collect();
        }
        OperationState::NotStarted | OperationState::RolledBack | OperationState::Failed => {
            operation.error = Some(in_full);
        }
        OperationState::Queued
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted
        | OperationState::Done => {}
    }
}

/// Cancels an operation. For administrators.
///
/// A waiting operation ends at once. A running operation is rolled back, unless it finishes first.
/// `GET /v1/operations/{id}` shows the result.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/operations/{id}/cancel", operation_id = "cancelOperation", tag = "operations",
    params(("id" = String, Path, description = "`op-<number>`")),
    responses((status = 202, description = "The operation is being rolled back", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn cancel(
    State(operations): State<Operations>,
    State(requests): State<Requests>,
    Admin { caller, by, .. }: Admin<CancelOperations>,
    header: Header,
    PathPart(id): PathPart,
) -> Result<(StatusCode, Json<Operation>), Failure> {
    let key = header.of(caller.uid(), &format!("/v1/operations/{id}/cancel"), &());
    let idempotency = requests.idempotency.clone();
    // The operation is cancelled even if the caller disconnects.
    let shown = operations.clone();
    let cancelling = requests.carry_out_while_stopping(async move {
        let _lock = match &key {
            Some(key) => Some(idempotency.lock(key).await?),
            None => None,
        };
        let answered = match &key {
            Some(key) => idempotency.operation(key).await?,
            None => None,
        };
        let operation = match answered {
            Some(operation) => operations.get(&operation.to_string()).await?,
            None => operations.cancel(&id, by, key).await?,
        };
        Ok(operation)
    });
    let mut operation = cancelling.await?;
    show_to(&shown, &mut operation, &caller).await?;
    Ok((StatusCode::ACCEPTED, Json(operation)))
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, one, cancel))]
pub(super) struct OperationPaths;
