//! Log entries about the devices of a lease.
//!
//! gpushd writes only one value for each field of a journal entry. So gpushd writes one entry for
//! each device of a lease. `journalctl GPUSH_MIG=UUID` or `journalctl GPUSH_GPU=UUID` finds the
//! entry of a device.

use std::{collections::BTreeSet, fmt::Display};

use gpush_api::LeaseMember;
use gpush_store::LeaseRecord;

/// Logs that a lease was granted or has ended. `what` completes the sentence "lease L12 …".
pub(super) fn change(record: &LeaseRecord, what: impl Display) {
    let (lease, uid) = (record.id, record.holder.uid);
    let devices: BTreeSet<(&str, &str)> = record.members.iter().map(device).collect();
    if devices.is_empty() {
        tracing::info!(%lease, uid, "lease {lease} {what}");
    }
    for (gpu, target) in devices {
        let mig = (target != gpu && !target.is_empty()).then_some(target);
        tracing::info!(%lease, uid, gpu, mig, "lease {lease} {what} (device {})", mig.unwrap_or(gpu));
    }
}

fn device(member: &LeaseMember) -> (&str, &str) {
    (&member.gpu, &member.target)
}
