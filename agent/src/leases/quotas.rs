//! The accounts of users, and their quotas.

use std::collections::BTreeSet;

use gpush_api::{ApiError, QuotaView};
use gpush_core::lease::{
    quota::{self, Effective, Subject},
    request::DefaultRequest,
};
use gpush_host::accounts::Account;

use super::{
    Leases, access,
    holder_facts::{HolderFacts, unknown_account},
};
use crate::{
    operations::scheduler::{HeldLeases, slurm_gpus},
    requests::caller::Caller,
};

/// Returns the account of a user, and the effective quota of the account.
///
/// # Errors
/// If the name service did not answer, and so the account or the quota is unknown.
pub(super) async fn quota(
    leases: &Leases,
    caller: &Caller,
    holder: u32,
    gpus: usize,
) -> Result<(Account, Effective), ApiError> {
    let facts = HolderFacts::of(leases, caller, holder).await?;
    Ok((facts.account, facts.effective(gpus)?))
}

/// Returns the quota of a user, and how much of it is used. The caller may read it.
///
/// # Errors
/// If the name service does not answer about the user, or about a holder of a lease.
pub(crate) async fn quota_view(leases: &Leases, caller: &Caller, uid: u32) -> Result<QuotaView, ApiError> {
    let host = leases.handles.context.state.now();
    let facts = HolderFacts::of(leases, caller, uid).await?;
    let id_of = |subject: &Subject| facts.id_of(subject);
    let effective = facts.effective(host.gpus.len())?;
    know_holders(leases).await?;
    let held = HeldLeases::of(leases.handles.context.users.accounts(), &host.leases).by(facts.account);
    let ignored = quota::ignored(&facts.quotas, facts.user(), id_of);
    let Effective { subject, limits, default } = &effective;
    Ok(QuotaView {
        uid,
        user: leases.handles.context.users.user(uid).await,
        quota: subject.as_ref().map(Subject::label),
        ignored_quotas: ignored.iter().map(Subject::label).collect(),
        allowed_kinds: limits.kinds.as_ref().map(|kinds| kinds.iter().copied().collect()),
        allowed_gpus: limits.gpus.as_ref().map(|gpus| gpus.iter().copied().collect()),
        closed_gpus: access::closed(&host, &facts).into_keys().collect(),
        slurm_gpus: slurm_gpus(&host).into_iter().collect(),
        longest_s: limits.longest_s,
        default_request: default.as_ref().map(DefaultRequest::text),
        limits: quota::standing(limits, &held),
    })
}

/// Returns the users who hold leases, wait for leases, or have a quota of their own. In the order of their uids.
pub(crate) async fn users_with_quotas(leases: &Leases) -> Vec<u32> {
    let (table, config) = (leases.handles.context.state.leases(), leases.handles.context.state.config());
    let mut uids: BTreeSet<u32> = table.open.values().map(|lease| lease.record.holder.uid).collect();
    for quota in config.quotas(&[]) {
        if let Subject::User(name) = &quota.subject {
            // Leave out a name that belongs to no user, and one about which the name service does not answer.
            uids.extend(leases.handles.context.users.names().uid(name).await.ok().flatten());
        }
    }
    uids.into_iter().collect()
}

/// Returns what the caller's quota names: a user, a group, or everybody. `None` for root and for the standard limits.
///
/// # Errors
/// As [`quota()`].
pub(crate) async fn quota_subject(leases: &Leases, caller: &Caller) -> Result<Option<Subject>, ApiError> {
    let gpus = leases.handles.context.state.now().gpus.len();
    quota(leases, caller, caller.uid(), gpus).await.map(|(_, quota)| quota.subject)
}

/// Looks up the accounts of all holders, so that [`crate::operations::scheduler::HeldLeases::of`] knows them. Waits only for holders
/// whose account is not known, so that the holder of many leases causes no lookups when another user requests a lease.
///
/// # Errors
/// If the name service does not answer about a holder.
pub(super) async fn know_holders(leases: &Leases) -> Result<(), ApiError> {
    let table = leases.handles.context.state.leases();
    let open = table.open.values().map(|lease| lease.record.holder.uid);
    let holders: BTreeSet<u32> = open.chain(table.reserved.values().map(|one| one.holder)).collect();
    let accounts = leases.handles.context.users.accounts();
    for uid in holders.into_iter().filter(|uid| accounts.last(*uid).is_err()) {
        accounts.of(uid).await.map_err(|unanswered| unknown_account(uid, unanswered))?;
    }
    Ok(())
}
