//! `/v1/config`: the effective config, how the file differs from it, and the reload.

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use gpush_api::{ConfigDiff, ConfigView, ReloadRequest};

use super::{
    HttpHandles,
    admin::{Admin, ReadConfigFile, ReloadConfig},
    extract::Body,
    failure::Failure,
    if_match::{IfMatch, tagged},
    response_limiter::ResponseLimiter,
    without_parameters,
};
use crate::{
    leases::{self, Leases},
    reconcile::reload::{Differences, ReloadCommand, ReloadSender},
    requests::caller::Caller,
    state::{self, readings::Readings, redact},
    system::settings::Settings,
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(
        Router::new()
            .route("/v1/config", get(show))
            .route("/v1/config/diff", get(diff))
            .route("/v1/config/reload", post(reload)),
    )
}

/// Returns the effective config.
///
/// The answer also has the GPUs that each rule claims, and the changed settings that need a restart. Users who are not
/// administrators see the rules, the layouts and their quota.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/config", operation_id = "getConfig", tag = "config",
    responses((status = 200, description = "The answer", body = ConfigView), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn show(
    State(state): State<state::State>,
    State(readings): State<Readings>,
    State(settings): State<Settings>,
    State(leases): State<Leases>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
) -> Result<Response, Failure> {
    let (generation, viewer) = (state.now().generation, caller.viewer);
    let of = caller.clone();
    let view = async move {
        // Show the rules without their GPUs if the driver is unavailable.
        let gpus = readings.host().await.map(|observed| observed.gpus(viewer)).unwrap_or_default();
        let (config, file) = (settings.config(), settings.file());
        let mut view = if viewer.is_admin() {
            config.view(file.as_deref(), &gpus)
        } else {
            // If the name service does not answer, show no quota.
            let quota = leases::quota_subject(&leases, &of).await.unwrap_or_default();
            config.view_for_user(file.as_deref(), &gpus, quota.as_ref())
        };
        view.pending_restart = settings.pending_restart();
        view.trouble = settings.trouble();
        view.generation = generation;
        redact::config(&mut view, viewer);
        Ok::<ConfigView, Failure>(view)
    };
    Ok(tagged(limiter.answer(&caller, StatusCode::OK, view).await?, generation))
}

/// Compares the config file, the effective config and the GPUs. For administrators.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/config/diff", operation_id = "diffConfig", tag = "config",
    responses((status = 200, description = "The answer", body = ConfigDiff), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn diff(
    State(differences): State<Differences>,
    State(limiter): State<ResponseLimiter>,
    // Users see only a part of the active config, and the file may have more.
    Admin { caller, .. }: Admin<ReadConfigFile>,
) -> Result<Response, Failure> {
    let viewer = caller.viewer;
    let diff = async move { Ok::<ConfigDiff, Failure>(differences.find(viewer).await) };
    limiter.answer(&caller, StatusCode::OK, diff).await
}

/// Reloads the config file, as SIGHUP does. For administrators.
///
/// The whole file takes effect, or none of it. A file that changes an overridden rule is refused, unless
/// `clear_overrides` is set.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/config/reload", operation_id = "reloadConfig", tag = "config", request_body = ReloadRequest,
    params(("If-Match" = Option<u64>, Header, description = "Generation that the caller expects. If it is not the present one, the answer is 412")),
    responses((status = 200, description = "The new config is effective", body = gpush_api::Reloaded), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn reload(
    State(state): State<state::State>,
    State(reloads): State<ReloadSender>,
    Admin { by, .. }: Admin<ReloadConfig>,
    if_match: IfMatch,
    Body(request): Body<ReloadRequest>,
) -> Result<Response, Failure> {
    let ReloadRequest { clear_overrides } = request;
    let wish = ReloadCommand { by: Some(by), clear_overrides, expected: if_match.0 };
    let reloaded = reloads.ask(wish).await.map_err(|error| if_match.failure(&state, error))?;
    let generation = reloaded.generation;
    Ok(tagged(Json(reloaded).into_response(), generation))
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(show, diff, reload))]
pub(super) struct ConfigPaths;
