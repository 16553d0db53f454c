//! `gpushctl lease list` and `lease show`.

use gpush_api::{ApiError, Code, Gpu, Lease, LeaseId};
use gpush_client::Client;

use crate::{
    args::Gpus,
    exit::{Failure, Outcome},
    output::Output,
    render::lease,
};

/// Whose leases a list has.
pub(super) enum Holders<'a> {
    All,
    Caller,
    /// The user with this name or uid.
    User(&'a str),
}

pub(super) async fn list(
    client: &mut Client,
    which: &Gpus,
    holders: Holders<'_>,
    ended: usize,
    out: &Output,
) -> Outcome {
    let mut leases = match holders {
        Holders::Caller => client.own_leases(ended).await?,
        Holders::All => client.leases(ended).await?,
        Holders::User(user) => {
            let uid = super::uid_of(user)?;
            let mut leases = client.leases(ended).await?;
            leases.retain(|lease| lease.belongs_to(uid, user));
            leases
        }
    };
    let selectors = which.selectors();
    let gpus = if selectors.is_empty() {
        super::gpus(client).await
    } else {
        let gpus = client.gpus(false).await?;
        let chosen = super::super::select_of(client, gpus.clone(), &selectors).await?;
        leases.retain(|lease| concerns(lease, &chosen, &gpus));
        gpus
    };
    out.list(&leases, |look| lease::list(&leases, &gpus, look))?;
    Ok(0)
}

/// Returns whether a lease has a share of a GPU in `chosen`, or waits for such a share.
pub(super) fn concerns(lease: &Lease, chosen: &[Gpu], all: &[Gpu]) -> bool {
    if !lease.members.is_empty() {
        return lease.members.iter().any(|member| chosen.iter().any(|gpu| gpu.uuid == member.gpu_uuid));
    }
    // gpushd does not show the requests of other users. A lease without a visible request may wait
    // for any GPU.
    let wanted = lease.request.as_ref().map(|request| request.gpus.as_slice()).unwrap_or_default();
    match super::super::select(all.to_vec(), wanted) {
        Ok(wanted) => wanted.iter().any(|gpu| chosen.iter().any(|one| one.uuid == gpu.uuid)),
        Err(_) => true,
    }
}

pub(super) async fn show(client: &mut Client, ids: &[LeaseId], out: &Output) -> Outcome {
    let leases = if ids.is_empty() { own_leases(client).await? } else { named(client, ids).await? };
    let gpus = super::gpus(client).await;
    if let ([lease], true) = (leases.as_slice(), out.json) {
        out.document(lease)?;
    } else {
        // Both are additional: without them, the leases are shown.
        let usage = client.usage().await.map(|usage| usage.lease_usage).unwrap_or_default();
        let all = client.leases(0).await.unwrap_or_default();
        let surroundings = lease::Surroundings { usage: &usage, leases: &all };
        out.list(&leases, |look| lease::show(&leases, &gpus, &surroundings, look))?;
    }
    Ok(0)
}

async fn own_leases(client: &mut Client) -> Result<Vec<Lease>, Failure> {
    let leases = client.own_leases(0).await?;
    if leases.is_empty() {
        let error = ApiError::new(Code::NotFound, "you hold no lease");
        return Err(error.hint("list all leases with `gpushctl lease list`").into());
    }
    Ok(leases)
}

async fn named(client: &mut Client, ids: &[LeaseId]) -> Result<Vec<Lease>, Failure> {
    let mut leases = Vec::new();
    for id in ids {
        leases.push(client.lease_of(*id).await?);
    }
    Ok(leases)
}
