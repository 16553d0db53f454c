//! Executes what the idle policy has decided about a lease.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{IdleAction, LeaseBinding, LeaseId};
use gpush_core::lease::unused::{UnusedEnd, UnusedWarning, unused_for};
use gpush_host::helper::{End, Job};
use gpush_store::LeaseRecord;
use gpush_usage::{idle::UnusedReport, moment::Moment};
use jiff::Timestamp;

use super::Idle;
use crate::{
    leases::{self, UnusedNews},
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
    Warn { notice: u32, report: UnusedReport, action: IdleAction, due: Moment },
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
}

impl Idle {
    /// Executes a task.
    pub(super) async fn execute(&self, task: IdleTask) -> IdleOutcome {
        let mut outcome = IdleOutcome { lease: task.lease, recorded: None, is_refused: false };
        for act in &task.acts {
            match act {
                IdleAct::Warn { notice, report, action, due } => {
                    let warning = UnusedWarning {
                        unused_since: Usage::timestamp(report.unused_since),
                        is_empty: report.deadline.is_empty,
                        action: *action,
                        due_at: Usage::timestamp(*due),
                        of_job: task.of_job,
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
                IdleAct::End { report, ends_processes } => {
                    outcome.is_refused = !self.end(&task, report, *ends_processes).await;
                }
            }
        }
        outcome
    }

    /// Ends a lease. Returns whether its end has begun.
    async fn end(&self, task: &IdleTask, report: &UnusedReport, ends_processes: bool) -> bool {
        let (lease, unused) = (task.lease, words(report));
        tracing::warn!(%lease, uid = task.record.holder.uid, "lease {lease} {unused}, so gpushd ends it");
        if task.of_job {
            return self.cancel_job(&task.record).await;
        }
        leases::end_unused(&self.0.leases, lease, format!("the lease {unused}"), ends_processes).await
    }

    /// Cancels the Slurm job of a lease. Slurm's Epilog then ends the lease.
    async fn cancel_job(&self, record: &LeaseRecord) -> bool {
        let (lease, LeaseBinding::Job { job, .. }) = (record.id, &record.binding) else { return false };
        let operation = format!("idle-{lease}");
        let run = Job {
            operation: operation.clone(),
            step: format!("scancel-{job}"),
            program: SCANCEL.to_owned(),
            args: vec![job.to_string()],
            env: BTreeMap::new(),
            input: None,
            deadline: SCANCEL_DEADLINE,
            routine: false,
        };
        let helpers = &self.0.context.host_services.helpers;
        let ended = helpers.run(run).await;
        helpers.forget(&operation);
        match ended {
            Ok(ended) if ended.end == End::Exited(0) => true,
            Ok(ended) => {
                let (output, end) = (ended.output_suffix(), ended.end);
                tracing::warn!(%lease, "lease {lease}: {SCANCEL} {job} {end}{output}");
                false
            }
            Err(error) => {
                tracing::warn!(%lease, "lease {lease}: job {job} cannot be cancelled: {error}");
                false
            }
        }
    }
}

/// Says how long a lease is unused: `has been unused for 4h`.
fn words(report: &UnusedReport) -> String {
    unused_for(Usage::timestamp(report.unused_since), report.deadline.is_empty, Timestamp::now())
}
