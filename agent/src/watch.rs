//! What is to be noticed although nobody asks: errors that the driver reports, memory rows that wait
//! for a reset, a driver that comes, goes or becomes another.
//!
//! The worker listens to the driver's events. One that dies leaves the host unheard, so a look is
//! taken then, which starts another; beyond that the GPUs are looked at as often as the config says.

use std::time::Duration;

use gpush_nvml::Event;
use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    time::{Instant, sleep_until},
};

use crate::{
    agent::{Agent, Shared},
    auth::Asker,
    cordon, view,
};

/// Between two looks while there is no worker: at first, doubled each time, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Watches until the agent stops; `events` are those of its hardware.
pub(crate) async fn run(agent: Shared, mut events: Receiver<Event>) {
    let mut status = agent.hardware.watch();
    let mut driver = None;
    let mut unheard = 0;
    let mut again = next(&agent, 0);
    loop {
        let wait = async {
            match again {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = agent.stopping.cancelled() => return,
            event = events.recv() => match event {
                Ok(event) => cordon::heard(&agent, &event),
                Err(RecvError::Lagged(missed)) => {
                    tracing::warn!("{missed} events of the driver came faster than they could be taken in");
                }
                Err(RecvError::Closed) => return,
            },
            changed = status.changed() => {
                if changed.is_err() {
                    return;
                }
                let (worker, now) = {
                    let status = status.borrow_and_update();
                    (status.worker, status.driver.clone())
                };
                if worker.is_some() && unheard > 0 {
                    // Somebody's call has started it: that look is not needed any more.
                    unheard = 0;
                    again = next(&agent, unheard);
                } else if worker.is_none() && unheard == 0 {
                    unheard = 1;
                    again = next(&agent, unheard);
                }
                if let Some(now) = now {
                    say(driver.as_ref(), &now);
                    driver = Some(now);
                }
            }
            () = agent.look.notified() => {
                look(&agent).await;
                again = next(&agent, unheard);
            }
            () = wait => {
                look(&agent).await;
                unheard = if agent.hardware.status().worker.is_some() { 0 } else { unheard + 1 };
                again = next(&agent, unheard);
            }
        }
    }
}

/// When to look next, after so many looks that found no worker.
fn next(agent: &Agent, unheard: u32) -> Option<Instant> {
    let seconds = agent.settings.config().health.poll_s;
    let poll = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
    let soon = (unheard > 0).then(|| PAUSE.0.saturating_mul(1 << unheard.min(16).saturating_sub(1)).min(PAUSE.1));
    [poll, soon].into_iter().flatten().min().map(|pause| Instant::now() + pause)
}

/// Looks at the GPUs, which takes in what their readings say.
async fn look(agent: &Agent) {
    if agent.conditions.maintenance().is_none() {
        let _ = view::gpus(agent, &Asker::agent()).await;
    }
}

/// Says that another driver answers than before.
fn say(before: Option<&gpush_api::Driver>, now: &gpush_api::Driver) {
    match before {
        Some(before) if before.version != now.version => tracing::warn!(
            "the driver is {} now, it was {}: the GPUs are matched again by UUID",
            now.version,
            before.version
        ),
        Some(_) | None => {}
    }
}
