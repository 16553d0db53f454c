//! `gpushctl lease renew` and `gpushctl lease end`.

use gpush_api::{ApiError, Lease, LeaseId, LeaseRenewRequest, LeaseRevokeRequest};
use gpush_client::{Client, Error, Kind};
use jiff::Timestamp;

use super::list::concerns;
use crate::{
    args::LeaseEndArgs,
    exit::{Failure, Outcome},
    output::{ChangedLeases, Output},
    render::{appearance::count, lease},
};

pub(super) async fn renew(client: &mut Client, id: LeaseId, duration_s: u64, out: &Output) -> Outcome {
    let renewed = client.lease_renew(id, LeaseRenewRequest { duration_s }).await?;
    out.change(true, &renewed, |look| lease::renewed(&renewed, look))?;
    Ok(0)
}

/// Ends the leases that the command line names or selects. Without a reason, releases leases of the caller; with a reason,
/// revokes leases of any user.
pub(super) async fn end(client: &mut Client, args: &LeaseEndArgs, out: &Output) -> Outcome {
    let ids = if args.leases.is_empty() {
        let leases = selected(client, args).await?;
        if leases.is_empty() {
            return nothing_to_end(args, out);
        }
        if !confirmed(client, args, &leases, out).await? {
            out.remark("No lease was ended.\n");
            return Ok(1);
        }
        leases.iter().map(|lease| lease.id).collect()
    } else {
        args.leases.clone()
    };
    let Some(reason) = args.reason.clone() else {
        return end_each(&ids, out, async |id| client.lease_release(id).await).await;
    };
    let request = LeaseRevokeRequest { reason, end: args.kill, notice_s: args.notice, grace_s: args.grace };
    end_each(&ids, out, async |id| client.lease_revoke(id, &request).await).await
}

/// Returns the open leases that `--all`, `-g` or `--user` selects.
async fn selected(client: &mut Client, args: &LeaseEndArgs) -> Result<Vec<Lease>, Failure> {
    let mut leases = if args.reason.is_some() { client.leases(0).await? } else { client.own_leases(0).await? };
    if let Some(user) = &args.user {
        let uid = super::uid_of(user)?;
        leases.retain(|lease| lease.holder.uid == uid || lease.account.as_ref() == Some(user));
    }
    if !args.gpus.is_empty() {
        let gpus = client.gpus(false).await?;
        let chosen = super::super::select_of(client, gpus.clone(), &args.gpus).await?;
        leases.retain(|lease| concerns(lease, &chosen, &gpus));
    }
    Ok(leases)
}

/// Says that no lease is selected. This is not an error, because the leases have the requested state.
fn nothing_to_end(args: &LeaseEndArgs, out: &Output) -> Outcome {
    let whose = match (&args.user, args.reason.is_some()) {
        (Some(user), _) => format!("{} holds no lease", out.look.clean(user)),
        (None, true) => "no user holds a lease".to_owned(),
        (None, false) => "you hold no lease".to_owned(),
    };
    let here = if args.gpus.is_empty() { "" } else { " there" };
    out.change(false, &ChangedLeases { leases: &[] }, |_| format!("Nothing to end: {whose}{here}.\n"))?;
    Ok(0)
}

/// On a terminal, shows the selected leases of all users and asks whether to end them.
async fn confirmed(client: &mut Client, args: &LeaseEndArgs, leases: &[Lease], out: &Output) -> Result<bool, Failure> {
    if args.reason.is_none() || args.yes || !out.can_ask() {
        return Ok(true);
    }
    let gpus = super::gpus(client).await;
    out.text(lease::list(leases, &gpus, &out.look).text())?;
    let number = count(leases.len(), "lease");
    let processes = if args.kill { " and the processes" } else { "" };
    out.confirmed(&format!("This ends {number}{processes}. Continue?"))
}

/// Ends leases one after the other. If one lease cannot be ended, still ends the others.
async fn end_each(ids: &[LeaseId], out: &Output, mut end: impl AsyncFnMut(LeaseId) -> Result<Lease, Error>) -> Outcome {
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
        // Times of gpushd have whole seconds.
        let is_new = |lease: &Lease| lease.ended_at.is_none_or(|at| at.as_second() >= began.as_second());
        let changed = ended.iter().any(is_new);
        out.change(changed, &ChangedLeases { leases: &ended }, |look| {
            ended.iter().map(|one| lease::ended(one, began, look)).collect()
        })?;
        return Ok(0);
    }
    let mut error = if errors.len() == 1 {
        errors.swap_remove(0)
    } else {
        ApiError::several(format!("cannot end {} of {} leases", errors.len(), ids.len()), errors)
    };
    if !ended.is_empty() {
        let names: Vec<String> = ended.iter().map(|lease| lease.id.to_string()).collect();
        error = error.outcome(format!("ended: {}", names.join(", ")));
    }
    Err(error.into())
}
