//! Executes what the policies have decided about a lease.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{LeaseBinding, LeaseId};
use gpush_core::lease::{
    over_limit,
    over_limit::OverLimitEnd,
    unused::{UnusedEnd, unused_for},
};
use gpush_host::{
    helper::{End, Job},
    proc,
};
use gpush_store::LeaseRecord;
use gpush_usage::{
    idle::UnusedReport,
    over_limit::{MemoryExcess, MemoryReading},
};
use jiff::Timestamp;

use super::{LeasePolicies, PolicyName};
use crate::{
    leases::{self, EndCheck, HolderNews, SeenUnused},
    system::slurm_job,
    usage::Usage,
};

/// The program that cancels Slurm jobs.
const SCANCEL: &str = "/usr/bin/scancel";

/// Maximum time for `scancel`.
const SCANCEL_DEADLINE: Duration = Duration::from_secs(20);

/// Time between two attempts to deliver a notice that has not reached the holder, in ms.
pub(super) const RETRY_MS: u64 = 60_000;

/// What gpushd does with a lease now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PolicyAct {
    /// Tell the holder what happens to the lease. The machine of the policy waits until the notice is recorded.
    Warn { policy: PolicyName, notice: u32, news: HolderNews },
    /// Tell the holder that the last warning does not apply any more.
    Withdraw(HolderNews),
    /// Log something about the lease, as a predicate: `has been unused for 4h`.
    Report(String),
    /// End the lease.
    End(PolicyEnd),
}

/// Why a policy ends a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PolicyEnd {
    /// The lease is unused.
    Unused { report: UnusedReport, ends_processes: bool },
    /// The lease uses more memory than its share has. Only the end of its processes frees the memory.
    OverLimit(MemoryExcess),
}

/// What gpushd does with one lease, in order.
#[derive(Debug)]
pub(super) struct PolicyTask {
    pub(super) lease: LeaseId,
    pub(super) of_job: bool,
    pub(super) acts: Vec<PolicyAct>,
    pub(super) record: LeaseRecord,
}

/// The outcome of a task.
#[derive(Debug)]
pub(super) struct PolicyOutcome {
    pub(super) lease: LeaseId,
    /// The notices that have reached the holder.
    pub(super) recorded: Vec<(PolicyName, u32)>,
    /// The policy that has begun to end the lease.
    pub(super) begun: Option<PolicyName>,
    /// The policy whose end of the lease was refused.
    pub(super) refused: Option<PolicyName>,
    /// Whether the job of the lease also runs on other nodes, so that gpushd never cancels it.
    pub(super) runs_elsewhere: bool,
}

impl PolicyEnd {
    fn policy(self) -> PolicyName {
        match self {
            Self::Unused { .. } => PolicyName::Idle,
            Self::OverLimit(_) => PolicyName::OverLimit,
        }
    }

    /// Returns the reason, as words that follow `lease L17`.
    fn words(self) -> String {
        match self {
            Self::Unused { report, .. } => words(&report),
            Self::OverLimit(MemoryExcess { used_mib, limit_mib }) => over_limit::above(used_mib, limit_mib),
        }
    }

    /// Returns the notice for a job that gpushd does not cancel, because it also runs on other nodes.
    fn runs_elsewhere(self) -> HolderNews {
        match self {
            Self::Unused { .. } => HolderNews::UnusedNoMore(UnusedEnd::RunsElsewhere),
            Self::OverLimit(_) => HolderNews::OverLimitNoMore(OverLimitEnd::RunsElsewhere),
        }
    }

    fn ends_processes(self) -> bool {
        match self {
            Self::Unused { ends_processes, .. } => ends_processes,
            Self::OverLimit(_) => true,
        }
    }
}

impl LeasePolicies {
    /// Executes a task.
    pub(super) async fn execute(&self, task: PolicyTask) -> PolicyOutcome {
        let mut outcome = PolicyOutcome {
            lease: task.lease,
            recorded: Vec::new(),
            begun: None,
            refused: None,
            runs_elsewhere: false,
        };
        for act in &task.acts {
            match act {
                PolicyAct::Warn { policy, notice, news } => {
                    if leases::tell_holder(&self.0.leases, task.lease, *news).await {
                        outcome.recorded.push((*policy, *notice));
                    }
                }
                PolicyAct::Withdraw(news) => {
                    leases::tell_holder(&self.0.leases, task.lease, *news).await;
                }
                PolicyAct::Report(words) => {
                    let lease = task.lease;
                    tracing::warn!(%lease, uid = task.record.holder.uid, "lease {lease} {words}");
                }
                PolicyAct::End(end) => match self.end(&task, *end).await {
                    EndOutcome::Begun => outcome.begun = Some(end.policy()),
                    EndOutcome::Refused => outcome.refused = Some(end.policy()),
                    EndOutcome::RunsElsewhere => {
                        (outcome.refused, outcome.runs_elsewhere) = (Some(end.policy()), true);
                        leases::tell_holder(&self.0.leases, task.lease, end.runs_elsewhere()).await;
                    }
                },
            }
        }
        outcome
    }

    /// Ends a lease, if the reason still applies.
    async fn end(&self, task: &PolicyTask, end: PolicyEnd) -> EndOutcome {
        let (lease, words) = (task.lease, end.words());
        let check = match end {
            PolicyEnd::Unused { report, .. } => {
                let Some(sampled_at) = self.0.usage.last_sample(&task.record) else { return EndOutcome::Refused };
                let sampled_at = proc::ticks(Duration::from_millis(sampled_at.monotonic_ms));
                EndCheck::Unused(SeenUnused { is_empty: report.deadline.is_empty, sampled_at })
            }
            PolicyEnd::OverLimit(_) => match self.0.usage.memory_of(lease) {
                Some(MemoryReading::Above { .. }) => EndCheck::Active,
                Some(reading @ (MemoryReading::Within | MemoryReading::Unknown)) => {
                    // The machine begins again, so it withdraws no notice.
                    let is_within = reading == MemoryReading::Within;
                    let why = if is_within { OverLimitEnd::Within } else { OverLimitEnd::Unknown };
                    leases::tell_holder(&self.0.leases, lease, HolderNews::OverLimitNoMore(why)).await;
                    return EndOutcome::Refused;
                }
                None => return EndOutcome::Refused,
            },
        };
        tracing::warn!(%lease, uid = task.record.holder.uid, "lease {lease} {words}, so gpushd ends it");
        if task.of_job {
            return self.cancel_job(&task.record, end.policy(), check).await;
        }
        let reason = format!("the lease {words}");
        match leases::end_by_policy(&self.0.leases, lease, reason, end.ends_processes(), check).await {
            true => EndOutcome::Begun,
            false => EndOutcome::Refused,
        }
    }

    /// Cancels the Slurm job of a lease. Slurm's Epilog then ends the lease.
    async fn cancel_job(&self, record: &LeaseRecord, policy: PolicyName, check: EndCheck) -> EndOutcome {
        let (lease, LeaseBinding::Job { job, .. }) = (record.id, &record.binding) else {
            return EndOutcome::Refused;
        };
        let services = &self.0.context.host_services;
        let Some(extent) = slurm_job::extent(services, *job).await else { return EndOutcome::Refused };
        if !extent.is_only_here() {
            tracing::warn!(%lease, "lease {lease}: a part of job {job} runs on other nodes, so gpushd does not cancel it");
            return EndOutcome::RunsElsewhere;
        }
        if !leases::may_end(&self.0.leases, lease, check).await {
            return EndOutcome::Refused;
        }
        let prefix = match policy {
            PolicyName::Idle => "idle",
            PolicyName::OverLimit => "over-limit",
        };
        let (operation, name) = (format!("{prefix}-{lease}"), extent.name);
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
            Ok(ended) if ended.end == End::Exited(0) => return EndOutcome::Begun,
            Ok(ended) => {
                let (output, end) = (ended.output_suffix(), ended.end);
                tracing::warn!(%lease, "lease {lease}: {SCANCEL} {name} {end}{output}");
            }
            Err(error) => tracing::warn!(%lease, "lease {lease}: cannot cancel job {name}: {error}"),
        }
        EndOutcome::Refused
    }
}

/// The outcome of the end of a lease by a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndOutcome {
    /// The end has begun.
    Begun,
    /// The reason does not apply any more, the lease is kept or inactive, or the end failed.
    Refused,
    /// The job also runs on other nodes.
    RunsElsewhere,
}

/// Says how long a lease is unused: `has been unused for 4h`.
pub(super) fn words(report: &UnusedReport) -> String {
    unused_for(Usage::timestamp(report.unused_since), report.deadline.is_empty, Timestamp::now())
}
