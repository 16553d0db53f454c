//! The API over HTTP: routes, and what all of them have in common.
//!
//! Every answer to what is HTTP is JSON, errors included, whatever was wrong with it; every error is an
//! [`gpush_api::ApiError`]. What a path does is in the module of its noun; answers whose size grows
//! with the host are made at the `desk`, so that the small ones need not wait for them.

mod audit;
mod config;
pub(crate) mod desk;
mod events;
mod extract;
pub(crate) mod failure;
mod gpus;
mod health;
mod host;
mod if_match;
mod mig;
mod mps;
pub(crate) mod openapi;
mod operations;
mod overrides;
mod processes;
mod requests;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    http::{Method, Uri},
    routing::{delete, get, post},
};

use self::failure::Failure;
use crate::agent::Shared;

/// Largest request body in bytes.
const BODY: usize = 64 << 10;

/// The whole API.
pub(crate) fn router(agent: Shared) -> Router {
    Router::new()
        .route("/v1/version", get(health::version))
        .route("/v1/health", get(health::health))
        .route("/v1/gpus", get(gpus::list))
        .route("/v1/gpus/{gpu}", get(gpus::one))
        .route("/v1/gpus/{gpu}/profiles", get(gpus::profiles))
        .route("/v1/gpus/{gpu}/cordon", post(gpus::cordon))
        .route("/v1/gpus/{gpu}/uncordon", post(gpus::uncordon))
        .route("/v1/maintenance/enter", post(host::enter))
        .route("/v1/maintenance/leave", post(host::leave))
        .route("/v1/recover", post(host::recover))
        .route("/v1/mig/devices", get(mig::list_devices))
        .route("/v1/mig/plan", post(mig::plan))
        .route("/v1/mig/apply", post(mig::apply))
        .route("/v1/mps", get(mps::list))
        .route("/v1/mps/{target}", get(mps::one))
        .route("/v1/mps/{target}/start", post(mps::start))
        .route("/v1/mps/{target}/stop", post(mps::stop))
        .route("/v1/mps/{target}/restart", post(mps::restart))
        .route("/v1/mps/{target}/drain", post(mps::drain))
        .route("/v1/mps/{target}/settings", post(mps::set))
        .route("/v1/mps/{target}/shares", post(mps::take))
        .route("/v1/mps/{target}/logs", get(mps::logs))
        .route("/v1/mps/shares/{id}", delete(mps::end))
        .route("/v1/processes", get(processes::list))
        .route("/v1/operations", get(operations::list))
        .route("/v1/operations/{id}", get(operations::one))
        .route("/v1/operations/{id}/cancel", post(operations::cancel))
        .route("/v1/events", get(events::stream))
        .route("/v1/audit", get(audit::list))
        .route("/v1/config", get(config::show))
        .route("/v1/config/diff", get(config::diff))
        .route("/v1/config/reload", post(config::reload))
        .route("/v1/overrides", get(overrides::list))
        .route("/v1/overrides/{gpu}", delete(overrides::end))
        .route("/v1/openapi.json", get(openapi::show))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(BODY))
        .with_state(agent)
}

async fn no_such_path(uri: Uri) -> Failure {
    Failure::no_such_path(uri.path())
}

async fn no_such_method(method: Method, uri: Uri) -> Failure {
    Failure::no_such_method(&method, uri.path())
}
