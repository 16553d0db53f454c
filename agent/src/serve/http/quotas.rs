//! `/v1/quotas`: the quotas of users, and what is left of them.

use axum::{Router, extract::State, http::StatusCode, response::Response, routing::get};
use gpush_api::QuotaView;
use serde::Deserialize;

use super::{HttpHandles, extract::Parameters, failure::Failure, response_limiter::ResponseLimiter};
use crate::{
    leases::{self, Leases},
    requests::caller::Caller,
    serve::authorization::Authorization,
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    Router::new().route("/v1/quotas", get(list))
}

/// Parameters of `GET /v1/quotas`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct QuotaParameters {
    /// User id; by default that of the caller. Only administrators may name another user.
    #[serde(default)]
    uid: Option<u32>,
    /// All users who hold leases, wait for leases, or have a quota of their own. Only administrators may list them.
    #[serde(default)]
    all: Option<bool>,
}

/// Returns the quota of the caller, and what is left of it.
///
/// Administrators can name another user, or list all users.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/quotas", operation_id = "listQuotas", tag = "leases", params(QuotaParameters),
    responses((status = 200, description = "The answer", body = Vec<QuotaView>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn list(
    State(leases): State<Leases>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(QuotaParameters { uid, all }): Parameters<QuotaParameters>,
) -> Result<Response, Failure> {
    let is_all = all.unwrap_or_default();
    if is_all || uid.is_some_and(|uid| uid != caller.uid()) {
        authorization.admin(&caller, "read the quotas of other users").await?;
    }
    let by = caller.clone();
    let views = async move {
        let uids = if is_all { leases::users_with_quotas(&leases).await } else { vec![uid.unwrap_or(by.uid())] };
        let mut views: Vec<QuotaView> = Vec::new();
        for uid in uids {
            views.push(leases::quota_view(&leases, &by, uid).await?);
        }
        Ok::<_, Failure>(views)
    };
    limiter.answer(&caller, StatusCode::OK, views).await
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(list))]
pub(super) struct QuotaPaths;
