//! Granting shares: parts of a target, each with a ceiling for its clients.
//!
//! ```text
//! requested ─► granted by the queue ─► the daemon serves, has room, and no other user's clients ─► recorded ─► access
//!      └─────► refused: why, and what to do
//! ended: see `share_end` ─► recorded ─► access revoked, unless the user has another share
//! ```
//!
//! A share is an environment that cooperating clients keep. The pipe directory enforces who has access; nothing but the
//! daemon's own ceiling enforces how much a client takes beyond its share.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{ApiError, Code, MpsPolicy, MpsSettings, MpsShare as Shown, MpsShareRequest, MpsShareTaken, MpsUsers};
use gpush_core::sharing;
use gpush_host::proc;
use gpush_mps::daemon::Request as Do;
use gpush_store::{MpsShare, NewAudit, NewMpsShare, ProcessId};
use jiff::{SignedDuration, Timestamp};

use super::{Entry, Mps, share_end, targets::Outlook, view};
use crate::{
    caller::Caller,
    eligibility,
    idempotency::Key,
    lanes::{Ahead, Waiter, Withheld},
    state::words,
};

/// How long a request waits until an operation on its GPU has ended: most take less.
const OPERATION: Duration = Duration::from_secs(2);

/// Longest life of a share that ends by itself, seconds.
const LONGEST: u64 = 366 * 24 * 3600;

/// Takes a share of a target.
///
/// # Errors
/// When the daemon does not serve, there is no room, or another user has it.
pub(crate) async fn take(
    mps: &Mps,
    caller: &Caller,
    text: &str,
    request: MpsShareRequest,
    key: Option<Key>,
) -> Result<MpsShareTaken, ApiError> {
    let (uuid, entry) = view::find(mps, text)?;
    // Shares that have ended need no room.
    share_end::expire(mps).await;
    // One key takes one share, also when it is sent for several targets at once.
    let _key = match &key {
        Some(key) => Some(mps.handles.idempotency.lock(key).await),
        None => None,
    };
    // Before the lock, which operations need too. Until the share is recorded no operation begins on the GPU.
    let granted = mps.handles.lanes.grant(&entry.gpu_uuid, &uuid, OPERATION).await;
    let _turn = entry.turn.lock().await;
    if let Some(key) = &key
        && let Some(id) = mps.handles.idempotency.number(key).await?
    {
        let known = mps.shares_of(&uuid).into_iter().find(|share| share.id == id);
        return match known {
            Some(share) => Ok(taken(&uuid, &entry, &share)),
            None => Err(ApiError::new(Code::NotFound, format!("share s{id}, taken by this request before, has ended"))
                .hint("ask for another one")),
        };
    }
    let seen = entry.daemon.seen();
    let label = view::label(&entry, &uuid);
    if let Some(why) = Outlook::of(mps, caller.viewer).ends(&uuid, &entry) {
        return Err(view::refuse_end(&label, &entry, why));
    }
    let is_stopped = mps.record(&uuid).stopped.is_some();
    let policy = seen
        .policy
        .clone()
        .filter(|_| view::admits(&seen))
        .ok_or_else(|| view::closed(&label, &entry, &seen, is_stopped))?;
    let settings = settings(&label, &policy, &request)?;
    if let Some(memory) = entry.target.as_ref().and_then(|target| target.memory_mib) {
        sharing::fits(&settings, memory, &label)?;
    }
    // Permanent reasons for a refusal are reported before temporary ones.
    let process = request.with_pid.map(|pid| process(caller, pid)).transpose()?;
    let expires_at = request.for_s.map(until).transpose()?;
    eligibility::admits(&mps.handles.readings, caller.viewer, &entry.gpu_uuid, &label).await?;
    let _grant = granted.map_err(|withheld| not_granted(mps, &entry, &label, withheld))?;
    room(mps, caller, &label, &uuid, &entry, &policy, &settings)?;
    let by = caller.actor(mps.handles.users.user(caller.peer.uid).await);
    let uid = by.uid;
    // First: another user's clients may block this, and then nothing must be recorded.
    let before: BTreeSet<u32> = mps.shares_of(&uuid).iter().map(|share| share.by.uid).collect();
    let mut users = before.clone();
    users.insert(uid);
    entry.daemon.have(Do::Users(users)).await?;
    // It may have ended since it was checked.
    let now = entry.daemon.seen();
    if !view::admits(&now) {
        let _refused_already = entry.daemon.have(Do::Users(before)).await;
        return Err(view::closed(&label, &entry, &now, is_stopped));
    }
    let new = NewMpsShare { target: uuid.clone(), by: by.clone(), settings, process, expires_at };
    let short = entry.short.clone();
    let written = mps.handles.store.write(move |tx| {
        let share = tx.take_mps_share(new.clone())?;
        if let Some(key) = &key {
            key.keep_with(tx, share.id)?;
        }
        tx.audit(NewAudit {
            by: Some(by.clone()),
            action: "mps.share".to_owned(),
            object: format!("s{}", share.id),
            result: "taken".to_owned(),
            detail: serde_json::json!({ "target": short, "uuid": share.target, "percentage": share.settings.percentage }),
        })?;
        Ok(share)
    });
    let share = match written.await {
        Ok(share) => share,
        Err(error) => {
            let _refused_already = entry.daemon.have(Do::Users(before)).await;
            return Err(error.into());
        }
    };
    tracing::info!(mps = entry.short, uid, "share s{} of {}% was taken", share.id, share.settings.percentage);
    mps.shares().push(share.clone());
    if share.process.is_some() || share.expires_at.is_some() {
        // From now on, ended shares are checked for more often.
        mps.expiring.send_modify(|granted| *granted += 1);
    }
    Ok(taken(&uuid, &entry, &share))
}

/// Explains why no share of a target is granted now.
fn not_granted(mps: &Mps, entry: &Entry, label: &str, withheld: Withheld) -> ApiError {
    match withheld {
        Withheld::Claimed(holder) => {
            let index = entry.target.as_ref().map(|target| target.gpu);
            let index = index.or_else(|| mps.handles.state.index_of(&entry.gpu_uuid)).unwrap_or_default();
            words::changed_by(index, &entry.gpu_uuid, &holder)
        }
        Withheld::Reserved(Ahead { waiter: Waiter::Operation(id), .. }) => {
            ApiError::new(Code::Conflict, format!("{label} is not available: operation {id} waits for it"))
                .cause("the operation came first, and takes the target away")
                .hint(format!("ask again when it has ended: `gpushctl operation wait {id}`"))
                .retryable()
        }
        Withheld::Reserved(Ahead { waiter: Waiter::Share, .. }) => {
            ApiError::new(Code::Conflict, format!("{label} is not available: another request for a share came first"))
                .hint("ask again in a moment")
                .retryable()
        }
    }
}

/// Returns the settings of the share's clients: the requested ones, within the daemon's limits.
fn settings(label: &str, policy: &MpsPolicy, request: &MpsShareRequest) -> Result<MpsSettings, ApiError> {
    let ceiling = &policy.settings;
    let percentage = request.percentage.unwrap_or(ceiling.percentage);
    let bad = |what: String| Err(ApiError::new(Code::BadRequest, format!("{label}: {what}")).hint("ask for less"));
    if percentage > ceiling.percentage {
        let what =
            format!("a share of {percentage}% is more than its daemon lets a client have, {}%", ceiling.percentage);
        return bad(what);
    }
    let memory_limit_mib = request.memory_limit_mib.or(ceiling.memory_limit_mib);
    if let (Some(asked), Some(most)) = (memory_limit_mib, ceiling.memory_limit_mib)
        && asked > most
    {
        return bad(format!("a memory limit of {asked} is more than its daemon lets a client have, {most}"));
    }
    let priority = request.priority.unwrap_or(ceiling.priority);
    if priority < ceiling.priority {
        return bad(format!("priority {priority} is above that of its daemon, {}", ceiling.priority));
    }
    Ok(MpsSettings { percentage, memory_limit_mib, priority })
}

/// Refuses a share for which there is no room.
fn room(
    mps: &Mps,
    caller: &Caller,
    label: &str,
    uuid: &str,
    entry: &Entry,
    policy: &MpsPolicy,
    settings: &MpsSettings,
) -> Result<(), ApiError> {
    let shares = mps.shares_of(uuid);
    let show = format!("`gpushctl mps show {}` shows them", view::name(entry));
    let others = shares.iter().find(|share| share.by.uid != caller.peer.uid);
    if let Some(other) = others.filter(|_| policy.users == MpsUsers::One) {
        return Err(ApiError::new(Code::Conflict, format!("{label} is in use by {}", words::actor(&other.by)))
            .cause("its MPS daemon serves one user at a time: another one's clients would hang until the first one's have ended")
            .hint(format!("ask again when they have given their shares back; {show}"))
            .retryable());
    }
    if shares.len() >= policy.max_clients as usize {
        return Err(ApiError::new(
            Code::Conflict,
            format!("{label} has {} shares, as many as it may have clients", shares.len()),
        )
        .hint(format!("give one back: `gpushctl mps release SHARE`; {show}"))
        .retryable());
    }
    let given: u32 = shares.iter().map(|share| u32::from(share.settings.percentage.tenths())).sum();
    let most = policy.shares_percent.saturating_mul(10);
    if given + u32::from(settings.percentage.tenths()) > most {
        let percent = |tenths: u32| format!("{}%", f64::from(tenths) / 10.0);
        return Err(ApiError::new(
            Code::Conflict,
            format!(
                "{label} has {} of {} left, less than {}%",
                percent(most.saturating_sub(given)),
                percent(most),
                settings.percentage
            ),
        )
        .cause(format!("{} shares have {}", shares.len(), percent(given)))
        .hint(if given < most {
            format!("ask for less, or when one was given back; {show}")
        } else {
            format!("ask again when one was given back; {show}")
        })
        .retryable());
    }
    Ok(())
}

/// Finds the process with which a share is to end. A caller cannot tell a process of another user from one that does
/// not exist.
///
/// # Errors
/// When the process is not the caller's, or does not exist.
fn process(caller: &Caller, pid: u32) -> Result<ProcessId, ApiError> {
    let bad = |why: &str| {
        Err(ApiError::new(Code::BadRequest, format!("a share can't end with process {pid}: {why}"))
            .hint("name a process of yours that lasts as long as the share is needed, or a time"))
    };
    let pid = match proc::local_pid(caller.peer.pid, pid) {
        Ok(pid) => pid,
        Err(why) => return bad(why),
    };
    match (proc::start(pid), proc::owner(pid)) {
        (Some(start), Some(uid)) if caller.viewer.is_admin() || uid == caller.peer.uid => Ok(ProcessId { pid, start }),
        (_, _) if caller.viewer.is_admin() => bad("it does not exist"),
        (_, _) => bad("you have no such process"),
    }
}

fn until(seconds: u64) -> Result<Timestamp, ApiError> {
    let bad = || ApiError::new(Code::BadRequest, format!("a share can stand for 1 to {LONGEST} s, not {seconds}"));
    if !(1..=LONGEST).contains(&seconds) {
        return Err(bad());
    }
    let span = SignedDuration::from_secs(i64::try_from(seconds).map_err(|_| bad())?);
    Timestamp::now().checked_add(span).map_err(|_| bad())
}

/// Returns a share as it is granted.
fn taken(uuid: &str, entry: &Entry, share: &MpsShare) -> MpsShareTaken {
    let seen = entry.daemon.seen();
    let pipe = seen.pipe.map(|pipe| pipe.display().to_string()).unwrap_or_default();
    let MpsSettings { percentage, memory_limit_mib, priority } = &share.settings;
    let mut environment = vec![
        ("CUDA_MPS_PIPE_DIRECTORY".to_owned(), pipe),
        // By UUID: the daemon sees one device and calls it 0, whatever its index is.
        ("CUDA_VISIBLE_DEVICES".to_owned(), uuid.to_owned()),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".to_owned(), percentage.to_string()),
    ];
    if let Some(limit) = memory_limit_mib {
        environment.push(("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT".to_owned(), format!("0={limit}")));
    }
    environment.push(("CUDA_MPS_CLIENT_PRIORITY".to_owned(), priority.number().to_string()));
    environment.push((view::SHARE_VARIABLE.to_owned(), format!("s{}", share.id)));
    MpsShareTaken { share: shown(share, &entry.short), environment }
}

/// A share as the API shows it.
pub(super) fn shown(share: &MpsShare, short: &str) -> Shown {
    Shown {
        id: format!("s{}", share.id),
        target: short.to_owned(),
        by: share.by.clone(),
        settings: share.settings.clone(),
        created_at: share.created_at,
        with_pid: share.process.map(|process| process.pid),
        expires_at: share.expires_at,
    }
}

#[cfg(test)]
mod tests {
    use gpush_host::peer::Peer;

    use super::*;
    use crate::caller::Viewer;

    #[test]
    fn other_users_process_looks_like_no_process() {
        let own = std::process::id();
        let peer = Peer { uid: 4_000_000, pid: Some(own), groups: Vec::new(), is_on_this_host: true };
        let caller = Caller { peer, viewer: Viewer::User(4_000_000) };
        // Another user's process, and a pid that no kernel gives out.
        let refused = [own, u32::MAX / 2].map(|pid| {
            let error = process(&caller, pid).unwrap_err();
            (error.code, error.message.replace(&pid.to_string(), "PID"))
        });
        assert_eq!(refused[0], refused[1]);
        let admin = Caller { viewer: Viewer::Admin, ..caller };
        assert_eq!(process(&admin, own).unwrap().pid, own);
    }
}
