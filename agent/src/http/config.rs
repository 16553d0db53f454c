//! `/v1/config`: the config in force, how the file differs from it, reading the file again.

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use gpush_api::{ConfigDiff, ConfigView, ReloadRequest};

use super::{
    desk,
    extract::Body,
    failure::Failure,
    if_match::{IfMatch, tagged},
};
use crate::{
    agent::Shared,
    auth::Asker,
    reload::{self, Wish},
    view,
};

/// The config in force, which GPUs its rules claim, and what of the file waits for a restart.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/config", operation_id = "getConfig", tag = "config",
    responses((status = 200, description = "The answer", body = ConfigView), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn show(State(agent): State<Shared>, asker: Asker) -> Result<Response, Failure> {
    let generation = agent.overrides.generation();
    let view = async move |agent: Shared, asker: Asker| -> Result<ConfigView, Failure> {
        // Without a driver the rules claim nothing, and can be read all the same.
        let gpus = view::gpus(&agent, &asker).await.unwrap_or_default();
        let mut view = agent.settings.config().view(agent.settings.file().as_deref(), &gpus);
        view.pending_restart = agent.settings.pending_restart();
        view.trouble = agent.settings.trouble();
        view.generation = generation;
        Ok(view)
    };
    Ok(tagged(desk::answer(agent, asker, StatusCode::OK, view).await?, generation))
}

/// The file as a reload would read it now against the config in force, and what stands on each GPU.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/config/diff", operation_id = "diffConfig", tag = "config",
    responses((status = 200, description = "The answer", body = ConfigDiff), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn diff(State(agent): State<Shared>, asker: Asker) -> Result<Response, Failure> {
    if !asker.admin {
        // The file is its owner's to show until it is in force.
        let user = agent.users.user(asker.peer.uid).await;
        return Err(asker.denied("read the config file", user.as_deref(), &agent.settings.config().access).into());
    }
    let diff =
        async |agent: Shared, asker: Asker| -> Result<ConfigDiff, Failure> { Ok(reload::diff(&agent, &asker).await) };
    desk::answer(agent, asker, StatusCode::OK, diff).await
}

/// Reads the file again, as SIGHUP does: all of it is taken or nothing. A file that changes a rule
/// on which an override stands is refused, unless the request says that such overrides end.
#[cfg_attr(feature = "openapi", utoipa::path(
    post, path = "/v1/config/reload", operation_id = "reloadConfig", tag = "config", request_body = ReloadRequest,
    params(("If-Match" = Option<u64>, Header, description = "Generation; another one is answered with 412")),
    responses((status = 200, description = "It is in force", body = gpush_api::Reloaded), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn reload(
    State(agent): State<Shared>,
    asker: Asker,
    if_match: IfMatch,
    Body(request): Body<ReloadRequest>,
) -> Result<Response, Failure> {
    let user = agent.users.user(asker.peer.uid).await;
    if !asker.admin {
        return Err(asker.denied("reload the config", user.as_deref(), &agent.settings.config().access).into());
    }
    let ReloadRequest { clear_overrides } = request;
    let wish = Wish { by: Some(asker.actor(user)), clear_overrides, expected: if_match.0 };
    let reloaded = agent.reloads.ask(wish).await.map_err(|error| if_match.failure(&agent, error))?;
    let generation = reloaded.generation;
    Ok(tagged(Json(reloaded).into_response(), generation))
}
