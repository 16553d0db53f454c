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
};
use crate::{agent::Shared, auth::Asker, overrides, request, view};

/// Overrides that stand, in the order in which they were made.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/overrides", operation_id = "listOverrides", tag = "config",
    responses((status = 200, description = "The answer", body = Overrides), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(State(agent): State<Shared>, asker: Asker) -> Result<Response, Failure> {
    let generation = agent.overrides.generation();
    let list = async move |agent: Shared, asker: Asker| -> Result<Overrides, Failure> {
        // Without a driver they stand all the same.
        let gpus = view::gpus(&agent, &asker).await.unwrap_or_default();
        Ok(Overrides { generation, overrides: overrides::all(&agent, &gpus, &asker) })
    };
    Ok(tagged(desk::answer(agent, asker, StatusCode::OK, list).await?, generation))
}

/// Ends the override of a GPU. What stands on it is left as it is, unless `auto_reconcile` says
/// otherwise.
#[cfg_attr(feature = "openapi", utoipa::path(
    delete, path = "/v1/overrides/{gpu}", operation_id = "endOverride", tag = "config",
    params(
        ("gpu" = String, Path, description = "Index, UUID or its beginning, or PCI address"),
        ("If-Match" = Option<u64>, Header, description = "Generation; another one is answered with 412")
    ),
    responses((status = 200, description = "It has ended", body = OverrideEnded), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn end(
    State(agent): State<Shared>,
    asker: Asker,
    if_match: IfMatch,
    Part(gpu): Part,
) -> Result<Response, Failure> {
    let user = agent.users.user(asker.peer.uid).await;
    if !asker.admin {
        return Err(asker.denied("end overrides", user.as_deref(), &agent.settings.config().access).into());
    }
    let gpus = view::gpus(&agent, &asker).await;
    let (uuid, index, label) = meant(&agent, &gpus, &gpu)?;
    let (shared, by, expected) = (Arc::clone(&agent), asker.actor(user), if_match.0);
    // On record and in memory, whether or not the asker is still there.
    let ending = async move { overrides::clear(&shared, uuid, &label, by, expected).await };
    let ended = request::whole(&agent, ending).await;
    let (ended, generation) = ended.map_err(|error| if_match.failure(&agent, error))?;
    let answer = OverrideEnded { generation, ended: overrides::view(ended, index, &asker) };
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
        Err(_) if agent.overrides.of(text).is_some() => Ok((text.to_owned(), None, text.to_owned())),
        Err(error) => Err(error),
    }
}
