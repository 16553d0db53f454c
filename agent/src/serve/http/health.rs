//! `/v1/version` and `/v1/health`: versions, and whether gpushd is healthy.

use axum::{Json, Router, extract::State, routing::get};
use gpush_api::Version;

use super::{HttpHandles, without_parameters};
use crate::{requests::caller::Caller, serve::health::Health};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(Router::new().route("/v1/version", get(version)).route("/v1/health", get(health)))
}

/// Returns the versions of gpushd, of the API and of the driver.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/version", operation_id = "getVersion", tag = "about",
    responses((status = 200, description = "The answer", body = Version), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn version(State(health): State<Health>) -> Json<Version> {
    Json(Version {
        agent: env!("CARGO_PKG_VERSION").to_owned(),
        api: "v1".to_owned(),
        driver: health.driver().await.ok(),
    })
}

/// Returns whether everything works, and each problem with what to do about it.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/health", operation_id = "getHealth", tag = "about",
    responses((status = 200, description = "The answer", body = gpush_api::Health), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn health(State(health): State<Health>, caller: Caller) -> Json<gpush_api::Health> {
    Json(health.report(caller.viewer).await)
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(version, health))]
pub(super) struct HealthPaths;
