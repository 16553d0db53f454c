//! `/v1/overrides`: what stands above the config, and ending it.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use gpush_api::{ApiError, Code, Gpu, OverrideEnded, Overrides};
use gpush_core::selector::Selector;

use super::{
    desk,
    extract::Part,
    failure::Failure,
    if_match::{IfMatch, tagged},
    requests,
};
use crate::{agent::Shared, caller::Caller, overrides, state::overridden};

/// Overrides that stand, in the order in which they were made.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/overrides", operation_id = "listOverrides", tag = "config",
    responses((status = 200, description = "The answer", body = Overrides), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(State(agent): State<Shared>, caller: Caller) -> Result<Response, Failure> {
    let generation = agent.state.now().generation;
    let list = async move |agent: Shared, caller: Caller| -> Result<Overrides, Failure> {
        // Without a driver they stand all the same.
        let gpus = agent.readings.host().await.map(|observed| observed.gpus(caller.viewer)).unwrap_or_default();
        Ok(Overrides { generation, overrides: overrides::all(&agent.state, &gpus, caller.viewer) })
    };
    Ok(tagged(desk::answer(agent, caller, StatusCode::OK, list).await?, generation))
}

/// Ends the override of a GPU. What stands on it is left as it is, unless `auto_reconcile` says
/// otherwise.
#[cfg_attr(test, utoipa::path(
    delete, path = "/v1/overrides/{gpu}", operation_id = "endOverride", tag = "config",
    params(
        ("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address"),
        ("If-Match" = Option<u64>, Header, description = "Generation; another one is answered with 412")
    ),
    responses((status = 200, description = "It has ended", body = OverrideEnded), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn end(
    State(agent): State<Shared>,
    caller: Caller,
    if_match: IfMatch,
    Part(gpu): Part,
) -> Result<Response, Failure> {
    let user = agent.users.user(caller.peer.uid).await;
    if !caller.viewer.is_admin() {
        return Err(caller.denied("end overrides", user.as_deref(), &agent.settings.config().access).into());
    }
    let gpus = agent.readings.host().await.map(|observed| observed.gpus(caller.viewer));
    let (uuid, index, label) = meant(&agent, &gpus, &gpu)?;
    let (shared, by, expected) = (Arc::clone(&agent), caller.actor(user), if_match.0);
    // On record and in memory, whether or not the caller is still there.
    let ending = async move { overrides::clear(&shared.state, &shared.store, uuid, &label, by, expected).await };
    let ended = requests::whole(&agent, ending).await;
    let (ended, generation) = ended.map_err(|error| if_match.failure(&agent, error))?;
    let answer = OverrideEnded { generation, ended: overridden(ended, index) };
    Ok(tagged(Json(answer).into_response(), generation))
}

/// The GPU that a text names: by all that names a GPU, or, without a driver, by its UUID.
fn meant(
    agent: &Shared,
    gpus: &Result<Vec<Gpu>, ApiError>,
    text: &str,
) -> Result<(String, Option<u32>, String), ApiError> {
    let seen = match gpus {
        Ok(gpus) => Selector::resolve(&[text], gpus).map(|found| (gpus, found)),
        Err(error) => Err(error.clone()),
    };
    match seen {
        Ok((gpus, found)) => match found.as_slice() {
            [one] => {
                let gpu = &gpus[*one];
                Ok((gpu.uuid.clone(), Some(gpu.index), format!("GPU {} ({})", gpu.index, gpu.uuid)))
            }
            several => {
                let message = format!("{text:?} names {} GPUs, one is wanted", several.len());
                Err(ApiError::new(Code::BadRequest, message).hint("end the override of one GPU after the other"))
            }
        },
        // One that the driver does not show can have an override all the same.
        Err(_) if agent.state.override_of(text).is_some() => Ok((text.to_owned(), None, text.to_owned())),
        Err(error) => Err(error),
    }
}
