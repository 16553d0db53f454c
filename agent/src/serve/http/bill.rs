//! `/v1/bill`: what the shares of a month cost.

use axum::{Router, extract::State, http::StatusCode, response::Response, routing::get};
use gpush_api::{Bill, BillModel, UsageGrouping};
use serde::Deserialize;

use super::{
    HttpHandles, extract::Parameters, failure::Failure, response_limiter::ResponseLimiter, usage::visible_user,
};
use crate::{
    requests::caller::Caller,
    serve::authorization::Authorization,
    usage::{BillQuery, Usage},
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    Router::new().route("/v1/bill", get(bill)).route("/v1/bill/csv", get(csv))
}

/// Parameters of `GET /v1/bill`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct BillParameters {
    /// Month in UTC, such as `2026-11`; the present one by default.
    #[serde(default)]
    month: Option<String>,
    /// What the bill charges for; held shares by default.
    #[serde(default)]
    #[cfg_attr(test, param(inline))]
    model: BillModel,
    /// By what the lines are grouped; by user by default.
    #[serde(default)]
    #[cfg_attr(test, param(inline))]
    by: UsageGrouping,
    /// Only leases of this user; for administrators.
    #[serde(default)]
    user: Option<String>,
}

/// Parameters of `GET /v1/bill/csv`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct BillRowsParameters {
    /// Month in UTC, such as `2026-11`; the present one by default.
    #[serde(default)]
    month: Option<String>,
    /// What the bill charges for; held shares by default.
    #[serde(default)]
    #[cfg_attr(test, param(inline))]
    model: BillModel,
    /// Only leases of this user; for administrators.
    #[serde(default)]
    user: Option<String>,
    /// Whether the columns are those of FOCUS 1.2.
    #[serde(default)]
    focus: bool,
}

/// Returns the sums of the bill of a month. Users see their own bill, administrators that of all users.
///
/// About an hour after its end, a month is closed. The bill of a closed month never changes: it keeps its rows and prices.
/// What is recorded later for a closed month becomes a correction in a later month.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/bill", operation_id = "getBill", tag = "leases", params(BillParameters),
    responses((status = 200, description = "The answer", body = Bill), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn bill(
    State(usage): State<Usage>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(BillParameters { month, model, by, user }): Parameters<BillParameters>,
) -> Result<Response, Failure> {
    let query = BillQuery::new(month.as_deref(), model, by)?;
    let only = visible_user(&authorization, &caller, user).await?;
    limiter
        .answer(&caller, StatusCode::OK, async move { Ok::<Bill, Failure>(usage.bill(query, only.as_deref()).await?) })
        .await
}

/// Returns the bill of a month as CSV: one row for each lease, target and hour, and one for the unallocated capacity of
/// each GPU and hour.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/bill/csv", operation_id = "getBillRows", tag = "leases", params(BillRowsParameters),
    responses((status = 200, description = "The rows", body = String, content_type = "text/csv"), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn csv(
    State(usage): State<Usage>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(BillRowsParameters { month, model, user, focus }): Parameters<BillRowsParameters>,
) -> Result<Response, Failure> {
    let query = BillQuery::new(month.as_deref(), model, UsageGrouping::default())?;
    let only = visible_user(&authorization, &caller, user).await?;
    let rows = async move { Ok::<String, Failure>(usage.bill_rows(query, only.as_deref(), focus).await?) };
    limiter.answer_csv(&caller, rows).await
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(bill, csv))]
pub(super) struct BillPaths;
