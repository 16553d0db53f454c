//! Attributes processes to the open leases, with the rules of [`gpush_core::attribution`].

use gpush_core::attribution::{AttributableLease, Attribution, Facts, GpuUse, attribute};

use super::{LeaseTable, OpenLease};

impl OpenLease {
    fn attributable(&self) -> AttributableLease<'_> {
        let record = &self.record;
        let (holder, binding) = (record.holder.uid, &record.binding);
        AttributableLease { id: record.id, holder, binding, members: &record.members }
    }

    /// Returns whether the lease has a share of the device that a process uses.
    pub(crate) fn is_on(&self, gpu_use: GpuUse<'_>) -> bool {
        gpu_use.is_of(&self.attributable())
    }
}

impl LeaseTable {
    /// Returns to which lease a process belongs.
    pub(crate) fn attribute(&self, facts: &impl Facts, gpu_use: GpuUse<'_>) -> Attribution {
        attribute(facts, gpu_use, self.holding().map(OpenLease::attributable))
    }

    /// Returns whether a user holds a lease on the device that a process uses.
    pub(crate) fn is_held_by(&self, uid: u32, gpu_use: GpuUse<'_>) -> bool {
        self.holding().any(|lease| lease.record.holder.uid == uid && lease.is_on(gpu_use))
    }
}
