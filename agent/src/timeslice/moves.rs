//! GPUs that an operation makes ready to be shared by turns, or takes away from that: it is done only once their level
//! and compute mode were read back, and begins only once what was set for turns has gone.
//!
//! ```text
//! plan ─► leaves the GPU whole, and its rule says timeslice ─► step Set
//! begin ─► what was set for turns that no rule wants ─► let go, awaited ─► steps
//! done  ─► step Set ─► set and read back, awaited ─► what did not come about is told with the operation
//! ```
//!
//! A level that can't be set is no reason to take a GPU back: it is tried again, as after any drift.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{ApiError, Gpu, GpuPlan, Mode, Step, TimesliceStep};
use tokio::time::Instant;

use super::{Subject, Timeslice};

/// How long an operation waits for `nvidia-smi`, which may take a while to find its driver.
const PATIENCE: Duration = Duration::from_secs(20);

/// Between two looks, while a GPU was not seen as it is.
const LOOK: Duration = Duration::from_millis(20);

/// GPUs that operations wait for, by UUID, each with what is wrong with it once it was seen to.
pub(super) type Awaited = BTreeMap<String, Option<Vec<String>>>;

/// Fills in which plans leave a GPU that is shared by turns from then on.
pub(crate) fn plan(gpus: &[Gpu], plans: &mut [GpuPlan]) {
    for plan in plans.iter_mut().filter(|plan| plan.error.is_none() && !plan.is_empty()) {
        let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == plan.uuid) else { continue };
        if gpu.mode == Mode::Timeslice && plan.leaves_whole(gpu) {
            plan.add(Step::Timeslice(TimesliceStep::Set));
        }
    }
}

/// Waits until these GPUs are as their rules want them as far as turns go; a sentence on what is not.
pub(crate) async fn settled(timeslice: &Timeslice, uuids: &[String]) -> Vec<String> {
    if uuids.is_empty() {
        return Vec::new();
    }
    timeslice.awaited().extend(uuids.iter().map(|uuid| (uuid.clone(), None)));
    let those = Those { timeslice, uuids };
    timeslice.settle_afresh();
    let until = Instant::now() + PATIENCE;
    loop {
        // Before it is looked: what comes between is not missed.
        let told = timeslice.seen_to.notified();
        if timeslice.awaited().iter().filter(|(uuid, _)| uuids.contains(uuid)).all(|(_, seen)| seen.is_some()) {
            break;
        }
        tokio::select! {
            () = told => {}
            // It may have been looked at while its last reading was from before the change.
            () = tokio::time::sleep(LOOK) => timeslice.settle(),
            () = tokio::time::sleep_until(until) => break,
            () = timeslice.stopping.cancelled() => break,
        }
    }
    those.told()
}

/// GPUs that an operation waits for, for as long as it does.
struct Those<'a> {
    timeslice: &'a Timeslice,
    uuids: &'a [String],
}

impl Those<'_> {
    fn told(&self) -> Vec<String> {
        let awaited = self.timeslice.awaited();
        let late = |uuid: &String| vec![format!("what turns mean for GPU {uuid} is seen to after the operation")];
        self.uuids.iter().flat_map(|uuid| awaited.get(uuid).cloned().flatten().unwrap_or_else(|| late(uuid))).collect()
    }
}

impl Drop for Those<'_> {
    fn drop(&mut self) {
        let mut awaited = self.timeslice.awaited();
        self.uuids.iter().for_each(|uuid| drop(awaited.remove(uuid)));
    }
}

/// GPUs on which something of ours stands that is there for turns.
pub(crate) fn to_let_go(timeslice: &Timeslice, plans: &[GpuPlan]) -> Vec<String> {
    let ours = plans.iter().filter(|plan| !plan.sets_timeslice() && timeslice.shared_gpus.has_turns_of(&plan.uuid));
    ours.map(|plan| plan.uuid.clone()).collect()
}

impl Timeslice {
    /// Whether an operation waits for a GPU: it is to be seen to although it is being changed.
    pub(super) fn is_awaited(&self, uuid: &str) -> bool {
        self.awaited().contains_key(uuid)
    }

    /// What operations wait for now.
    pub(super) fn all_awaited(&self) -> Vec<String> {
        self.awaited().keys().cloned().collect()
    }

    /// These were looked at: whoever waits is told what is wrong with them.
    pub(super) fn tell_awaited<'a>(&self, uuids: impl Iterator<Item = &'a String>) {
        let (mut awaited, troubles) = (self.awaited(), self.all_troubles());
        for uuid in uuids {
            let Some(seen) = awaited.get_mut(uuid) else { continue };
            let subjects = [Subject::Program, Subject::Level(uuid.clone()), Subject::ComputeMode(uuid.clone())];
            let of = subjects.iter().filter_map(|subject| troubles.get(subject));
            *seen = Some(of.flat_map(ApiError::sentences).map(str::to_owned).collect());
        }
        self.seen_to.notify_waiters();
    }
}
