//! The layouts of a boot, GPU by GPU, until each has its verdict.
//!
//! ```text
//!            ┌────────── the driver is not there, the GPU can't be read: looked at again, for ever
//!            ▼        │
//! claimed ─► due ─────┼─ tried and failed: tried again, ATTEMPTS times ──┐
//!                     │                                                  ▼
//!                     ├─ has it, or refused for good ──────────────► settled, on record
//!                     └─ another operation has the GPU ────────────► settled, on record
//! ```
//!
//! Each GPU has an operation of its own: one that can't have its layout costs no other. Settled
//! GPUs are recorded one by one, so that an agent that is started again on the same boot goes on
//! with those that are not, and leaves the others alone. A GPU that can't be identified may be one
//! that is claimed: while there is one, the record is not complete.
//!
//! Looking costs nothing and goes on until there is something to be seen, with a pause that grows
//! to [`PAUSE`]'s second. An attempt that failed has destroyed and made instances, so attempts are
//! counted: [`ATTEMPTS`] in about 16 s outlast a monitor's open handle and services that start
//! beside gpushd, and a driver that refuses that often will not be talked round by more. From then
//! on the GPU's drift, and the trouble in health, are somebody's to look at.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{ApiError, Code, Gpu, GpuState, Mode};
use gpush_store::BootRecord;
use tokio::{task::JoinSet, time::Instant};

use super::{
    Handles, Subject,
    give::{self, Outcome},
};
use crate::{caller::Viewer, operation, state::words};

/// Between two looks or attempts: at first, doubled each time, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// How often a layout is tried that fails on the way.
const ATTEMPTS: u32 = 6;

/// What is due on this boot.
#[derive(Debug)]
pub(super) struct Layouts {
    record: BootRecord,
    /// GPUs that were looked at and not settled, by UUID.
    due: BTreeMap<String, Tried>,
    /// Looks at a host without driver, or with GPUs that can't be identified.
    looks: u32,
    /// Whether it was said that the driver is waited for.
    said: bool,
}

/// What was tried on a GPU.
#[derive(Debug)]
struct Tried {
    looks: u32,
    attempts: u32,
    again: Instant,
    /// What was said last, so that it is not said each time.
    said: String,
}

fn pause(times: u32) -> Duration {
    PAUSE.0.saturating_mul(1 << times.min(16)).min(PAUSE.1)
}

impl Layouts {
    pub(super) fn new(record: BootRecord) -> Self {
        Self { record, due: BTreeMap::new(), looks: 0, said: false }
    }

    /// Whether this GPU's layout of this boot is still due, as far as is known.
    pub(super) fn is_due(&self, uuid: &str) -> bool {
        !self.record.settled.contains(uuid)
    }

    /// Does what is to be done now; when to come again, `None` when all is done.
    pub(super) async fn round(&mut self, handles: &Handles) -> Option<Instant> {
        let before = self.record.clone();
        let again = self.look(handles).await;
        self.record.complete = again.is_none();
        if self.record != before {
            self.write(handles).await;
        }
        again
    }

    async fn look(&mut self, handles: &Handles) -> Option<Instant> {
        let config = handles.state.config();
        if !config.rules.iter().any(|rule| is_given(rule.mode)) {
            handles.startup.forget(&Subject::Unidentified);
            return None;
        }
        let observed = tokio::select! {
            observed = handles.readings.host() => observed,
            () = handles.stopping.cancelled() => return Some(Instant::now()),
        };
        let observed = match observed {
            Ok(observed) => observed,
            Err(error) => {
                if !self.said {
                    tracing::info!("layouts wait for the driver: {error}");
                    self.said = true;
                }
                self.looks += 1;
                return Some(Instant::now() + pause(self.looks - 1));
            }
        };
        let nameless: Vec<u32> = observed.host.nameless.iter().map(|(index, _)| *index).collect();
        let gpus = observed.gpus(Viewer::Agent);
        let mut tasks = JoinSet::new();
        let now = Instant::now();
        for gpu in gpus {
            if !self.is_due(&gpu.uuid) || self.due.get(&gpu.uuid).is_some_and(|tried| now < tried.again) {
                continue;
            }
            let handles = handles.clone();
            tasks.spawn(async move {
                let outcome = attend(&handles, &gpu).await;
                (gpu, outcome)
            });
        }
        for (gpu, outcome) in tasks.join_all().await {
            self.judge(handles, &gpu, outcome);
        }
        let unidentified = self.unidentified(handles, &nameless);
        self.due.values().map(|tried| tried.again).chain(unidentified).min()
    }

    fn judge(&mut self, handles: &Handles, gpu: &Gpu, outcome: Outcome) {
        let now = Instant::now();
        let tried = self.due.entry(gpu.uuid.clone()).or_insert(Tried {
            looks: 0,
            attempts: 0,
            again: now,
            said: String::new(),
        });
        let subject = Subject::Gpu(gpu.uuid.clone());
        let apply = apply_again(gpu);
        let trouble = match outcome {
            Outcome::Given => {
                handles.startup.forget(&subject);
                None
            }
            Outcome::Theirs(error) => {
                tracing::info!(gpu = gpu.uuid, "left alone: {error}");
                handles.startup.forget(&subject);
                None
            }
            Outcome::Stopping => return,
            Outcome::NotYet(error) => {
                tried.looks += 1;
                tried.again = now + pause(tried.looks - 1);
                Some((error, true, "its layout is still due: gpushd looks again by itself".to_owned()))
            }
            Outcome::Failed(error) if tried.attempts + 1 < ATTEMPTS => {
                tried.attempts += 1;
                tried.again = now + pause(tried.attempts - 1);
                let so_far = tried.attempts;
                Some((error, true, format!("tried {so_far} of {ATTEMPTS} times: gpushd tries again by itself")))
            }
            Outcome::Failed(error) => {
                let given_up = format!("tried {ATTEMPTS} times: apply it when the cause is mended, {apply}");
                Some((error, false, given_up))
            }
            Outcome::Never(error) => {
                let given_up = format!("gpushd does not try again by itself: {apply} does");
                Some((error, false, given_up))
            }
        };
        let Some((mut error, again, outlook)) = trouble else {
            self.settle(gpu);
            return;
        };
        if let Some(one) = &gpu.overridden {
            error.causes.push(format!("this layout is an override by {}", words::actor(&one.by)));
        }
        if !again || tried.said != error.message {
            tried.said.clone_from(&error.message);
            give::log(gpu, &error.clone().cause(outlook.clone()));
        }
        error.causes.push(outlook);
        handles.startup.note(subject, error);
        if !again {
            self.settle(gpu);
        }
    }

    fn settle(&mut self, gpu: &Gpu) {
        self.due.remove(&gpu.uuid);
        self.record.settled.insert(gpu.uuid.clone());
    }

    /// When to look again for GPUs that can't be identified.
    fn unidentified(&mut self, handles: &Handles, nameless: &[u32]) -> Option<Instant> {
        if nameless.is_empty() {
            handles.startup.forget(&Subject::Unidentified);
            return None;
        }
        let indices: Vec<String> = nameless.iter().map(u32::to_string).collect();
        let message = format!("it is not known whether a layout is due on GPU {}", indices.join(", "));
        let error = ApiError::new(Code::DriverError, message)
            .cause("the driver lists it and it can't be identified: gpushd looks again by itself");
        handles
            .startup
            .note(Subject::Unidentified, error.hint("see the kernel's log: `dmesg | grep -i -e nvrm -e xid`"));
        self.looks += 1;
        Some(Instant::now() + pause(self.looks - 1))
    }

    async fn write(&self, handles: &Handles) {
        let record = self.record.clone();
        let Err(error) = handles.store.write_ending(move |tx| tx.record_boot(&record)).await else {
            handles.startup.recorded(self.record.clone());
            handles.startup.forget(&Subject::Boot);
            return;
        };
        tracing::error!("the boot can't be recorded: {error}");
        handles.startup.note(
            Subject::Boot,
            ApiError::new(Code::Internal, "the boot can't be recorded")
                .cause(error.to_string())
                .hint("until it can, the config's layouts are applied again each time gpushd starts"),
        );
    }
}

/// Whether a GPU of a mode is brought to it by an operation.
pub(super) fn is_given(mode: Mode) -> bool {
    match mode {
        Mode::Mig | Mode::Mps => true,
        Mode::Unmanaged | Mode::Exclusive | Mode::Timeslice => false,
    }
}

/// The command that tries again. On a GPU with an override, naming the GPU would end that.
fn apply_again(gpu: &Gpu) -> String {
    match gpu.overridden {
        Some(_) => "`gpushctl mig apply`".to_owned(),
        None => format!("`gpushctl apply {}`", gpu.index),
    }
}

/// What is to be done with a GPU whose layout may be due, done.
async fn attend(handles: &Handles, gpu: &Gpu) -> Outcome {
    if !is_given(gpu.mode) || handles.startup.is_left(&gpu.uuid) {
        return Outcome::Given;
    }
    let not_yet = |what: &str| {
        let mut error = ApiError::new(Code::DriverError, format!("GPU {} ({}) {what}", gpu.index, gpu.uuid));
        error.causes.extend(gpu.reasons.iter().cloned());
        Outcome::NotYet(error.hint(format!("`gpushctl gpu show {}` says what is known of it", gpu.index)))
    };
    if handles.operations.is_being_recovered(&gpu.uuid) {
        return not_yet("is still an operation's that gpushd left unfinished when it ended");
    }
    if !gpu.cordons.is_empty() && !gpu.drift.is_empty() {
        return not_yet("is cordoned, so gpushd does not give it its layout by itself");
    }
    match gpu.state {
        GpuState::Maintenance => not_yet("is in maintenance, so it has not got its layout"),
        GpuState::Held => not_yet("is held, so it has not got its layout"),
        GpuState::Unknown => not_yet("can't be read, so it has not got its layout"),
        GpuState::Ready | GpuState::Cordoned | GpuState::Changing | GpuState::Degraded
            if gpu.drift.is_empty() && gpu.stale =>
        {
            not_yet("has not been read lately, so it is not known whether it has its layout")
        }
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded if gpu.drift.is_empty() => Outcome::Given,
        GpuState::Ready | GpuState::Cordoned | GpuState::Changing | GpuState::Degraded | GpuState::Lost => {
            give::give(handles, operation::START, gpu).await
        }
    }
}
