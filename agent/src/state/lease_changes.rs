//! Reads and changes the leases in the state of the host, and publishes the differences as events.

use std::sync::Arc;

use gpush_api::{EventPayload, LeaseState};

use super::{
    AffectedGpus, HostState, State,
    leases::{LeaseTable, Reservation, ReservationId},
};

/// Why capacity can no longer be reserved as it was placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutdatedPlacement {
    /// The desired state of the GPUs has changed, so the placement may contradict the new rules.
    DesiredState,
    /// Another grant has got capacity since.
    Capacity,
}

impl State {
    /// Returns all leases that have not ended.
    pub(crate) fn leases(&self) -> Arc<LeaseTable> {
        Arc::clone(&self.0.snapshot.borrow().leases)
    }

    /// Reserves capacity that was placed with the snapshot `seen` and the leases `table`.
    ///
    /// # Errors
    /// If the placement is outdated.
    pub(crate) fn reserve(
        &self,
        seen: &HostState,
        table: &LeaseTable,
        reservation: Reservation,
    ) -> Result<ReservationId, OutdatedPlacement> {
        self.update(|known| {
            let is_current =
                Arc::ptr_eq(&known.config, &seen.config) && known.overrides.generation() == seen.generation;
            if !is_current {
                return (AffectedGpus::None, Err(OutdatedPlacement::DesiredState));
            }
            if known.leases.has_grants_since(table) {
                return (AffectedGpus::None, Err(OutdatedPlacement::Capacity));
            }
            let gpus = reservation.members.iter().map(|member| member.gpu_uuid.clone()).collect();
            let id = Arc::make_mut(&mut known.leases).reserve(reservation);
            (AffectedGpus::Gpus(gpus), Ok(id))
        })
    }

    /// Changes the leases, and publishes the differences as events. Then removes the leases that have ended.
    pub(crate) fn change_leases<T>(&self, change: impl FnOnce(&mut LeaseTable) -> T) -> T {
        self.update(|known| {
            let before = Arc::clone(&known.leases);
            let table = Arc::make_mut(&mut known.leases);
            let result = change(table);
            for lease in table.open.values() {
                let before = before.open.get(&lease.id());
                if before.is_some_and(|before| Arc::ptr_eq(before, lease)) {
                    continue;
                }
                let event = lease.event();
                if before.is_none_or(|before| before.event() != event) {
                    self.0.events.publish(EventPayload::Lease(Box::new(event)));
                }
            }
            table.open.retain(|_, lease| lease.state.name() != LeaseState::Ended);
            let gpus = known.leases.changed_gpus(&before);
            (if gpus.is_empty() { AffectedGpus::None } else { AffectedGpus::Gpus(gpus) }, result)
        })
    }
}
