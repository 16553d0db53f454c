//! The answers of gpushd that one picture shows.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{DeviceActivity, GpuProcess, GpuProcesses, GpuState, GpuUsage, HostUsage, LeaseId, SignalSource};
use gpush_client::{Client, Kind};
use jiff::Timestamp;
use serde::Serialize;

use crate::{exit::Failure, output::Output, render::status::Status};

/// Maximum wait of `top --once` for the first samples.
const FIRST_SAMPLES: Duration = Duration::from_secs(3);

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

    /// Returns whether gpushd has a sample of each GPU, or cannot take one.
    fn has_samples(&self) -> bool {
        let is_sampled =
            |usage: &GpuUsage| usage.failure.is_some() || usage.sampled_at.is_some() && has_activity(usage);
        let mut ready = self.status.gpus.iter().filter(|gpu| gpu.state == GpuState::Ready);
        ready.all(|gpu| self.usage.gpu_usage.iter().any(|one| one.gpu_uuid == gpu.uuid && is_sampled(one)))
    }
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
    Ok(HostAnswers { status, usage, processes, processes_error, own, at: Timestamp::now() })
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
    Ok(HostAnswers { status, usage, at: Timestamp::now(), ..before.clone() })
}

/// Reads everything, and waits a moment for the first samples: gpushd takes no samples while no client needs them.
pub(super) async fn read_with_samples(
    client: &mut Client,
    selectors: &[String],
    out: &Output,
) -> Result<HostAnswers, Failure> {
    let mut answers = read_all(client, selectors, out).await?;
    let deadline = tokio::time::Instant::now() + FIRST_SAMPLES;
    while !answers.has_samples() && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(RETRY).await;
        answers = read_figures(client, &answers, out).await?;
    }
    Ok(answers)
}
