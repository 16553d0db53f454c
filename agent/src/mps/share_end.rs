//! The end of shares: released, with their process, at their time, or with their target.
//!
//! An end is recorded first. Then the user's access is revoked, unless the user has another share of the target.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use gpush_api::{ApiError, Code, MpsShare as Shown};
use gpush_host::proc;
use gpush_mps::daemon::Request as Do;
use gpush_store::{MpsShare, NewAudit, StoreError};
use jiff::Timestamp;

use super::{Mps, shares::shown};
use crate::caller::Caller;

/// Releases a share on request. Its clients continue, without a share.
///
/// # Errors
/// When there is none of that id, or it is another user's.
pub(crate) async fn end(mps: &Mps, caller: &Caller, id: &str) -> Result<Shown, ApiError> {
    let known = id.strip_prefix('s').filter(|number| number.bytes().all(|digit| digit.is_ascii_digit()));
    let known = known.and_then(|number| number.parse::<u64>().ok());
    let Some(share) = known.and_then(|id| find(mps, id)).filter(|share| caller.viewer.may_see(Some(share.by.uid)))
    else {
        return Err(no_share(id));
    };
    let entry = mps.entries().get(&share.target).cloned();
    let turn = entry.as_ref().map(|entry| Arc::clone(&entry.turn)).unwrap_or_default();
    let _turn = turn.lock().await;
    // It may have ended by itself meanwhile.
    let share = find(mps, share.id).ok_or_else(|| no_share(id))?;
    let by = caller.actor(mps.handles.users.user(caller.peer.uid).await);
    drop_share(mps, &share, Some(by), "given back").await?;
    Ok(shown(&share, &entry.map_or_else(|| share.target.clone(), |entry| entry.short)))
}

fn find(mps: &Mps, id: u64) -> Option<MpsShare> {
    mps.shares().iter().find(|share| share.id == id).cloned()
}

fn no_share(id: &str) -> ApiError {
    ApiError::new(Code::NotFound, format!("there is no share {id:?} of yours"))
        .hint("`gpushctl mps show TARGET` shows them; one that has ended is gone")
}

async fn drop_share(
    mps: &Mps,
    share: &MpsShare,
    by: Option<gpush_api::Actor>,
    why: &'static str,
) -> Result<(), ApiError> {
    record_ends(mps, vec![(share.clone(), why)], by).await?;
    forget(mps, share, why).await
}

/// Records the ends of shares, all in one transaction.
async fn record_ends(
    mps: &Mps,
    ended: Vec<(MpsShare, &'static str)>,
    by: Option<gpush_api::Actor>,
) -> Result<(), StoreError> {
    let written = mps.handles.store.write_ending(move |tx| {
        ended.iter().try_for_each(|(share, why)| {
            tx.end_mps_share(share.id)?;
            tx.audit(NewAudit {
                by: by.clone(),
                action: "mps.share".to_owned(),
                object: format!("s{}", share.id),
                result: (*why).to_owned(),
                detail: serde_json::json!({ "uuid": share.target, "uid": share.by.uid }),
            })
            .map(|_| ())
        })
    });
    written.await
}

/// Forgets a share whose end is recorded, and revokes the access of its user.
async fn forget(mps: &Mps, share: &MpsShare, why: &'static str) -> Result<(), ApiError> {
    let (id, uid) = (share.id, share.by.uid);
    mps.shares().retain(|one| one.id != id);
    tracing::info!(uid, "share s{id} ended: {why}");
    let entry = mps.entries().get(&share.target).cloned();
    if let Some(entry) = entry {
        let users = mps.shares_of(&share.target).iter().map(|one| one.by.uid).collect();
        entry.daemon.have(Do::Users(users)).await?;
    }
    Ok(())
}

/// Ends all shares of a target that is none any more.
pub(super) async fn end_all_of(mps: &Mps, uuid: &str) {
    for share in mps.shares_of(uuid) {
        if let Err(error) = drop_share(mps, &share, None, "its target is not shared any more").await {
            tracing::error!("share s{} can't be ended: {error}", share.id);
        }
    }
}

/// Whether there are shares that end by themselves.
pub(super) fn end_by_themselves(mps: &Mps) -> bool {
    mps.shares().iter().any(|share| share.process.is_some() || share.expires_at.is_some())
}

/// Ends the shares whose process has ended or that have expired. Shares of targets whose lock is taken end at the next
/// check. Returns the UUIDs of the GPUs of the ended shares.
pub(super) async fn expire(mps: &Mps) -> BTreeSet<String> {
    let now = Timestamp::now();
    let over = |share: &MpsShare| {
        let process = share.process.is_some_and(|one| proc::start(one.pid) != Some(one.start));
        let time = share.expires_at.is_some_and(|at| at <= now);
        match (process, time) {
            (true, _) => Some("its process ended"),
            (false, true) => Some("its time came"),
            (false, false) => None,
        }
    };
    let ended: Vec<_> = mps.shares().iter().filter_map(|share| Some((share.clone(), over(share)?))).collect();
    // One lock a target, held until all is recorded: two shares of it may have ended.
    let mut turns = BTreeMap::new();
    for target in ended.iter().map(|(share, _)| &share.target) {
        let entry = mps.entries().get(target).cloned();
        // A check does not wait for those who change the shares of a target.
        if let Ok(turn) = entry.map(|entry| entry.turn).unwrap_or_default().try_lock_owned() {
            turns.entry(target.clone()).or_insert(turn);
        }
    }
    // It may have been released meanwhile.
    let ended: Vec<_> = ended
        .into_iter()
        .filter(|(share, _)| turns.contains_key(&share.target) && find(mps, share.id).is_some())
        .collect();
    if ended.is_empty() {
        return BTreeSet::new();
    }
    let recorded = record_ends(mps, ended.clone(), None).await;
    mps.expiry.report(recorded.as_ref().err(), ended.len());
    if recorded.is_err() {
        return BTreeSet::new();
    }
    let targets: Vec<String> = ended.iter().map(|(share, _)| share.target.clone()).collect();
    for (share, why) in ended {
        if let Err(error) = forget(mps, &share, why).await {
            tracing::error!("cannot revoke the access of the user of share s{}: {error}", share.id);
        }
    }
    let entries = mps.entries();
    targets.iter().filter_map(|target| Some(entries.get(target)?.gpu_uuid.clone())).collect()
}

/// Whether the ends of shares can be recorded; logged when that changes.
#[derive(Debug, Default)]
pub(super) struct Expiry(Mutex<Option<String>>);

impl Expiry {
    /// Takes what came of recording the ends of `count` shares. Returns whether it was logged.
    fn report(&self, error: Option<&StoreError>, count: usize) -> bool {
        let mut failing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let error = error.map(ToString::to_string);
        if *failing == error {
            return false;
        }
        match &error {
            Some(error) => tracing::error!("cannot record that {count} shares have ended, retrying: {error}"),
            None => tracing::info!("the ends of shares can be recorded again"),
        }
        *failing = error;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_expiry_is_logged_once_per_change() {
        let expiry = Expiry::default();
        let full = StoreError::Full { path: "/var/lib/gpush".into() };
        let logged = [None, Some(&full), Some(&full), Some(&full), Some(&StoreError::Closed), None, None]
            .map(|error| expiry.report(error, 160));
        assert_eq!(logged, [false, true, false, false, true, true, false]);
    }
}
