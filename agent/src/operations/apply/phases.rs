//! Executes the forward steps of an operation: first the brackets, then phase by phase on all its
//! GPUs.
//!
//! ```text
//! brackets ─► MIG on ─► instances ─► MIG off ─► after
//!    │          │           │           │         │
//!    └──────────┴───────────┴───────────┴─────────┴─ a step fails, or the operation is cancelled: stop
//! ```
//!
//! In the phase `Instances`, a slow driver call on one GPU does not stop the steps on the other
//! GPUs, because the call may still succeed.

use std::sync::Arc;

use gpush_api::{ApiError, Code, GpuPlan, GpuUuid, MpsStep, Phase, Step, TimesliceStep};
use gpush_core::step::{self, Bracket, Instances, brackets, difference};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{
    Executor,
    part::{Part, instances},
};
use crate::{
    modes::{
        Trouble,
        driver::Driver,
        mig::{
            self,
            holders::HeldBy,
            reset::{Cancel, Purpose},
        },
        mps::{self, Mps},
        timeslice,
    },
    operations::operation::OperationHandle,
};

/// The progress of the steps of one GPU.
#[derive(Debug)]
pub(super) enum PartOutcome {
    /// All steps succeeded, and a reading then showed the planned layout.
    Done,
    /// Stopped before a step, because a step on another GPU failed or the operation was cancelled.
    Stopped,
    /// A step failed.
    Troubled(Trouble),
}

/// Whether the next phase may begin.
enum NextPhase {
    Go,
    Stop,
}

/// The execution of the steps of one operation.
struct Run<'a> {
    executor: &'a Executor,
    ongoing: &'a Arc<OperationHandle>,
    parts: &'a [Part],
    /// The outcome on each GPU. The index is the GPU's position in the plans.
    ends: Vec<PartOutcome>,
    held_by: Vec<HeldBy>,
}

/// The outcome of the steps of an operation.
#[derive(Debug)]
pub(super) struct Executed {
    /// The outcome on each GPU, in the order of the plans.
    pub(super) ends: Vec<PartOutcome>,
    /// The holders of GPUs that the driver did not change because they are in use.
    pub(super) held_by: Vec<HeldBy>,
}

/// Executes the steps of an operation.
pub(super) async fn execute(executor: &Executor, ongoing: &Arc<OperationHandle>, parts: &[Part]) -> Executed {
    let ends = parts.iter().map(|_| PartOutcome::Stopped).collect();
    let mut run = Run { executor, ongoing, parts, ends, held_by: Vec::new() };
    if let Err((position, error)) = run.open_brackets().await {
        run.ends[position] = PartOutcome::Troubled(Trouble::Failed(error));
        return run.outcome();
    }
    for phase in Phase::ALL {
        match run.phase(phase).await {
            NextPhase::Go => {}
            NextPhase::Stop => break,
        }
    }
    run.name_holders().await;
    run.outcome()
}

/// Returns the text that an operation shows as its current step while the hook `program` runs.
pub(super) fn running_hook(program: &str) -> String {
    format!("running the hook {program}")
}

impl Run<'_> {
    fn outcome(self) -> Executed {
        Executed { ends: self.ends, held_by: self.held_by }
    }

    /// Stops the services that must not run during the steps, and then runs the hook `before`.
    ///
    /// # Errors
    /// If a service cannot be stopped or the hook fails. The error includes the position of the GPU whose plan needs
    /// the failed action.
    async fn open_brackets(&self) -> Result<(), (usize, ApiError)> {
        let Executor { services, timeslice, mps, mig, .. } = self.executor;
        let plans: Vec<GpuPlan> = self.parts.iter().map(|part| part.plan.clone()).collect();
        let (id, number) = (self.ongoing.id(), self.ongoing.number());
        let first = plans.iter().position(|plan| !plan.services.is_empty() || !plan.hooks.is_empty());
        let first = first.unwrap_or_default();
        for bracket in brackets(&plans, &id, &mig.context.state.config().mode_change) {
            let (position, opened) = match &bracket {
                Bracket::Timeslice => {
                    let release = timeslice::gpus_to_release(timeslice, &plans);
                    for failure in timeslice::apply_and_read_back(timeslice, &release).await {
                        self.ongoing.note(failure);
                    }
                    continue;
                }
                Bracket::MpsDaemon { position, step } => (*position, self.mps_step(mps, *position, step).await),
                Bracket::Service { service } => (first, services.stop(number, service).await),
                Bracket::HookAfter { .. } => (first, services.note_hook(number, &bracket).await),
                Bracket::HookBefore { program, env } => {
                    self.ongoing.progress(first, |progress| progress.doing = Some(running_hook(program)));
                    let ran = services.hook_before(number, program, env.clone()).await;
                    self.ongoing.progress(first, |progress| progress.doing = None);
                    (first, ran)
                }
            };
            opened.map_err(|error| (position, error))?;
        }
        Ok(())
    }

    /// If the driver refused a step because a GPU is in use, adds the holders of the GPU to the error.
    async fn name_holders(&mut self) {
        let is_blocked = |part: &&Part| match &self.ends[part.position] {
            PartOutcome::Troubled(Trouble::InUse(_)) => true,
            PartOutcome::Troubled(Trouble::Failed(_) | Trouble::Lost(_) | Trouble::Unknown(_))
            | PartOutcome::Done
            | PartOutcome::Stopped => false,
        };
        let blocked: Vec<&Part> = self.parts.iter().filter(is_blocked).collect();
        // Search for all GPUs at the same time, because the rollback waits for the searches.
        let searches = blocked.iter().map(|part| self.executor.mig.suspects(&part.plan.gpu_uuid));
        let found = futures_util::future::join_all(searches).await;
        for (part, suspects) in blocked.into_iter().zip(found) {
            let PartOutcome::Troubled(Trouble::InUse(error)) = &mut self.ends[part.position] else { continue };
            for holder in &suspects {
                if !error.causes.contains(&holder.public) {
                    error.causes.push(holder.public.clone());
                }
            }
            self.held_by.extend(suspects);
        }
    }

    /// Executes one phase on all GPUs.
    async fn phase(&mut self, phase: Phase) -> NextPhase {
        match phase {
            // The only steps of this phase are to stop services and to run the hook, which [`Run::open_brackets`] does.
            Phase::Before => NextPhase::Go,
            Phase::MigOn => self.mig_mode(phase, true).await,
            Phase::Instances => self.instances().await,
            Phase::MigOff => self.mig_mode(phase, false).await,
            Phase::After => self.share().await,
        }
    }

    /// Returns whether the operation was cancelled. If so, marks all GPUs as stopped.
    fn is_cancelled(&mut self) -> bool {
        let cancelled = self.ongoing.cancelled().is_cancelled();
        if cancelled {
            self.ends.iter_mut().for_each(|end| *end = PartOutcome::Stopped);
        }
        cancelled
    }

    /// Changes MIG mode together on all GPUs whose plans have a step in `phase`.
    async fn mig_mode(&mut self, phase: Phase, enable: bool) -> NextPhase {
        let those: Vec<&Part> = self.parts.iter().filter(|part| part.plan.phase(phase).next().is_some()).collect();
        if those.is_empty() {
            return NextPhase::Go;
        }
        if self.is_cancelled() {
            return NextPhase::Stop;
        }
        for part in &those {
            begin_step(self.ongoing, part.position, step::describe_mode(enable).to_owned());
        }
        let id = self.ongoing.id();
        let uuids = changed_modes(self.ongoing);
        let why = || self.ongoing.why_cancelled();
        let cancel = Cancel { cancelled: self.ongoing.cancelled(), why: &why };
        let purpose = Purpose { operation: &id, changes: &uuids, cancel: Some(cancel) };
        let changes: Vec<_> = those.iter().map(|part| part.mode_change()).collect();
        let mut troubled = mig::mode::execute(&self.executor.mig, &purpose, &changes, enable).await;
        let all_done = troubled.is_empty();
        for part in those {
            let trouble = troubled.remove(&part.position);
            end_step(self.ongoing, part.position, trouble.as_ref().map(Trouble::error));
            if let Some(trouble) = trouble {
                self.ends[part.position] = PartOutcome::Troubled(trouble);
            }
        }
        if all_done { NextPhase::Go } else { NextPhase::Stop }
    }

    /// Creates and destroys instances on all GPUs concurrently.
    async fn instances(&mut self) -> NextPhase {
        // `abort` is cancelled when the operation is cancelled, or when a step on any GPU fails.
        let abort = self.ongoing.cancelled().child_token();
        let mut tasks = JoinSet::new();
        for part in self.parts {
            let driver = self.executor.mig.driver.clone();
            let (ongoing, part, abort) = (Arc::clone(self.ongoing), part.clone(), abort.clone());
            tasks.spawn(async move {
                let end = on_one_gpu(&driver, &ongoing, &part, &abort).await;
                if let PartOutcome::Troubled(_) = &end {
                    abort.cancel();
                }
                (part.position, end)
            });
        }
        for (position, end) in tasks.join_all().await {
            self.ends[position] = end;
        }
        if self.ends.iter().all(|end| matches!(end, PartOutcome::Done)) { NextPhase::Go } else { NextPhase::Stop }
    }

    /// Executes the steps that set up the sharing of GPUs and MIG devices.
    async fn share(&mut self) -> NextPhase {
        let Executor { mps, timeslice, mig, .. } = self.executor;
        let mut time_sliced: Vec<(&Part, &Step)> = Vec::new();
        let mut devices: Vec<(&Part, &Step)> = Vec::new();
        let mut steps: Vec<(&Part, &Step)> = Vec::new();
        for part in self.parts {
            steps.extend(part.plan.phase(Phase::After).map(|step| (part, step)));
        }
        for (part, step) in steps {
            match step {
                // Collect the daemons of MIG devices, because they can start at the same time.
                Step::Mps(MpsStep::StartDaemon { device: Some(_) }) => devices.push((part, step)),
                Step::Mps(step) => {
                    if self.is_cancelled() {
                        return NextPhase::Stop;
                    }
                    if let Err(error) = self.mps_step(mps, part.position, step).await {
                        self.ends[part.position] = PartOutcome::Troubled(Trouble::Failed(error));
                        return NextPhase::Stop;
                    }
                }
                // Collect the time-sliced GPUs, because one call of nvidia-smi sets the time slice of all of them.
                Step::Timeslice(TimesliceStep::Set | TimesliceStep::Clear) => time_sliced.push((part, step)),
                Step::MigMode(_) | Step::Instance(_) => {}
            }
        }
        if !devices.is_empty() && self.is_cancelled() {
            return NextPhase::Stop;
        }
        devices.iter().for_each(|(part, step)| begin_step(self.ongoing, part.position, step::describe(step)));
        // An operation that changes no override does not change which devices are shared.
        let layout = |part: &Part| part.lasting.as_ref().map(|_| part.plan.layout.clone());
        let layouts = devices.iter().map(|(part, _)| (part.plan.gpu_uuid.clone(), layout(part))).collect();
        for failure in mps::start_device_daemons(mps, &self.ongoing.id(), layouts).await {
            self.ongoing.note(failure);
        }
        devices.iter().for_each(|(part, _)| end_step(self.ongoing, part.position, None));
        for (part, step) in &time_sliced {
            begin_step(self.ongoing, part.position, step::describe(step));
            mig.driver.readings.invalidate(&part.plan.gpu_uuid);
        }
        let uuids: Vec<GpuUuid> = time_sliced.iter().map(|(part, _)| part.plan.gpu_uuid.clone()).collect();
        for failure in timeslice::apply_and_read_back(timeslice, &uuids).await {
            self.ongoing.note(failure);
        }
        time_sliced.iter().for_each(|(part, _)| end_step(self.ongoing, part.position, None));
        NextPhase::Go
    }

    /// Executes one MPS step of the GPU at `position`, such as starting or stopping an MPS daemon.
    async fn mps_step(&self, mps: &Mps, position: usize, step: &MpsStep) -> Result<(), ApiError> {
        begin_step(self.ongoing, position, step::describe(&Step::Mps(step.clone())));
        let (id, uuid) = (self.ongoing.id(), &self.parts[position].plan.gpu_uuid);
        let done = match step {
            MpsStep::StopDaemon { uuid: target, label } => mps::stop_for_operation(mps, &id, uuid, target, label).await,
            MpsStep::StartDaemon { device: None } => mps::start_and_wait(mps, &id, uuid).await,
            // The daemons of MIG devices are started together.
            MpsStep::StartDaemon { device: Some(_) } => Ok(()),
        };
        end_step(self.ongoing, position, done.as_ref().err());
        done
    }
}

/// Executes the steps on the instances of one GPU, and then reads the GPU again. Stops at the first failure or when
/// `abort` is cancelled.
async fn on_one_gpu(driver: &Driver, ongoing: &OperationHandle, part: &Part, abort: &CancellationToken) -> PartOutcome {
    match instance_steps(driver, ongoing, part, abort).await {
        Ok(end) => end,
        Err(trouble) => {
            ongoing.progress(part.position, |progress| {
                progress.doing = None;
                progress.error = Some(trouble.error().clone());
            });
            PartOutcome::Troubled(trouble)
        }
    }
}

async fn instance_steps(
    driver: &Driver,
    ongoing: &OperationHandle,
    part: &Part,
    abort: &CancellationToken,
) -> Result<PartOutcome, Trouble> {
    let gpu = part.gpu();
    let mut known = Instances::of(instances(part.found.as_ref()));
    for step in part.plan.instance_steps() {
        if abort.is_cancelled() {
            return Ok(PartOutcome::Stopped);
        }
        let words = step::describe_instance(step);
        tracing::debug!(operation = ongoing.id(), gpu = part.plan.gpu_uuid.as_str(), "{words}");
        begin_step(ongoing, part.position, words);
        mig::instances::execute(driver, &gpu, step, &mut known).await?;
        // Do not send an event here, because the next step sends an event at once.
        ongoing.progress(part.position, |progress| progress.done += 1);
    }
    if part.plan.mig_mode() == Some(false) {
        // The GPU is read later, after its MIG mode is off.
        return Ok(PartOutcome::Done);
    }
    begin_step(ongoing, part.position, "reading the layout back".to_owned());
    let reading = driver.read(&gpu).await?;
    let Some(difference) = difference(&part.plan, &gpu.label, reading.mig.as_ref()) else {
        ongoing.progress(part.position, |progress| progress.doing = None);
        return Ok(PartOutcome::Done);
    };
    let what = if part.is_empty() {
        "the GPU had the desired layout, but another program has changed the layout since then"
    } else {
        "the driver reported success, but the GPU does not have the desired layout"
    };
    let message = format!("{}: {what}", gpu.label);
    Err(Trouble::Failed(ApiError::new(Code::DriverError, message).cause(difference)))
}

/// Returns the UUIDs of the GPUs whose MIG mode the operation changes, according to its recorded plans.
pub(super) fn changed_modes(ongoing: &OperationHandle) -> Vec<GpuUuid> {
    let plans = ongoing.snapshot().plans.into_iter();
    plans.filter(|plan| plan.mig_mode().is_some()).map(|plan| plan.gpu_uuid).collect()
}

fn begin_step(ongoing: &OperationHandle, position: usize, words: String) {
    ongoing.progress(position, |progress| progress.doing = Some(words));
}

fn end_step(ongoing: &OperationHandle, position: usize, error: Option<&ApiError>) {
    ongoing.progress(position, |progress| {
        progress.doing = None;
        match error {
            None => progress.done += 1,
            Some(error) => progress.error = Some(error.clone()),
        }
    });
}
