//! Reads the time-slice levels of GPUs, and sets the levels that differ from the desired level.
//!
//! ```text
//! list ─► each GPU: as desired ─────────────────────────────────────► seen
//!           │ differs                                                  ▲
//!           ▼                                                          │
//!         recorded (unless it is the default) ───────► set ─► list ────┘ done only when listed
//! ```

use gpush_api::{ApiError, Code, GpuUuid, TimesliceLevel};
use gpush_core::{
    compute_policy::{GpuIdentifier, LevelReport, level_of},
    timeslice_plan::{self, LevelAction},
};
use gpush_store::LevelSet;

use super::{Timeslice, TroubleSubject, schedule::Schedule, smi, target::TimeslicedGpu};
use crate::state::{Level, LevelRound};

/// Reason that gpushd shows if the driver has no time-slice levels for a GPU.
const UNSUPPORTED: &str = "the driver has no time-slice levels for this GPU: only Turing and later GPUs have them";

/// Reason that gpushd shows if the driver reports no levels for a GPU that had a level before.
const DOUBTED: &str = "the GPU has no time-slice levels, although it had one before";

/// Which task sets levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Setter {
    /// The reconciler. It locks the lane of each GPU before it changes the GPU, and skips GPUs whose lanes are not
    /// free.
    Reconciler,
    /// An operation. It already has the lanes of these GPUs.
    Operation,
}

/// Reads the levels of all GPUs with one call of `nvidia-smi`, and sets the levels that differ from the desired levels.
/// Returns the UUIDs of GPUs that were skipped because their lanes were not free.
pub(super) async fn reconcile(
    timeslice: &Timeslice,
    pace: &mut Schedule,
    round: &mut LevelRound,
    aims: &[TimeslicedGpu],
    setter: Setter,
) -> Vec<GpuUuid> {
    let mut busy = Vec::new();
    let Some(reported) = list(timeslice, pace, round, aims).await else { return busy };
    let mut set = Vec::new();
    for aim in aims {
        let reported = reported_level(timeslice, round, &reported, aim);
        let reported = reported.as_ref();
        let before = store_level(round, aim, reported);
        match timeslice_plan::level_action(aim.level(), reported) {
            LevelAction::Nothing => mark_ok(timeslice, pace, round, aim).await,
            LevelAction::Set(now) => {
                let turn = match setter {
                    Setter::Operation => None,
                    Setter::Reconciler => match timeslice.context.lanes.try_lock(&aim.gpu.uuid) {
                        Some(turn) => Some(turn),
                        None => {
                            busy.push(aim.gpu.uuid.clone());
                            continue;
                        }
                    },
                };
                if change(timeslice, pace, round, aim, now).await {
                    set.push((aim, now, turn));
                }
            }
            LevelAction::Unsupported => unsupported(timeslice, pace, aim, before).await,
            LevelAction::Unknown(why) => fail(timeslice, pace, round, aim, &error(aim, &why)),
        }
    }
    if set.is_empty() {
        return busy;
    }
    let Some(reported) = list(timeslice, pace, round, aims).await else { return busy };
    for (aim, before, _turn) in set {
        let reported = reported_level(timeslice, round, &reported, aim);
        let reported = reported.as_ref();
        match timeslice_plan::level_action(aim.level(), reported) {
            LevelAction::Nothing => {
                log_change(round, aim, before);
                store_level(round, aim, reported);
                mark_ok(timeslice, pace, round, aim).await;
            }
            LevelAction::Set(now) => {
                store_level(round, aim, reported);
                let why =
                    format!("nvidia-smi reported that the level `{}` was set, but the level is `{now}`", aim.level());
                fail(timeslice, pace, round, aim, &error(aim, &why));
            }
            LevelAction::Unsupported => {
                let before = store_level(round, aim, reported);
                unsupported(timeslice, pace, aim, before).await;
            }
            LevelAction::Unknown(why) => {
                store_level(round, aim, reported);
                fail(timeslice, pace, round, aim, &error(aim, &why));
            }
        }
    }
    busy
}

/// Returns what nvidia-smi reports about a GPU. If the GPU had a level before, "not supported" counts as an error.
/// Without this rule, a temporary fault of the driver would make gpushd forget a level that it has set.
fn reported_level(
    timeslice: &Timeslice,
    round: &mut LevelRound,
    reported: &[(GpuIdentifier, LevelReport)],
    aim: &TimeslicedGpu,
) -> Option<LevelReport> {
    let uuid = &aim.gpu.uuid;
    let reported = level_of(reported, aim.gpu.index, uuid, &aim.gpu.pci)?.clone();
    let is_mig = aim.gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
    let had_level = round.is_supporting(uuid) || timeslice.shared_gpus.level(uuid).is_some();
    if matches!(reported, LevelReport::Level(_)) {
        round.mark_supporting(uuid);
    }
    Some(without_doubtful(reported, is_mig, had_level))
}

/// Returns the report, or an error if the report says that a GPU without MIG lost its support for levels.
fn without_doubtful(reported: LevelReport, is_mig: bool, had_level: bool) -> LevelReport {
    match reported {
        LevelReport::Unsupported if !is_mig && had_level => LevelReport::Failed(DOUBTED.to_owned()),
        LevelReport::Unsupported | LevelReport::Level(_) | LevelReport::Failed(_) => reported,
    }
}

/// Lists the levels with nvidia-smi. If this fails, stores the error and returns `None`.
async fn list(
    timeslice: &Timeslice,
    pace: &mut Schedule,
    round: &mut LevelRound,
    aims: &[TimeslicedGpu],
) -> Option<Vec<(GpuIdentifier, LevelReport)>> {
    match smi::list(timeslice).await {
        Ok(reported) => {
            pace.mark_ok(&TroubleSubject::Program);
            timeslice.clear_error(&TroubleSubject::Program);
            Some(reported)
        }
        // Maintenance has begun meanwhile. gpushd already reports the maintenance elsewhere, so store no error.
        Err(_) if timeslice.context.state.maintenance().is_some() => None,
        Err(error) => {
            let why = error.sentences().join(": ");
            for aim in aims.iter().filter(|aim| aim.policy.is_some()) {
                round.set(&aim.gpu.uuid, Level::Unknown(why.clone()));
            }
            pace.failed(TroubleSubject::Program);
            timeslice.note(TroubleSubject::Program, &error);
            None
        }
    }
}

/// Stores the level of a time-sliced GPU. Returns the level that was stored before.
fn store_level(round: &mut LevelRound, aim: &TimeslicedGpu, reported: Option<&LevelReport>) -> Option<Level> {
    aim.policy.as_ref()?;
    let level = match timeslice_plan::level_action(aim.level(), reported) {
        LevelAction::Nothing => Level::Known(aim.level()),
        LevelAction::Set(now) => Level::Known(now),
        LevelAction::Unsupported => Level::Unsupported(UNSUPPORTED.to_owned()),
        LevelAction::Unknown(why) => Level::Unknown(why),
    };
    round.set(&aim.gpu.uuid, level)
}

/// Sets the level of a GPU. Returns whether nvidia-smi reported success.
async fn change(
    timeslice: &Timeslice,
    pace: &mut Schedule,
    round: &mut LevelRound,
    aim: &TimeslicedGpu,
    now: TimesliceLevel,
) -> bool {
    let uuid = &aim.gpu.uuid;
    if aim.policy.is_none() && !timeslice.shared_gpus.level(uuid).is_some_and(|ours| ours.is_ours(now)) {
        // Another program has changed the level since gpushd set it, so leave the level unchanged.
        mark_ok(timeslice, pace, round, aim).await;
        return false;
    }
    if !pace.may_try(&TroubleSubject::Level(uuid.clone())) {
        return false;
    }
    let wanted = aim.level();
    // If the GPU has a level other than the default, it supports levels. Then "not supported" is only a temporary
    // fault.
    let can_be_set = now != TimesliceLevel::Default || round.was_set_before(uuid);
    let about = record_of_change(timeslice.shared_gpus.level(uuid), now, wanted);
    if wanted != TimesliceLevel::Default
        && let Err(why) = timeslice.shared_gpus.note_level(uuid, Some(about)).await
    {
        fail(timeslice, pace, round, aim, &error(aim, &why));
        return false;
    }
    match smi::set(timeslice, &aim.gpu, wanted).await {
        Ok(()) => true,
        Err(smi::NotSet::Unsupported) if can_be_set => {
            fail(
                timeslice,
                pace,
                round,
                aim,
                &error(aim, &format!("nvidia-smi cannot set the time-slice level `{wanted}`: {DOUBTED}")),
            );
            false
        }
        Err(smi::NotSet::Unsupported) => {
            let before = store_level(round, aim, Some(&LevelReport::Unsupported));
            unsupported(timeslice, pace, aim, before).await;
            false
        }
        Err(smi::NotSet::Failed(why)) => {
            let why = why.causes.join("; ");
            fail(
                timeslice,
                pace,
                round,
                aim,
                &error(aim, &format!("nvidia-smi cannot set the time-slice level `{wanted}`: {why}")),
            );
            false
        }
    }
}

/// Returns the record of a GPU whose level gpushd is about to change from `now` to `wanted`. Until gpushd has read the new
/// level, the GPU may have the old level or the new level. So the record has both levels, if gpushd has also set the old
/// level.
fn record_of_change(ours: Option<LevelSet>, now: TimesliceLevel, wanted: TimesliceLevel) -> LevelSet {
    let last = ours.filter(|ours| ours.is_ours(now)).map(|_| now);
    LevelSet { set: wanted, last: last.filter(|last| *last != wanted) }
}

/// Logs that gpushd has set the desired level, and what the level was before.
fn log_change(round: &LevelRound, aim: &TimeslicedGpu, before: TimesliceLevel) {
    let (gpu, level) = (&aim.gpu.uuid, aim.level());
    match &aim.policy {
        None => tracing::info!(
            gpu = gpu.as_str(),
            "GPU {gpu} is no longer time-sliced: restored its time-slice level `{level}`"
        ),
        Some(_) if round.was_set(gpu, level) => tracing::warn!(
            gpu = gpu.as_str(),
            "GPU {gpu}: its time-slice level was `{before}`, because another program changed it or the driver lost \
            it: gpushd has set it to `{level}` again"
        ),
        Some(_) => {
            tracing::info!(gpu = gpu.as_str(), "GPU {gpu}: its time-slice level changed from `{before}` to `{level}`");
        }
    }
}

/// Stores that the GPU has the desired level, and updates the record.
async fn mark_ok(timeslice: &Timeslice, pace: &mut Schedule, round: &mut LevelRound, aim: &TimeslicedGpu) {
    let subject = TroubleSubject::Level(aim.gpu.uuid.clone());
    pace.mark_ok(&subject);
    timeslice.clear_error(&subject);
    if aim.policy.is_some() {
        round.mark_set(&aim.gpu.uuid, aim.level());
    }
    if aim.policy.is_none() || aim.level() == TimesliceLevel::Default {
        forget(timeslice, aim).await;
    } else if timeslice.shared_gpus.level(&aim.gpu.uuid).is_some_and(|ours| ours.last.is_some()) {
        let done = LevelSet { set: aim.level(), last: None };
        if let Err(why) = timeslice.shared_gpus.note_level(&aim.gpu.uuid, Some(done)).await {
            tracing::error!(gpu = aim.gpu.uuid.as_str(), "{why}");
        }
    }
}

/// Stores that the driver has no levels for a GPU. `before` is the level that was stored before.
async fn unsupported(timeslice: &Timeslice, pace: &mut Schedule, aim: &TimeslicedGpu, before: Option<Level>) {
    if aim.level() != TimesliceLevel::Default && !matches!(before, Some(Level::Unsupported(_))) {
        tracing::warn!(
            gpu = aim.gpu.uuid.as_str(),
            "GPU {}: {UNSUPPORTED}; the config wants the level `{}`",
            aim.gpu.uuid,
            aim.level()
        );
    }
    let subject = TroubleSubject::Level(aim.gpu.uuid.clone());
    pace.mark_ok(&subject);
    timeslice.clear_error(&subject);
    forget(timeslice, aim).await;
}

/// Removes the record of the level that gpushd has set on the GPU.
async fn forget(timeslice: &Timeslice, aim: &TimeslicedGpu) {
    if let Err(why) = timeslice.shared_gpus.note_level(&aim.gpu.uuid, None).await {
        tracing::error!(gpu = aim.gpu.uuid.as_str(), "{why}");
    }
}

fn fail(timeslice: &Timeslice, pace: &mut Schedule, round: &mut LevelRound, aim: &TimeslicedGpu, error: &ApiError) {
    let subject = TroubleSubject::Level(aim.gpu.uuid.clone());
    round.failed(&aim.gpu.uuid, error.causes.join("; "));
    pace.failed(subject.clone());
    timeslice.note(subject, error);
}

fn error(aim: &TimeslicedGpu, why: &str) -> ApiError {
    let what = format!("GPU {} ({}) does not have the time-slice level `{}`", aim.gpu.index, aim.gpu.uuid, aim.level());
    ApiError::new(Code::DriverError, what)
        .cause(why.to_owned())
        .hint(
            "gpushd tries again; to try now: `gpushctl config reload` (administrator); to see the levels: `nvidia-smi \
            compute-policy -l`",
        )
        .retryable()
}

#[cfg(test)]
mod tests {
    use gpush_api::TimeslicePolicy;

    use super::*;
    use crate::{modes::scene::whole_gpu, state::State};

    const DEFAULT: TimesliceLevel = TimesliceLevel::Default;
    const SHORT: TimesliceLevel = TimesliceLevel::Short;
    const LONG: TimesliceLevel = TimesliceLevel::Long;

    #[test]
    fn record_has_the_old_level_only_if_gpushd_has_set_it() {
        let set = |set, last| LevelSet { set, last };
        for (ours, now, wanted, record) in [
            (None, DEFAULT, LONG, set(LONG, None)),
            (None, SHORT, LONG, set(LONG, None)),
            (Some(set(SHORT, None)), SHORT, LONG, set(LONG, Some(SHORT))),
            (Some(set(SHORT, None)), DEFAULT, LONG, set(LONG, None)),
            (Some(set(LONG, None)), DEFAULT, LONG, set(LONG, None)),
            // The previous change from short to long did not take effect.
            (Some(set(LONG, Some(SHORT))), SHORT, LONG, set(LONG, Some(SHORT))),
            (Some(set(LONG, Some(SHORT))), SHORT, DEFAULT, set(DEFAULT, Some(SHORT))),
        ] {
            let about = record_of_change(ours, now, wanted);
            assert_eq!(about, record, "{ours:?}: {now} to {wanted}");
            assert!(about.is_ours(wanted));
        }
    }

    #[test]
    fn gpu_that_had_a_level_is_not_unsupported_unless_mig_is_on() {
        let doubted = LevelReport::Failed(DOUBTED.to_owned());
        for (is_mig, had_level, expected) in [
            (false, false, &LevelReport::Unsupported),
            (false, true, &doubted),
            (true, false, &LevelReport::Unsupported),
            (true, true, &LevelReport::Unsupported),
        ] {
            assert_eq!(
                without_doubtful(LevelReport::Unsupported, is_mig, had_level),
                *expected,
                "{is_mig} {had_level}"
            );
            let level = LevelReport::Level(LONG);
            assert_eq!(without_doubtful(level.clone(), is_mig, had_level), level);
        }
    }

    #[test]
    fn level_is_stored_only_for_time_sliced_gpus() {
        let policy = TimeslicePolicy { level: LONG, ..TimeslicePolicy::default() };
        let target = |policy| TimeslicedGpu { gpu: whole_gpu(), policy };
        for (report, level) in [
            (Some(LevelReport::Level(LONG)), Level::Known(LONG)),
            (Some(LevelReport::Level(SHORT)), Level::Known(SHORT)),
            (Some(LevelReport::Unsupported), Level::Unsupported(UNSUPPORTED.to_owned())),
            (None, Level::Unknown("nvidia-smi does not report the time-slice level".to_owned())),
        ] {
            let mut round = State::empty().begin_level_round();
            assert_eq!(store_level(&mut round, &target(None), report.as_ref()), None);
            assert_eq!(store_level(&mut round, &target(Some(policy.clone())), report.as_ref()), None, "no level yet");
            assert_eq!(store_level(&mut round, &target(Some(policy.clone())), report.as_ref()), Some(level));
        }
    }
}
