//! `/v1/audit`: who changed what, for administrators.

use std::collections::HashMap;

use axum::{Router, extract::State, http::StatusCode, response::Response, routing::get};
use gpush_api::{ApiError, AuditRecord, Gpu, GpuIndex, GpuUuid, TargetUuid};
use gpush_core::selector::Selector;
use gpush_store::{AuditQuery, Store};
use jiff::Timestamp;
use serde::Deserialize;

use super::{
    HttpHandles,
    admin::{Admin, ReadAudit},
    extract::Parameters,
    failure::Failure,
    response_limiter::ResponseLimiter,
};
use crate::{
    serve::authorization::Authorization,
    state::{self, HostState},
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    Router::new().route("/v1/audit", get(list))
}

/// Length of a complete GPU UUID.
const WHOLE_UUID: usize = "GPU-00000000-0000-0000-0000-000000000000".len();

/// Default and maximum number of records in one response.
const PAGE: (usize, usize) = (100, 1000);

/// Parameters of `GET /v1/audit`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct AuditParameters {
    /// Only records after this sequence number, oldest first. 0 starts with the oldest record. For
    /// the next page, use the `sequence` of the last record. Without `after`, the answer has the
    /// latest records.
    after: Option<u64>,
    /// Maximum number of records, 1 to 1000; 100 by default.
    limit: Option<usize>,
    /// Only records about these objects, separated by commas: operations, leases, MIG devices (`0:1g.10gb@2` or a
    /// UUID), MPS targets, users, `config`, `host`, or GPUs (`GPU 4` or a selector). A GPU includes its operations,
    /// resets, leases and MPS targets; a MIG device includes the operations of its GPU.
    object: Option<String>,
    /// Only records made at this time or later, such as `2026-01-02T03:04:05Z`.
    #[cfg_attr(test, param(value_type = Option<String>, format = DateTime))]
    since: Option<Timestamp>,
}

/// Lists records of the audit trail, oldest first. For administrators.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/audit", operation_id = "listAudit", tag = "audit", params(AuditParameters),
    responses((status = 200, description = "The answer", body = Vec<AuditRecord>), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn list(
    State(store): State<Store>,
    State(state): State<state::State>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    Admin { caller, .. }: Admin<ReadAudit>,
    Parameters(parameters): Parameters<AuditParameters>,
) -> Result<Response, Failure> {
    let limit = parameters.limit.unwrap_or(PAGE.0);
    if !(1..=PAGE.1).contains(&limit) {
        let message = format!("`limit` must be 1 to {} records, not {limit}", PAGE.1);
        return Err(Failure::bad_request(StatusCode::BAD_REQUEST, message)
            .hint("request page by page: set `after` to the sequence number of the last record of the previous page"));
    }
    let AuditParameters { after, object, since, .. } = parameters;
    let Objects { names, operations_of } =
        object.map(|text| objects(&state.now(), &text)).transpose()?.unwrap_or_default();
    let query =
        AuditQuery { after: after.unwrap_or(0), limit, latest: after.is_none(), objects: names, operations_of, since };
    let list = async move {
        let records = store.read(move |view| view.audit(&query)).await.map_err(ApiError::from)?;
        let unnamed = records.iter().filter_map(|record| record.by.as_ref()).filter(|by| by.user.is_none());
        let owners = authorization.owners(unnamed.map(|by| by.uid).collect()).await;
        Ok::<Vec<AuditRecord>, Failure>(records.into_iter().map(|record| shown(record, &owners)).collect())
    };
    limiter.answer(&caller, StatusCode::OK, list).await
}

/// The objects that the parameter `object` names, in the form in which audit records store them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Objects {
    names: Vec<String>,
    /// UUIDs of the GPUs of the requested MIG devices. gpushd includes the operations on these GPUs, because operations
    /// create and destroy the devices.
    operations_of: Vec<String>,
}

/// Returns the objects that `text` names. If the driver does not list a GPU or MIG device, only its complete UUID finds
/// it.
fn objects(host: &HostState, text: &str) -> Result<Objects, ApiError> {
    let mut found = Objects::default();
    for word in text.split(',').map(str::trim) {
        if let Some((gpu, device)) = device(host, word) {
            found.names.push(device);
            found.operations_of.extend(gpu);
        } else {
            found.names.extend(named(host, word)?);
        }
    }
    Ok(found)
}

/// Returns the UUIDs of the GPUs that `word` names. If `word` names another object, returns `word` itself.
fn named(host: &HostState, word: &str) -> Result<Vec<String>, ApiError> {
    // Accept `GPU 4` in addition to `4`, because `gpushctl audit` prints `GPU 4`.
    let word = word.strip_prefix("GPU ").map_or(word, str::trim);
    let gpus = |word: &str| Ok(host.named(word)?.iter().map(GpuUuid::to_string).collect());
    let selector: Selector = match word.parse() {
        Ok(selector) => selector,
        Err(_) => return gpus(word),
    };
    match selector {
        Selector::Uuid(uuid) if uuid.len() == WHOLE_UUID => Ok(vec![uuid]),
        // Although `word` looks like a product name, it may name another object, such as `op-1` or `config`.
        Selector::Model(name) if !name.contains(['*', '?']) => Ok(gpus(word).unwrap_or_else(|_| vec![word.to_owned()])),
        Selector::All
        | Selector::Indexes(..)
        | Selector::Uuid(_)
        | Selector::Pci { .. }
        | Selector::DeviceId(_)
        | Selector::Model(_) => gpus(word),
    }
}

/// Finds the MIG device that a text names, such as `1:2g.20gb@2`, `MIG-…` or the beginning of the UUID. Returns the
/// UUID of the device, and the UUID of its GPU if the driver lists the device.
fn device(host: &HostState, text: &str) -> Option<(Option<String>, String)> {
    let gpus = || host.gpus.iter().map(|one| &one.gpu);
    let devices = |gpu: &Gpu| -> Vec<TargetUuid> {
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).flat_map(|instance| &instance.compute);
        instances.filter_map(|compute| compute.uuid.clone()).collect()
    };
    if text.starts_with("MIG-") {
        let mut known = gpus().flat_map(|gpu| devices(gpu).into_iter().map(|device| (gpu.uuid.clone(), device)));
        let found = known.find(|(_, device)| device.as_str().starts_with(text));
        return Some(
            found.map_or_else(|| (None, text.to_owned()), |(gpu, device)| (Some(gpu.to_string()), device.to_string())),
        );
    }
    let (gpu, device) = text.split_once(':')?;
    let (profile, start) = device.split_once('@')?;
    let (index, start): (GpuIndex, u8) = (gpu.parse().ok()?, start.parse().ok()?);
    let gpu = gpus().find(|gpu| gpu.index == index)?;
    let mut instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let instance = instances.find(|one| one.profile == profile && one.placement.start == start)?;
    Some((Some(gpu.uuid.to_string()), instance.compute.first()?.uuid.clone()?.to_string()))
}

/// Returns a record for a response. `owners` has the owners of subordinate uids.
fn shown(record: gpush_store::AuditRecord, owners: &HashMap<u32, String>) -> AuditRecord {
    let gpush_store::AuditRecord { sequence, at, by, action, object, result, detail } = record;
    let unnamed = by.as_ref().filter(|by| by.user.is_none());
    let account = unnamed.and_then(|by| owners.get(&by.uid)).cloned();
    AuditRecord { sequence, at, by, account, action, object, result, detail }
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(list))]
pub(super) struct AuditPaths;
