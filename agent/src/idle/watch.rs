//! The task that asks the idle policy after each sample.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gpush_api::{LeaseId, LeaseState};
use gpush_core::lease::unused::UnusedEnd;
use gpush_host::subtask;
use gpush_usage::{
    idle::{IdleAction, IdleEffect, IdleEvent, IdleMachine, UnusedReport},
    judge::UseState,
    moment::Moment,
};
use tokio::task::JoinSet;

use super::{
    Idle, Watched,
    act::{IdleAct, IdleOutcome, IdleTask},
};
use crate::{
    leases,
    usage::{ObservedLeases, Usage},
};

/// Longest pause between two observations. Without samples, a lease is soon unknown.
const PAUSE: Duration = Duration::from_secs(30);

/// Time between two attempts to deliver a notice that has not reached the holder, in ms.
const RETRY_MS: u64 = 60_000;

/// Watches the leases until gpushd stops.
pub(super) async fn run(idle: Idle) {
    let stopping = idle.0.context.stopping.clone();
    let mut samples = idle.0.usage.samples();
    let mut acting: JoinSet<IdleOutcome> = JoinSet::new();
    let mut busy = BTreeSet::new();
    loop {
        tokio::select! {
            () = stopping.cancelled() => break,
            changed = samples.changed() => if changed.is_err() { break },
            Some(outcome) = subtask::next(&mut acting), if !acting.is_empty() => {
                busy.remove(&outcome.lease);
                idle.note(&outcome);
                continue;
            }
            () = tokio::time::sleep(PAUSE) => {}
        }
        for task in idle.round(&busy).await {
            busy.insert(task.lease);
            let idle = idle.clone();
            acting.spawn(async move { idle.execute(task).await });
        }
    }
    // A revocation that has begun is recorded before gpushd exits; the outcome does not matter any more.
    while subtask::next(&mut acting).await.is_some() {}
}

impl Idle {
    /// Observes all active leases, and returns what to do. Leases in `busy` wait for the outcome of an earlier effect.
    async fn round(&self, busy: &BTreeSet<LeaseId>) -> Vec<IdleTask> {
        let ObservedLeases { host, now, leases: open } = self.0.usage.observed_leases();
        let mut seen = BTreeMap::new();
        for (lease, figures) in open {
            if lease.state.name() == LeaseState::Active {
                let subject = self.subject(&host, &lease.record, figures.begun).await;
                let observed = IdleEvent::observed(&figures, leases::is_judged_by_memory(&host, &lease.record));
                seen.insert(lease.id(), (lease, subject, observed));
            }
        }
        let mut tasks = Vec::new();
        let mut watched = self.0.watched.lock();
        watched.retain(|id, _| seen.contains_key(id));
        for (id, (lease, subject, observed)) in seen {
            let one = watched.entry(id).or_insert_with(|| Watched {
                machine: IdleMachine::new(),
                policy: subject.policy.clone(),
                terms: subject.terms,
                observed: observed.clone(),
                keep: None,
                attempt: None,
                runs_elsewhere: false,
            });
            (one.policy, one.terms, one.observed) = (subject.policy, subject.terms, observed);
            one.policy.ends_slurm_jobs &= !one.runs_elsewhere;
            if busy.contains(&id) {
                continue;
            }
            let acts = one.step(lease.keep.as_ref(), now);
            if !acts.is_empty() {
                let of_job = subject.terms.is_slurm_job;
                tasks.push(IdleTask { lease: id, of_job, acts, record: lease.record.clone() });
            }
        }
        tasks
    }

    /// Tells the machine the outcome of its effects.
    fn note(&self, outcome: &IdleOutcome) {
        let now = self.0.usage.now();
        let mut watched = self.0.watched.lock();
        let Some(one) = watched.get_mut(&outcome.lease) else { return };
        one.runs_elsewhere |= outcome.runs_elsewhere;
        if let Some(notice) = outcome.recorded {
            let _ = one.machine.step(IdleEvent::NoticeRecorded(notice), &one.policy, one.terms, now);
        }
        if outcome.is_refused {
            let _ = one.machine.step(IdleEvent::EndRefused, &one.policy, one.terms, now);
        }
    }
}

impl Watched {
    /// Tells the machine about a new keep and the present observation. Returns what to do.
    fn step(&mut self, keep: Option<&gpush_api::LeaseKeep>, now: Moment) -> Vec<IdleAct> {
        let mut effects = Vec::new();
        if let Some(keep) = self.takes_over(keep, now) {
            effects.extend(self.machine.step(IdleEvent::Kept(keep), &self.policy, self.terms, now));
        }
        effects.extend(self.machine.step(self.observed.clone(), &self.policy, self.terms, now));
        let mut acts: Vec<IdleAct> = effects.into_iter().map(|effect| self.act(&effect, now)).collect();
        if acts.is_empty() {
            acts.extend(self.repeated_notice(now));
        }
        if let Some(IdleAct::Warn { notice, .. }) = acts.last() {
            self.attempt = Some((*notice, now));
        }
        acts
    }

    fn act(&self, effect: &IdleEffect, now: Moment) -> IdleAct {
        match effect {
            IdleEffect::Warn { notice, report, action } => {
                let deadline = self.machine.outlook(&self.observed, &self.policy, self.terms, now);
                let due = deadline.map_or(report.deadline.at, |outlook| outlook.due);
                self.warning(*notice, *report, *action, due)
            }
            IdleEffect::Withdraw => IdleAct::Withdraw(self.end_of_unused_time(now)),
            IdleEffect::Report(report) => IdleAct::Report(*report),
            IdleEffect::Release(report) => IdleAct::End { report: *report, ends_processes: false },
            IdleEffect::End(report) => IdleAct::End { report: *report, ends_processes: true },
        }
    }

    fn warning(&self, notice: u32, report: UnusedReport, action: IdleAction, due: Moment) -> IdleAct {
        IdleAct::Warn { notice, report, action, due, longest_keep_ms: self.policy.max_keep_ms }
    }

    /// Returns the last notice again if it has not reached the holder for a while.
    fn repeated_notice(&self, now: Moment) -> Option<IdleAct> {
        let notice = self.machine.unrecorded_notice()?;
        let (last, at) = self.attempt?;
        if last != notice || now.ms_since(at) < RETRY_MS {
            return None;
        }
        let &IdleEvent::Observed { state, since, unused_since: Some(unused) } = &self.observed else { return None };
        let deadline = self.policy.deadline(self.terms, state, unused, since, None);
        let report = UnusedReport { unused_since: unused, deadline };
        let outlook = self.machine.outlook(&self.observed, &self.policy, self.terms, now)?;
        Some(self.warning(notice, report, outlook.action, outlook.due))
    }

    /// Returns why the last warning does not apply any more.
    fn end_of_unused_time(&self, now: Moment) -> UnusedEnd {
        if let Some(keep) = self.machine.keep(now) {
            return UnusedEnd::Kept(Usage::timestamp(keep.until));
        }
        if self.terms.is_exempt {
            return UnusedEnd::Exempt;
        }
        match &self.observed {
            IdleEvent::Observed { state: UseState::Busy, .. } => UnusedEnd::Used,
            IdleEvent::Observed { unused_since: Some(_), .. } if !self.policy.action_for(self.terms).ends_leases() => {
                UnusedEnd::NotEnded
            }
            IdleEvent::Observed { .. } | IdleEvent::NoticeRecorded(_) | IdleEvent::Kept(_) | IdleEvent::EndRefused => {
                UnusedEnd::Unknown
            }
        }
    }
}
