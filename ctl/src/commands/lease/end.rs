//! `gpushctl lease renew` and `gpushctl lease end`.

use gpush_api::{ApiError, Code, Gpu, Lease, LeaseId, LeaseRenewRequest, LeaseRequest, LeaseRevokeRequest, LeaseState};
use gpush_client::{Client, Error, Kind, QuotaQuery};
use jiff::Timestamp;

use super::list::concerns;
use crate::{
    args::LeaseEndArgs,
    exit::{Failure, Outcome},
    output::{ChangedLeases, Output},
    render::{appearance::count, lease},
};

pub(super) async fn renew(client: &mut Client, id: LeaseId, duration_s: u64, out: &Output) -> Outcome {
    let before = if out.json { None } else { client.lease_of(id).await.ok().and_then(|lease| lease.expires_at) };
    let renewed = client.lease_renew(id, LeaseRenewRequest { duration_s }).await?;
    out.change(true, &renewed, |look| lease::renewed(&renewed, before, look))?;
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
    let before = read_leases(client, &ids).await;
    let Some(reason) = args.reason.clone() else {
        refuse_others(client, &before).await?;
        return end_each(&ids, &before, out, async |id| client.lease_release(id).await).await;
    };
    let request = LeaseRevokeRequest { reason, end: args.kill, notice_s: args.notice, grace_s: args.grace };
    end_each(&ids, &before, out, async |id| client.lease_revoke(id, &request).await).await
}

/// Returns the leases as they are before the command ends them. Leaves out leases that cannot be read: gpushd refuses to
/// end them.
async fn read_leases(client: &mut Client, ids: &[LeaseId]) -> Vec<Lease> {
    let mut leases = Vec::new();
    for id in ids {
        leases.extend(client.lease_of(*id).await);
    }
    leases
}

/// Refuses to release leases of other users without a reason. gpushd permits this to administrators, but the holders would
/// not learn why their leases ended. If the caller is not an administrator, gpushd refuses it.
async fn refuse_others(client: &mut Client, leases: &[Lease]) -> Result<(), ApiError> {
    let caller = nix::unistd::geteuid().as_raw();
    if caller != 0 {
        return Ok(());
    }
    let others: Vec<String> = leases
        .iter()
        .filter(|lease| lease.holder.uid != caller && lease.state != LeaseState::Ended)
        // The administrator who requested a lease for a user may release it.
        .filter(|lease| lease.asked_by.as_ref().is_none_or(|by| by.uid != caller))
        .map(|lease| lease.id.to_string())
        .collect();
    // Root of a container is no administrator. Only administrators may read the quotas of all users.
    if others.is_empty() || client.quotas(QuotaQuery::All).await.is_err() {
        return Ok(());
    }
    let which = others.join(" ");
    let (belong, end) = if others.len() == 1 {
        ("belongs to another user", "its end needs")
    } else {
        ("belong to other users", "their end needs")
    };
    Err(ApiError::new(Code::BadRequest, format!("{which} {belong}, and {end} a reason"))
        .hint(format!("add the reason: `gpushctl lease end {which} --reason TEXT` (administrator)")))
}

/// Returns the open leases that `--all`, `-g` or `--user` selects.
async fn selected(client: &mut Client, args: &LeaseEndArgs) -> Result<Vec<Lease>, Failure> {
    let mut leases = if args.reason.is_some() { client.leases(0).await? } else { client.own_leases(0).await? };
    if let Some(user) = &args.user {
        let uid = super::uid_of(user)?;
        leases.retain(|lease| lease.belongs_to(uid, user));
    }
    if !args.gpus.is_empty() {
        let gpus = client.gpus(false).await?;
        let chosen = super::super::select_of(client, gpus.clone(), &args.gpus).await?;
        // A waiting request that may get another GPU does not end.
        let waits_elsewhere = |lease: &Lease| {
            lease.members.is_empty()
                && !lease.request.as_ref().is_some_and(|request| is_only_on(request, &chosen, &gpus))
        };
        leases.retain(|lease| concerns(lease, &chosen, &gpus) && !waits_elsewhere(lease));
    }
    Ok(leases)
}

/// Returns whether a request names GPUs, and all of them are among the chosen ones.
fn is_only_on(request: &LeaseRequest, chosen: &[Gpu], all: &[Gpu]) -> bool {
    if request.gpus.is_empty() {
        return false;
    }
    let Ok(named) = super::super::select(all.to_vec(), &request.gpus) else { return false };
    !named.is_empty() && named.iter().all(|gpu| chosen.iter().any(|one| one.uuid == gpu.uuid))
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
async fn end_each(
    ids: &[LeaseId],
    before: &[Lease],
    out: &Output,
    mut end: impl AsyncFnMut(LeaseId) -> Result<Lease, Error>,
) -> Outcome {
    let began = Timestamp::now();
    let (mut ended, mut errors) = (Vec::new(), Vec::new());
    for id in ids {
        match end(*id).await {
            Ok(lease) => ended.push(lease),
            Err(error) if error.kind == Kind::Answer => errors.push(ApiError::from(error)),
            Err(error) => return Err(with_ended(*error.error, &ended).into()),
        }
    }
    if errors.is_empty() {
        let changed = ended.iter().any(|lease| command_changed_lease(before, lease));
        out.change(changed, &ChangedLeases { leases: &ended }, |look| {
            ended.iter().map(|one| lease::ended(one, began, look)).collect()
        })?;
        return Ok(0);
    }
    let error = if errors.len() == 1 {
        errors.swap_remove(0)
    } else {
        ApiError::several(format!("cannot end {} of {} leases", errors.len(), ids.len()), errors)
    };
    Err(with_ended(error, &ended).into())
}

/// Adds to an error which leases have ended before it.
fn with_ended(error: ApiError, ended: &[Lease]) -> ApiError {
    if ended.is_empty() {
        return error;
    }
    let names: Vec<String> = ended.iter().map(|lease| lease.id.to_string()).collect();
    error.outcome(format!("ended: {}", names.join(", ")))
}

/// Returns whether the command has changed a lease: its state, or when its processes end.
fn command_changed_lease(before: &[Lease], now: &Lease) -> bool {
    let earlier = before.iter().find(|lease| lease.id == now.id);
    earlier.is_none_or(|earlier| {
        let was_open = matches!(earlier.state, LeaseState::Queued | LeaseState::Granting | LeaseState::Active);
        was_open || earlier.state != LeaseState::Ended && earlier.revocation != now.revocation
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::fixtures;

    /// Fault: `lease end` of a lease whose processes still run said each time that it had changed something.
    #[test]
    fn second_end_of_a_lease_changes_nothing() {
        let active = fixtures::lease::mps();
        let releasing = Lease { state: LeaseState::Releasing, ..active.clone() };
        let ended = Lease { state: LeaseState::Ended, ..active.clone() };
        for (before, now, changed) in [
            (&active, &releasing, true),
            (&releasing, &releasing, false),
            (&releasing, &ended, false),
            (&ended, &ended, false),
        ] {
            assert_eq!(
                command_changed_lease(std::slice::from_ref(before), now),
                changed,
                "{:?}",
                (before.state, now.state)
            );
        }
    }

    /// Fault: `lease end -g 6 --reason x` also revoked waiting requests that could get any GPU.
    #[test]
    fn request_that_may_get_another_gpu_is_not_only_on_the_chosen_ones() {
        let all = fixtures::mixed();
        let chosen = &all[..1];
        let request = |gpus: &[&str]| LeaseRequest {
            gpus: gpus.iter().map(|&text| text.to_owned()).collect(),
            ..LeaseRequest::default()
        };
        for (gpus, is_only) in [(&[][..], false), (&["0"], true), (&["0-1"], false), (&["all"], false)] {
            assert_eq!(is_only_on(&request(gpus), chosen, &all), is_only, "{gpus:?}");
        }
    }
}
