//! Unused leases: `/v1/leases/idle`, and requests to keep a lease.

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, State},
    http::StatusCode,
    response::Response,
    routing::{get, post},
};
use gpush_api::{IdleAction, IdleReport, Lease, LeaseKeepRequest};
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;

use super::{
    HttpHandles,
    extract::{Body, Parameters, PathPart},
    failure::Failure,
    requests::Requests,
    response_limiter::ResponseLimiter,
    without_parameters,
};
use crate::{
    lease_policies::{IdleQuery, LeasePolicies},
    leases::{self, Leases},
    requests::{caller::Caller, idempotency::Header},
};

/// Maximum size in bytes of a request to keep a lease.
const BODY: usize = 4 << 10;

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(Router::new().route("/v1/leases/{id}/keep", post(keep)))
        .route("/v1/leases/idle", get(report))
        .layer(DefaultBodyLimit::max(BODY))
}

/// Parameters of `GET /v1/leases/idle`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct IdleParameters {
    /// Start of the period of the dry run; 7 days ago by default.
    #[serde(default)]
    #[cfg_attr(test, param(value_type = Option<String>, format = DateTime))]
    since: Option<Timestamp>,
    /// The action that the dry run assumes; by default, that of each lease's rule.
    #[serde(default)]
    #[cfg_attr(test, param(inline))]
    action: Option<IdleAction>,
}

/// Returns the leases that are unused now, and a dry run: which leases the idle policy of the present config would have
/// reported or ended in a period. Users see their own leases, administrators those of all users.
///
/// The dry run uses the recorded unused times of at least 5 minutes. It assumes that each notice reached the holder at
/// once, and ignores keeps.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/leases/idle", operation_id = "getIdleLeases", tag = "leases", params(IdleParameters),
    responses((status = 200, description = "The answer", body = IdleReport), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn report(
    State(policies): State<LeasePolicies>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(IdleParameters { since, action }): Parameters<IdleParameters>,
) -> Result<Response, Failure> {
    let week = SignedDuration::from_hours(7 * 24);
    let from = since.unwrap_or_else(|| Timestamp::now().saturating_sub(week).unwrap_or(Timestamp::MIN));
    let only = (!caller.viewer.is_admin()).then(|| caller.uid());
    let query = IdleQuery { from, action, only };
    let answer = async move { Ok::<IdleReport, Failure>(policies.report(query).await?) };
    limiter.answer(&caller, StatusCode::OK, answer).await
}

/// Keeps an active lease for a time although it is unused. For its holder, the owner of the holder's subordinate uid, and
/// administrators. A later request replaces an earlier one.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/leases/{id}/keep", operation_id = "keepLease", tag = "leases", request_body = LeaseKeepRequest,
    params(("id" = String, Path, description = "`L<number>`"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The lease", body = Lease), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn keep(
    State(leases): State<Leases>,
    State(requests): State<Requests>,
    caller: Caller,
    header: Header,
    PathPart(id): PathPart,
    Body(request): Body<LeaseKeepRequest>,
) -> Result<Json<Lease>, Failure> {
    requests.can_record()?;
    let key = header.of(caller.uid(), &format!("/v1/leases/{id}/keep"), &request);
    let keeping = async move { leases::keep(&leases, &caller, &id, request, key).await };
    Ok(Json(requests.carry_out(keeping).await?))
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(report, keep))]
pub(super) struct IdlePaths;
