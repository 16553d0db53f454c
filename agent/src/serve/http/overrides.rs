//! `/v1/overrides`: lists and clears overrides.

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{delete, get},
};
use gpush_api::{ApiError, Code, Gpu, GpuIndex, GpuUuid, OverrideEnded, Overrides};
use gpush_core::selector::Selector;
use gpush_store::Store;

use super::{
    HttpHandles,
    admin::{Admin, EndOverrides},
    extract::PathPart,
    failure::Failure,
    if_match::{IfMatch, tagged},
    requests::Requests,
    response_limiter::ResponseLimiter,
    without_parameters,
};
use crate::{
    operations::overrides,
    requests::caller::Caller,
    state::{self, overridden, readings::Readings},
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(Router::new().route("/v1/overrides", get(list)).route("/v1/overrides/{gpu}", delete(end)))
}

/// Lists the active overrides, in the order in which they were made.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/overrides", operation_id = "listOverrides", tag = "config",
    responses((status = 200, description = "The answer", body = Overrides), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn list(
    State(state): State<state::State>,
    State(readings): State<Readings>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
) -> Result<Response, Failure> {
    let (generation, viewer) = (state.now().generation, caller.viewer);
    let list = async move {
        // If the driver is unavailable, show the overrides without information from the GPUs.
        let gpus = readings.host().await.map(|observed| observed.gpus(viewer)).unwrap_or_default();
        Ok::<Overrides, Failure>(Overrides { generation, overrides: overrides::all(&state, &gpus, viewer) })
    };
    Ok(tagged(limiter.answer(&caller, StatusCode::OK, list).await?, generation))
}

/// Clears the override of a GPU. For administrators.
///
/// The layout of the GPU does not change, unless `auto_reconcile` is on.
#[cfg_attr(test, utoipa::path(
    delete, path = "/v1/overrides/{gpu}", operation_id = "endOverride", tag = "config",
    params(
        ("gpu" = String, Path, description = "Index, UUID (whole or the first characters), or PCI address"),
        ("If-Match" = Option<u64>, Header, description = "Generation that the caller expects. If it is not the present one, the answer is 412")
    ),
    responses((status = 200, description = "The override has ended", body = OverrideEnded), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn end(
    State(state): State<state::State>,
    State(readings): State<Readings>,
    State(store): State<Store>,
    State(requests): State<Requests>,
    Admin { caller, by, .. }: Admin<EndOverrides>,
    if_match: IfMatch,
    PathPart(gpu): PathPart,
) -> Result<Response, Failure> {
    let gpus = readings.host().await.map(|observed| observed.gpus(caller.viewer));
    let (uuid, index, label) = find_gpu(&state, &gpus, &gpu)?;
    let (known, expected) = (state.clone(), if_match.0);
    // The override is cleared even if the caller disconnects.
    let ending = async move { overrides::clear(&known, &store, uuid, &label, by, expected).await };
    let ended = requests.carry_out(ending).await;
    let (ended, generation) = ended.map_err(|error| if_match.failure(&state, error))?;
    let answer = OverrideEnded { generation, ended: overridden(ended, index) };
    Ok(tagged(Json(answer).into_response(), generation))
}

/// Finds the GPU that a text names: by any selector, or only by its UUID if the driver does not
/// list the GPU.
fn find_gpu(
    state: &state::State,
    gpus: &Result<Vec<Gpu>, ApiError>,
    text: &str,
) -> Result<(GpuUuid, Option<GpuIndex>, String), ApiError> {
    let seen = match gpus {
        Ok(gpus) => Selector::resolve(&[text], gpus).map(|found| (gpus, found)),
        Err(error) => Err(error.clone()),
    };
    match seen {
        Ok((gpus, found)) => match found.as_slice() {
            [one] => {
                let gpu = &gpus[*one];
                Ok((gpu.uuid.clone(), Some(gpu.index), format!("GPU {} ({})", gpu.index, gpu.uuid)))
            }
            several => {
                let message = format!("{text:?} matches {} GPUs; name one", several.len());
                Err(ApiError::new(Code::BadRequest, message).hint("clear the overrides one GPU at a time"))
            }
        },
        // A GPU that the driver does not list may still have an override, which can be cleared by
        // UUID.
        Err(_) if state.override_of(&text.into()).is_some() => Ok((text.into(), None, text.to_owned())),
        Err(error) => Err(error),
    }
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, end))]
pub(super) struct OverridePaths;
