//! `/v1/leases`: shares of GPUs for users.

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, State},
    http::StatusCode,
    response::Response,
    routing::{get, post},
};
use gpush_api::{
    ApiError, Code, EnteredLease, Lease, LeaseGrant, LeaseId, LeaseRenewRequest, LeaseRequest, LeaseRevokeRequest,
};
use serde::{Deserialize, Serialize};

use super::{
    HttpHandles,
    admin::{Admin, RevokeLeases},
    extract::{Body, Parameters, PathPart},
    failure::Failure,
    requests::Requests,
    response_limiter::ResponseLimiter,
    without_parameters,
};
use crate::{
    lease_policies::LeasePolicies,
    leases::{self, Leases, Outcome},
    requests::{caller::Caller, idempotency::Header},
    serve::authorization::Authorization,
    usage::Usage,
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(
        Router::new()
            .route("/v1/leases", post(request))
            .route("/v1/leases/{id}", get(one))
            .route("/v1/leases/{id}/environment", get(environment))
            .route("/v1/leases/{id}/enter", post(enter))
            .route("/v1/leases/{id}/release", post(release))
            .route("/v1/leases/{id}/renew", post(renew))
            .route("/v1/leases/{id}/revoke", post(revoke)),
    )
    .route("/v1/leases", get(list))
    .layer(DefaultBodyLimit::max(BODY))
}

/// Maximum size in bytes of a body about leases. Any user may send it, and gpushd stores the request.
const BODY: usize = 4 << 10;

/// Parameters of `GET /v1/leases`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct ListParameters {
    /// Number of ended leases to add, at most 100; none by default.
    #[serde(default)]
    ended: Option<usize>,
    /// Only leases that ended before this ended lease. For the next page, use the `id` of the last lease.
    #[serde(default)]
    #[cfg_attr(test, param(value_type = Option<String>))]
    before: Option<LeaseId>,
    /// Only the leases of the caller, and those of the caller's subordinate uids.
    #[serde(default)]
    mine: Option<bool>,
    /// Only the leases of this uid, and those of its subordinate uids.
    #[serde(default)]
    holder: Option<u32>,
    /// Only the leases of the Slurm job with this id.
    #[serde(default)]
    job: Option<u32>,
}

/// Moves the calling process into a scope that opens the devices of a lease of the caller.
///
/// Without a list of devices for login sessions, or if the process is not in a login session, this changes nothing.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/leases/{id}/enter", operation_id = "enterLease", tag = "leases", request_body = LeaseReleaseRequest,
    params(("id" = String, Path, description = "Lease id, such as `L17`")),
    responses((status = 200, description = "The scope", body = EnteredLease), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn enter(
    State(leases): State<Leases>,
    State(requests): State<Requests>,
    caller: Caller,
    PathPart(id): PathPart,
    Body(LeaseReleaseRequest {}): Body<LeaseReleaseRequest>,
) -> Result<Json<EnteredLease>, Failure> {
    let entered = requests.carry_out(async move { leases::enter(&leases, &caller, &id).await });
    Ok(Json(entered.await?))
}

/// A body without fields.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
struct LeaseReleaseRequest {}

/// Requests a lease.
///
/// With `wait`, the request is answered when the lease is granted. If the client disconnects before that, the request
/// leaves the queue.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/leases", operation_id = "requestLease", tag = "leases", request_body = LeaseRequest,
    params(("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key gets the same lease")),
    responses((status = 200, description = "The active lease, and the environment for its processes", body = LeaseGrant), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn request(
    State(leases): State<Leases>,
    State(requests): State<Requests>,
    State(authorization): State<Authorization>,
    caller: Caller,
    header: Header,
    Body(request): Body<LeaseRequest>,
) -> Result<Json<LeaseGrant>, Failure> {
    requests.can_record()?;
    if request.holder.is_some_and(|holder| holder != caller.uid()) {
        authorization.admin(&caller, "request leases for other users").await?;
    }
    let key = header.of(caller.uid(), "/v1/leases", &request);
    let requested = async move { leases::request_lease(&leases, &caller, request, key).await };
    match requests.carry_out(requested).await? {
        Outcome::Granted(granted) => Ok(Json(granted.into_delivered())),
        // If the client disconnects, hyper drops this future, and the request leaves the queue.
        Outcome::Queued(waiter) => Ok(Json(waiter.granted().await?)),
    }
}

/// Lists the leases that have not ended, in the order of arrival.
///
/// With `ended`, the list then continues with the last ended leases, the latest first. Users see only their own ended
/// leases, and those of their subordinate uids.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/leases", operation_id = "listLeases", tag = "leases", params(ListParameters),
    responses((status = 200, description = "The answer", body = Vec<Lease>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn list(
    State(leases): State<Leases>,
    State(usage): State<Usage>,
    State(policies): State<LeasePolicies>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(ListParameters { ended, before, mine, holder, job }): Parameters<ListParameters>,
) -> Result<Response, Failure> {
    let ended = ended.unwrap_or_default();
    if ended > leases::MOST_ENDED {
        let message = format!("`ended` must be at most {}, not {ended}", leases::MOST_ENDED);
        let error = ApiError::new(Code::BadRequest, message);
        return Err(error.hint("request page by page: set `before` to the id of the last lease").into());
    }
    let whose = match (mine, holder) {
        (Some(true), _) => leases::Whose::Caller,
        (_, Some(uid)) => leases::Whose::Holder(uid),
        (_, None) => leases::Whose::All,
    };
    let filter = leases::LeaseFilter { whose, job };
    let by = caller.clone();
    let list = async move {
        let mut list = match before {
            None => leases::all(&leases, &by, filter, ended).await?,
            Some(before) => leases::ended_before(&leases, &by, filter, before, ended).await?,
        };
        usage.add_to(&mut list, by.viewer).await;
        policies.add_to(&mut list);
        Ok::<Vec<Lease>, Failure>(list)
    };
    limiter.answer(&caller, StatusCode::OK, list).await
}

/// Returns one lease.
///
/// gpushd keeps a limited number of ended leases.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/leases/{id}", operation_id = "getLease", tag = "leases",
    params(("id" = String, Path, description = "`L<number>`")),
    responses((status = 200, description = "The answer", body = Lease), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn one(
    State(leases): State<Leases>,
    State(usage): State<Usage>,
    State(policies): State<LeasePolicies>,
    caller: Caller,
    PathPart(id): PathPart,
) -> Result<Json<Lease>, Failure> {
    let mut lease = leases::one(&leases, caller.viewer, &id).await?;
    usage.add_to(std::slice::from_mut(&mut lease), caller.viewer).await;
    policies.add_to(std::slice::from_mut(&mut lease));
    Ok(Json(lease))
}

/// Returns an active lease and the environment for its processes. For its holder and administrators.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/leases/{id}/environment", operation_id = "getLeaseEnvironment", tag = "leases",
    params(("id" = String, Path, description = "`L<number>`")),
    responses((status = 200, description = "The answer", body = LeaseGrant), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn environment(
    State(leases): State<Leases>,
    caller: Caller,
    PathPart(id): PathPart,
) -> Result<Json<LeaseGrant>, Failure> {
    Ok(Json(leases::environment(&leases, &caller, &id).await?))
}

/// Releases a lease, or cancels a queued lease. For its holder, the owner of the holder's subordinate uid, and
/// administrators.
///
/// The capacity of the lease is free when all processes of the lease have ended.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/leases/{id}/release", operation_id = "releaseLease", tag = "leases", request_body = LeaseReleaseRequest,
    params(("id" = String, Path, description = "`L<number>`"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The lease, releasing or ended", body = Lease), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn release(
    State(leases): State<Leases>,
    State(requests): State<Requests>,
    caller: Caller,
    header: Header,
    PathPart(id): PathPart,
    Body(body): Body<LeaseReleaseRequest>,
) -> Result<Json<Lease>, Failure> {
    let key = header.of(caller.uid(), &format!("/v1/leases/{id}/release"), &body);
    let releasing = async move { leases::release(&leases, &caller, &id, key).await };
    Ok(Json(requests.carry_out_while_stopping(releasing).await?))
}

/// Sets a new end for an active lease. For its holder, the owner of the holder's subordinate uid, and administrators.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/leases/{id}/renew", operation_id = "renewLease", tag = "leases", request_body = LeaseRenewRequest,
    params(("id" = String, Path, description = "`L<number>`"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The lease", body = Lease), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn renew(
    State(leases): State<Leases>,
    State(requests): State<Requests>,
    caller: Caller,
    header: Header,
    PathPart(id): PathPart,
    Body(request): Body<LeaseRenewRequest>,
) -> Result<Json<Lease>, Failure> {
    requests.can_record()?;
    let key = header.of(caller.uid(), &format!("/v1/leases/{id}/renew"), &request);
    let renewing = async move { leases::renew(&leases, &caller, &id, request, key).await };
    Ok(Json(requests.carry_out(renewing).await?))
}

/// Revokes a lease. For administrators.
///
/// With `end`, or if the rule has `at_end = "end"`, gpushd ends the processes of the lease after the notice.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/leases/{id}/revoke", operation_id = "revokeLease", tag = "leases", request_body = LeaseRevokeRequest,
    params(("id" = String, Path, description = "`L<number>`"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The lease, releasing or ended", body = Lease), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn revoke(
    State(leases): State<Leases>,
    State(requests): State<Requests>,
    Admin { caller, .. }: Admin<RevokeLeases>,
    header: Header,
    PathPart(id): PathPart,
    Body(request): Body<LeaseRevokeRequest>,
) -> Result<Json<Lease>, Failure> {
    let key = header.of(caller.uid(), &format!("/v1/leases/{id}/revoke"), &request);
    let revoking = async move { leases::revoke(&leases, &caller, &id, request, key).await };
    Ok(Json(requests.carry_out_while_stopping(revoking).await?))
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, request, one, environment, enter, release, renew, revoke))]
pub(super) struct LeasePaths;
