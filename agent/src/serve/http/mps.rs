//! `/v1/mps`: targets that are shared through MPS, and their daemons.

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::Response,
    routing::{get, post},
};
use gpush_api::{Code, MpsActionRequest, MpsDaemon, MpsLogs, MpsSetRequest, MpsSetResponse};
use serde::Deserialize;

use super::{
    HttpHandles,
    admin::{Admin, ControlMps, ReadMpsLogs, SetMpsLimits},
    extract::{Body, Parameters, PathPart},
    failure::Failure,
    requests::Requests,
    response_limiter::ResponseLimiter,
    without_parameters,
};
use crate::{
    modes::mps::{self, Mps, MpsAction},
    requests::{caller::Caller, idempotency::Header},
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(
        Router::new()
            .route("/v1/mps", get(list))
            .route("/v1/mps/{target}", get(one))
            .route("/v1/mps/{target}/start", post(start))
            .route("/v1/mps/{target}/stop", post(stop))
            .route("/v1/mps/{target}/restart", post(restart))
            .route("/v1/mps/{target}/drain", post(drain))
            .route("/v1/mps/{target}/settings", post(set)),
    )
    .route("/v1/mps/{target}/logs", get(logs))
}

/// Default and maximum number of lines of each log.
const LINES: (usize, usize) = (50, 2000);

/// Lists the targets that are shared through MPS, by GPU.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/mps", operation_id = "listMps", tag = "mps",
    responses((status = 200, description = "The answer", body = Vec<MpsDaemon>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn list(
    State(mps): State<Mps>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
) -> Result<Response, Failure> {
    let of = caller.clone();
    let list = async move { Ok::<Vec<MpsDaemon>, Failure>(mps::all(&mps, &of).await?) };
    limiter.answer(&caller, StatusCode::OK, list).await
}

/// Returns one target with its daemon.
///
/// If an administrator asks, gpushd polls the daemon first. For other users, the answer may be a second old.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/mps/{target}", operation_id = "getMps", tag = "mps",
    params(("target" = String, Path, description = "Index of a GPU, MIG device such as `0:2g.20gb@2`, short name, or UUID (whole or the first characters)")),
    responses((status = 200, description = "The answer", body = MpsDaemon), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn one(State(mps): State<Mps>, caller: Caller, PathPart(target): PathPart) -> Result<Json<MpsDaemon>, Failure> {
    Ok(Json(mps::one(&mps, &caller, &target).await?))
}

/// Starts a daemon that was stopped, is draining, or failed too often. For administrators.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/mps/{target}/start", operation_id = "startMps", tag = "mps", request_body = MpsActionRequest,
    params(("target" = String, Path, description = "Target: index, MIG device, UUID or short name"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "State of the daemon after the action", body = MpsDaemon), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn start(
    State(mps): State<Mps>,
    State(requests): State<Requests>,
    admin: Admin<ControlMps>,
    header: Header,
    PathPart(target): PathPart,
    Body(how): Body<MpsActionRequest>,
) -> Result<Json<MpsDaemon>, Failure> {
    act((mps, requests), admin, header, target, MpsAction::Start, how).await
}

/// Stops a daemon until it is started again. For administrators.
///
/// While clients or leases use the daemon, the request is refused unless `force` is set.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/mps/{target}/stop", operation_id = "stopMps", tag = "mps", request_body = MpsActionRequest,
    params(("target" = String, Path, description = "Target: index, MIG device, UUID or short name"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "State of the daemon after the action", body = MpsDaemon), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn stop(
    State(mps): State<Mps>,
    State(requests): State<Requests>,
    admin: Admin<ControlMps>,
    header: Header,
    PathPart(target): PathPart,
    Body(how): Body<MpsActionRequest>,
) -> Result<Json<MpsDaemon>, Failure> {
    act((mps, requests), admin, header, target, MpsAction::Stop, how).await
}

/// Restarts a daemon. For administrators.
///
/// While clients or leases use the daemon, the request is refused unless `force` is set.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/mps/{target}/restart", operation_id = "restartMps", tag = "mps", request_body = MpsActionRequest,
    params(("target" = String, Path, description = "Target: index, MIG device, UUID or short name"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "State of the daemon after the action", body = MpsDaemon), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn restart(
    State(mps): State<Mps>,
    State(requests): State<Requests>,
    admin: Admin<ControlMps>,
    header: Header,
    PathPart(target): PathPart,
    Body(how): Body<MpsActionRequest>,
) -> Result<Json<MpsDaemon>, Failure> {
    act((mps, requests), admin, header, target, MpsAction::Restart, how).await
}

/// Drains a daemon. For administrators.
///
/// gpushd admits no new clients. gpushd stops the daemon when the clients have ended, or at the deadline.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/mps/{target}/drain", operation_id = "drainMps", tag = "mps", request_body = MpsActionRequest,
    params(("target" = String, Path, description = "Target: index, MIG device, UUID or short name"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "State of the daemon after the action", body = MpsDaemon), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn drain(
    State(mps): State<Mps>,
    State(requests): State<Requests>,
    admin: Admin<ControlMps>,
    header: Header,
    PathPart(target): PathPart,
    Body(how): Body<MpsActionRequest>,
) -> Result<Json<MpsDaemon>, Failure> {
    act((mps, requests), admin, header, target, MpsAction::Drain, how).await
}

async fn act(
    (mps, requests): (Mps, Requests),
    Admin { caller, by, .. }: Admin<ControlMps>,
    header: Header,
    target: String,
    act: MpsAction,
    how: MpsActionRequest,
) -> Result<Json<MpsDaemon>, Failure> {
    let path = format!("/v1/mps/{target}/{}", act.verb());
    let key = header.of(caller.uid(), &path, &how);
    let request = requests.admit(by, key, None)?;
    let (daemons, of, text) = (mps.clone(), caller.clone(), target.clone());
    let once =
        requests.once(request, move |request| async move { mps::act(&daemons, &of, &text, act, how, request).await });
    match once.await? {
        Some(daemon) => Ok(Json(daemon)),
        None => Ok(Json(mps::one(&mps, &caller, &target).await?)),
    }
}

/// Sets limits for clients. These limits override the limits of the rule. For administrators.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/mps/{target}/settings", operation_id = "setMps", tag = "mps", request_body = MpsSetRequest,
    params(("target" = String, Path, description = "Target: index, MIG device, UUID or short name"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "Result", body = MpsSetResponse), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn set(
    State(mps): State<Mps>,
    State(requests): State<Requests>,
    Admin { caller, by, .. }: Admin<SetMpsLimits>,
    header: Header,
    PathPart(target): PathPart,
    Body(change): Body<MpsSetRequest>,
) -> Result<Json<MpsSetResponse>, Failure> {
    let key = header.of(caller.uid(), &format!("/v1/mps/{target}/settings"), &change);
    let request = requests.admit(by, key, None)?;
    let (daemons, of, text) = (mps.clone(), caller.clone(), target.clone());
    let once =
        requests.once(request, move |request| async move { mps::set(&daemons, &of, &text, change, request).await });
    match once.await? {
        Some(set) => Ok(Json(set)),
        None => {
            let daemon = mps::one(&mps, &caller, &target).await?;
            Ok(Json(MpsSetResponse { daemon, reaches: vec!["this request was carried out before".to_owned()] }))
        }
    }
}

/// Parameters of logs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lines {
    lines: Option<usize>,
    all: Option<bool>,
}

/// Returns the last lines of a daemon's logs. For administrators.
///
/// Other users may not read the logs, because they contain messages about all clients.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/mps/{target}/logs", operation_id = "getMpsLogs", tag = "mps",
    params(("target" = String, Path, description = "Target: index, MIG device, UUID or short name"), ("lines" = Option<usize>, Query, description = "Number of lines from the end of each log file; 50 by default, 2000 at most"), ("all" = Option<bool>, Query, description = "`true`: also return the lines that only gpushd's own probes caused")),
    responses((status = 200, description = "The answer", body = MpsLogs), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn logs(
    State(mps): State<Mps>,
    State(limiter): State<ResponseLimiter>,
    Admin { caller, .. }: Admin<ReadMpsLogs>,
    PathPart(target): PathPart,
    Parameters(Lines { lines, all }): Parameters<Lines>,
) -> Result<Response, Failure> {
    let lines = match lines {
        Some(lines) if lines > LINES.1 => {
            let message = format!("`lines` must be at most {}, not {lines}", LINES.1);
            return Err(gpush_api::ApiError::new(Code::BadRequest, message).into());
        }
        lines => lines.unwrap_or(LINES.0),
    };
    let logs =
        async move { Ok::<MpsLogs, Failure>(mps::logs_of(&mps, &target, lines, all.unwrap_or_default()).await?) };
    limiter.answer(&caller, StatusCode::OK, logs).await
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, one, start, stop, restart, drain, set, logs))]
pub(super) struct MpsPaths;
