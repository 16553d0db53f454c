//! The leases as gpushd shows them. An inserted fault changes the responses of gpushd before the
//! test sees them.

use std::cell::RefCell;
use std::collections::BTreeSet;

use gpush_api::{ApiError, Lease, LeaseGrant, LeaseId, LeaseKind, LeaseState};
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
    /// If gpushd refuses a request, the fault grants a target that is leased in another way.
    OtherKind,
    /// The compute mode of a GPU changes after a grant.
    ComputeMode,
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

    /// Returns whether the compute mode changes after a grant.
    pub(super) fn changes_compute_mode(&self) -> bool {
        self.planted == Some(Planted::ComputeMode)
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
        let requested = body["share"]["kind"].as_str().expect("a kind");
        let is_same = |lease: &Lease| requested.starts_with(lease.kind.name());
        let invented = match self.planted {
            Some(Planted::DoubleGrant) if error.retryable => self.invent(agent, is_same),
            Some(Planted::OtherKind) => self.invent(agent, |lease| !is_same(lease)),
            _ => None,
        };
        let Some(mut lease) = invented else { return Err(error) };
        let kinds = [LeaseKind::Mig, LeaseKind::Mps, LeaseKind::Timeslice, LeaseKind::Whole];
        lease.kind = kinds.into_iter().find(|kind| requested.starts_with(kind.name())).expect("a kind");
        self.invented.borrow_mut().push(lease.clone());
        Ok(LeaseGrant {
            lease,
            environment: Vec::new(),
            warnings: Vec::new(),
            quota_notes: Vec::new(),
            binding_reason: None,
        })
    }

    /// Returns a lease that gpushd did not grant, on the target of a lease for which `is` returns true.
    fn invent(&self, agent: &Agent, is: impl Fn(&Lease) -> bool) -> Option<Lease> {
        let leases = self.open(agent);
        let known: BTreeSet<u64> = leases.iter().map(|lease| lease.id.0).collect();
        let mut lease = leases.iter().find(|lease| is(lease))?.clone();
        lease.id = LeaseId(known.last()? + 100_000);
        Some(lease)
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
