//! `gpushctl lease renew`, `release` and `revoke`.

use gpush_api::{ApiError, Lease, LeaseId, LeaseRenewRequest, LeaseRevokeRequest};
use gpush_client::{Client, Error, Kind};
use jiff::Timestamp;

use crate::{exit::Outcome, output::Output, render::lease};

pub(super) async fn renew(client: &mut Client, id: LeaseId, duration_s: u64, out: &Output) -> Outcome {
    let renewed = client.lease_renew(id, LeaseRenewRequest { duration_s }).await?;
    out.show(&renewed, |look| lease::renewed(&renewed, look))?;
    Ok(0)
}

pub(super) async fn release(client: &mut Client, ids: &[LeaseId], out: &Output) -> Outcome {
    end_each(ids, "release", "released", out, async |id| client.lease_release(id).await).await
}

pub(super) async fn revoke(
    client: &mut Client,
    ids: &[LeaseId],
    request: &LeaseRevokeRequest,
    out: &Output,
) -> Outcome {
    end_each(ids, "revoke", "revoked", out, async |id| client.lease_revoke(id, request).await).await
}

/// Ends leases one after the other. If one lease cannot be ended, still ends the others.
async fn end_each(
    ids: &[LeaseId],
    verb: &str,
    done: &str,
    out: &Output,
    mut end: impl AsyncFnMut(LeaseId) -> Result<Lease, Error>,
) -> Outcome {
    let began = Timestamp::now();
    let (mut ended, mut errors) = (Vec::new(), Vec::new());
    for id in ids {
        match end(*id).await {
            Ok(lease) => ended.push(lease),
            Err(error) if error.kind == Kind::Answer => errors.push(ApiError::from(error)),
            Err(error) => return Err(error.into()),
        }
    }
    if errors.is_empty() {
        out.show(&ended, |look| ended.iter().map(|one| lease::ended(one, began, look)).collect())?;
        return Ok(0);
    }
    let mut error = if errors.len() == 1 {
        errors.swap_remove(0)
    } else {
        ApiError::several(format!("cannot {verb} {} of {} leases", errors.len(), ids.len()), errors)
    };
    if !ended.is_empty() {
        let names: Vec<String> = ended.iter().map(|lease| lease.id.to_string()).collect();
        error = error.outcome(format!("{done}: {}", names.join(", ")));
    }
    Err(error.into())
}
