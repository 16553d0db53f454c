//! The task that asks the policies after each sample.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gpush_api::{LeaseId, LeaseState};
use gpush_host::subtask;
use gpush_usage::{
    idle::{IdleEvent, IdleMachine},
    moment::Moment,
    over_limit::{MemoryReading, OverLimitEvent},
};
use tokio::task::JoinSet;

use super::{
    LeasePolicies, PolicyName, Watched,
    act::{PolicyAct, PolicyOutcome, PolicyTask},
    over_limit::WatchedMemory,
    unused::WatchedUse,
};
use crate::{leases, usage::ObservedLeases};

/// Longest pause between two observations. Without samples, a lease is soon unknown.
const PAUSE: Duration = Duration::from_secs(30);

/// Time after which a policy begins again with a lease that it has ended and that is still active, in ms: Slurm may not
/// have carried out `scancel`.
const END_WITHOUT_EFFECT_MS: u64 = 600_000;

/// Watches the leases until gpushd stops.
pub(super) async fn run(policies: LeasePolicies) {
    let stopping = policies.0.context.stopping.clone();
    let mut samples = policies.0.usage.samples();
    let mut acting: JoinSet<PolicyOutcome> = JoinSet::new();
    let mut busy = BTreeSet::new();
    loop {
        tokio::select! {
            () = stopping.cancelled() => break,
            changed = samples.changed() => if changed.is_err() { break },
            Some(outcome) = subtask::next(&mut acting), if !acting.is_empty() => {
                busy.remove(&outcome.lease);
                policies.note(&outcome);
                continue;
            }
            () = tokio::time::sleep(PAUSE) => {}
        }
        for task in policies.round(&busy).await {
            busy.insert(task.lease);
            let policies = policies.clone();
            acting.spawn(async move { policies.execute(task).await });
        }
    }
    // A revocation that has begun is recorded before gpushd exits; the outcome does not matter any more.
    while subtask::next(&mut acting).await.is_some() {}
}

impl LeasePolicies {
    /// Observes all active leases, and returns what to do. Leases in `busy` wait for the outcome of an earlier effect.
    async fn round(&self, busy: &BTreeSet<LeaseId>) -> Vec<PolicyTask> {
        let ObservedLeases { host, now, leases: open } = self.0.usage.observed_leases();
        let mut seen = BTreeMap::new();
        for (lease, figures) in open {
            if lease.state.name() == LeaseState::Active {
                let subject = self.subject(&host, &lease.record, figures.begun).await;
                let observed = IdleEvent::observed(&figures, leases::is_judged_by_memory(&host, &lease.record));
                let memory = MemoryReading::observed(&figures);
                let memory = memory.map(|read| (leases::over_limit_policy(&host, &lease.record), read));
                seen.insert(lease.id(), (lease, subject, observed, memory));
            }
        }
        let mut tasks = Vec::new();
        let mut watched = self.0.watched.lock();
        watched.retain(|id, _| seen.contains_key(id));
        for (id, (lease, subject, observed, memory)) in seen {
            let of_job = subject.terms.is_slurm_job;
            let one = watched.entry(id).or_insert_with(|| Watched {
                usage: WatchedUse {
                    machine: IdleMachine::new(),
                    policy: subject.policy.clone(),
                    terms: subject.terms,
                    observed: observed.clone(),
                    keep: None,
                    attempt: None,
                },
                memory: None,
                ending: None,
                runs_elsewhere: false,
            });
            (one.usage.policy, one.usage.terms, one.usage.observed) = (subject.policy, subject.terms, observed);
            one.usage.policy.ends_slurm_jobs &= !one.runs_elsewhere;
            one.memory = memory.map(|(mut policy, read)| {
                policy.ends_slurm_jobs &= !one.runs_elsewhere;
                WatchedMemory::observed(one.memory.take(), policy, read)
            });
            if busy.contains(&id) {
                continue;
            }
            one.begin_again_without_effect(id, now);
            if one.ending.is_some() {
                continue;
            }
            let acts = one.step(lease.keep.as_ref(), now);
            if !acts.is_empty() {
                tasks.push(PolicyTask { lease: id, of_job, acts, record: lease.record.clone() });
            }
        }
        tasks
    }

    /// Tells the machines the outcome of their effects.
    fn note(&self, outcome: &PolicyOutcome) {
        let now = self.0.usage.now();
        let mut watched = self.0.watched.lock();
        let Some(one) = watched.get_mut(&outcome.lease) else { return };
        one.runs_elsewhere |= outcome.runs_elsewhere;
        for (policy, notice) in &outcome.recorded {
            match policy {
                PolicyName::Idle => one.usage.note(IdleEvent::NoticeRecorded(*notice), now),
                PolicyName::OverLimit => one.note_memory(OverLimitEvent::NoticeRecorded(*notice), now),
            }
        }
        one.ending = outcome.begun.map(|policy| (policy, now)).or(one.ending);
        if let Some(policy) = outcome.refused {
            one.end_refused(policy, now);
        }
    }
}

impl Watched {
    /// Passes a new keep and the present observation to the state machines. Returns what to do.
    fn step(&mut self, keep: Option<&gpush_api::LeaseKeep>, now: Moment) -> Vec<PolicyAct> {
        let mut acts = self.usage.step(keep, now);
        let ends = acts.iter().any(|act| matches!(act, PolicyAct::End(_)));
        // The lease can only end once.
        if let Some(memory) = self.memory.as_mut().filter(|_| !ends) {
            acts.extend(memory.step(now));
        }
        acts
    }

    fn end_refused(&mut self, policy: PolicyName, now: Moment) {
        match policy {
            PolicyName::Idle => self.usage.note(IdleEvent::EndRefused, now),
            PolicyName::OverLimit => self.note_memory(OverLimitEvent::EndRefused, now),
        }
    }

    /// Lets a policy begin again if the end that it has begun has had no effect.
    fn begin_again_without_effect(&mut self, lease: LeaseId, now: Moment) {
        if let Some((policy, begun)) = self.ending
            && now.ms_since(begun) >= END_WITHOUT_EFFECT_MS
        {
            self.ending = None;
            tracing::warn!(%lease, "lease {lease} is still active {} min after gpushd has begun to end it", END_WITHOUT_EFFECT_MS / 60_000);
            self.end_refused(policy, now);
        }
    }

    fn note_memory(&mut self, event: OverLimitEvent, now: Moment) {
        if let Some(memory) = &mut self.memory {
            memory.note(event, now);
        }
    }
}
