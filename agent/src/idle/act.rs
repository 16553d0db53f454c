//! Executes what the idle policy has decided about a lease.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{IdleAction, LeaseBinding, LeaseId};
use gpush_core::lease::unused::{UnusedEnd, UnusedWarning, unused_for};
use gpush_host::{
    helper::{End, Job},
    proc,
};
use gpush_store::LeaseRecord;
use gpush_usage::{idle::UnusedReport, moment::Moment};
use jiff::Timestamp;

use super::Idle;
use crate::{
    leases::{self, SeenUnused, UnusedNews},
    system::slurm_job,
    usage::Usage,
};

/// The program that cancels Slurm jobs.
const SCANCEL: &str = "/usr/bin/scancel";

/// Maximum time for `scancel`.
const SCANCEL_DEADLINE: Duration = Duration::from_secs(20);

/// What gpushd does with a lease now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum IdleAct {
    /// Tell the holder that the lease is unused. `due` is the earliest time of the action.
    Warn { notice: u32, report: UnusedReport, action: IdleAction, due: Moment, longest_keep_ms: u64 },
    /// Tell the holder that the last warning does not apply any more.
    Withdraw(UnusedEnd),
    /// Log that the lease is unused.
    Report(UnusedReport),
    /// End the lease.
    End { report: UnusedReport, ends_processes: bool },
}

/// What gpushd does with one lease, in order.
#[derive(Debug)]
pub(super) struct IdleTask {
    pub(super) lease: LeaseId,
    pub(super) of_job: bool,
    pub(super) acts: Vec<IdleAct>,
    pub(super) record: LeaseRecord,
}

/// The outcome of a task.
#[derive(Debug)]
pub(super) struct IdleOutcome {
    pub(super) lease: LeaseId,
    /// The notice that has reached the holder.
    pub(super) recorded: Option<u32>,
    /// Whether the end of the lease was refused.
    pub(super) is_refused: bool,
    /// Whether the job of the lease also runs on other nodes, so that gpushd never cancels it.
    pub(super) runs_elsewhere: bool,
}

impl Idle {
    /// Executes a task.
    pub(super) async fn execute(&self, task: IdleTask) -> IdleOutcome {
        let mut outcome = IdleOutcome { lease: task.lease, recorded: None, is_refused: false, runs_elsewhere: false };
        for act in &task.acts {
            match act {
                IdleAct::Warn { notice, report, action, due, longest_keep_ms } => {
                    let warning = UnusedWarning {
                        unused_since: Usage::timestamp(report.unused_since),
                        is_empty: report.deadline.is_empty,
                        action: *action,
                        due_at: Usage::timestamp(*due),
                        of_job: task.of_job,
                        longest_keep_s: longest_keep_ms / 1000,
                    };
                    if leases::tell_unused(&self.0.leases, task.lease, UnusedNews::Warning(warning)).await {
                        outcome.recorded = Some(*notice);
                    }
                }
                IdleAct::Withdraw(end) => {
                    leases::tell_unused(&self.0.leases, task.lease, UnusedNews::NoMore(*end)).await;
                }
                IdleAct::Report(report) => {
                    let (lease, unused) = (task.lease, words(report));
                    tracing::warn!(%lease, uid = task.record.holder.uid, "lease {lease} {unused}");
                }
                IdleAct::End { report, ends_processes } => match self.end(&task, report, *ends_processes).await {
                    UnusedLeaseEnd::Begun => {}
                    UnusedLeaseEnd::Refused => outcome.is_refused = true,
                    UnusedLeaseEnd::RunsElsewhere => {
                        (outcome.is_refused, outcome.runs_elsewhere) = (true, true);
                        let news = UnusedNews::NoMore(UnusedEnd::RunsElsewhere);
                        leases::tell_unused(&self.0.leases, task.lease, news).await;
                    }
                },
            }
        }
        outcome
    }

    /// Ends a lease, if it is still unused.
    async fn end(&self, task: &IdleTask, report: &UnusedReport, ends_processes: bool) -> UnusedLeaseEnd {
        let (lease, unused, is_empty) = (task.lease, words(report), report.deadline.is_empty);
        let Some(sampled_at) = self.0.usage.last_sample(&task.record) else { return UnusedLeaseEnd::Refused };
        let seen = SeenUnused { is_empty, sampled_at: proc::ticks(Duration::from_millis(sampled_at.monotonic_ms)) };
        tracing::warn!(%lease, uid = task.record.holder.uid, "lease {lease} {unused}, so gpushd ends it");
        if task.of_job {
            return self.cancel_job(&task.record, seen).await;
        }
        let reason = format!("the lease {unused}");
        match leases::end_unused(&self.0.leases, lease, reason, ends_processes, seen).await {
            true => UnusedLeaseEnd::Begun,
            false => UnusedLeaseEnd::Refused,
        }
    }

    /// Cancels the Slurm job of a lease. Slurm's Epilog then ends the lease.
    async fn cancel_job(&self, record: &LeaseRecord, seen: SeenUnused) -> UnusedLeaseEnd {
        let (lease, LeaseBinding::Job { job, .. }) = (record.id, &record.binding) else {
            return UnusedLeaseEnd::Refused;
        };
        let services = &self.0.context.host_services;
        let Some(extent) = slurm_job::extent(services, *job).await else { return UnusedLeaseEnd::Refused };
        if !extent.is_only_here() {
            tracing::warn!(%lease, "lease {lease}: a part of job {job} runs on other nodes, so gpushd does not cancel it");
            return UnusedLeaseEnd::RunsElsewhere;
        }
        if !leases::is_still_unused(&self.0.leases, lease, seen).await {
            return UnusedLeaseEnd::Refused;
        }
        let (operation, name) = (format!("idle-{lease}"), extent.name);
        let run = Job {
            operation: operation.clone(),
            step: format!("scancel-{job}"),
            program: SCANCEL.to_owned(),
            args: vec![name.clone()],
            env: BTreeMap::new(),
            input: None,
            deadline: SCANCEL_DEADLINE,
            routine: false,
        };
        let ended = services.helpers.run(run).await;
        services.helpers.forget(&operation);
        match ended {
            Ok(ended) if ended.end == End::Exited(0) => return UnusedLeaseEnd::Begun,
            Ok(ended) => {
                let (output, end) = (ended.output_suffix(), ended.end);
                tracing::warn!(%lease, "lease {lease}: {SCANCEL} {name} {end}{output}");
            }
            Err(error) => tracing::warn!(%lease, "lease {lease}: job {name} cannot be cancelled: {error}"),
        }
        UnusedLeaseEnd::Refused
    }
}

/// The outcome of the end of an unused lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UnusedLeaseEnd {
    /// The end has begun.
    Begun,
    /// The lease is used, kept or inactive, or the end failed.
    Refused,
    /// The job also runs on other nodes.
    RunsElsewhere,
}

/// Says how long a lease is unused: `has been unused for 4h`.
fn words(report: &UnusedReport) -> String {
    unused_for(Usage::timestamp(report.unused_since), report.deadline.is_empty, Timestamp::now())
}
