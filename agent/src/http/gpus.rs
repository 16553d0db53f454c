//! `/v1/gpus`: the GPUs and their profiles.

use std::sync::Arc;

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::{ApiError, Code, Gpu, GpuProfile, WhyRequest};
use gpush_core::selector::Selector;
use serde::Deserialize;

use super::{
    desk,
    extract::{Body, Parameters, Part},
    failure::Failure,
};
use crate::{
    agent::Shared,
    answers::Header,
    auth::Asker,
    cordon,
    request::{Request, whole},
    view,
};

/// Parameters of `GET /v1/gpus`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
pub(super) struct ListParameters {
    /// Whether each GPU's MIG profiles are included.
    #[serde(default)]
    profiles: bool,
}

/// All GPUs, by index.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/gpus", operation_id = "listGpus", tag = "gpus", params(ListParameters),
    responses((status = 200, description = "The answer", body = Vec<Gpu>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(
    State(agent): State<Shared>,
    asker: Asker,
    Parameters(parameters): Parameters<ListParameters>,
) -> Result<Response, Failure> {
    let list = async move |agent: Shared, asker: Asker| -> Result<Vec<Gpu>, Failure> {
        let mut gpus = view::gpus(&agent, &asker).await?;
        if !parameters.profiles {
            for mig in gpus.iter_mut().filter_map(|gpu| gpu.mig.as_mut()) {
                mig.profiles.clear();
            }
        }
        Ok(gpus)
    };
    desk::answer(agent, asker, StatusCode::OK, list).await
}

/// One GPU, by index, UUID (or its beginning) or PCI address; its MIG profiles included.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/gpus/{gpu}", operation_id = "getGpu", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address")),
    responses((status = 200, description = "The answer", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn one(State(agent): State<Shared>, asker: Asker, Part(gpu): Part) -> Result<Response, Failure> {
    let one =
        async move |agent: Shared, asker: Asker| -> Result<Gpu, Failure> { Ok(find(&agent, &asker, &gpu).await?) };
    desk::answer(agent, asker, StatusCode::OK, one).await
}

/// The MIG profiles of one GPU, as its driver tells them.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/gpus/{gpu}/profiles", operation_id = "listProfiles", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address")),
    responses((status = 200, description = "The answer", body = Vec<GpuProfile>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn profiles(State(agent): State<Shared>, asker: Asker, Part(gpu): Part) -> Result<Response, Failure> {
    let profiles = async move |agent: Shared, asker: Asker| -> Result<Vec<GpuProfile>, Failure> {
        let gpu = find(&agent, &asker, &gpu).await?;
        match gpu.mig {
            Some(mig) => Ok(mig.profiles),
            None => {
                let message = format!("GPU {} ({}, {}) has no MIG", gpu.index, gpu.name, gpu.uuid);
                let error = ApiError::new(Code::Unsupported, message);
                Err(error.hint("choose a GPU that has it: `gpushctl gpu list` shows them").into())
            }
        }
    };
    desk::answer(agent, asker, StatusCode::OK, profiles).await
}

/// Keeps new work off a GPU; what runs on it goes on. Repeated, the new reason takes the old one's place.
#[cfg_attr(feature = "openapi", utoipa::path(
    post, path = "/v1/gpus/{gpu}/cordon", operation_id = "cordonGpu", tag = "gpus", request_body = WhyRequest,
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address"), ("idempotency-key" = Option<String>, Header, description = "The same key for the same request carries it out once")),
    responses((status = 200, description = "The GPU as it is now", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn cordon(
    State(agent): State<Shared>,
    asker: Asker,
    header: Header,
    Part(gpu): Part,
    Body(why): Body<WhyRequest>,
) -> Result<Response, Failure> {
    let request = Request::of(&agent, &asker, "cordon GPUs", header, &format!("/v1/gpus/{gpu}/cordon"), why).await?;
    changed(agent, asker, gpu, request, |agent, gpu, request| async move { cordon::set(&agent, &gpu, request).await })
        .await
}

/// Takes all cordons off a GPU. One that gpushd had set comes back only when the fault is reported anew.
#[cfg_attr(feature = "openapi", utoipa::path(
    post, path = "/v1/gpus/{gpu}/uncordon", operation_id = "uncordonGpu", tag = "gpus", request_body = WhyRequest,
    params(("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address"), ("idempotency-key" = Option<String>, Header, description = "The same key for the same request carries it out once")),
    responses((status = 200, description = "The GPU as it is now", body = Gpu), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn uncordon(
    State(agent): State<Shared>,
    asker: Asker,
    header: Header,
    Part(gpu): Part,
    Body(why): Body<WhyRequest>,
) -> Result<Response, Failure> {
    let request =
        Request::of(&agent, &asker, "uncordon GPUs", header, &format!("/v1/gpus/{gpu}/uncordon"), why).await?;
    changed(agent, asker, gpu, request, |agent, gpu, request| async move { cordon::clear(&agent, &gpu, request).await })
        .await
}

/// The GPU once `change` is made of it, or was under the same key.
async fn changed<C, F>(
    agent: Shared,
    asker: Asker,
    gpu: String,
    request: Request,
    change: C,
) -> Result<Response, Failure>
where
    C: FnOnce(Shared, Gpu, Request) -> F + Send + 'static,
    F: Future<Output = Result<(), ApiError>> + Send + 'static,
{
    let change = async move |agent: Shared, asker: Asker| -> Result<Gpu, Failure> {
        let found = find(&agent, &asker, &gpu).await?;
        if !request.is_done(&agent).await? {
            whole(&agent, change(Arc::clone(&agent), found.clone(), request)).await?;
        }
        Ok(find(&agent, &asker, &found.uuid).await?)
    };
    desk::answer(agent, asker, StatusCode::OK, change).await
}

async fn find(agent: &Shared, asker: &Asker, text: &str) -> Result<Gpu, ApiError> {
    let mut gpus = view::gpus(agent, asker).await?;
    let found = Selector::resolve(&[text], &gpus)?;
    match found.as_slice() {
        [one] => Ok(gpus.swap_remove(*one)),
        several => {
            Err(ApiError::new(Code::BadRequest, format!("{text:?} names {} GPUs, one is wanted", several.len()))
                .hint("give an index, a UUID or a PCI address: `gpushctl gpu list` shows them"))
        }
    }
}
