//! `/v1/audit`: who changed what, for administrators.

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::{ApiError, AuditRecord};
use gpush_core::selector::Selector;
use gpush_store::{AuditQuery, Store};
use jiff::Timestamp;
use serde::Deserialize;

use super::{extract::Parameters, failure::Failure, response_limiter::ResponseLimiter};
use crate::{
    authorization::Authorization,
    caller::Caller,
    state::{self, HostState},
};

/// Characters of a GPU's UUID.
const WHOLE_UUID: usize = "GPU-00000000-0000-0000-0000-000000000000".len();

/// Records in one answer: usually, and at most.
const PAGE: (usize, usize) = (100, 1000);

/// Parameters of `GET /v1/audit`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct AuditParameters {
    /// Those after the record of this sequence number, from the first on: 0 begins with the oldest, the
    /// last number of a page asks for the next. Without it come the last ones.
    after: Option<u64>,
    /// How many at most, 1 to 1000; 100 without it.
    limit: Option<usize>,
    /// Only those about this: an operation, `config`, `host`, or GPUs by their selectors, with commas
    /// between. Operations that concern a GPU are found under it.
    object: Option<String>,
    /// Only those made at this time or later, as `2026-01-02T03:04:05Z`.
    #[cfg_attr(test, param(value_type = Option<String>, format = DateTime))]
    since: Option<Timestamp>,
}

/// Records of the audit trail, oldest first. For administrators.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/audit", operation_id = "listAudit", tag = "audit", params(AuditParameters),
    responses((status = 200, description = "The answer", body = Vec<AuditRecord>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(
    State(store): State<Store>,
    State(state): State<state::State>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    Parameters(parameters): Parameters<AuditParameters>,
) -> Result<Response, Failure> {
    authorization.admin(&caller, "read the audit trail").await?;
    let limit = parameters.limit.unwrap_or(PAGE.0);
    if !(1..=PAGE.1).contains(&limit) {
        let message = format!("`limit` is {limit}, and an answer holds 1 to {} records", PAGE.1);
        return Err(Failure::bad_request(StatusCode::BAD_REQUEST, message)
            .hint("ask for the others page by page: `after` takes the sequence number of the last record of a page"));
    }
    let AuditParameters { after, object, since, .. } = parameters;
    let objects = object.map(|text| objects(&state.now(), &text)).transpose()?.unwrap_or_default();
    let query = AuditQuery { after: after.unwrap_or(0), limit, latest: after.is_none(), objects, since };
    let list = async move {
        let records = store.read(move |view| view.audit(&query)).await.map_err(ApiError::from)?;
        Ok::<Vec<AuditRecord>, Failure>(records.into_iter().map(shown).collect())
    };
    limiter.answer(&caller, StatusCode::OK, list).await
}

/// What records name by `text`. A GPU that is gone is found by the whole of its UUID.
fn objects(host: &HostState, text: &str) -> Result<Vec<String>, ApiError> {
    let one = |word: &str| {
        let selector: Selector = match word.parse() {
            Ok(selector) => selector,
            Err(_) => return host.named(word),
        };
        match selector {
            Selector::Uuid(uuid) if uuid.len() == WHOLE_UUID => Ok(vec![uuid]),
            // An operation, `config`, or a product name.
            Selector::Model(name) if !name.contains(['*', '?']) => {
                Ok(host.named(word).unwrap_or_else(|_| vec![word.to_owned()]))
            }
            Selector::All | Selector::Indexes(..) | Selector::Uuid(_) | Selector::Pci { .. } | Selector::Model(_) => {
                host.named(word)
            }
        }
    };
    let mut found = Vec::new();
    for word in text.split(',') {
        found.extend(one(word.trim())?);
    }
    Ok(found)
}

fn shown(record: gpush_store::AuditRecord) -> AuditRecord {
    let gpush_store::AuditRecord { sequence, at, by, action, object, result, detail } = record;
    AuditRecord { sequence, at, by, action, object, result, detail }
}
