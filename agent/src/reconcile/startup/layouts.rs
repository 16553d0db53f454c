//! Applies the layouts of a boot, GPU by GPU. A GPU is settled when it has its layout, or when gpushd no longer tries.
//!
//! ```text
//! outcome of an attempt                      next attempt            end
//! driver or GPU does not answer, cordon,     after a pause           none, it may last
//!   or another operation has the GPU
//! the attempt failed                         after a pause           after [`ATTEMPTS`]: settled
//! GPU in use                                 after a pause           after [`READY`], or [`ATTEMPTS`] refusals by
//!                                                                    the driver: settled and waiting
//! GPU in use, settled and waiting            every [`IN_USE`]        none, it may last
//! GPU has its layout, or needs none          -                       settled
//! refused for good                           -                       settled
//! a caller began an operation on the GPU,    -                       settled
//!   or cancelled the attempt
//! ```
//!
//! Each GPU has a separate operation. So if one GPU cannot get its layout, this does not delay other GPUs. gpushd
//! records each GPU when it is settled. If gpushd starts again on the same boot, it continues with the GPUs that are
//! not settled. While the driver cannot identify a GPU, the record is not complete, because a rule may claim that GPU.
//!
//! gpushd checks without limit whether it can try again, because a check is cheap; the pause between checks grows to
//! the second value of [`PAUSE`]. A failed attempt has destroyed and created instances, so the number of attempts is
//! limited. All [`ATTEMPTS`] together take about 16 s. If all attempts fail, gpushd shows the difference as drift, and
//! health shows the error.
//!
//! A GPU in use is different: a monitor keeps a handle open for seconds, a service or a job for hours. gpushd tries such
//! a GPU often while `gpushctl ready` waits for the host. After that, the GPU no longer delays `gpushctl ready`, and
//! gpushd tries it every 30 s. Each attempt that the driver refuses stops and starts services. So after such a refusal,
//! gpushd tries a waiting GPU only when one of its known holders has ended, or after [`REFUSED`].

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, Gpu, GpuIndex, GpuUuid, Holder};
use gpush_core::holders;
use gpush_store::BootRecord;
use tokio::time::Instant;

use super::{
    ProblemSubject, StartupHandles,
    attempt::{self, InUse, LayoutResult},
    due_layout,
    running::{AttemptPurpose, RunningAttempts},
};
use crate::{requests::caller::Viewer, state::words, system::backoff::nth_pause};

/// First and longest pause between two checks or attempts. The pause doubles each time.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// Maximum number of operations that gpushd tries for one layout.
const ATTEMPTS: u32 = 6;

/// Time after its start in which gpushd retries GPUs in use at short intervals. This is less than the 90 s that
/// gpush-ready.service waits for the host, so that this unit can report what uses the GPU.
const READY: Duration = Duration::from_secs(80);

/// Interval at which gpushd tries a waiting GPU.
const IN_USE: Duration = Duration::from_secs(30);

/// Maximum time after a refusal by the driver until gpushd tries a waiting GPU again. gpushd may not know what the driver
/// refused the change for, so the known holders alone do not decide.
const REFUSED: Duration = Duration::from_secs(10 * 60);

/// The layouts that must be applied on this boot.
#[derive(Debug)]
pub(super) struct Layouts {
    record: BootRecord,
    /// GPUs whose layout gpushd still has to apply, by UUID.
    due: BTreeMap<GpuUuid, GpuAttempts>,
    begun: Instant,
    /// Number of checks in which the driver did not answer or could not identify a GPU.
    checks: u32,
    /// Whether the log already says that gpushd waits for the driver.
    is_wait_logged: bool,
}

/// The progress of the layouts of the boot.
#[derive(Debug)]
pub(super) enum Progress {
    /// All GPUs are settled.
    Complete,
    /// Attempts are running, or due at this time. If only waiting GPUs are left, the record of the boot is complete.
    Waiting(Option<Instant>),
}

/// The attempts to apply the layout of one GPU.
#[derive(Debug)]
struct GpuAttempts {
    checks: u32,
    attempts: u32,
    again: Instant,
    /// The error that was logged last, so that it is not logged again.
    logged: String,
    /// The last refusal by the driver because the GPU is in use, and its time.
    refused: Option<(InUse, Instant)>,
}

/// When to check again.
#[derive(Debug, Default)]
struct NextCheck {
    /// For GPUs that are not settled.
    unsettled: Option<Instant>,
    /// For waiting GPUs.
    waiting: Option<Instant>,
}

impl NextCheck {
    fn unsettled(again: Instant) -> Self {
        Self { unsettled: Some(again), waiting: None }
    }
}

impl Layouts {
    pub(super) fn new(record: BootRecord) -> Self {
        Self { record, due: BTreeMap::new(), begun: Instant::now(), checks: 0, is_wait_logged: false }
    }

    /// Returns whether gpushd still has to apply the layout of a GPU on this boot.
    pub(super) fn is_due(&self, uuid: &GpuUuid) -> bool {
        !self.record.settled.contains(uuid) || self.record.waiting.contains(uuid)
    }

    /// Checks the GPUs whose layouts are due, and starts the attempts to apply these layouts.
    pub(super) async fn round(&mut self, handles: &StartupHandles, attempts: &mut RunningAttempts) -> Progress {
        let next = self.start_due(handles, attempts).await;
        let is_settled = next.unsettled.is_none() && !attempts.has(AttemptPurpose::Boot);
        if is_settled && !self.record.complete {
            self.record.complete = true;
            self.write(handles).await;
        }
        let is_waiting = next.waiting.is_some() || attempts.has(AttemptPurpose::Waiting);
        if is_settled && !is_waiting {
            return Progress::Complete;
        }
        Progress::Waiting(next.unsettled.into_iter().chain(next.waiting).min())
    }

    /// Starts the attempts that are due. Returns when to check again.
    async fn start_due(&mut self, handles: &StartupHandles, attempts: &mut RunningAttempts) -> NextCheck {
        let host = handles.context.state.now();
        if !host.rules_are_known {
            // Wait for a valid config. A reload ends this wait early.
            return NextCheck::unsettled(Instant::now() + PAUSE.1);
        }
        let config = Arc::clone(&host.config);
        if !config.rules.iter().any(|rule| rule.mode.is_managed()) {
            handles.startup.forget(&ProblemSubject::Unidentified);
            if !self.record.waiting.is_empty() {
                self.record.waiting.clear();
                self.write(handles).await;
            }
            return NextCheck::default();
        }
        let observed = tokio::select! {
            observed = handles.context.readings.host() => observed,
            () = handles.context.stopping.cancelled() => return NextCheck::unsettled(Instant::now()),
        };
        let observed = match observed {
            Ok(observed) => observed,
            Err(error) => {
                if !self.is_wait_logged {
                    tracing::info!("the driver does not answer yet, so gpushd applies the layouts later: {error}");
                    self.is_wait_logged = true;
                }
                self.checks += 1;
                return NextCheck::unsettled(Instant::now() + nth_pause(PAUSE, self.checks - 1));
            }
        };
        let nameless: Vec<GpuIndex> = observed.host.nameless.iter().map(|(index, _)| *index).collect();
        let gpus = observed.gpus(Viewer::Agent);
        let now = Instant::now();
        for gpu in gpus {
            let is_later = self.due.get(&gpu.uuid).is_some_and(|tried| now < tried.again);
            if !self.is_due(&gpu.uuid) || is_later || attempts.is_running(&gpu.uuid) {
                continue;
            }
            let (handles, one) = (handles.clone(), gpu.clone());
            let refused = self.due.get(&gpu.uuid).and_then(|tried| tried.refused.clone());
            let is_waiting = self.record.waiting.contains(&gpu.uuid);
            let purpose = if is_waiting { AttemptPurpose::Waiting } else { AttemptPurpose::Boot };
            attempts.start(purpose, gpu, async move {
                match refused.filter(|_| is_waiting) {
                    Some((refused, since))
                        if since.elapsed() < REFUSED && is_still_held(&handles, &one, &refused).await =>
                    {
                        LayoutResult::InUse(InUse { has_begun: false, ..refused })
                    }
                    Some(_) | None => due_layout::apply_if_due(&handles, &one).await,
                }
            });
        }
        let unidentified = self.unidentified(handles, &nameless);
        let waiting = &self.record.waiting;
        let again = |is_waiting: bool| {
            let due = self.due.iter().filter(|(uuid, _)| !attempts.is_running(uuid));
            due.filter(|(uuid, _)| waiting.contains(*uuid) == is_waiting).map(|(_, tried)| tried.again).min()
        };
        NextCheck { unsettled: again(false).into_iter().chain(unidentified).min(), waiting: again(true) }
    }

    /// Records the outcome of an attempt.
    pub(super) async fn record_outcome(&mut self, handles: &StartupHandles, gpu: &Gpu, outcome: LayoutResult) {
        let before = self.record.clone();
        self.note_outcome(handles, gpu, outcome);
        if self.record != before {
            self.write(handles).await;
        }
    }

    fn note_outcome(&mut self, handles: &StartupHandles, gpu: &Gpu, outcome: LayoutResult) {
        let now = Instant::now();
        let tried = self.due.entry(gpu.uuid.clone()).or_insert(GpuAttempts {
            checks: 0,
            attempts: 0,
            again: now,
            logged: String::new(),
            refused: None,
        });
        let holders = match &outcome {
            LayoutResult::InUse(in_use) => in_use.holders.clone(),
            LayoutResult::Given
            | LayoutResult::Busy(_)
            | LayoutResult::Cancelled(_)
            | LayoutResult::Never(_)
            | LayoutResult::NotYet(_)
            | LayoutResult::Failed(_)
            | LayoutResult::Stopping => Vec::new(),
        };
        if handles.context.state.set_blocked_by(&gpu.uuid, holders.clone()) {
            for holder in &holders {
                tracing::warn!(
                    gpu = gpu.uuid.as_str(),
                    "the layout is not applied: held by {}",
                    holders::describe(holder)
                );
            }
        }
        let subject = ProblemSubject::Gpu(gpu.uuid.clone());
        let apply = format!("`gpushctl apply {}` (administrator)", gpu.index);
        let trouble = match outcome {
            LayoutResult::Given => {
                handles.startup.forget(&subject);
                None
            }
            LayoutResult::Cancelled(error) => {
                tracing::info!(
                    gpu = gpu.uuid.as_str(),
                    "GPU {}: its layout is not applied at start: {error}",
                    gpu.uuid
                );
                handles.startup.forget(&subject);
                None
            }
            // If a user requested the operation that has claimed the GPU, the next check marks the GPU as settled.
            LayoutResult::Busy(_) => {
                tried.checks += 1;
                tried.again = now + nth_pause(PAUSE, tried.checks - 1);
                return;
            }
            LayoutResult::Stopping => return,
            LayoutResult::NotYet(error) => {
                tried.checks += 1;
                tried.again = now + nth_pause(PAUSE, tried.checks - 1);
                Some((error, true, "its layout is not applied yet: gpushd tries again".to_owned()))
            }
            LayoutResult::InUse(in_use) => {
                let may_wait = self.record.waiting.contains(&gpu.uuid) || now >= self.begun + READY;
                let error = in_use.error_without_holders(gpu);
                let outlook = match tried.in_use(in_use, may_wait, now) {
                    InUseNext::Soon => "the GPU is in use: gpushd tries again".to_owned(),
                    InUseNext::Waiting => {
                        self.record.settled.insert(gpu.uuid.clone());
                        self.record.waiting.insert(gpu.uuid.clone());
                        format!("the GPU is in use: gpushd tries again every {} s", IN_USE.as_secs())
                    }
                };
                Some((error, true, outlook))
            }
            LayoutResult::Failed(error) if tried.attempts + 1 < ATTEMPTS => {
                tried.attempts += 1;
                tried.again = now + nth_pause(PAUSE, tried.attempts - 1);
                let so_far = tried.attempts;
                Some((error, true, format!("gpushd has tried {so_far} of {ATTEMPTS} times, and tries again")))
            }
            LayoutResult::Failed(error) => {
                let given_up =
                    format!("gpushd has tried {ATTEMPTS} times: remove the cause, then apply the layout with {apply}");
                Some((error, false, given_up))
            }
            LayoutResult::Never(error) => {
                let given_up = format!("gpushd does not try again: apply the layout with {apply}");
                Some((error, false, given_up))
            }
        };
        let Some((mut error, again, outlook)) = trouble else {
            self.mark_settled(gpu);
            return;
        };
        if let Some(one) = &gpu.overridden {
            error.causes.push(format!("this layout is an override by {}", words::actor(&one.by)));
        }
        if !again || tried.logged != error.message {
            tried.logged.clone_from(&error.message);
            attempt::log(gpu, &error.clone().cause(outlook.clone()));
        }
        error.causes.push(outlook);
        handles.startup.note(subject, error);
        if !again {
            self.mark_settled(gpu);
        }
    }

    fn mark_settled(&mut self, gpu: &Gpu) {
        self.due.remove(&gpu.uuid);
        self.record.waiting.remove(&gpu.uuid);
        self.record.settled.insert(gpu.uuid.clone());
    }

    /// If the driver cannot identify some GPUs, returns when to check them again.
    fn unidentified(&mut self, handles: &StartupHandles, nameless: &[GpuIndex]) -> Option<Instant> {
        if nameless.is_empty() {
            handles.startup.forget(&ProblemSubject::Unidentified);
            return None;
        }
        let indices: Vec<String> = nameless.iter().map(GpuIndex::to_string).collect();
        let message = format!(
            "the driver reports no UUID for GPU {}, so gpushd does not apply a layout there yet",
            indices.join(", ")
        );
        let error =
            ApiError::new(Code::DriverError, message).cause("gpushd identifies GPUs by their UUIDs, and tries again");
        handles
            .startup
            .note(ProblemSubject::Unidentified, error.hint("see the kernel's log: `dmesg | grep -i -e nvrm -e xid`"));
        self.checks += 1;
        Some(Instant::now() + nth_pause(PAUSE, self.checks - 1))
    }

    async fn write(&self, handles: &StartupHandles) {
        let record = self.record.clone();
        let Err(error) = handles.context.store.write_ending(move |tx| tx.record_boot(&record)).await else {
            handles.startup.recorded(self.record.clone());
            handles.startup.forget(&ProblemSubject::Boot);
            return;
        };
        tracing::error!("cannot record that the layouts of this boot were applied: {error}");
        handles.startup.note(
            ProblemSubject::Boot,
            ApiError::new(Code::Internal, "cannot record that the layouts of this boot were applied")
                .cause(error.to_string())
                .hint(
                    "see `journalctl -u gpushd`; until gpushd can record that it applied the layouts after this boot, it \
                    applies them at each start",
                ),
        );
    }
}

/// The next attempt on a GPU in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InUseNext {
    /// After a pause that is longer each time.
    Soon,
    /// Every [`IN_USE`].
    Waiting,
}

impl GpuAttempts {
    /// Notes that the GPU is in use. `may_wait` is true if gpushd no longer has to try often.
    fn in_use(&mut self, in_use: InUse, may_wait: bool, now: Instant) -> InUseNext {
        if in_use.has_begun {
            self.attempts += 1;
            self.refused = Some((in_use, now));
        }
        let next = if may_wait || self.attempts >= ATTEMPTS { InUseNext::Waiting } else { InUseNext::Soon };
        self.again = now
            + match next {
                InUseNext::Soon => {
                    self.checks += 1;
                    nth_pause(PAUSE, self.checks - 1)
                }
                InUseNext::Waiting => IN_USE,
            };
        next
    }
}

/// Returns whether everything that had the GPU open when the driver refused its layout still has the GPU open, as far as
/// gpushd knows.
async fn is_still_held(handles: &StartupHandles, gpu: &Gpu, refused: &InUse) -> bool {
    let is_changed_by_caller =
        handles.startup.is_changed_by_caller(&gpu.uuid) || handles.operations.began_on(&gpu.uuid);
    if is_changed_by_caller || gpu.drift.is_empty() {
        return false;
    }
    let now = attempt::holders(handles, gpu).await;
    let same = |one: &Holder, other: &Holder| (one.pid, one.uid, &one.module) == (other.pid, other.uid, &other.module);
    refused.holders.iter().all(|holder| now.iter().any(|other| same(holder, other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_use(has_begun: bool) -> InUse {
        let error = ApiError::new(Code::Blocked, "GPU 0 is in use");
        InUse { error, holders: Vec::new(), has_begun }
    }

    fn attempts(now: Instant) -> GpuAttempts {
        GpuAttempts { checks: 0, attempts: 0, again: now, logged: String::new(), refused: None }
    }

    /// Fault: an Ampere GPU that a monitor held for two seconds stayed without MIG until an administrator acted.
    #[test]
    fn gpu_in_use_is_tried_often_and_later_every_30_s() {
        let begun = Instant::now();
        let (mut now, mut tried, mut checks) = (begun, attempts(begun), 0);
        while now < begun + READY {
            assert_eq!(tried.in_use(in_use(false), false, now), InUseNext::Soon);
            assert!(tried.again > now && tried.again <= now + PAUSE.1);
            (now, checks) = (tried.again, checks + 1);
        }
        assert!((6..=20).contains(&checks), "{checks}");
        for _ in 0..3 {
            assert_eq!(tried.in_use(in_use(false), true, now), InUseNext::Waiting);
            assert_eq!(tried.again, now + IN_USE);
            now = tried.again;
        }
        assert!(tried.refused.is_none(), "no attempt began, so gpushd must plan again");
    }

    /// Each attempt that begins stops and starts services, so their number is limited.
    #[test]
    fn refusals_by_the_driver_are_limited_before_the_gpu_waits() {
        let now = Instant::now();
        let mut tried = attempts(now);
        let next: Vec<InUseNext> = (0..ATTEMPTS).map(|_| tried.in_use(in_use(true), false, now)).collect();
        assert!(next[..next.len() - 1].iter().all(|next| *next == InUseNext::Soon));
        assert_eq!((next.last(), tried.again), (Some(&InUseNext::Waiting), now + IN_USE));
        let since = tried.refused.as_ref().map(|(_, since)| *since);
        assert_eq!(since, Some(now));
        // A check that found the same holders is not another refusal.
        tried.in_use(in_use(false), true, now + IN_USE);
        assert_eq!((tried.refused.map(|(_, since)| since), tried.attempts), (since, ATTEMPTS));
    }
}
