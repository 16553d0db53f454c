//! `/v1/usage` and `/metrics`: what GPUs and leases are used for.

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse as _, Response},
    routing::get,
};
use gpush_api::{ApiError, Code, HostUsage, LeasePast, UsageGrouping, UsageHistory, UsageReport};
use gpush_openmetrics::Format;
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;

use super::{
    HttpHandles,
    extract::{Parameters, PathPart},
    failure::Failure,
    response_limiter::ResponseLimiter,
    without_parameters,
};
use crate::{
    leases,
    metrics::{Metrics, Scope},
    requests::caller::Caller,
    serve::authorization::Authorization,
    usage::{Need, ReportQuery, Usage},
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(Router::new().route("/v1/leases/{id}/usage", get(past)))
        .route("/v1/usage", get(usage))
        .route("/v1/usage/report", get(report))
        .route("/v1/usage/history", get(history))
        .route("/metrics", get(metrics))
}

/// Parameters of `GET /v1/usage`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct UsageParameters {
    /// Whether gpushd takes samples each second until 5 seconds after the last request with this parameter.
    #[serde(default)]
    watch: bool,
}

/// Parameters of `GET /metrics`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct MetricsParameters {
    /// `public` leaves out the metrics of leases, even if the caller may see them. A relay without a password sets it.
    #[serde(default)]
    #[cfg_attr(test, param(inline))]
    labels: Option<Labels>,
}

/// A selection of metrics.
#[derive(Debug, Clone, Copy, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
enum Labels {
    /// The metrics that every user may see.
    Public,
}

/// Returns what GPUs and leases are used for at present.
///
/// The figures are those of the last samples. While leases are open, gpushd takes a sample every 15 seconds. With `watch`,
/// gpushd takes one each second; the first answer can have few figures: repeat the request. Users see the figures of their
/// own leases, administrators those of all leases.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/usage", operation_id = "getUsage", tag = "gpus", params(UsageParameters),
    responses((status = 200, description = "The answer", body = HostUsage), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn usage(
    State(usage): State<Usage>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(UsageParameters { watch }): Parameters<UsageParameters>,
) -> Result<Response, Failure> {
    if watch {
        usage.need(Need::Watch);
    }
    let viewer = caller.viewer;
    limiter.answer(&caller, StatusCode::OK, async move { Ok::<HostUsage, Failure>(usage.figures(viewer)) }).await
}

/// Parameters of `GET /v1/usage/report`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct ReportParameters {
    /// Start of the period; 24 hours ago by default. The report begins with the UTC hour of this time.
    #[serde(default)]
    #[cfg_attr(test, param(value_type = Option<String>, format = DateTime))]
    since: Option<Timestamp>,
    /// End of the period; now by default.
    #[serde(default)]
    #[cfg_attr(test, param(value_type = Option<String>, format = DateTime))]
    until: Option<Timestamp>,
    /// By what the report groups; by user by default.
    #[serde(default)]
    #[cfg_attr(test, param(inline))]
    by: UsageGrouping,
    /// Only leases of this user; for administrators.
    #[serde(default)]
    user: Option<String>,
}

/// Returns who used how much in a period. Users see their own leases, administrators those of all users.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/usage/report", operation_id = "getUsageReport", tag = "leases", params(ReportParameters),
    responses((status = 200, description = "The answer", body = UsageReport), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn report(
    State(usage): State<Usage>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(ReportParameters { since, until, by, user }): Parameters<ReportParameters>,
) -> Result<Response, Failure> {
    let (since, until) = period(since, until, SignedDuration::from_hours(24), "gpushctl usage --since 7d")?;
    let only = visible_user(&authorization, &caller, user).await?;
    let query = ReportQuery { from: since, until, by };
    limiter
        .answer(&caller, StatusCode::OK, async move {
            Ok::<UsageReport, Failure>(usage.report(query, only.as_deref()).await?)
        })
        .await
}

/// Returns the period that a caller names. `length` is the default length, and `example` a command with an earlier start.
fn period(
    since: Option<Timestamp>,
    until: Option<Timestamp>,
    length: SignedDuration,
    example: &str,
) -> Result<(Timestamp, Timestamp), ApiError> {
    let until = until.unwrap_or_else(Timestamp::now);
    let since = since.unwrap_or_else(|| until.saturating_sub(length).unwrap_or(Timestamp::MIN));
    if since >= until {
        let error = ApiError::new(Code::BadRequest, format!("the period is empty: {since} is not before {until}"));
        return Err(error.hint(format!("name an earlier start, such as `{example}`")));
    }
    Ok((since, until))
}

/// Returns the user whose use a caller may see; `None` for all users.
pub(super) async fn visible_user(
    authorization: &Authorization,
    caller: &Caller,
    user: Option<String>,
) -> Result<Option<String>, ApiError> {
    let own = authorization.actor(caller).await;
    let own = own.user.unwrap_or_else(|| own.uid.to_string());
    let is_admin = caller.viewer.is_admin();
    Ok(match user {
        Some(user) if !is_admin && user != own => {
            authorization.admin(caller, "see the use of other users").await?;
            Some(user)
        }
        None if is_admin => None,
        Some(user) => Some(user),
        None => Some(own),
    })
}

/// Parameters of `GET /v1/usage/history`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct HistoryParameters {
    /// Start of the period; 7 days ago by default.
    #[serde(default)]
    #[cfg_attr(test, param(value_type = Option<String>, format = DateTime))]
    since: Option<Timestamp>,
    /// End of the period; now by default.
    #[serde(default)]
    #[cfg_attr(test, param(value_type = Option<String>, format = DateTime))]
    until: Option<Timestamp>,
    /// Only leases of this user; for administrators.
    #[serde(default)]
    user: Option<String>,
}

/// Returns what each lease of a period was used for. Users see their own leases, administrators those of all users, and
/// the requests. The answer has at most 5000 ended leases: the newest.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/usage/history", operation_id = "getUsageHistory", tag = "leases", params(HistoryParameters),
    responses((status = 200, description = "The answer", body = UsageHistory), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn history(
    State(usage): State<Usage>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(HistoryParameters { since, until, user }): Parameters<HistoryParameters>,
) -> Result<Response, Failure> {
    let (since, until) =
        period(since, until, SignedDuration::from_hours(7 * 24), "gpushctl advise from-use --since 30d")?;
    let only = visible_user(&authorization, &caller, user).await?;
    limiter
        .answer(&caller, StatusCode::OK, async move {
            Ok::<UsageHistory, Failure>(usage.lease_history(since, until, only.as_deref()).await?)
        })
        .await
}

/// Returns the recent past of a lease that has not ended: the last 60 minutes, 24 hours and 7 days. For its holder and
/// administrators.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/leases/{id}/usage", operation_id = "getLeaseUsage", tag = "leases",
    params(("id" = String, Path, description = "`L<number>`")),
    responses((status = 200, description = "The answer", body = LeasePast), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn past(State(usage): State<Usage>, caller: Caller, PathPart(id): PathPart) -> Result<Json<LeasePast>, Failure> {
    let lease = leases::id(&id)?;
    let past = usage.past(lease, caller.viewer).ok_or_else(|| {
        let message = format!("there is no open lease {lease} whose use you may see");
        ApiError::new(Code::NotFound, message).hint("list your leases with `gpushctl lease list --mine`")
    })?;
    Ok(Json(past))
}

/// Returns metrics as text for Prometheus, in the classic format or as OpenMetrics, as the header `Accept` says.
///
/// A scrape causes no driver call: gpushd takes samples each 15 seconds, until 5 minutes after the last scrape. Only
/// administrators and the users in `metrics.readers` get the metrics of leases.
#[cfg_attr(test, utoipa::path(
    get, path = "/metrics", operation_id = "getMetrics", tag = "gpus", params(MetricsParameters),
    responses((status = 200, description = "The metrics", body = String, content_type = "text/plain"), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn metrics(
    State(metrics): State<Metrics>,
    State(authorization): State<Authorization>,
    caller: Caller,
    Parameters(MetricsParameters { labels }): Parameters<MetricsParameters>,
    headers: HeaderMap,
) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = Format::accepted(accept);
    let scope = match labels {
        Some(Labels::Public) => Scope::Devices,
        None => metrics.scope(&caller, authorization.actor(&caller).await.user.as_deref()),
    };
    let text = metrics.text(scope, format);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(usage, report, history, past, metrics))]
pub(super) struct UsagePaths;
