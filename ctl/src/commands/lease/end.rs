//! `gpushctl lease renew`, `release` and `revoke`.

use gpush_api::{ApiError, LeaseId, LeaseRenewRequest, LeaseRevokeRequest};
use gpush_client::{Client, Kind};

use crate::{exit::Outcome, output::Output, render::lease};

pub(super) async fn renew(client: &mut Client, id: LeaseId, duration_s: u64, out: &Output) -> Outcome {
    let renewed = client.lease_renew(id, LeaseRenewRequest { duration_s }).await?;
    out.show(&renewed, |look| lease::renewed(&renewed, look))?;
    Ok(0)
}

pub(super) async fn release(client: &mut Client, ids: &[LeaseId], out: &Output) -> Outcome {
    let (mut released, mut errors) = (Vec::new(), Vec::new());
    // If one lease cannot be released, still release the others.
    for id in ids {
        match client.lease_release(*id).await {
            Ok(lease) => released.push(lease),
            Err(error) if error.kind == Kind::Answer => errors.push(ApiError::from(error)),
            Err(error) => return Err(error.into()),
        }
    }
    if errors.is_empty() {
        out.show(&released, |look| released.iter().map(|one| lease::ended(one, look)).collect())?;
        return Ok(0);
    }
    let mut error = if errors.len() == 1 {
        errors.swap_remove(0)
    } else {
        ApiError::several(format!("cannot release {} of {} leases", errors.len(), ids.len()), errors)
    };
    if !released.is_empty() {
        let done: Vec<String> = released.iter().map(|lease| lease.id.to_string()).collect();
        error = error.outcome(format!("released: {}", done.join(", ")));
    }
    Err(error.into())
}

pub(super) async fn revoke(client: &mut Client, id: LeaseId, request: &LeaseRevokeRequest, out: &Output) -> Outcome {
    let revoked = client.lease_revoke(id, request).await?;
    out.show(&revoked, |look| lease::ended(&revoked, look))?;
    Ok(0)
}
