//! What determines the quota of a user, and the GPUs that rules let the user lease: the account, the groups of the user,
//! and the ids of the users and groups that the config names.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, Gpu};
use gpush_core::{
    config::Config,
    lease::quota::{self, Effective, NamedId, Quota, Subject},
};
use gpush_host::{accounts::Account, users::Unanswered};

use super::Leases;
use crate::requests::caller::Caller;

/// The facts about the holder of a lease.
pub(super) struct HolderFacts {
    pub(super) account: Account,
    pub(super) quotas: Vec<Quota>,
    /// The ids of the users and groups that the config names, as far as they matter.
    ids: Vec<(Subject, NamedId)>,
    /// The groups of the user.
    gids: Vec<u32>,
    has_all_groups: bool,
}

impl HolderFacts {
    /// Finds the facts. Asks the name service about each user and group of the config, until it does not answer. Then it
    /// uses only what is known.
    ///
    /// # Errors
    /// If the name service did not answer, and so the account is unknown.
    pub(super) async fn of(leases: &Leases, caller: &Caller, holder: u32) -> Result<Self, ApiError> {
        let users = &leases.handles.context.users;
        let account = match holder {
            0 if caller.viewer.is_admin() || caller.holds(0) => Account::User(0),
            // Root of a container has the uid of the host's root, but not its rights.
            0 => Account::RootContainers,
            _ => users.accounts().of(holder).await.map_err(|unanswered| unknown_account(holder, unanswered))?,
        };
        let none = Self { account, quotas: Vec::new(), ids: Vec::new(), gids: Vec::new(), has_all_groups: true };
        if account == Account::User(0) {
            return Ok(none);
        }
        let config = leases.handles.context.state.config();
        let known: Vec<Gpu> = leases.handles.context.state.now().gpus.iter().map(|gpu| gpu.gpu.clone()).collect();
        let quotas = config.quotas(&known);
        let subjects = quotas.iter().map(|quota| quota.subject.clone()).chain(permitted(&config));
        let (mut ids, mut is_answering) = (Vec::<(Subject, NamedId)>::new(), true);
        for subject in subjects {
            if ids.iter().any(|(one, _)| *one == subject) {
                continue;
            }
            let names = users.names();
            let id = match (&subject, is_answering) {
                (Subject::User(name), true) => names.uid(name).await,
                (Subject::User(name), false) => names.last_uid(name),
                (Subject::Group(name), true) => names.group(name).await,
                (Subject::Group(name), false) => names.last_group(name),
                (Subject::Everybody, _) => Ok(None),
            };
            // Do not wait for each further name.
            is_answering &= id.is_ok();
            ids.push((subject, id.map_or(NamedId::Unanswered, |id| id.map_or(NamedId::Absent, NamedId::Known))));
        }
        let has_groups = ids.iter().any(|(subject, _)| matches!(subject, Subject::Group(_)));
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
        Ok(Self { quotas, ids, gids: [own, &listed].concat(), has_all_groups, ..none })
    }

    /// Returns the facts in the form in which quotas and rules use them.
    pub(super) fn user(&self) -> quota::User<'_> {
        match self.account {
            // Root has no quota, and no rule excludes root. So the name service does not matter.
            Account::User(0) => quota::User::Root,
            account => {
                quota::User::Account { uid: account.user(), gids: &self.gids, has_all_groups: self.has_all_groups }
            }
        }
    }

    /// Returns the id of a user or group of the config.
    pub(super) fn id_of(&self, subject: &Subject) -> NamedId {
        self.ids.iter().find(|(one, _)| one == subject).map_or(NamedId::Unanswered, |(_, id)| *id)
    }

    /// Returns the effective quota on a host with `gpus` GPUs.
    ///
    /// # Errors
    /// If the name service did not answer, and so the quota is unknown.
    pub(super) fn effective(&self, gpus: usize) -> Result<Effective, ApiError> {
        let effective = quota::effective(&self.quotas, self.user(), |subject| self.id_of(subject), gpus);
        effective.map_err(|unknown| ApiError::from(&unknown))
    }
}

/// Returns the users and groups that the rules of a config permit.
fn permitted(config: &Config) -> BTreeSet<Subject> {
    config.rules.iter().filter_map(|rule| rule.access.as_ref()).flat_map(Subject::permitted).collect()
}

/// Returns the error for a uid whose account is not known.
pub(super) fn unknown_account(uid: u32, unanswered: Unanswered) -> ApiError {
    ApiError::new(Code::Unavailable, format!("cannot determine the user of uid {uid}"))
        .cause(unanswered.to_string())
        .hint(format!("try again; if the error remains, check the name service: `getent passwd {uid}`"))
        .retryable()
}
