//! `gpushctl lease list` and `lease show`.

use gpush_api::{ApiError, Code, Gpu, Lease, LeaseId};
use gpush_client::{Client, LeaseSelection};
use jiff::Timestamp;

use crate::{
    args::{EndedNumber, Gpus},
    exit::{Failure, Outcome},
    output::Output,
    render::lease,
};

/// Whose leases a list has.
#[derive(Clone, Copy)]
pub(super) enum Holders<'a> {
    All,
    Caller,
    /// The user with this name or uid.
    User(&'a str),
}

/// Number of ended leases in a list whose length the user does not say.
const USUAL: usize = 20;

/// Which ended leases a list has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ended {
    /// Maximum number.
    limit: usize,
    /// Only leases that ended after this time.
    since: Option<Timestamp>,
}

impl Ended {
    /// Returns the ended leases for `--ended` and `--since`.
    pub(super) fn of(number: Option<EndedNumber>, since: Option<Timestamp>) -> Self {
        let limit = match (number, since) {
            (Some(EndedNumber::AtMost(number)), _) => number,
            (Some(EndedNumber::Usual) | None, Some(_)) => usize::MAX,
            (Some(EndedNumber::Usual), None) => USUAL,
            (None, None) => 0,
        };
        Self { limit, since }
    }
}

pub(super) async fn list(
    client: &mut Client,
    which: &Gpus,
    holders: Holders<'_>,
    job: Option<u32>,
    ended: Ended,
    out: &Output,
) -> Outcome {
    let selection = LeaseSelection { job, ended: ended.limit, since: ended.since, ..LeaseSelection::default() };
    let mut leases = match holders {
        Holders::Caller => client.leases_of(&LeaseSelection { is_mine: true, ..selection }).await?,
        Holders::All => client.leases_of(&selection).await?,
        Holders::User(user) => {
            let uid = super::uid_of(user)?;
            let mut leases = client.leases_of(&LeaseSelection { holder: Some(uid), ..selection }).await?;
            // An older gpushd returns the leases of all users.
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
    out.list(&leases, |look| match holders {
        Holders::Caller => lease::own(&leases, &gpus, look),
        Holders::All | Holders::User(_) => lease::list(&leases, &gpus, look),
    })?;
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
        // All are additional: without them, the leases are shown.
        let usage = client.usage().await.map(|usage| usage.lease_usage).unwrap_or_default();
        let all = client.leases(0).await.unwrap_or_default();
        let driver = client.version().await.ok().and_then(|version| version.driver);
        let has_memory_limits = driver.is_some_and(|driver| driver.memory_limits);
        let surroundings = lease::Surroundings { usage: &usage, leases: &all, has_memory_limits };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_without_a_number_lists_all_leases_since_then() {
        let since = Some(Timestamp::UNIX_EPOCH);
        for (number, since, limit) in [
            (None, None, 0),
            (Some(EndedNumber::Usual), None, 20),
            (Some(EndedNumber::AtMost(5)), None, 5),
            (None, since, usize::MAX),
            (Some(EndedNumber::Usual), since, usize::MAX),
            (Some(EndedNumber::AtMost(5)), since, 5),
        ] {
            assert_eq!(Ended::of(number, since), Ended { limit, since }, "{number:?} {since:?}");
        }
    }
}
