//! `/v1/mig`: MIG devices, plans, and their execution.

use std::time::Duration;

use axum::{
    Router,
    extract::State,
    http::StatusCode,
    response::Response,
    routing::{get, post},
};
use gpush_api::{ApiError, ApplyRequest, Code, LayoutSource, MigDevice, Operation, PlanRequest, Plans};
use jiff::Timestamp;

use super::{
    HttpHandles,
    admin::{Admin, ChangeLayouts},
    extract::Body,
    failure::Failure,
    if_match::IfMatch,
    response_limiter::ResponseLimiter,
    without_parameters,
};
use crate::{
    leases::{self, Leases},
    modes::mps,
    operations::apply::{self, Engine, Order, Planner},
    requests::{caller::Caller, idempotency::Header, request::reason},
    state::{self, readings::Readings, redact},
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(
        Router::new()
            .route("/v1/mig/devices", get(list_devices))
            .route("/v1/mig/plan", post(plan))
            .route("/v1/mig/apply", post(apply)),
    )
}

/// Maximum `wait_s`, in seconds.
const LONGEST_WAIT: u64 = 30 * 24 * 3600;

/// Lists all MIG devices with their use: free, granted, in use or reserved.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/mig/devices", operation_id = "listMigDevices", tag = "mig",
    responses((status = 200, description = "The answer", body = Vec<MigDevice>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn list_devices(
    State(readings): State<Readings>,
    State(mps): State<mps::Mps>,
    State(leases): State<Leases>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
) -> Result<Response, Failure> {
    let of = caller.clone();
    let list = async move {
        let seen = readings.host().await?;
        let daemons = mps::all(&mps, &of).await?;
        Ok::<Vec<MigDevice>, Failure>(leases::devices(&leases, &of, &seen, &daemons).await)
    };
    limiter.answer(&caller, StatusCode::OK, list).await
}

/// Returns the plan of each GPU for a layout, without changing anything.
///
/// If a GPU cannot have the layout, its plan has the reason.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/mig/plan", operation_id = "planMig", tag = "mig", request_body = PlanRequest,
    responses((status = 200, description = "The answer", body = Plans), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn plan(
    State(planner): State<Planner>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Body(request): Body<PlanRequest>,
) -> Result<Response, Failure> {
    let viewer = caller.viewer;
    let plan = async move { Ok::<Plans, Failure>(planner.plan(viewer, &request).await?) };
    limiter.answer(&caller, StatusCode::OK, plan).await
}

/// Starts an operation that applies a layout. For administrators.
///
/// gpushd plans all GPUs first. If one plan is refused, gpushd changes nothing.
/// `GET /v1/operations/{id}` shows the progress and the result.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/mig/apply", operation_id = "applyMig", tag = "mig", request_body = ApplyRequest,
    params(("If-Match" = Option<u64>, Header, description = "Generation that the caller expects. If it is not the present one, the answer is 412")),
    responses((status = 202, description = "The operation has begun", body = Operation), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn apply(
    State(engine): State<Engine>,
    State(state): State<state::State>,
    State(limiter): State<ResponseLimiter>,
    Admin { caller, .. }: Admin<ChangeLayouts>,
    header: Header,
    if_match: IfMatch,
    Body(request): Body<ApplyRequest>,
) -> Result<Response, Failure> {
    let key = header.of(caller.uid(), "/v1/mig/apply", &request);
    let wait = match request.wait_s {
        Some(seconds) if seconds > LONGEST_WAIT => {
            let message = format!("`wait_s` must be at most {LONGEST_WAIT} (30 days), not {seconds}");
            return Err(ApiError::new(Code::BadRequest, message).into());
        }
        seconds => seconds.map(Duration::from_secs),
    };
    let reason = request.reason.as_deref().map(reason).transpose()?;
    let (once, expires_at) = (request.once, request.expires_at);
    let request = trimmed(PlanRequest { gpus: request.gpus, layout: request.layout });
    let expected = if_match.0;
    let order = Order { reason, wait, once, expires_at, expected, key, ..Order::new("mig.apply", request) };
    let by = caller.clone();
    let begin = async move {
        check_expiry(once, expires_at)?;
        let begun = apply::begin(&engine, &by, order).await;
        let mut operation = begun.map_err(|error| if_match.failure(&state, error))?;
        redact::actor(&mut operation.by, by.viewer);
        Ok::<Operation, Failure>(operation)
    };
    limiter.answer(&caller, StatusCode::ACCEPTED, begin).await
}

/// Returns the request without blanks around its texts. The journal contains this request, and the planner refuses texts
/// that are long without blanks.
fn trimmed(mut request: PlanRequest) -> PlanRequest {
    let trim = |text: &mut String| *text = text.trim().to_owned();
    request.gpus.iter_mut().for_each(trim);
    match &mut request.layout {
        LayoutSource::Config | LayoutSource::Wanted => {}
        LayoutSource::Named(name) => trim(name),
        LayoutSource::Entries(entries) => entries.iter_mut().for_each(trim),
        LayoutSource::PerGpu(layouts) => {
            for layout in layouts {
                trim(&mut layout.gpu);
                layout.layout.iter_mut().for_each(trim);
            }
        }
    }
    request
}

/// Refuses an expiry time that has passed, and any expiry time for an operation that sets no
/// override.
fn check_expiry(once: bool, expires_at: Option<Timestamp>) -> Result<(), ApiError> {
    let Some(at) = expires_at else { return Ok(()) };
    let bad = |message: String| ApiError::new(Code::BadRequest, message);
    if once {
        let error = bad("`once` makes no override, so `expires_at` has no effect".to_owned());
        return Err(error.hint("leave out `once` or `expires_at`"));
    }
    if at <= Timestamp::now() {
        return Err(bad(format!("the override would expire at {at}, which has passed"))
            .hint("give a time in the future; `date -u` shows the time of the host"));
    }
    Ok(())
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(list_devices, plan, apply))]
pub(super) struct MigPaths;
