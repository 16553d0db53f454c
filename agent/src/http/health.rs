//! `/v1/version` and `/v1/health`: versions, and whether gpushd is healthy.

use axum::{Json, extract::State};
use gpush_api::Version;

use crate::{caller::Caller, health::Health};

/// Returns the versions of gpushd, of the API and of the driver.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/version", operation_id = "getVersion", tag = "about",
    responses((status = 200, description = "The answer", body = Version), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn version(State(health): State<Health>) -> Json<Version> {
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
pub(super) async fn health(State(health): State<Health>, caller: Caller) -> Json<gpush_api::Health> {
    Json(health.report(caller.viewer).await)
}
