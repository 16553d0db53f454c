//! `/v1/audit`: who changed what, for administrators.

use std::collections::BTreeSet;

use axum::{extract::State, http::StatusCode, response::Response};
use gpush_api::{ApiError, AuditRecord};
use gpush_core::{selector::Selector, sharing};
use gpush_store::{AuditQuery, Store};
use jiff::Timestamp;
use serde::Deserialize;

use super::{extract::Parameters, failure::Failure, response_limiter::ResponseLimiter};
use crate::{
    authorization::Authorization,
    caller::Caller,
    state::{self, HostState},
};

/// Length of a complete GPU UUID.
const WHOLE_UUID: usize = "GPU-00000000-0000-0000-0000-000000000000".len();

/// Default and maximum number of records in one response.
const PAGE: (usize, usize) = (100, 1000);

/// Parameters of `GET /v1/audit`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct AuditParameters {
    /// Only records after this sequence number, oldest first. 0 starts with the oldest record. For
    /// the next page, use the `sequence` of the last record. Without `after`, the answer has the
    /// latest records.
    after: Option<u64>,
    /// Maximum number of records, 1 to 1000; 100 by default.
    limit: Option<usize>,
    /// Only records about these objects, separated by commas: operations, leases, MPS targets, users, `config`,
    /// `host`, or selectors of GPUs. A GPU includes its operations and its MPS targets.
    object: Option<String>,
    /// Only records made at this time or later, such as `2026-01-02T03:04:05Z`.
    #[cfg_attr(test, param(value_type = Option<String>, format = DateTime))]
    since: Option<Timestamp>,
}

/// Lists records of the audit trail, oldest first. For administrators.
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
        let message = format!("`limit` is {limit}, but an answer has 1 to {} records", PAGE.1);
        return Err(Failure::bad_request(StatusCode::BAD_REQUEST, message)
            .hint("request page by page: `after` takes the sequence number of the last record of a page"));
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

/// Returns the objects that `text` names, as they are stored in records. A GPU that the driver does
/// not list is found only by its complete UUID.
fn objects(host: &HostState, text: &str) -> Result<Vec<String>, ApiError> {
    let one = |word: &str| {
        let selector: Selector = match word.parse() {
            Ok(selector) => selector,
            Err(_) => return host.named(word),
        };
        match selector {
            Selector::Uuid(uuid) if uuid.len() == WHOLE_UUID => Ok(vec![uuid]),
            // The word names another object, such as `op-1` or `config`, or is a product name.
            Selector::Model(name) if !name.contains(['*', '?']) => {
                Ok(host.named(word).unwrap_or_else(|_| vec![word.to_owned()]))
            }
            Selector::All | Selector::Indexes(..) | Selector::Uuid(_) | Selector::Pci { .. } | Selector::Model(_) => {
                host.named(word)
            }
        }
    };
    let mut found = Vec::new();
    for word in text.split(',').map(str::trim) {
        if let Some(uuid) = device(host, word) {
            found.push(sharing::short_name(&uuid, &BTreeSet::new()));
            found.push(uuid);
            continue;
        }
        for object in one(word)? {
            for target in targets(host, &object) {
                found.push(sharing::short_name(&target, &BTreeSet::new()));
                found.push(target);
            }
            found.push(object);
        }
    }
    Ok(found)
}

/// Returns the UUIDs of possible MPS targets on a GPU: the GPU and its MIG devices.
fn targets(host: &HostState, uuid: &str) -> Vec<String> {
    let Some(gpu) = host.gpu(uuid) else { return Vec::new() };
    let computes = gpu.gpu.mig.iter().flat_map(|mig| &mig.instances).flat_map(|instance| &instance.compute);
    computes.filter_map(|compute| compute.uuid.clone()).chain([uuid.to_owned()]).collect()
}

/// Returns the UUID of the MIG device that a text such as `1:2g.20gb@2` names.
fn device(host: &HostState, text: &str) -> Option<String> {
    let (gpu, device) = text.split_once(':')?;
    let (profile, start) = device.split_once('@')?;
    let (index, start): (u32, u8) = (gpu.parse().ok()?, start.parse().ok()?);
    let gpu = host.gpus.iter().find(|one| one.gpu.index == index)?;
    let mut instances = gpu.gpu.mig.iter().flat_map(|mig| &mig.instances);
    let instance = instances.find(|one| one.profile == profile && one.placement.start == start)?;
    instance.compute.first()?.uuid.clone()
}

fn shown(record: gpush_store::AuditRecord) -> AuditRecord {
    let gpush_store::AuditRecord { sequence, at, by, action, object, result, detail } = record;
    AuditRecord { sequence, at, by, action, object, result, detail }
}
