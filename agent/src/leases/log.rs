//! Log entries about the devices of a lease.
//!
//! A journal entry has one value for each field. So a lease with several devices has an entry for
//! each device: `journalctl GPUSH_MIG=UUID` and `journalctl GPUSH_GPU=UUID` find it.

use std::{collections::BTreeSet, fmt::Display};

use gpush_api::LeaseMember;
use gpush_store::LeaseRecord;

/// Logs that a lease was granted or has ended. `what` is the end of the sentence.
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
