//! The leases as gpushd shows them. An inserted fault changes the responses of gpushd before the
//! test sees them.

use std::cell::RefCell;
use std::collections::BTreeSet;

use gpush_api::{ApiError, Lease, LeaseGrant, LeaseId, LeaseState};
use gpush_tests::agent::Agent;
use serde_json::{Value, json};

/// A fault that is inserted between gpushd and the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Planted {
    /// If gpushd refuses a request because the capacity is in use, the fault grants a target that
    /// already has a lease.
    DoubleGrant,
    /// The caller gets an answer to its release, but gpushd never gets the release.
    LostRelease,
    /// The fault shows a releasing lease as ended while a process still runs.
    FreedEarly,
}

/// The responses of gpushd, with the changes that the fault makes.
#[derive(Debug)]
pub(super) struct Observed {
    planted: Option<Planted>,
    /// Leases that the fault has invented.
    invented: RefCell<Vec<Lease>>,
}

impl Observed {
    pub(super) fn new(planted: Option<Planted>) -> Self {
        Self { planted, invented: RefCell::default() }
    }

    /// Returns all leases that have not ended.
    pub(super) fn open(&self, agent: &Agent) -> Vec<Lease> {
        let answer = agent.get("/v1/leases");
        assert_eq!(answer.status, 200, "{:?}", answer.error());
        let mut leases: Vec<Lease> = serde_json::from_value(answer.json()).expect("leases");
        leases.extend(self.invented.borrow().iter().cloned());
        if self.planted == Some(Planted::FreedEarly) {
            leases.retain(|lease| lease.state != LeaseState::Releasing);
        }
        leases
    }

    /// Returns a lease by id. The lease may have ended.
    pub(super) fn one(&self, agent: &Agent, id: &str) -> Result<Lease, ApiError> {
        let answer = agent.get(&format!("/v1/leases/{id}"));
        if answer.status != 200 {
            return Err(answer.error());
        }
        let mut lease: Lease = serde_json::from_value(answer.json()).expect("a lease");
        if self.planted == Some(Planted::FreedEarly) && lease.state == LeaseState::Releasing {
            lease.state = LeaseState::Ended;
        }
        Ok(lease)
    }

    pub(super) fn request(&self, agent: &Agent, body: &Value) -> Result<LeaseGrant, ApiError> {
        let answer = agent.post("/v1/leases", body);
        if answer.status == 200 {
            return Ok(serde_json::from_value(answer.json()).expect("a grant"));
        }
        let error = answer.error();
        if self.planted == Some(Planted::DoubleGrant)
            && error.retryable
            && let Some(grant) = self.invent(agent, body)
        {
            return Ok(grant);
        }
        Err(error)
    }

    /// Returns a grant that gpushd did not make, of a target that already has a lease.
    fn invent(&self, agent: &Agent, body: &Value) -> Option<LeaseGrant> {
        let leases = self.open(agent);
        let kind = &body["share"]["kind"];
        let same = |lease: &&Lease| kind.as_str().is_some_and(|kind| kind.starts_with(lease.kind.name()));
        let known: BTreeSet<u64> = leases.iter().map(|lease| lease.id.0).collect();
        let mut lease = leases.iter().find(same)?.clone();
        lease.id = LeaseId(known.last()? + 100_000);
        self.invented.borrow_mut().push(lease.clone());
        Some(LeaseGrant { lease, environment: Vec::new(), binding_reason: None, warnings: Vec::new() })
    }

    /// Releases or revokes a lease.
    pub(super) fn end(&self, agent: &Agent, id: &str, revoke: bool) -> Result<Lease, ApiError> {
        if self.planted == Some(Planted::LostRelease) && !revoke {
            let mut lease = self.one(agent, id)?;
            lease.state = LeaseState::Ended;
            return Ok(lease);
        }
        let answer = if revoke {
            agent.post(&format!("/v1/leases/{id}/revoke"), &json!({ "reason": "test" }))
        } else {
            agent.post(&format!("/v1/leases/{id}/release"), &json!({}))
        };
        if answer.status != 200 {
            return Err(answer.error());
        }
        Ok(serde_json::from_value(answer.json()).expect("a lease"))
    }
}
