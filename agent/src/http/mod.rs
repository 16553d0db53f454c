//! The API over HTTP: routes, and code that all routes share.
//!
//! Every response to an HTTP request is JSON. Errors are always a [`gpush_api::ApiError`]. Each
//! module has the paths of one subject. Responses that can be large go through the
//! `response_limiter`, so that they do not delay small responses.

pub(crate) mod admin_socket;
mod audit;
mod config;
pub(crate) mod endless;
mod events;
mod extract;
pub(crate) mod failure;
mod gpus;
pub(crate) mod head;
mod health;
mod host;
mod if_match;
mod leases;
mod mig;
mod mps;
pub(crate) mod openapi;
mod operations;
mod overrides;
mod processes;
pub(crate) mod requests;
pub(crate) mod response_limiter;
mod slurm;

use axum::{
    Router,
    extract::{DefaultBodyLimit, FromRef, Request},
    http::{Method, Uri},
    middleware::{Next, from_fn},
    response::Response,
    routing::{delete, get, post},
};

use gpush_store::Store;

use self::{failure::Failure, requests::Requests, response_limiter::ResponseLimiter};
use crate::{
    apply::{Engine, Planner},
    authorization::Authorization,
    health::Health,
    leases::Leases,
    maintenance::MaintenanceControl,
    mps::Mps,
    operation::Operations,
    processes::Unleased,
    recover::LossAcceptance,
    reload::{Differences, ReloadSender},
    settings::Settings,
    slurm::Slurm,
    state::{Commits, State, readings::Readings},
};

/// Maximum size of a request body in bytes.
const BODY: usize = 64 << 10;

/// The handles that the API uses. A handler uses axum's `State` to get the handles that it needs.
#[derive(Debug, Clone)]
pub(crate) struct Handles {
    pub(crate) state: State,
    pub(crate) readings: Readings,
    pub(crate) settings: Settings,
    pub(crate) store: Store,
    pub(crate) authorization: Authorization,
    pub(crate) requests: Requests,
    pub(crate) limiter: ResponseLimiter,
    pub(crate) commits: Commits,
    pub(crate) maintenance: MaintenanceControl,
    pub(crate) recovery: LossAcceptance,
    pub(crate) reloads: ReloadSender,
    pub(crate) differences: Differences,
    pub(crate) health: Health,
    pub(crate) operations: Operations,
    pub(crate) engine: Engine,
    pub(crate) planner: Planner,
    pub(crate) mps: Mps,
    pub(crate) leases: Leases,
    pub(crate) unleased: Unleased,
    pub(crate) slurm: Slurm,
}

/// Lets handlers extract fields of [`Handles`] by type.
macro_rules! extractable {
    ($($field:ident: $type:ty),* $(,)?) => {
        $(impl FromRef<Handles> for $type {
            fn from_ref(handles: &Handles) -> Self {
                handles.$field.clone()
            }
        })*
    };
}

extractable! {
    state: State,
    readings: Readings,
    settings: Settings,
    store: Store,
    authorization: Authorization,
    requests: Requests,
    limiter: ResponseLimiter,
    commits: Commits,
    maintenance: MaintenanceControl,
    recovery: LossAcceptance,
    reloads: ReloadSender,
    differences: Differences,
    health: Health,
    operations: Operations,
    engine: Engine,
    planner: Planner,
    mps: Mps,
    leases: Leases,
    unleased: Unleased,
    slurm: Slurm,
}

/// Returns the router of the whole API.
pub(crate) fn router(handles: Handles) -> Router {
    with_parameters()
        .merge(without_parameters().route_layer(from_fn(takes_no_parameters)))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(BODY))
        .with_state(handles)
}

/// Routes whose handlers check query parameters.
fn with_parameters() -> Router<Handles> {
    Router::new()
        .route("/v1/gpus", get(gpus::list))
        .route("/v1/mps/{target}/logs", get(mps::logs))
        .route("/v1/leases", get(leases::list))
        .route("/v1/operations", get(operations::list))
        .route("/v1/operations/{id}", get(operations::one))
        .route("/v1/events", get(events::stream))
        .route("/v1/audit", get(audit::list))
}

/// Routes without query parameters.
fn without_parameters() -> Router<Handles> {
    Router::new()
        .route("/v1/version", get(health::version))
        .route("/v1/health", get(health::health))
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
        .route("/v1/leases", post(leases::request))
        .route("/v1/leases/{id}", get(leases::one))
        .route("/v1/leases/{id}/environment", get(leases::environment))
        .route("/v1/leases/{id}/release", post(leases::release))
        .route("/v1/leases/{id}/renew", post(leases::renew))
        .route("/v1/leases/{id}/revoke", post(leases::revoke))
        .route("/v1/slurm/jobs", post(slurm::start))
        .route("/v1/slurm/jobs/end", post(slurm::end))
        .route("/v1/processes", get(processes::list))
        .route("/v1/operations/{id}/cancel", post(operations::cancel))
        .route("/v1/config", get(config::show))
        .route("/v1/config/diff", get(config::diff))
        .route("/v1/config/reload", post(config::reload))
        .route("/v1/overrides", get(overrides::list))
        .route("/v1/overrides/{gpu}", delete(overrides::end))
        .route("/v1/openapi.json", get(openapi::show))
}

/// Refuses a request that has query parameters. Otherwise a misspelt parameter would have no
/// effect.
async fn takes_no_parameters(request: Request, next: Next) -> Result<Response, Failure> {
    match request.uri().query().filter(|query| !query.is_empty()) {
        None => Ok(next.run(request).await),
        Some(query) => Err(Failure::unknown_parameters(request.uri().path(), query)),
    }
}

async fn no_such_path(uri: Uri) -> Failure {
    Failure::no_such_path(uri.path())
}

async fn no_such_method(method: Method, uri: Uri) -> Failure {
    Failure::no_such_method(&method, uri.path())
}
