//! Granting a part of a target: never on a GPU that an operation has, never what the queue reserves.

use std::time::Duration;

use tokio::time::timeout;

use super::{Ahead, Lanes, Need, Needs, Place, Waiter};
use crate::state::Holder;

/// A grant that is being recorded; operations on the GPU begin after it.
#[derive(Debug)]
pub(crate) struct Grant {
    lanes: Lanes,
    gpu: String,
}

/// Why nothing is granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Withheld {
    /// An operation has the GPU.
    Claimed(Holder),
    /// Something that came first waits for it.
    Reserved(Ahead),
}

impl Lanes {
    /// Waits until a part of a target may be granted, at most for `patience`. Requests for parts of one target are
    /// granted in the order of their arrival.
    ///
    /// # Errors
    /// When an operation still has the GPU. At once when an operation waits that takes the target away: it may wait
    /// for long.
    pub(crate) async fn grant(&self, gpu: &str, target: &str, patience: Duration) -> Result<Grant, Withheld> {
        let needs = Needs::from([(gpu.to_owned(), Need::Part(target.to_owned()))]);
        let place = self.queue(Waiter::Share, needs);
        let mut room = self.room();
        let granted = async {
            loop {
                // Before it is tried, so that no change in between is missed.
                room.mark_unchanged();
                match self.try_grant(gpu, &place) {
                    Err(Withheld::Claimed(_) | Withheld::Reserved(Ahead { waiter: Waiter::Share, .. })) => {}
                    decided @ (Ok(_) | Err(Withheld::Reserved(Ahead { waiter: Waiter::Operation(_), .. }))) => {
                        return decided;
                    }
                }
                // The sender lives as long as the lanes do.
                let _changed = room.changed().await;
            }
        };
        match timeout(patience, granted).await {
            Ok(decided) => decided,
            Err(_) => self.try_grant(gpu, &place),
        }
    }

    fn try_grant(&self, gpu: &str, place: &Place) -> Result<Grant, Withheld> {
        let mut known = self.known();
        if let Some(holder) = known.claimed.get(gpu) {
            return Err(Withheld::Claimed(holder.clone()));
        }
        if let Some(ahead) = known.queue.ahead_of(place.ticket) {
            return Err(Withheld::Reserved(ahead));
        }
        known.work(gpu, |at_work| at_work.grants += 1);
        Ok(Grant { lanes: self.clone(), gpu: gpu.to_owned() })
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.lanes.known().work(&self.gpu, |at_work| at_work.grants -= 1);
        self.lanes.finish();
    }
}
