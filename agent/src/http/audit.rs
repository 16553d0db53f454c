//! `/v1/audit`: who changed what, for administrators.

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::{ApiError, AuditRecord};
use gpush_core::selector::Selector;
use gpush_store::AuditQuery;
use jiff::Timestamp;
use serde::Deserialize;

use super::{desk, extract::Parameters, failure::Failure};
use crate::{agent::Shared, auth::Asker, view};

/// Characters of a GPU's UUID.
const WHOLE_UUID: usize = "GPU-00000000-0000-0000-0000-000000000000".len();

/// Records in one answer: usually, and at most.
const PAGE: (usize, usize) = (100, 1000);

/// Parameters of `GET /v1/audit`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "openapi", into_params(parameter_in = Query))]
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
    #[cfg_attr(feature = "openapi", param(value_type = Option<String>, format = DateTime))]
    since: Option<Timestamp>,
}

/// Records of the audit trail, oldest first. For administrators.
#[cfg_attr(feature = "openapi", utoipa::path(
    get, path = "/v1/audit", operation_id = "listAudit", tag = "audit", params(AuditParameters),
    responses((status = 200, description = "The answer", body = Vec<AuditRecord>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn list(
    State(agent): State<Shared>,
    asker: Asker,
    Parameters(parameters): Parameters<AuditParameters>,
) -> Result<Response, Failure> {
    if !asker.admin {
        let user = agent.users.user(asker.peer.uid).await;
        return Err(asker.denied("read the audit trail", user.as_deref(), &agent.settings.config().access).into());
    }
    let limit = parameters.limit.unwrap_or(PAGE.0);
    if !(1..=PAGE.1).contains(&limit) {
        let message = format!("`limit` is {limit}, and an answer holds 1 to {} records", PAGE.1);
        return Err(Failure::bad_request(StatusCode::BAD_REQUEST, message)
            .hint("ask for the others page by page: `after` takes the sequence number of the last record of a page"));
    }
    let AuditParameters { after, object, since, .. } = parameters;
    let objects = object.map(|text| objects(&agent, &text)).transpose()?.unwrap_or_default();
    let query = AuditQuery { after: after.unwrap_or(0), limit, latest: after.is_none(), objects, since };
    let list = async move |agent: Shared, _| -> Result<Vec<AuditRecord>, Failure> {
        let records = agent.store.read(move |view| view.audit(&query)).await.map_err(gpush_api::ApiError::from)?;
        Ok(records.into_iter().map(shown).collect())
    };
    desk::answer(agent, asker, StatusCode::OK, list).await
}

/// What records name by `text`. A GPU that is gone is found by the whole of its UUID.
fn objects(agent: &Shared, text: &str) -> Result<Vec<String>, ApiError> {
    let one = |word: &str| {
        let selector: Selector = match word.parse() {
            Ok(selector) => selector,
            Err(_) => return view::meant(agent, word),
        };
        match selector {
            Selector::Uuid(uuid) if uuid.len() == WHOLE_UUID => Ok(vec![uuid]),
            // An operation, `config`, or a product name.
            Selector::Model(name) if !name.contains(['*', '?']) => {
                Ok(view::meant(agent, word).unwrap_or_else(|_| vec![word.to_owned()]))
            }
            Selector::All | Selector::Indexes(..) | Selector::Uuid(_) | Selector::Pci { .. } | Selector::Model(_) => {
                view::meant(agent, word)
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
