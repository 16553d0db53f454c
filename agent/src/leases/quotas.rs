//! The accounts of users, and their quotas.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, Gpu, QuotaView};
use gpush_core::lease::quota::{self, Effective, NamedId, Quota, Subject};
use gpush_host::{accounts::Account, users::Unanswered};

use super::Leases;
use crate::{operations::scheduler::HeldLeases, requests::caller::Caller};

/// What determines the quota of an account.
struct QuotaFacts {
    account: Account,
    quotas: Vec<Quota>,
    /// The ids of the users and groups that the quotas name, as far as they matter.
    ids: Vec<(Subject, NamedId)>,
    /// The groups of the user.
    gids: Vec<u32>,
    has_all_groups: bool,
}

impl QuotaFacts {
    fn user(&self) -> quota::User<'_> {
        match self.account {
            // Root has no quota, so the name service does not matter.
            Account::User(0) => quota::User::Root,
            account => {
                quota::User::Account { uid: account.user(), gids: &self.gids, has_all_groups: self.has_all_groups }
            }
        }
    }

    fn id_of(&self, subject: &Subject) -> NamedId {
        self.ids.iter().find(|(one, _)| one == subject).map_or(NamedId::Unanswered, |(_, id)| *id)
    }
}

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
    let facts = facts(leases, caller, holder).await?;
    let effective = quota::effective(&facts.quotas, facts.user(), |subject| facts.id_of(subject), gpus);
    Ok((facts.account, effective.map_err(|unknown| ApiError::from(&unknown))?))
}

async fn facts(leases: &Leases, caller: &Caller, holder: u32) -> Result<QuotaFacts, ApiError> {
    let users = &leases.handles.context.users;
    let account = match holder {
        0 if caller.viewer.is_admin() || caller.holds(0) => Account::User(0),
        // Root of a container has the uid of the host's root, but not its rights.
        0 => Account::RootContainers,
        _ => users.accounts().of(holder).await.map_err(|unanswered| unknown_account(holder, unanswered))?,
    };
    let none = QuotaFacts { account, quotas: Vec::new(), ids: Vec::new(), gids: Vec::new(), has_all_groups: true };
    if account == Account::User(0) {
        return Ok(none);
    }
    let config = leases.handles.context.state.config();
    let known: Vec<Gpu> = leases.handles.context.state.now().gpus.iter().map(|gpu| gpu.gpu.clone()).collect();
    let quotas = config.quotas(&known);
    let mut ids = Vec::new();
    for quota in &quotas {
        let id = match &quota.subject {
            Subject::User(name) => users.names().uid(name).await,
            Subject::Group(name) => users.names().group(name).await,
            Subject::Everybody => Ok(None),
        };
        ids.push((
            quota.subject.clone(),
            id.map_or(NamedId::Unanswered, |id| id.map_or(NamedId::Absent, NamedId::Known)),
        ));
        if id.is_err() {
            // Later quotas do not matter: an unknown quota never makes a later one apply.
            break;
        }
    }
    let has_groups = quotas.iter().any(|quota| matches!(quota.subject, Subject::Group(_)));
    let (listed, has_all_groups) = match account.user().filter(|_| has_groups) {
        // A process can drop a group in a user namespace. The group still counts.
        Some(uid) => match users.names().groups_of(uid).await {
            Ok(groups) => (groups.unwrap_or_default(), true),
            Err(_) => (Vec::new(), false),
        },
        None => (Vec::new(), true),
    };
    // Root of a container can choose its groups, so they do not count.
    let own = if caller.holds(holder) { caller.peer.groups.as_slice() } else { &[] };
    Ok(QuotaFacts { quotas, ids, gids: [own, &listed].concat(), has_all_groups, ..none })
}

/// Returns the quota of a user, and how much of it is used. The caller may read it.
///
/// # Errors
/// If the name service does not answer about the user, or about a holder of a lease.
pub(crate) async fn quota_view(leases: &Leases, caller: &Caller, uid: u32) -> Result<QuotaView, ApiError> {
    let host = leases.handles.context.state.now();
    let facts = facts(leases, caller, uid).await?;
    let id_of = |subject: &Subject| facts.id_of(subject);
    let effective = quota::effective(&facts.quotas, facts.user(), id_of, host.gpus.len())
        .map_err(|unknown| ApiError::from(&unknown))?;
    know_holders(leases).await?;
    let held = HeldLeases::of(leases.handles.context.users.accounts(), &host.leases).by(facts.account);
    let ignored = quota::ignored(&facts.quotas, facts.user(), id_of);
    let Effective { subject, limits } = &effective;
    Ok(QuotaView {
        uid,
        user: leases.handles.context.users.user(uid).await,
        quota: subject.as_ref().map(Subject::label),
        ignored_quotas: ignored.iter().map(Subject::label).collect(),
        allowed_kinds: limits.kinds.as_ref().map(|kinds| kinds.iter().copied().collect()),
        allowed_gpus: limits.gpus.as_ref().map(|gpus| gpus.iter().copied().collect()),
        longest_s: limits.longest_s,
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

/// Returns the error for a uid whose account is not known.
pub(super) fn unknown_account(uid: u32, unanswered: Unanswered) -> ApiError {
    ApiError::new(Code::Unavailable, format!("cannot determine the user of uid {uid}"))
        .cause(unanswered.to_string())
        .hint(format!("try again; if the error remains, check the name service: `getent passwd {uid}`"))
        .retryable()
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
