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
use crate::{agent::Shared, answers::Header, auth::Asker, cordon, request::Request, state, view, view::Facts};

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
    asker: Asker,
    Parameters(parameters): Parameters<ListParameters>,
) -> Result<Response, Failure> {
    if parameters.profiles {
        let list = async move |agent: Shared, asker: Asker| -> Result<Vec<Gpu>, Failure> {
            Ok(view::gpus(&agent, &asker).await?)
        };
        return desk::answer(agent, asker, StatusCode::OK, list).await;
    }
    let facts = Facts::of(&agent, view::host(&agent).await?);
    let viewer = facts.viewer(&asker);
    if agent.line.is_empty()
        && let Some(written) = agent.kept.answer(&facts, viewer)
    {
        return Ok(desk::json(StatusCode::OK, written));
    }
    let shared = Arc::clone(&agent);
    let list = async move |asker: Asker| -> Result<Bytes, Failure> {
        let mut gpus = facts.seen_by(&asker);
        let nobody_waits = shared.line.is_empty();
        for gpu in &mut gpus {
            state::progress(&shared, gpu);
            leave_out_profiles(gpu);
        }
        let written = desk::written(&gpus)?;
        if facts.are_at_rest() && nobody_waits && shared.line.is_empty() {
            shared.kept.keep(facts, viewer, written.clone());
        }
        Ok(written)
    };
    Ok(desk::json(StatusCode::OK, desk::carry(&agent, asker, list).await?))
}

/// One GPU, by index, UUID (or its beginning) or PCI address; its MIG profiles included.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/gpus/{gpu}", operation_id = "getGpu", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address")),
    responses((status = 200, description = "The answer", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn one(State(agent): State<Shared>, asker: Asker, Part(gpu): Part) -> Result<Json<Gpu>, Failure> {
    Ok(Json(find(&agent, &asker, &gpu).await?))
}

/// The MIG profiles of one GPU, as its driver tells them.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/gpus/{gpu}/profiles", operation_id = "listProfiles", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address")),
    responses((status = 200, description = "The answer", body = Vec<GpuProfile>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn profiles(
    State(agent): State<Shared>,
    asker: Asker,
    Part(gpu): Part,
) -> Result<Json<Arc<Vec<GpuProfile>>>, Failure> {
    let gpu = find(&agent, &asker, &gpu).await?;
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
    asker: Asker,
    header: Header,
    Part(gpu): Part,
    Body(why): Body<WhyRequest>,
) -> Result<Json<Gpu>, Failure> {
    let request = Request::of(&agent, &asker, "cordon GPUs", header, &format!("/v1/gpus/{gpu}/cordon"), why).await?;
    changed(
        &agent,
        &asker,
        &gpu,
        request,
        |agent, uuid, request| async move { cordon::set(&agent, uuid, request).await },
    )
    .await
}

/// Takes all cordons off a GPU. One that gpushd had set comes back only when the fault is reported anew.
#[cfg_attr(test, utoipa::path(
    post, path = "/v1/gpus/{gpu}/uncordon", operation_id = "uncordonGpu", tag = "gpus", request_body = WhyRequest,
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address"), ("idempotency-key" = Option<String>, Header, description = "The same key for the same request carries it out once")),
    responses((status = 200, description = "The GPU as it is now", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn uncordon(
    State(agent): State<Shared>,
    asker: Asker,
    header: Header,
    Part(gpu): Part,
    Body(why): Body<WhyRequest>,
) -> Result<Json<Gpu>, Failure> {
    let request =
        Request::of(&agent, &asker, "uncordon GPUs", header, &format!("/v1/gpus/{gpu}/uncordon"), why).await?;
    changed(
        &agent,
        &asker,
        &gpu,
        request,
        |agent, uuid, request| async move { cordon::clear(&agent, uuid, request).await },
    )
    .await
}

/// The GPU once `change` is made of it, or was under the same key.
async fn changed<C, F>(
    agent: &Shared,
    asker: &Asker,
    gpu: &str,
    request: Request,
    change: C,
) -> Result<Json<Gpu>, Failure>
where
    C: FnOnce(Shared, String, Request) -> F + Send + 'static,
    F: Future<Output = Result<(), ApiError>> + Send + 'static,
{
    let facts = Facts::of(agent, view::host(agent).await?);
    let uuid = facts.uuid(facts.position(asker, gpu)?).to_owned();
    let which = uuid.clone();
    request.once(agent, move |agent, request| change(agent, which, request)).await?;
    let mut gpu = find(agent, asker, &uuid).await?;
    leave_out_profiles(&mut gpu);
    Ok(Json(gpu))
}

fn leave_out_profiles(gpu: &mut Gpu) {
    if let Some(mig) = &mut gpu.mig {
        mig.profiles = Arc::default();
    }
}

async fn find(agent: &Shared, asker: &Asker, text: &str) -> Result<Gpu, ApiError> {
    let facts = Facts::of(agent, view::host(agent).await?);
    let mut gpu = facts.find(asker, text).map_err(|error| view::absent(agent, error))?;
    state::progress(agent, &mut gpu);
    Ok(gpu)
}
