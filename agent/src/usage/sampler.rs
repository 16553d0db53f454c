//! The task that takes samples, tells the ledger which leases begin, change and end, and starts the recording of the
//! sums.
//!
//! ```text
//! snapshot changed ─► last samples of the GPUs concerned ─► holds of the leases, unusable slices ─► ledger
//! interval over ────► one sample of each GPU, side by side ─► ledger, or a gap
//! record due ───────► one transaction (see `history`)
//! ```
//!
//! Each GPU has at most one sample in flight, so a GPU that hangs delays no other GPU and no lease. While something
//! needs samples, gpushd also samples the GPUs of a lease before the lease begins or ends. So the leases that used the
//! energy until then get it. gpushd waits at most 2 s for these samples.

use std::{sync::Arc, time::Duration};

use gpush_api::GpuUuid;
use gpush_host::subtask;
use gpush_nvml::SampleError;
use tokio::{sync::watch, task::JoinSet, time::Instant};

use super::{
    TakenSample, Usage,
    demand::Needs,
    follow::Follower,
    history::Recorder,
    learning::PowerLearning,
    round::{Rounds, SampleRequest},
    take,
};
use crate::state::{GpuSnapshot, HostState};

/// How long a change of the leases waits for the samples before it.
const WAIT_FOR_SAMPLES: Duration = Duration::from_secs(2);

type Taken = (GpuUuid, Result<TakenSample, SampleError>);

/// Takes samples and accounts leases until gpushd stops.
pub(super) async fn run(usage: Usage) {
    let parts = &*usage.0;
    let (mut snapshots, stopping) = (parts.context.state.watch(), &parts.context.stopping);
    // Reports need the number before the driver lists a GPU.
    let is_numbered = usage.number_rows().await;
    let Some(first) = first_with_gpus(&mut snapshots, &usage).await else { return };
    usage.restore(&first).await;
    let mut sampler = Sampler::new(usage.clone());
    let constants = &parts.context.host_services.constants;
    let mut recorder = Some(Recorder::new(constants.usage_record, constants.usage_close, usage.now(), is_numbered));
    let mut recording: JoinSet<Recorder> = JoinSet::new();
    loop {
        let host = Arc::clone(&snapshots.borrow_and_update());
        if !usage.records() {
            usage.drop_unrecorded();
        }
        let records = usage.records_leases(&host);
        let has_leases = usage.samples_leases(&host) || sampler.learns_power(&host);
        let needs = parts.demand.needs(Instant::now(), has_leases);
        sampler.follow(&host, needs);
        sampler.end_worker_without_need(needs);
        let due = sampler.rounds.next(needs);
        let is_scraped = needs.is_some_and(|needs| needs.is_scraped);
        let due_at = |one: &Recorder| one.due(usage.is_changed(), records, is_scraped);
        let record_due = recorder.as_ref().filter(|_| usage.records()).map(due_at);
        tokio::select! {
            () = stopping.cancelled() => break,
            changed = snapshots.changed() => if changed.is_err() { break },
            () = parts.demand.changed() => {}
            () = wait_until(sampler.deadline()) => {}
            Some((gpu, result)) = subtask::next(&mut sampler.in_flight), if !sampler.in_flight.is_empty() => {
                sampler.rounds.arrived(&gpu);
                parts.accounts.lock().note(gpu, result, parts.clock.now());
                parts.sampled.send_replace(());
            }
            Some(()) = subtask::next(&mut sampler.ending), if !sampler.ending.is_empty() => {}
            Some(back) = subtask::next(&mut recording), if !recording.is_empty() => recorder = Some(back),
            () = wait_until(due) => {
                // Time has passed since the needs were read.
                if let Some(needs) = parts.demand.needs(Instant::now(), has_leases) {
                    sampler.begin_round(&host, needs);
                }
            }
            () = wait_until(record_due) => if let Some(one) = recorder.take() {
                recording.spawn(one.record(usage.clone()));
            }
        }
    }
    while let Some(back) = subtask::next(&mut recording).await {
        recorder = Some(back);
    }
    if let Some(recorder) = recorder.filter(|_| usage.records()) {
        recorder.record(usage.clone()).await;
    }
}

async fn wait_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Waits for the first snapshot with GPUs; `None` if gpushd stops before.
async fn first_with_gpus(snapshots: &mut watch::Receiver<Arc<HostState>>, usage: &Usage) -> Option<Arc<HostState>> {
    tokio::select! {
        () = usage.0.context.stopping.cancelled() => None,
        host = snapshots.wait_for(|host| !host.gpus.is_empty()) => host.ok().map(|host| Arc::clone(&host)),
    }
}

/// The state of the task.
struct Sampler {
    usage: Usage,
    follower: Follower,
    rounds: Rounds,
    in_flight: JoinSet<Taken>,
    /// The end of the worker for samples.
    ending: JoinSet<()>,
    /// Whether a worker for samples may run.
    has_worker: bool,
    /// When a change of the leases is applied even if the samples before it are late.
    waits_until: Option<Instant>,
    learning: PowerLearning,
}

impl Sampler {
    fn new(usage: Usage) -> Self {
        Self {
            usage,
            follower: Follower::default(),
            rounds: Rounds::default(),
            in_flight: JoinSet::new(),
            ending: JoinSet::new(),
            has_worker: false,
            waits_until: None,
            learning: PowerLearning::default(),
        }
    }

    /// Tells the ledger the changes, after the last samples of the GPUs concerned.
    fn follow(&mut self, host: &Arc<HostState>, needs: Option<Needs>) {
        let changed = self.follower.changed_gpus(host);
        match self.waits_until {
            None => {
                if let Some(needs) = needs.filter(|_| !changed.is_empty()) {
                    let lanes = self.usage.0.context.lanes.changes();
                    let requests = self.rounds.before_change(host, needs, &changed, &lanes);
                    if !requests.is_empty() {
                        self.waits_until = Some(Instant::now() + WAIT_FOR_SAMPLES);
                        self.take(host, requests);
                    }
                }
            }
            Some(until) if until <= Instant::now() => self.waits_until = None,
            Some(_) => {}
        }
        if self.waits_until.is_some() && changed.iter().any(|gpu| self.rounds.is_in_flight(gpu)) {
            return;
        }
        self.waits_until = None;
        let parts = &*self.usage.0;
        self.follower.follow(host, &mut parts.accounts.lock(), parts.clock.now());
    }

    /// Returns whether a free GPU needs samples, because its power without work is not known.
    fn learns_power(&mut self, host: &HostState) -> bool {
        if !self.usage.records() && !host.config.acts_on_unused_leases() {
            return false;
        }
        let is_free = |one: &&Arc<GpuSnapshot>| one.gpu.leases.is_empty() && one.gpu.processes.is_empty();
        let free = host.gpus.iter().filter(is_free).map(|one| &one.gpu.uuid);
        self.learning.needs_samples(free, &self.usage.gpus_with_power_level())
    }

    /// Returns when a change of the leases no longer waits for samples.
    fn deadline(&self) -> Option<Instant> {
        self.waits_until
    }

    fn begin_round(&mut self, host: &Arc<HostState>, needs: Needs) {
        let parts = &*self.usage.0;
        let round = self.rounds.begin(host, needs, &parts.context.lanes.changes());
        self.learning.sampled();
        let now = parts.clock.now();
        for gpu in round.without_sample {
            parts.accounts.lock().ledger.gap(&gpu, now);
        }
        for gpu in round.without_driver {
            parts.accounts.lock().ledger.reset(&gpu, now);
        }
        self.take(host, round.requests);
    }

    fn take(&mut self, host: &Arc<HostState>, requests: Vec<SampleRequest>) {
        self.has_worker |= !requests.is_empty();
        for request in requests {
            let (usage, host) = (self.usage.clone(), Arc::clone(host));
            self.in_flight.spawn(async move { (request.gpu.uuid.clone(), take::sample(&usage, &host, request).await) });
        }
    }

    /// Ends the worker for samples when nothing needs samples any more: gpushd must not keep the driver open with it.
    fn end_worker_without_need(&mut self, needs: Option<Needs>) {
        if needs.is_some() || !self.in_flight.is_empty() || !std::mem::take(&mut self.has_worker) {
            return;
        }
        let context = Arc::clone(&self.usage.0.context);
        self.ending.spawn(async move {
            if let Err(error) = context.hardware.end_sampling().await {
                tracing::warn!("the worker for samples cannot be ended: {error}");
            }
        });
    }
}
