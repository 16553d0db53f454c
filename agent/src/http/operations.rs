//! `/v1/operations`: what is being done, and what was.

use std::time::Duration;

use axum::{Json, extract::State, http::StatusCode};
use gpush_api::Operation;
use serde::Deserialize;

use super::{
    extract::{Parameters, Part},
    failure::Failure,
};
use crate::{agent::Shared, auth::Asker, redact};

/// Longest wait of one request.
const LONGEST: Duration = Duration::from_secs(60);

/// Parameters of `GET /v1/operations/{id}`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
pub(super) struct OneParameters {
    /// Answer once the revision is past this one, or the operation has ended.
    #[serde(default)]
    after: Option<u64>,
    /// How long to wait for that, in milliseconds; at most 60000. Without it the answer comes at once.
    #[serde(default)]
    wait_ms: u64,
}

/// Operations that go on, and the last 200 that ended; oldest first.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/operations", operation_id = "listOperations", tag = "operations",
    responses((status = 200, description = "The answer", body = Vec<Operation>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(State(agent): State<Shared>, asker: Asker) -> Result<Json<Vec<Operation>>, Failure> {
    let mut operations = agent.operations.list(None, 200).await?;
    operations.reverse();
    operations.iter_mut().for_each(|operation| redact::operation(operation, &asker));
    Ok(Json(operations))
}

/// One operation, at once or when it has changed.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/operations/{id}", operation_id = "getOperation", tag = "operations",
    params(("id" = String, Path, description = "`op-<number>`"), OneParameters),
    responses((status = 200, description = "The answer", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn one(
    State(agent): State<Shared>,
    asker: Asker,
    Part(id): Part,
    Parameters(parameters): Parameters<OneParameters>,
) -> Result<Json<Operation>, Failure> {
    let mut operation = match parameters.after {
        Some(after) => {
            let wait = Duration::from_millis(parameters.wait_ms).min(LONGEST);
            agent.operations.wait(&id, after, wait).await?
        }
        None => agent.operations.get(&id).await?,
    };
    redact::operation(&mut operation, &asker);
    Ok(Json(operation))
}

/// Wants an operation taken back: one that waits ends at once, one that runs goes back to what stood
/// before. Follow it for its end; one that is done by then stays done.
#[cfg_attr(feature = "openapi", utoipa::path(
    post, path = "/v1/operations/{id}/cancel", operation_id = "cancelOperation", tag = "operations",
    params(("id" = String, Path, description = "`op-<number>`")),
    responses((status = 202, description = "It is being taken back", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn cancel(
    State(agent): State<Shared>,
    asker: Asker,
    Part(id): Part,
) -> Result<(StatusCode, Json<Operation>), Failure> {
    if !asker.admin {
        let user = agent.people.user(asker.peer.uid).await;
        return Err(asker.denied("cancel operations", user.as_deref(), &agent.settings.config().access).into());
    }
    let by = asker.actor(agent.people.user(asker.peer.uid).await);
    let mut operation = agent.operations.cancel(&id, by).await?;
    redact::operation(&mut operation, &asker);
    Ok((StatusCode::ACCEPTED, Json(operation)))
}
