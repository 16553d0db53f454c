//! Calls for leases.

use std::time::Duration;

use gpush_api::{
    EnteredLease, IdleAction, IdleReport, LONGEST_LEASE_S, Lease, LeaseGrant, LeaseId, LeaseKeepRequest,
    LeaseRenewRequest, LeaseRequest, LeaseRevokeRequest, LeaseState, LeaseWait, QuotaView, whole_second,
};
use jiff::Timestamp;
use serde::Serialize;

use crate::{
    client::{Client, DEFAULT_DEADLINE},
    error::Error,
};

/// Maximum number of ended leases in one answer of gpushd.
pub(crate) const PAGE: usize = 100;

/// A body without fields.
#[derive(Serialize)]
pub(crate) struct EmptyBody {}

/// Default time limit for the answer to a request for a lease. gpushd may have to wait until systemd has created the
/// scope of the lease.
const GRANTING: Duration = Duration::from_secs(40);

/// Whose quotas to return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaQuery {
    /// That of the caller.
    Caller,
    /// That of the user with this uid; for administrators.
    User(u32),
    /// Those of all users with leases, and of all users that a quota names; for administrators.
    All,
}

/// Selects leases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeaseSelection {
    /// Only the leases of the caller.
    pub is_mine: bool,
    /// Only the leases of this uid, and those of its subordinate uids.
    pub holder: Option<u32>,
    /// Only the leases of the Slurm job with this id.
    pub job: Option<u32>,
    /// Maximum number of ended leases.
    pub ended: usize,
    /// Of the ended leases, only those that ended after this time.
    pub since: Option<Timestamp>,
}

impl LeaseSelection {
    pub(crate) fn path(&self, limit: usize, before: Option<LeaseId>) -> String {
        let parameters = [
            self.is_mine.then(|| "mine=true".to_owned()),
            self.holder.map(|uid| format!("holder={uid}")),
            self.job.map(|job| format!("job={job}")),
            (limit > 0).then(|| format!("ended={limit}")),
            before.map(|before| format!("before={before}")),
        ];
        let parameters: Vec<String> = parameters.into_iter().flatten().collect();
        if parameters.is_empty() { "/v1/leases".to_owned() } else { format!("/v1/leases?{}", parameters.join("&")) }
    }

    /// Returns whether a lease ended before the selected time.
    fn is_too_old(&self, lease: &Lease) -> bool {
        self.since.zip(lease.ended_at).is_some_and(|(since, ended)| ended < since)
    }
}

impl Client {
    /// `GET /v1/quotas`. Returns the quotas, with what is left of them.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Denied`] for another user, unless the caller is an administrator.
    pub async fn quotas(&mut self, query: QuotaQuery) -> Result<Vec<QuotaView>, Error> {
        match query {
            QuotaQuery::Caller => self.get("/v1/quotas").await,
            QuotaQuery::User(uid) => self.get(&format!("/v1/quotas?uid={uid}")).await,
            QuotaQuery::All => self.get("/v1/quotas?all=true").await,
        }
    }

    /// `POST /v1/leases`. Returns when the lease is granted.
    ///
    /// If the request may wait, the time limit is the request's `wait` plus the time for one
    /// answer. When the caller drops this future, the connection closes and gpushd removes the
    /// request from the queue.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Blocked`] if the capacity is not free and the request does not wait.
    pub async fn lease(&mut self, request: &LeaseRequest) -> Result<LeaseGrant, Error> {
        let longest = match request.wait {
            LeaseWait::No => 0,
            LeaseWait::Seconds(seconds) => seconds.min(LONGEST_LEASE_S),
            LeaseWait::Unlimited => LONGEST_LEASE_S,
        };
        let answer = match self.answer_deadline() {
            DEFAULT_DEADLINE => GRANTING,
            set_by_caller => set_by_caller,
        };
        let deadline = Duration::from_secs(longest) + answer;
        self.change_within("/v1/leases", request, deadline).await
    }

    /// `GET /v1/leases`. Returns all leases that have not ended, in order of arrival, and then the
    /// last `ended` leases that have ended, latest first.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn leases(&mut self, ended: usize) -> Result<Vec<Lease>, Error> {
        self.leases_of(&LeaseSelection { ended, ..LeaseSelection::default() }).await
    }

    /// `GET /v1/leases?mine=true`. Does the same as [`Client::leases`], with the leases of the caller only. gpushd decides
    /// which these are, because a process in a user namespace does not know its uid on the host.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn own_leases(&mut self, ended: usize) -> Result<Vec<Lease>, Error> {
        self.leases_of(&LeaseSelection { is_mine: true, ended, ..LeaseSelection::default() }).await
    }

    /// `GET /v1/leases`. Returns a selection of leases: first those that have not ended, in order of arrival, and then those
    /// that have ended, latest first.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn leases_of(&mut self, selection: &LeaseSelection) -> Result<Vec<Lease>, Error> {
        let ended = selection.ended;
        let has_ended = |lease: &&Lease| lease.state == LeaseState::Ended;
        let mut all: Vec<Lease> = self.get(&selection.path(ended.min(PAGE), None)).await?;
        let mut found = all.iter().filter(has_ended).count();
        let mut is_full = found >= PAGE;
        while found < ended && is_full {
            let Some(last) = all.iter().rfind(has_ended) else { break };
            if selection.is_too_old(last) {
                break;
            }
            let path = selection.path((ended - found).min(PAGE), Some(last.id));
            let page: Vec<Lease> = self.get(&path).await?;
            (found, is_full) = (found + page.len(), page.len() == PAGE);
            all.extend(page);
        }
        all.retain(|lease| !selection.is_too_old(lease));
        Ok(all)
    }

    /// `GET /v1/leases/{id}`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn lease_of(&mut self, id: LeaseId) -> Result<Lease, Error> {
        self.get(&format!("/v1/leases/{id}")).await
    }

    /// `GET /v1/leases/{id}/environment`.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Denied`] for users other than the holder and administrators.
    pub async fn lease_environment(&mut self, id: LeaseId) -> Result<LeaseGrant, Error> {
        self.get(&format!("/v1/leases/{id}/environment")).await
    }

    /// `POST /v1/leases/{id}/enter`. Moves this process into a scope that opens the devices of the lease, if needed.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn lease_enter(&mut self, id: LeaseId) -> Result<EnteredLease, Error> {
        self.change(&format!("/v1/leases/{id}/enter"), &EmptyBody {}).await
    }

    /// `POST /v1/leases/{id}/renew`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn lease_renew(&mut self, id: LeaseId, request: LeaseRenewRequest) -> Result<Lease, Error> {
        self.change(&format!("/v1/leases/{id}/renew"), &request).await
    }

    /// `POST /v1/leases/{id}/keep`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn lease_keep(&mut self, id: LeaseId, request: &LeaseKeepRequest) -> Result<Lease, Error> {
        self.change(&format!("/v1/leases/{id}/keep"), request).await
    }

    /// `GET /v1/leases/idle`. `action` is the action that the dry run assumes; `None` for that of each lease's rule.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn idle_leases(&mut self, since: Timestamp, action: Option<IdleAction>) -> Result<IdleReport, Error> {
        let action = action.map_or_else(String::new, |action| format!("&action={}", action.name()));
        self.get(&format!("/v1/leases/idle?since={}{action}", whole_second(since))).await
    }

    /// `POST /v1/leases/{id}/release`. Returns the lease: `releasing` if any of its processes still exists, otherwise
    /// `ended`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn lease_release(&mut self, id: LeaseId) -> Result<Lease, Error> {
        self.change(&format!("/v1/leases/{id}/release"), &EmptyBody {}).await
    }

    /// `POST /v1/leases/{id}/revoke`.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Denied`] for users who are not administrators.
    pub async fn lease_revoke(&mut self, id: LeaseId, request: &LeaseRevokeRequest) -> Result<Lease, Error> {
        self.change(&format!("/v1/leases/{id}/revoke"), request).await
    }
}
