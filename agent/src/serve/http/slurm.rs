//! `/v1/slurm/jobs`: requests of Slurm's hooks, only through the admin socket.

use axum::{
    Json, Router,
    extract::{FromRef, FromRequestParts, State},
    http::request::Parts,
    routing::post,
};
use gpush_api::{ApiError, Code, SlurmJobEnd, SlurmJobEnded, SlurmJobStart, SlurmJobStarted};

use super::{
    HttpHandles, admin_socket::ThroughAdminSocket, extract::Body, failure::Failure, requests::Requests,
    without_parameters,
};
use crate::{requests::caller::Caller, serve::authorization::Authorization, slurm::Slurm};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(Router::new().route("/v1/slurm/jobs", post(start)).route("/v1/slurm/jobs/end", post(end)))
}

/// A hook of Slurm: an administrator that sent its request through the admin socket.
struct Hook(Caller);

impl<S: Send + Sync> FromRequestParts<S> for Hook
where
    Authorization: FromRef<S>,
{
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let caller = Caller::from_request_parts(parts, state).await?;
        if parts.extensions.get::<ThroughAdminSocket>().is_none() || !caller.viewer.is_admin() {
            return Err(ApiError::new(Code::Denied, "only Slurm's hooks may begin and end the leases of jobs")
                .cause("the hooks run as root, and use the admin socket of gpushd")
                .hint("run `gpushctl slurm prolog` from Slurm's Prolog, and `gpushctl slurm epilog` from its Epilog")
                .into());
        }
        Ok(Self(caller.into_hook()))
    }
}

/// Requests the lease of a job on this node. A refusal that concerns only the job is an answer, not
/// an error. An error means that the node cannot serve the job. A repeated request gets the same
/// lease. Only through the admin socket.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/slurm/jobs", operation_id = "startSlurmJob", tag = "slurm", request_body = SlurmJobStart,
    responses((status = 200, description = "Lease and environment of the job", body = SlurmJobStarted), (status = "default", description = "Why the node cannot serve the job", body = gpush_api::ApiError))))]
async fn start(
    State(slurm): State<Slurm>,
    State(requests): State<Requests>,
    Hook(caller): Hook,
    Body(job): Body<SlurmJobStart>,
) -> Result<Json<SlurmJobStarted>, Failure> {
    let starting = async move { slurm.start(caller, job).await };
    Ok(Json(requests.carry_out(starting).await?.delivered()))
}

/// Ends the lease of a job on this node, and the processes that the job left, as the config says.
/// Answers when the capacity is free, or when the wait of the hook is over. A job without a lease
/// is not an error. Only through the admin socket.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/slurm/jobs/end", operation_id = "endSlurmJob", tag = "slurm", request_body = SlurmJobEnd,
    responses((status = 200, description = "The leases that ended, and those whose capacity is not free yet", body = SlurmJobEnded), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn end(
    State(slurm): State<Slurm>,
    State(requests): State<Requests>,
    Hook(caller): Hook,
    Body(job): Body<SlurmJobEnd>,
) -> Result<Json<SlurmJobEnded>, Failure> {
    let ending = async move { slurm.end(caller, job).await };
    Ok(Json(requests.carry_out_while_stopping(ending).await?))
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(start, end))]
pub(super) struct SlurmPaths;
