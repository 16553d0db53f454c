//! The watchdog of systemd. gpushd notifies systemd as long as its accept loop and its store answer.
//!
//! gpushd does not check driver threads: if a GPU hangs, this is no reason to restart a gpushd that serves the other
//! GPUs. gpushd does not check the tasks of operations either, because these tasks may run for minutes.
//!
//! ```text
//! every half of WatchdogSec: no task has failed for good ─► ping the accept loop ─► ping the store ─► notify
//!                                    └── a check fails, or gets no answer within that time: no notification
//! ```

use std::time::Duration;

use gpush_host::notify::{self, Notification};
use gpush_store::Store;
use tokio::{
    sync::{mpsc, oneshot},
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::system::tasks::Tasks;

/// Asks an accept loop to show that it still answers.
pub(crate) type Ping = oneshot::Sender<()>;

/// Notifies systemd periodically, until `closing` is cancelled.
pub(crate) async fn notify_periodically(
    period: Duration,
    sender: mpsc::Sender<Ping>,
    store: Store,
    tasks: Tasks,
    closing: CancellationToken,
) {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        if closing.run_until_cancelled(ticks.tick()).await.is_none() {
            return;
        }
        if !tasks.are_alive() {
            tracing::error!("a task has failed for good: gpushd does not notify the watchdog of systemd");
            continue;
        }
        match timeout(period, responds(&sender, &store)).await {
            Ok(true) => notify::send(Notification::Alive),
            Ok(false) => tracing::error!(
                "gpushd no longer accepts connections, or its database thread has ended: gpushd does not notify the \
                watchdog of systemd"
            ),
            Err(_) => tracing::error!(
                "gpushd does not accept connections, or its database does not answer: gpushd does not notify the \
                watchdog of systemd"
            ),
        }
    }
}

async fn responds(sender: &mpsc::Sender<Ping>, store: &Store) -> bool {
    let (ping, answer) = oneshot::channel();
    sender.send(ping).await.is_ok() && answer.await.is_ok() && store.ping().await.is_ok()
}

#[cfg(test)]
mod tests {
    use gpush_store::Options;

    use super::*;

    #[tokio::test]
    async fn agent_is_alive_while_loop_and_store_answer() {
        let scratch = tempfile::tempdir().unwrap();
        let store = Store::open(scratch.path(), Options::default()).unwrap().store;
        let (sender, mut pings) = mpsc::channel::<Ping>(1);
        let answers = tokio::spawn(async move {
            let _ = pings.recv().await.map(|ping| ping.send(()));
            pings
        });
        assert!(responds(&sender, &store).await);
        let pings = answers.await.unwrap();
        // An accept loop that hangs does not answer.
        assert!(timeout(Duration::from_millis(20), responds(&sender, &store)).await.is_err());
        drop(pings);
        assert!(!responds(&sender, &store).await);
    }
}
