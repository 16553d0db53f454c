//! `/v1/enforcement`: whether the kernel denies the GPUs to login sessions.

use axum::{
    Json, Router,
    extract::State,
    routing::{get, post},
};
use gpush_api::{AdministratorScope, DeviceEnforcement, EnforcementPlan, EnforcementRequest};

use super::{
    HttpHandles,
    admin::{Admin, ChangeDeviceAccess, PlanDeviceAccess},
    extract::Body,
    failure::Failure,
    requests::Requests,
    without_parameters,
};
use crate::{
    enforcement::Enforcement,
    leases::{self, Leases},
    requests::{caller::Caller, idempotency::Header},
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(
        Router::new()
            .route("/v1/enforcement", get(status))
            .route("/v1/enforcement/plan", get(plan))
            .route("/v1/enforcement/on", post(turn_on))
            .route("/v1/enforcement/off", post(turn_off))
            .route("/v1/enforcement/shell", post(shell)),
    )
}

/// Returns whether the kernel denies the GPUs to login sessions.
///
/// If the last check is older than 10 seconds, gpushd checks again: it runs programs that try to open a GPU.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/enforcement", operation_id = "getEnforcement", tag = "host",
    responses((status = 200, description = "The device access", body = DeviceEnforcement), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn status(State(enforcement): State<Enforcement>, _: Caller) -> Json<DeviceEnforcement> {
    Json(enforcement.status().await)
}

/// Returns what `POST /v1/enforcement/on` changes on this host. For administrators.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/enforcement/plan", operation_id = "planEnforcement", tag = "host",
    responses((status = 200, description = "The plan", body = EnforcementPlan), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn plan(
    State(enforcement): State<Enforcement>,
    _: Admin<PlanDeviceAccess>,
) -> Result<Json<EnforcementPlan>, Failure> {
    Ok(Json(enforcement.plan().await?))
}

/// Lets the kernel deny the GPUs to login sessions. For administrators.
///
/// systemd keeps the setting over restarts of gpushd and of the host.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/enforcement/on", operation_id = "turnEnforcementOn", tag = "host", request_body = EnforcementRequest,
    params(("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The device access after", body = DeviceEnforcement), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn turn_on(
    State(enforcement): State<Enforcement>,
    State(requests): State<Requests>,
    Admin { caller, by, .. }: Admin<ChangeDeviceAccess>,
    header: Header,
    Body(body): Body<EnforcementRequest>,
) -> Result<Json<DeviceEnforcement>, Failure> {
    let key = header.of(caller.uid(), "/v1/enforcement/on", &body);
    let request = requests.admit(by, key, body.reason.as_deref())?;
    let control = enforcement.clone();
    let done = requests.once(request, move |request| async move { control.turn_on(request, body.force).await }).await?;
    Ok(after(done, &enforcement).await)
}

/// Lets login sessions open the GPUs again. For administrators.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/enforcement/off", operation_id = "turnEnforcementOff", tag = "host", request_body = EnforcementRequest,
    params(("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The device access after", body = DeviceEnforcement), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn turn_off(
    State(enforcement): State<Enforcement>,
    State(requests): State<Requests>,
    Admin { caller, by, .. }: Admin<ChangeDeviceAccess>,
    header: Header,
    Body(body): Body<EnforcementRequest>,
) -> Result<Json<DeviceEnforcement>, Failure> {
    let key = header.of(caller.uid(), "/v1/enforcement/off", &body);
    let request = requests.admit(by, key, body.reason.as_deref())?;
    let control = enforcement.clone();
    let done = requests.once(request, move |request| async move { control.turn_off(request).await }).await?;
    Ok(after(done, &enforcement).await)
}

/// Returns the answer to a change. `done` is `None` if an earlier request with the same key made the change.
async fn after(done: Option<DeviceEnforcement>, enforcement: &Enforcement) -> Json<DeviceEnforcement> {
    Json(match done {
        Some(after) => after,
        None => enforcement.status().await,
    })
}

/// Moves the calling process into a scope outside of its login session, so that it can open the GPUs. For administrators.
///
/// The caller must be root.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/enforcement/shell", operation_id = "leaveSession", tag = "host",
    responses((status = 200, description = "The scope", body = AdministratorScope), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn shell(
    State(leases): State<Leases>,
    State(requests): State<Requests>,
    Admin { caller, by, .. }: Admin<ChangeDeviceAccess>,
) -> Result<Json<AdministratorScope>, Failure> {
    requests.can_record()?;
    let moved = requests.carry_out(async move { leases::leave_session(&leases, &caller, by).await });
    Ok(Json(moved.await?))
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(status, plan, turn_on, turn_off, shell))]
pub(super) struct EnforcementPaths;
