//! `/v1/config`: the config in force.

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::ConfigView;

use super::{desk, failure::Failure};
use crate::{agent::Shared, auth::Asker, view};

/// The config in force, which GPUs its rules claim, and what of the file waits for a restart.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/config", operation_id = "getConfig", tag = "config",
    responses((status = 200, description = "The answer", body = ConfigView), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn show(State(agent): State<Shared>, asker: Asker) -> Result<Response, Failure> {
    let view = async |agent: Shared, asker: Asker| -> Result<ConfigView, Failure> {
        // Without a driver the rules claim nothing, and can be read all the same.
        let gpus = view::gpus(&agent, &asker).await.unwrap_or_default();
        let mut view = agent.settings.config().view(agent.settings.file().as_deref(), &gpus);
        view.pending_restart = agent.settings.pending_restart();
        Ok(view)
    };
    desk::answer(agent, asker, StatusCode::OK, view).await
}
