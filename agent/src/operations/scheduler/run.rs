//! The task of the scheduler: when it makes a pass.

use std::time::Duration;

use tokio::{sync::oneshot, time::Instant};

use super::{Scheduler, answer::LeaseAnswer, pass, reserve::ReadHost};
use crate::{requests::caller::Viewer, state::Observed};

/// Interval between readings while a request waits for something that only a reading shows, such as the end of a process
/// without a lease.
const READ: Duration = Duration::from_secs(1);

/// Interval between passes if no reading can help. It also limits how late gpushd notices unreported changes, such as
/// answers of the name service.
const FALLBACK: Duration = Duration::from_secs(30);

/// Makes passes until gpushd stops.
pub(super) async fn run(scheduler: Scheduler) {
    let handles = &scheduler.handles;
    let mut changed = scheduler.changed.subscribe();
    let mut room = handles.context.lanes.room();
    let mut snapshots = handles.context.state.watch();
    loop {
        let (begun, is_idle) = (Instant::now(), !scheduler.entries().has_leases());
        let mut next_reading = READ;
        if !is_idle {
            room.mark_unchanged();
            snapshots.mark_unchanged();
            match handles.context.stopping.run_until_cancelled(pass(&scheduler)).await {
                Some(next) => next_reading = next,
                None => return,
            }
        }
        let reading = Instant::now() + next_reading;
        // A pause may have ended during the pass.
        let due = scheduler.entries().next_due(begun).map_or(reading, |due| due.min(reading));
        tokio::select! {
            () = handles.context.stopping.cancelled() => return,
            _ = changed.changed() => {}
            changed = room.changed(), if !is_idle => if changed.is_err() { return },
            changed = snapshots.changed(), if !is_idle => if changed.is_err() { return },
            () = tokio::time::sleep_until(due), if !is_idle => {}
        }
    }
}

/// Makes a pass. Returns the time until the next pass if nothing changes meanwhile.
async fn pass(scheduler: &Scheduler) -> Duration {
    let changes = scheduler.handles.context.lanes.changes();
    // Without a driver gpushd cannot grant anything, so the requests continue to wait.
    let Ok(seen) = scheduler.handles.context.readings.host().await else { return READ };
    resolve_all(scheduler, &seen).await;
    let gpus = seen.gpus(Viewer::Log);
    let (deciding, read) = (scheduler.clone(), ReadHost { host: seen.host, gpus, changes });
    // The searches run on a blocking thread. They are completed even if gpushd stops, because they may reserve capacity.
    let decided = scheduler.handles.context.tasks.blocking_before_exit(move || pass::decide(&deciding, &read)).await;
    if decided.unwrap_or(true) { READ } else { FALLBACK }
}

/// Resolves each request again that was resolved with an older config, or by an earlier gpushd. Waits until the tasks of
/// these requests have tried. Call this before any placement.
pub(crate) async fn resolve_all(scheduler: &Scheduler, seen: &Observed) {
    let unresolved = scheduler.entries().unresolved(&seen.host.config);
    let resolving: Vec<_> = unresolved
        .into_iter()
        .map(|inbox| {
            let (done, resolved) = oneshot::channel();
            inbox.answer(LeaseAnswer::Resolve(seen.clone(), done));
            resolved
        })
        .collect();
    for resolved in resolving {
        let _the_task_may_have_ended = resolved.await;
    }
}
