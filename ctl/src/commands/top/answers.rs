//! The answers of gpushd that one picture shows.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{
    DeviceActivity, Gpu, GpuProcess, GpuProcesses, GpuState, GpuUsage, GpuUuid, HostUsage, Lease, LeaseId, SignalSource,
};
use gpush_client::{Client, Kind};
use gpush_core::selector::Selector;
use jiff::Timestamp;
use serde::Serialize;

use crate::{exit::Failure, output::Output, render::status::Status};

/// Maximum wait of `top --once` for new samples.
const NEW_SAMPLES: Duration = Duration::from_secs(3);

/// Pause between two requests of `top --once`.
const RETRY: Duration = Duration::from_millis(200);

/// What gpushd answered. Also the output of `top --once --json`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct HostAnswers {
    #[serde(flatten)]
    pub(super) status: Status,
    #[serde(flatten)]
    pub(super) usage: HostUsage,
    #[serde(flatten)]
    pub(super) processes: Option<GpuProcesses>,
    /// Why gpushd could not list the processes.
    #[serde(skip)]
    pub(super) processes_error: Option<String>,
    /// The GPUs that the caller has not selected; empty if all are selected.
    #[serde(skip)]
    pub(super) others: BTreeSet<GpuUuid>,
    /// The open leases of the caller.
    #[serde(skip)]
    pub(super) own: BTreeSet<LeaseId>,
    /// The time of the last answer.
    #[serde(skip)]
    pub(super) at: Timestamp,
}

impl HostAnswers {
    pub(super) fn processes(&self) -> &[GpuProcess] {
        self.processes.as_ref().map_or(&[], |all| &all.processes)
    }

    /// Returns whether gpushd has a sample of each GPU that is not older than `began`, or cannot take one.
    fn has_samples_since(&self, began: Timestamp) -> bool {
        let is_new = |usage: &GpuUsage| usage.sampled_at.is_some_and(|at| at >= began) && has_activity(usage);
        let is_sampled = |usage: &GpuUsage| usage.failure.is_some() || is_new(usage);
        let mut ready = self.status.gpus.iter().filter(|gpu| gpu.state == GpuState::Ready);
        ready.all(|gpu| self.usage.gpu_usage.iter().any(|one| one.gpu_uuid == gpu.uuid && is_sampled(one)))
    }

    /// Returns the time of the oldest sample; `None` if there is none.
    pub(super) fn oldest_sample(&self) -> Option<Timestamp> {
        let ready = self.status.gpus.iter().filter(|gpu| gpu.state == GpuState::Ready);
        let samples = ready.filter_map(|gpu| self.usage.gpu_usage.iter().find(|one| one.gpu_uuid == gpu.uuid));
        samples.filter_map(|usage| usage.sampled_at).min()
    }

    /// Leaves out the leases, figures and processes of the GPUs that the caller has not selected.
    fn without_others(mut self) -> Self {
        if self.others.is_empty() {
            return self;
        }
        let Self { status, usage, processes, .. } = &mut self;
        let is_selected = |gpu: &GpuUuid| status.gpus.iter().any(|one| one.uuid == *gpu);
        let is_shown = |lease: &Lease| match lease.members.as_slice() {
            [] => lease.request.as_ref().is_none_or(|request| may_wait_for(&request.gpus, &status.gpus)),
            members => members.iter().any(|member| is_selected(&member.gpu_uuid)),
        };
        usage.gpu_usage.retain(|one| is_selected(&one.gpu_uuid));
        if let Some(processes) = processes {
            processes.processes.retain(|one| is_selected(&one.gpu_uuid));
        }
        let leases: Vec<Lease> = status.leases.iter().filter(|lease| is_shown(lease)).cloned().collect();
        status.leases = leases;
        usage.lease_usage.retain(|one| status.leases.iter().any(|lease| lease.id == one.lease_id));
        self
    }
}

/// Returns whether a lease that requests the GPUs `wanted` may get one of these GPUs.
fn may_wait_for(wanted: &[String], gpus: &[Gpu]) -> bool {
    let mut selectors = wanted.iter().flat_map(|text| text.split(',')).map(str::parse::<Selector>);
    let matches = |selector: Selector| gpus.iter().any(|gpu| selector.matches(gpu));
    wanted.is_empty() || selectors.any(|selector| selector.map_or(true, matches))
}

/// Returns whether a GPU has all the activity that its source can report. The first sample of GPU performance monitoring
/// has none, because a window needs two samples.
fn has_activity(usage: &GpuUsage) -> bool {
    let is_known = |activity: &DeviceActivity| activity.sm_activity.or(activity.busy).is_some();
    match usage.source {
        SignalSource::MemoryOnly => true,
        SignalSource::None => false,
        SignalSource::Gpm | SignalSource::Utilization | SignalSource::Processes => {
            is_known(&usage.activity) || usage.instance_usage.iter().any(|one| is_known(&one.activity))
        }
    }
}

/// Reads everything. `out` prints the remarks.
pub(super) async fn read_all(client: &mut Client, selectors: &[String], out: &Output) -> Result<HostAnswers, Failure> {
    let (status, _) = super::super::status::read(client, false, selectors, out).await?;
    let usage = client.watched_usage().await?;
    let own = client.own_leases(0).await?.iter().map(|lease| lease.id).collect();
    let (processes, processes_error) = match client.processes().await {
        Ok(processes) => (Some(processes), None),
        Err(error) if error.kind == Kind::Answer => (None, Some(error.error.message.clone())),
        Err(error) => return Err(error.into()),
    };
    let is_selected = |gpu: &GpuUuid| status.gpus.iter().any(|one| one.uuid == *gpu);
    let others =
        usage.gpu_usage.iter().map(|one| &one.gpu_uuid).filter(|gpu| !selectors.is_empty() && !is_selected(gpu));
    let others = others.cloned().collect();
    let answers = HostAnswers { status, usage, processes, processes_error, others, own, at: Timestamp::now() };
    Ok(answers.without_others())
}

/// Reads the figures and the leases again. gpushd answers both without a call of the driver.
pub(super) async fn read_figures(
    client: &mut Client,
    before: &HostAnswers,
    out: &Output,
) -> Result<HostAnswers, Failure> {
    let usage = client.watched_usage().await?;
    let leases = super::super::lease::of(client, &before.status.gpus, out).await;
    let status = Status { leases, ..before.status.clone() };
    Ok(HostAnswers { status, usage, at: Timestamp::now(), ..before.clone() }.without_others())
}

/// Reads everything, and waits a moment for new samples: while no client watches, gpushd takes few or no samples, and
/// figures of 15 seconds ago do not belong to the processes of now.
pub(super) async fn read_with_samples(
    client: &mut Client,
    selectors: &[String],
    out: &Output,
) -> Result<HostAnswers, Failure> {
    // Times of gpushd have whole seconds.
    let began = gpush_api::whole_second(Timestamp::now());
    let mut answers = read_all(client, selectors, out).await?;
    if answers.has_samples_since(began) {
        return Ok(answers);
    }
    let deadline = tokio::time::Instant::now() + NEW_SAMPLES;
    while !answers.has_samples_since(began) && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(RETRY).await;
        answers = read_figures(client, &answers, out).await?;
    }
    // The processes have to be as new as the samples.
    let HostAnswers { processes, processes_error, .. } = read_all(client, selectors, out).await?;
    Ok(HostAnswers { processes, processes_error, ..answers })
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use crate::commands::top::samples;

    /// Fault: `top --once` showed figures of 15 seconds ago above the processes of now.
    #[test]
    fn sample_before_the_command_is_not_new() {
        let answers = samples::host();
        let sampled = answers.oldest_sample().unwrap();
        assert!(answers.has_samples_since(sampled));
        assert!(!answers.has_samples_since(sampled + SignedDuration::from_secs(1)));
        let mut failed = answers.clone();
        failed.usage.gpu_usage.iter_mut().for_each(|usage| usage.failure = Some("x".to_owned()));
        assert!(failed.has_samples_since(sampled + SignedDuration::from_secs(1)), "gpushd cannot take a sample");
    }

    /// Fault: `top 0` counted the leases of all GPUs.
    #[test]
    fn selected_gpu_is_shown_without_leases_of_other_gpus() {
        let mut answers = samples::host();
        answers.others = answers.status.gpus.drain(1..).map(|gpu| gpu.uuid).collect();
        let selected = answers.without_others();
        let ids: Vec<u64> = selected.status.leases.iter().map(|lease| lease.id.0).collect();
        assert_eq!(ids, [12, 13, 14, 19], "the queued lease L19 requests GPUs 0 to 3");
        assert!(selected.usage.lease_usage.iter().all(|usage| ids.contains(&usage.lease_id.0)));
        assert!(selected.processes().iter().all(|process| process.gpu_uuid == selected.status.gpus[0].uuid));
        assert_eq!(selected.usage.gpu_usage.len(), 1);
    }
}
