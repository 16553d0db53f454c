//! `/v1/maintenance` and `/v1/recover`: requests about the whole host.

use axum::{Json, Router, extract::State, routing::post};
use gpush_api::{ApiError, Code, GpuUuid, MaintenanceRequest, MaintenanceState, ReasonRequest, Recovered};
use gpush_core::{
    quote::Quoted,
    selector::{self, Selector},
};

use super::{
    HttpHandles,
    admin::{AcceptLoss, Admin, EnterMaintenance, LeaveMaintenance},
    extract::Body,
    failure::Failure,
    requests::Requests,
    without_parameters,
};
use crate::{
    operations::{maintenance::MaintenanceControl, recover::LossAcceptance},
    requests::{caller::Caller, idempotency::Header},
    state::redact,
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(
        Router::new()
            .route("/v1/maintenance/enter", post(enter))
            .route("/v1/maintenance/leave", post(leave))
            .route("/v1/recover", post(recover)),
    )
}

/// Enters maintenance: gpushd closes all its driver handles before it answers. For administrators.
///
/// The request is refused while an operation changes a GPU, or a lease is in use. If the request
/// names GPUs, gpushd considers only the leases of these GPUs. Maintenance survives restarts of
/// gpushd and of the host.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/maintenance/enter", operation_id = "enterMaintenance", tag = "host", request_body = MaintenanceRequest,
    params(("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The state after", body = MaintenanceState), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn enter(
    State(maintenance): State<MaintenanceControl>,
    State(requests): State<Requests>,
    Admin { caller, by, .. }: Admin<EnterMaintenance>,
    header: Header,
    Body(body): Body<MaintenanceRequest>,
) -> Result<Json<MaintenanceState>, Failure> {
    let key = header.of(caller.uid(), "/v1/maintenance/enter", &body);
    let request = requests.admit(by, key, body.reason.as_deref())?;
    let (control, resets) = (maintenance.clone(), gpu_uuids(&body.gpu_uuids)?);
    let entered = requests.once(request, |request| async move { control.enter(request, resets).await });
    if entered.await?.is_none() {
        // An earlier request with this key may have recorded maintenance, but failed to close the driver handles. So
        // try again to close them.
        let control = maintenance.clone();
        requests.carry_out(async move { control.close_handles().await }).await?;
    }
    Ok(state(&maintenance, &caller))
}

/// Returns the UUIDs in the form of the driver. gpushd compares them with the GPUs of leases, and records them.
fn gpu_uuids(given: &[GpuUuid]) -> Result<Vec<GpuUuid>, ApiError> {
    let bad =
        |message: String| ApiError::new(Code::BadRequest, message).hint("`gpushctl gpu list -o uuid` lists the UUIDs");
    if given.len() > selector::MOST {
        return Err(bad(format!("{} GPUs are more than the limit of {}", given.len(), selector::MOST)));
    }
    let uuid = |text: &GpuUuid| match text.as_str().parse() {
        Ok(Selector::Uuid(uuid)) => Ok(GpuUuid::from(uuid)),
        _ => Err(bad(format!("{} is not a GPU UUID", Quoted(text.as_str())))),
    };
    given.iter().map(uuid).collect()
}

/// Leaves maintenance: gpushd opens the GPUs again. For administrators.
///
/// If the host is not in maintenance, the request has no effect.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/maintenance/leave", operation_id = "leaveMaintenance", tag = "host", request_body = MaintenanceRequest,
    params(("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The state after", body = MaintenanceState), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn leave(
    State(maintenance): State<MaintenanceControl>,
    State(requests): State<Requests>,
    Admin { caller, by, .. }: Admin<LeaveMaintenance>,
    header: Header,
    Body(body): Body<MaintenanceRequest>,
) -> Result<Json<MaintenanceState>, Failure> {
    let key = header.of(caller.uid(), "/v1/maintenance/leave", &body);
    let request = requests.admit(by, key, body.reason.as_deref())?;
    let (control, resets) = (maintenance.clone(), gpu_uuids(&body.gpu_uuids)?);
    requests.once(request, |request| async move { control.leave(request, resets).await }).await?;
    Ok(state(&maintenance, &caller))
}

/// Accepts the loss of the database. For administrators.
///
/// Releases the GPUs in the state `held`. Their layouts do not change.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/recover", operation_id = "recover", tag = "host", request_body = ReasonRequest,
    params(("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "What was lost", body = Recovered), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn recover(
    State(recovery): State<LossAcceptance>,
    State(requests): State<Requests>,
    Admin { caller, by, .. }: Admin<AcceptLoss>,
    header: Header,
    Body(why): Body<ReasonRequest>,
) -> Result<Json<Recovered>, Failure> {
    let key = header.of(caller.uid(), "/v1/recover", &why);
    let request = requests.admit(by, key, why.reason.as_deref())?;
    let recovered = requests.once(request, |request| async move { recovery.recover(request).await });
    Ok(Json(recovered.await?.unwrap_or_default()))
}

fn state(control: &MaintenanceControl, caller: &Caller) -> Json<MaintenanceState> {
    let mut maintenance = control.current();
    if let Some(by) = maintenance.as_mut().and_then(|maintenance| maintenance.by.as_mut()) {
        redact::actor(by, caller.viewer);
    }
    Json(maintenance.into())
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(enter, leave, recover))]
pub(super) struct HostPaths;

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: a UUID with blanks was the UUID of no lease, so gpushd entered maintenance although the GPU was leased.
    #[test]
    fn uuids_for_maintenance_get_the_form_of_the_driver() {
        let parsed = |texts: &[&str]| gpu_uuids(&texts.iter().map(|&text| text.into()).collect::<Vec<_>>());
        assert_eq!(parsed(&[" gpu-5E8C07A4 "]).unwrap(), ["GPU-5e8c07a4"]);
        assert_eq!(parsed(&[]).unwrap(), [""; 0]);
        for bad in ["0", "all", "", "MIG-5e8c07a4", &"x".repeat(4000)] {
            assert_eq!(parsed(&["GPU-5e8c07a4", bad]).unwrap_err().code, Code::BadRequest, "{bad}");
        }
        assert_eq!(parsed(&["GPU-5e8c07a4"; selector::MOST + 1]).unwrap_err().code, Code::BadRequest);
    }
}
