//! The API over HTTP: routes, and code that all routes share.
//!
//! Every response to an HTTP request is JSON. Errors are always a [`gpush_api::ApiError`]. Each
//! module has the routes of one subject. Responses that can be large go through the
//! `response_limiter`, so that they do not delay small responses.

mod admin;
pub(crate) mod admin_socket;
mod answer_budget;
mod audit;
mod bill;
mod body;
mod body_text;
pub(crate) mod change_limiter;
mod config;
pub(crate) mod endless;
mod enforcement;
mod events;
mod extract;
pub(crate) mod failure;
pub(crate) mod gpu_list_cache;
mod gpus;
pub(crate) mod head;
mod health;
mod host;
mod idle;
mod if_match;
mod leases;
mod mig;
mod mps;
pub(crate) mod openapi;
mod operations;
mod overrides;
mod processes;
mod quotas;
pub(crate) mod requests;
pub(crate) mod response_limiter;
mod slurm;
mod usage;

use std::sync::Arc;

use axum::{
    Router,
    extract::{DefaultBodyLimit, FromRef, Request},
    http::{Method, Uri},
    middleware::{Next, from_fn, from_fn_with_state},
    response::Response,
};

use gpush_store::Store;

use self::{
    change_limiter::ChangeLimiter, failure::Failure, gpu_list_cache::GpuListCache, requests::Requests,
    response_limiter::ResponseLimiter,
};
use crate::{
    enforcement::Enforcement,
    lease_policies::LeasePolicies,
    leases::Leases,
    metrics::Metrics,
    modes::mps::Mps,
    operations::{
        apply::{Engine, Planner},
        maintenance::MaintenanceControl,
        operation::Operations,
        recover::LossAcceptance,
    },
    processes::Unleased,
    reconcile::reload::{Differences, ReloadSender},
    serve::{authorization::Authorization, health::Health},
    slurm::Slurm,
    state::{Commits, State, context::HostContext, readings::Readings},
    system::{settings::Settings, tasks::Tasks},
    usage::Usage,
};

/// Maximum size of a request body in bytes. Only administrators send such large bodies, with layouts.
const BODY: usize = 64 << 10;

/// The handles that the API uses. A handler uses axum's `State` to get the handles that it needs. axum clones the state
/// several times for each request, so the handles are behind one `Arc`.
#[derive(Debug, Clone)]
pub(crate) struct HttpHandles(Arc<ApiHandles>);

/// The handles behind [`HttpHandles`].
#[derive(Debug, Clone)]
pub(crate) struct ApiHandles {
    pub(crate) context: Arc<HostContext>,
    pub(crate) authorization: Authorization,
    pub(crate) requests: Requests,
    pub(crate) limiter: ResponseLimiter,
    pub(crate) gpu_lists: GpuListCache,
    pub(crate) changes: ChangeLimiter,
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
    pub(crate) enforcement: Enforcement,
    pub(crate) policies: LeasePolicies,
    pub(crate) unleased: Unleased,
    pub(crate) slurm: Slurm,
    pub(crate) usage: Usage,
    pub(crate) metrics: Metrics,
}

/// Lets handlers extract fields of [`HttpHandles`] by type.
macro_rules! extractable {
    ($($($part:ident).+: $type:ty),* $(,)?) => {
        $(impl FromRef<HttpHandles> for $type {
            fn from_ref(handles: &HttpHandles) -> Self {
                handles.0.$($part).+.clone()
            }
        })*
    };
}

extractable! {
    context.state: State,
    context.readings: Readings,
    context.settings: Settings,
    context.store: Store,
    context.tasks: Tasks,
    authorization: Authorization,
    requests: Requests,
    limiter: ResponseLimiter,
    gpu_lists: GpuListCache,
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
    enforcement: Enforcement,
    policies: LeasePolicies,
    unleased: Unleased,
    slurm: Slurm,
    usage: Usage,
    metrics: Metrics,
}

/// Returns the router of the whole API.
pub(crate) fn router(handles: ApiHandles) -> Router {
    let routes = [
        audit::routes(),
        config::routes(),
        enforcement::routes(),
        events::routes(),
        gpus::routes(),
        health::routes(),
        host::routes(),
        idle::routes(),
        leases::routes(),
        mig::routes(),
        mps::routes(),
        openapi::routes(),
        operations::routes(),
        overrides::routes(),
        processes::routes(),
        quotas::routes(),
        slurm::routes(),
        usage::routes(),
        bill::routes(),
    ];
    let all = routes.into_iter().fold(Router::new(), Router::merge);
    let handles = HttpHandles(Arc::new(handles));
    all.fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(BODY))
        .layer(from_fn_with_state(handles.clone(), change_limiter::limit_changes))
        .with_state(handles)
}

/// Makes routes refuse query parameters. For routes whose handlers do not check parameters.
fn without_parameters(routes: Router<HttpHandles>) -> Router<HttpHandles> {
    routes.route_layer(from_fn(takes_no_parameters))
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
