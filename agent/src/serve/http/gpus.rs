//! `/v1/gpus`: the GPUs and their profiles.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Bytes,
    extract::{FromRef, State},
    http::StatusCode,
    response::Response,
    routing::{get, post},
};
use gpush_api::{ApiError, Code, Gpu, GpuHolders, GpuProfile, ReasonRequest};
use serde::Deserialize;

use super::{
    HttpHandles,
    admin::{Admin, CordonGpus, UncordonGpus},
    answer_budget,
    extract::{Body, Parameters, PathPart},
    failure::Failure,
    gpu_list_cache::GpuListCache,
    requests::Requests,
    response_limiter::{self, ResponseLimiter},
    without_parameters,
};
use crate::{
    operations::{
        apply::{self, Engine, Planner},
        cordon,
    },
    requests::{caller::Caller, idempotency::Header, request::Request},
    state::{self, Commits, readings::Readings, redact},
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(
        Router::new()
            .route("/v1/gpus/{gpu}", get(one))
            .route("/v1/gpus/{gpu}/profiles", get(profiles))
            .route("/v1/gpus/{gpu}/holders", get(holders))
            .route("/v1/gpus/{gpu}/cordon", post(cordon))
            .route("/v1/gpus/{gpu}/uncordon", post(uncordon)),
    )
    .route("/v1/gpus", get(list))
}

/// Parameters of `GET /v1/gpus`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct ListParameters {
    /// Whether to include the MIG profiles of each GPU.
    #[serde(default)]
    profiles: bool,
}

/// Lists all GPUs, in the order of their indexes.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/gpus", operation_id = "listGpus", tag = "gpus", params(ListParameters),
    responses((status = 200, description = "The answer", body = Vec<Gpu>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn list(
    State(engine): State<Engine>,
    State(readings): State<Readings>,
    State(limiter): State<ResponseLimiter>,
    State(stored): State<GpuListCache>,
    caller: Caller,
    Parameters(parameters): Parameters<ListParameters>,
) -> Result<Response, Failure> {
    let observed = readings.host().await?;
    if parameters.profiles {
        let viewer = caller.viewer;
        let list = async move {
            let mut gpus = observed.gpus(viewer);
            gpus.iter_mut().for_each(|gpu| apply::add_progress(&engine, &observed.host, gpu));
            Ok::<Vec<Gpu>, Failure>(gpus)
        };
        return limiter.answer(&caller, StatusCode::OK, list).await;
    }
    let viewer = observed.viewer(caller.viewer);
    // The cached answer does not contain the progress of operations or the queue. So use it only if
    // no operation runs or waits.
    let is_idle = engine.operations.count_waiting() == 0 && !observed.host.gpus.iter().any(|gpu| gpu.is_changing());
    if is_idle && let Some(json) = stored.get(&observed, viewer) {
        return Ok(answer_budget::response(StatusCode::OK, answer_budget::JSON, json));
    }
    let of = caller.viewer;
    let list = async move {
        let mut gpus = observed.gpus(of);
        for gpu in &mut gpus {
            apply::add_progress(&engine, &observed.host, gpu);
            leave_out_profiles(gpu);
        }
        let json = response_limiter::to_json(&gpus)?;
        // Do not cache the answer if an operation was queued meanwhile.
        if is_idle && engine.operations.count_waiting() == 0 {
            stored.insert(&observed, viewer, json.clone());
        }
        Ok::<Bytes, Failure>(json)
    };
    Ok(answer_budget::response(StatusCode::OK, answer_budget::JSON, limiter.run(&caller, list).await??))
}

/// Returns one GPU, with its MIG profiles.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/gpus/{gpu}", operation_id = "getGpu", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID (whole or the first characters), or PCI address")),
    responses((status = 200, description = "The answer", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn one(
    State(engine): State<Engine>,
    State(readings): State<Readings>,
    caller: Caller,
    PathPart(gpu): PathPart,
) -> Result<Json<Gpu>, Failure> {
    Ok(Json(find(&engine, &readings, &caller, &gpu).await?))
}

/// Lists the MIG profiles of one GPU, as the driver reports them.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/gpus/{gpu}/profiles", operation_id = "listProfiles", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID (whole or the first characters), or PCI address")),
    responses((status = 200, description = "The answer", body = Vec<GpuProfile>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn profiles(
    State(engine): State<Engine>,
    State(readings): State<Readings>,
    caller: Caller,
    PathPart(gpu): PathPart,
) -> Result<Json<Arc<Vec<GpuProfile>>>, Failure> {
    let gpu = find(&engine, &readings, &caller, &gpu).await?;
    match gpu.mig {
        Some(mig) => Ok(Json(mig.profiles)),
        None => {
            let message = format!("GPU {} ({}, {}) does not support MIG", gpu.index, gpu.name, gpu.uuid);
            let error = ApiError::new(Code::Unsupported, message);
            Err(error.hint("choose a GPU that supports it: `gpushctl gpu list` shows them").into())
        }
    }
}

/// Lists what has a GPU open: processes and kernel modules.
///
/// The driver lists only processes that compute. This list also has monitors and services, which block a reset and some
/// changes of MIG mode.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/gpus/{gpu}/holders", operation_id = "listHolders", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID (whole or the first characters), or PCI address")),
    responses((status = 200, description = "The answer", body = GpuHolders), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn holders(
    State(planner): State<Planner>,
    State(readings): State<Readings>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    PathPart(gpu): PathPart,
) -> Result<Response, Failure> {
    let host = readings.host().await?.host;
    let (index, uuid) = {
        let gpu = &host.gpus[host.position(&gpu)?].gpu;
        (gpu.index, gpu.uuid.clone())
    };
    let viewer = caller.viewer;
    let list = async move {
        let found = planner.holders(std::slice::from_ref(&uuid)).await?;
        let holders = found.into_iter().map(|holder| redact::holder(holder, viewer)).collect();
        Ok::<GpuHolders, Failure>(GpuHolders { gpu: index, gpu_uuid: uuid, holders })
    };
    limiter.answer(&caller, StatusCode::OK, list).await
}

/// Blocks new work on a GPU. For administrators.
///
/// Running processes continue. A repeated request replaces the reason.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/gpus/{gpu}/cordon", operation_id = "cordonGpu", tag = "gpus", request_body = ReasonRequest,
    params(("gpu" = String, Path, description = "Index, UUID (whole or the first characters), or PCI address"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The GPU as it is now", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn cordon(
    State(change): State<CordonChange>,
    Admin { caller, by, .. }: Admin<CordonGpus>,
    header: Header,
    PathPart(gpu): PathPart,
    Body(why): Body<ReasonRequest>,
) -> Result<Json<Gpu>, Failure> {
    let key = header.of(caller.uid(), &format!("/v1/gpus/{gpu}/cordon"), &why);
    let request = change.requests.admit(by, key, why.reason.as_deref())?;
    let (commits, state) = (change.commits.clone(), change.state.clone());
    change
        .make(&caller, &gpu, request, |uuid, request| async move {
            cordon::set(&commits, &state.now(), uuid.into(), request).await
        })
        .await
}

/// Removes all cordons of a GPU. For administrators.
///
/// gpushd sets its own cordon again only when the driver reports a new fault.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/gpus/{gpu}/uncordon", operation_id = "uncordonGpu", tag = "gpus", request_body = ReasonRequest,
    params(("gpu" = String, Path, description = "Index, UUID (whole or the first characters), or PCI address"), ("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key is executed only once")),
    responses((status = 200, description = "The GPU as it is now", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn uncordon(
    State(change): State<CordonChange>,
    Admin { caller, by, .. }: Admin<UncordonGpus>,
    header: Header,
    PathPart(gpu): PathPart,
    Body(why): Body<ReasonRequest>,
) -> Result<Json<Gpu>, Failure> {
    let key = header.of(caller.uid(), &format!("/v1/gpus/{gpu}/uncordon"), &why);
    let request = change.requests.admit(by, key, why.reason.as_deref())?;
    let commits = change.commits.clone();
    change
        .make(
            &caller,
            &gpu,
            request,
            |uuid, request| async move { cordon::clear(&commits, uuid.into(), request).await },
        )
        .await
}

#[derive(Debug)]
struct CordonChange {
    engine: Engine,
    readings: Readings,
    requests: Requests,
    commits: Commits,
    state: state::State,
}

impl FromRef<HttpHandles> for CordonChange {
    fn from_ref(handles: &HttpHandles) -> Self {
        Self {
            engine: handles.0.engine.clone(),
            readings: handles.0.context.readings.clone(),
            requests: handles.0.requests.clone(),
            commits: handles.0.commits.clone(),
            state: handles.0.context.state.clone(),
        }
    }
}

impl CordonChange {
    /// Changes a GPU, unless an earlier request with the same idempotency key has already made the
    /// change. Returns the GPU.
    async fn make<C, F>(&self, caller: &Caller, gpu: &str, request: Request, change: C) -> Result<Json<Gpu>, Failure>
    where
        C: FnOnce(String, Request) -> F + Send + 'static,
        F: Future<Output = Result<(), ApiError>> + Send + 'static,
    {
        let host = self.readings.host().await?.host;
        let uuid = host.gpus[host.position(gpu)?].gpu.uuid.clone();
        let which = uuid.clone();
        self.requests.once(request, move |request| change(which.to_string(), request)).await?;
        let mut gpu = find(&self.engine, &self.readings, caller, uuid.as_str()).await?;
        leave_out_profiles(&mut gpu);
        Ok(Json(gpu))
    }
}

fn leave_out_profiles(gpu: &mut Gpu) {
    if let Some(mig) = &mut gpu.mig {
        mig.profiles = Arc::default();
    }
}

async fn find(engine: &Engine, readings: &Readings, caller: &Caller, text: &str) -> Result<Gpu, ApiError> {
    let observed = readings.host().await?;
    let mut gpu = observed.at(observed.host.position(text)?, caller.viewer);
    apply::add_progress(engine, &observed.host, &mut gpu);
    Ok(gpu)
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, one, profiles, holders, cordon, uncordon))]
pub(super) struct GpuPaths;
