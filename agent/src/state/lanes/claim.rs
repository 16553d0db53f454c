//! The lanes of one operation, which the operation claims all at once.

use std::{collections::BTreeMap, sync::MutexGuard, time::Duration};

use gpush_api::{ApiError, GpuIndex, GpuUuid};
use tokio::time::Instant;

use super::{LaneStates, Lanes};
use crate::state::{Holder, words};

/// Maximum time that an operation without `wait` waits for the planning of other operations. A plan takes as long as its
/// readings of the driver, usually some milliseconds.
const PLANNING: Duration = Duration::from_secs(5);

/// The lanes that one operation has claimed. Dropping this value releases them.
#[derive(Debug)]
pub(crate) struct Claim {
    lanes: Lanes,
    uuids: Vec<GpuUuid>,
}

impl Lanes {
    /// Claims GPUs, given as (index, UUID). A reconciler or a grant may still run on these GPUs: see
    /// [`Claim::wait_until_alone`].
    ///
    /// # Errors
    /// If another operation has claimed one of the GPUs, or if the lanes are closed. In the first
    /// case, the error names the operation.
    pub(crate) fn claim(&self, gpus: &[(GpuIndex, GpuUuid)]) -> Result<Claim, ApiError> {
        let known = self.states();
        match &known.closed {
            Some(closed) => Err(closed.clone()),
            None => self.take(known, gpus),
        }
    }

    /// Claims GPUs as [`Lanes::claim`] does. If an operation that is being planned has claimed one of the GPUs, first
    /// waits until that operation has begun or was refused, but at most [`PLANNING`].
    ///
    /// # Errors
    /// As [`Lanes::claim`].
    pub(crate) async fn claim_after_planning(&self, gpus: &[(GpuIndex, GpuUuid)]) -> Result<Claim, ApiError> {
        let mut room = self.room();
        let end = Instant::now() + PLANNING;
        loop {
            room.mark_unchanged();
            match self.claim(gpus) {
                Err(error) if !self.is_being_planned(gpus) => return Err(error),
                Err(error) => {
                    if tokio::time::timeout_at(end, room.changed()).await.is_err() {
                        return Err(error);
                    }
                }
                Ok(claim) => return Ok(claim),
            }
        }
    }

    /// Returns whether operations that are being planned have claimed some of these GPUs, and no other operation has.
    fn is_being_planned(&self, gpus: &[(GpuIndex, GpuUuid)]) -> bool {
        let known = self.states();
        let holders: Vec<&Holder> = gpus.iter().filter_map(|(_, uuid)| known.claimed.get(uuid)).collect();
        known.closed.is_none() && holders.iter().all(|holder| !holder.has_begun())
    }

    /// Claims the GPUs of an operation that a previous gpushd began. Succeeds even while the lanes are closed.
    ///
    /// # Errors
    /// If another operation has claimed one of the GPUs. The error names that operation.
    pub(crate) fn claim_again(&self, gpus: &[(GpuIndex, GpuUuid)]) -> Result<Claim, ApiError> {
        self.take(self.states(), gpus)
    }

    fn take(&self, mut known: MutexGuard<'_, LaneStates>, gpus: &[(GpuIndex, GpuUuid)]) -> Result<Claim, ApiError> {
        for (index, uuid) in gpus {
            let Some(holder) = known.claimed.get(uuid) else { continue };
            return Err(words::changed_by(*index, uuid, holder));
        }
        let claim = Claim { lanes: self.clone(), uuids: gpus.iter().map(|(_, uuid)| uuid.clone()).collect() };
        claim.show(&mut known.claimed, &Holder::Planning);
        Ok(claim)
    }
}

impl Claim {
    /// Waits until the reconcilers and grants that ran on these GPUs at the time of the claim have finished. No new
    /// reconcilers and grants can start while the claim exists.
    pub(crate) async fn wait_until_alone(&self) {
        let mut finished = self.lanes.0.finished.subscribe();
        let is_alone = |lanes: &Lanes| {
            let known = lanes.states();
            self.uuids.iter().all(|uuid| known.is_idle(uuid))
        };
        // Cannot fail: `self.lanes` keeps the sender alive.
        let _alone = finished.wait_for(|_| is_alone(&self.lanes)).await.is_ok();
    }

    /// Marks the GPUs as changing: the operation with this id has begun.
    pub(crate) fn begin(&self, id: &str) {
        let mut known = self.lanes.states();
        known.changes.note(&self.uuids);
        self.show(&mut known.claimed, &Holder::Operation(id.to_owned()));
        drop(known);
        // Wakes reconcilers that wait for these GPUs. They return, because the operation does their work.
        self.lanes.make_room();
    }

    fn show(&self, claimed: &mut BTreeMap<GpuUuid, Holder>, holder: &Holder) {
        claimed.extend(self.uuids.iter().map(|uuid| (uuid.clone(), holder.clone())));
        self.lanes.0.host.set_lane(&self.uuids, Some(holder));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut known = self.lanes.states();
        // An operation that never began has changed nothing.
        if self.uuids.iter().any(|uuid| known.claimed.get(uuid).is_some_and(Holder::has_begun)) {
            known.changes.note(&self.uuids);
        }
        for uuid in &self.uuids {
            known.claimed.remove(uuid);
        }
        self.lanes.0.host.set_lane(&self.uuids, None);
        drop(known);
        self.lanes.make_room();
    }
}
