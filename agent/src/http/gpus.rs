//! `/v1/gpus`: the GPUs and their profiles.

use std::sync::Arc;

use axum::{Json, body::Bytes, extract::State, http::StatusCode, response::Response};
use gpush_api::{ApiError, Code, Gpu, GpuProfile, WhyRequest};
use serde::Deserialize;

use super::{
    desk,
    extract::{Body, Parameters, Part},
    failure::Failure,
};
use crate::{agent::Shared, apply, caller::Caller, cordon, idempotency::Header, request::Request};

/// Parameters of `GET /v1/gpus`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct ListParameters {
    /// Whether each GPU's MIG profiles are included.
    #[serde(default)]
    profiles: bool,
}

/// All GPUs, by index.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/gpus", operation_id = "listGpus", tag = "gpus", params(ListParameters),
    responses((status = 200, description = "The answer", body = Vec<Gpu>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(
    State(agent): State<Shared>,
    caller: Caller,
    Parameters(parameters): Parameters<ListParameters>,
) -> Result<Response, Failure> {
    let observed = agent.readings.host().await?;
    if parameters.profiles {
        let list = async move |agent: Shared, caller: Caller| -> Result<Vec<Gpu>, Failure> {
            let mut gpus = observed.gpus(caller.viewer);
            gpus.iter_mut().for_each(|gpu| apply::add_progress(&agent.queue, &agent.operations, &observed.host, gpu));
            Ok(gpus)
        };
        return desk::answer(agent, caller, StatusCode::OK, list).await;
    }
    let viewer = observed.viewer(caller.viewer);
    // How far an operation is, and which ones wait, is no part of a snapshot.
    let is_whole =
        observed.late.is_empty() && agent.queue.is_empty() && !observed.host.gpus.iter().any(|gpu| gpu.is_changing());
    if is_whole && let Some(json) = observed.host.answers.get(viewer) {
        return Ok(desk::json(StatusCode::OK, json));
    }
    let shared = Arc::clone(&agent);
    let list = async move |caller: Caller| -> Result<Bytes, Failure> {
        let mut gpus = observed.gpus(caller.viewer);
        for gpu in &mut gpus {
            apply::add_progress(&shared.queue, &shared.operations, &observed.host, gpu);
            leave_out_profiles(gpu);
        }
        let json = desk::written(&gpus)?;
        if is_whole {
            observed.host.answers.keep(viewer, json.clone());
        }
        Ok(json)
    };
    Ok(desk::json(StatusCode::OK, desk::carry(&agent, caller, list).await?))
}

/// One GPU, by index, UUID (or its beginning) or PCI address; its MIG profiles included.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/gpus/{gpu}", operation_id = "getGpu", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address")),
    responses((status = 200, description = "The answer", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn one(State(agent): State<Shared>, caller: Caller, Part(gpu): Part) -> Result<Json<Gpu>, Failure> {
    Ok(Json(find(&agent, &caller, &gpu).await?))
}

/// The MIG profiles of one GPU, as its driver tells them.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/gpus/{gpu}/profiles", operation_id = "listProfiles", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address")),
    responses((status = 200, description = "The answer", body = Vec<GpuProfile>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn profiles(
    State(agent): State<Shared>,
    caller: Caller,
    Part(gpu): Part,
) -> Result<Json<Arc<Vec<GpuProfile>>>, Failure> {
    let gpu = find(&agent, &caller, &gpu).await?;
    match gpu.mig {
        Some(mig) => Ok(Json(mig.profiles)),
        None => {
            let message = format!("GPU {} ({}, {}) has no MIG", gpu.index, gpu.name, gpu.uuid);
            let error = ApiError::new(Code::Unsupported, message);
            Err(error.hint("choose a GPU that has it: `gpushctl gpu list` shows them").into())
        }
    }
}

/// Keeps new work off a GPU; what runs on it goes on. Repeated, the new reason takes the old one's place.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/gpus/{gpu}/cordon", operation_id = "cordonGpu", tag = "gpus", request_body = WhyRequest,
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address"), ("idempotency-key" = Option<String>, Header, description = "The same key for the same request carries it out once")),
    responses((status = 200, description = "The GPU as it is now", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn cordon(
    State(agent): State<Shared>,
    caller: Caller,
    header: Header,
    Part(gpu): Part,
    Body(why): Body<WhyRequest>,
) -> Result<Json<Gpu>, Failure> {
    let request = Request::of(&agent, &caller, "cordon GPUs", header, &format!("/v1/gpus/{gpu}/cordon"), why).await?;
    changed(&agent, &caller, &gpu, request, |agent, uuid, request| async move {
        cordon::set(&agent.commits, &agent.state.now(), uuid, request).await
    })
    .await
}

/// Takes all cordons off a GPU. One that gpushd had set comes back only when the fault is reported anew.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/gpus/{gpu}/uncordon", operation_id = "uncordonGpu", tag = "gpus", request_body = WhyRequest,
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address"), ("idempotency-key" = Option<String>, Header, description = "The same key for the same request carries it out once")),
    responses((status = 200, description = "The GPU as it is now", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn uncordon(
    State(agent): State<Shared>,
    caller: Caller,
    header: Header,
    Part(gpu): Part,
    Body(why): Body<WhyRequest>,
) -> Result<Json<Gpu>, Failure> {
    let request =
        Request::of(&agent, &caller, "uncordon GPUs", header, &format!("/v1/gpus/{gpu}/uncordon"), why).await?;
    changed(&agent, &caller, &gpu, request, |agent, uuid, request| async move {
        cordon::clear(&agent.commits, uuid, request).await
    })
    .await
}

/// The GPU once `change` is made of it, or was under the same key.
async fn changed<C, F>(
    agent: &Shared,
    caller: &Caller,
    gpu: &str,
    request: Request,
    change: C,
) -> Result<Json<Gpu>, Failure>
where
    C: FnOnce(Shared, String, Request) -> F + Send + 'static,
    F: Future<Output = Result<(), ApiError>> + Send + 'static,
{
    let host = agent.readings.host().await?.host;
    let uuid = host.gpus[host.position(gpu)?].gpu.uuid.clone();
    let which = uuid.clone();
    request.once(agent, move |agent, request| change(agent, which, request)).await?;
    let mut gpu = find(agent, caller, &uuid).await?;
    leave_out_profiles(&mut gpu);
    Ok(Json(gpu))
}

fn leave_out_profiles(gpu: &mut Gpu) {
    if let Some(mig) = &mut gpu.mig {
        mig.profiles = Arc::default();
    }
}

async fn find(agent: &Shared, caller: &Caller, text: &str) -> Result<Gpu, ApiError> {
    let observed = agent.readings.host().await?;
    let mut gpu = observed.at(observed.host.position(text)?, caller.viewer);
    apply::add_progress(&agent.queue, &agent.operations, &observed.host, &mut gpu);
    Ok(gpu)
}
