//! Log entries about the grant and the end of a lease.
//!
//! A lease has one entry. The message names the user and the devices as `gpushctl status` does. The entry has a field
//! for each device, so `journalctl GPUSH_MIG=UUID` and `journalctl GPUSH_GPU=UUID` find it. An entry has room for
//! [`DEVICES`] devices; a lease with more devices has further entries. Only the first entry contains the text of the
//! request, at most [`MOST`] characters of it.

use std::fmt::Display;

use gpush_api::{GpuUuid, LeaseMember, TargetUuid};
use gpush_core::sharing;
use gpush_store::LeaseRecord;

use crate::state::{HostState, State};

/// Maximum number of devices in one entry.
const DEVICES: usize = 8;

/// Maximum length of the text of a request in the log, in characters.
const MOST: usize = 1000;

/// A device as an entry names it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Device {
    /// UUID of the GPU.
    gpu: GpuUuid,
    /// UUID of the MIG device; `None` if the device is a whole GPU, or is being created.
    mig: Option<TargetUuid>,
    /// The name, such as `GPU 0` or `MIG device 0:1g.10gb@4`.
    name: String,
}

impl Device {
    fn of(member: &LeaseMember, host: &HostState) -> Self {
        let mig = (member.target != member.gpu_uuid && !member.target.is_empty()).then(|| member.target.clone());
        let gpu = host.gpu(&member.gpu_uuid).map(|snapshot| &snapshot.gpu);
        let place = gpu.and_then(|gpu| sharing::locate_target(std::slice::from_ref(gpu), &member.target));
        let name = match (place, gpu, &mig) {
            (Some((index, Some(device))), _, _) => format!("MIG device {index}:{device}"),
            // The device does not exist any more, or gpushd has not read the GPU since it was created.
            (None, _, Some(mig)) => format!("MIG device {mig}"),
            (Some((index, None)), _, _) => format!("GPU {index}"),
            (None, Some(gpu), None) => format!("GPU {}", gpu.index),
            (None, None, None) => member.gpu_uuid.to_string(),
        };
        Self { gpu: member.gpu_uuid.clone(), mig, name }
    }
}

/// Returns the devices of a lease, each once.
fn devices(record: &LeaseRecord, host: &HostState) -> Vec<Device> {
    let mut devices: Vec<Device> = Vec::new();
    for device in record.members.iter().map(|member| Device::of(member, host)) {
        if !devices.contains(&device) {
            devices.push(device);
        }
    }
    devices
}

/// Shortens the text of a request for the log.
pub(super) fn short(mut text: String) -> String {
    if let Some((at, _)) = text.char_indices().nth(MOST) {
        text.truncate(at);
        text.push('\u{2026}');
    }
    text
}

/// Logs that a lease was granted. `request` is the text of its request.
pub(super) fn granted(state: &State, record: &LeaseRecord, request: String) {
    entries(state, record, &format!("was granted: {}", short(request)), "was granted");
}

/// Logs that a lease has changed. `what` completes the sentence "lease L12 of alice on GPU 0 …".
pub(super) fn change(state: &State, record: &LeaseRecord, what: impl Display) {
    let what = what.to_string();
    entries(state, record, &what, &what);
}

/// Writes the entries of a lease: the first one with the text `first`, the others with the text `what`.
fn entries(state: &State, record: &LeaseRecord, first: &str, what: &str) {
    let (lease, uid, host) = (record.id, record.holder.uid, state.now());
    let user = record.holder.user.clone().unwrap_or_else(|| format!("uid {uid}"));
    let devices = devices(record, &host);
    if devices.is_empty() {
        tracing::info!(%lease, uid, "lease {lease} of {user} {first}");
    }
    for (number, some) in devices.chunks(DEVICES).enumerate() {
        let what = if number == 0 { first } else { what };
        let names = some.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ");
        let gpu = |at: usize| some.get(at).map(|device| device.gpu.as_str());
        // A field without a value is left out.
        let other_gpu = |at: usize| gpu(at).filter(|uuid| (0..at).all(|before| gpu(before) != Some(uuid)));
        let mig = |at: usize| some.get(at).and_then(|device| device.mig.as_ref().map(TargetUuid::as_str));
        tracing::info!(
            %lease, uid,
            gpu = gpu(0), mig = mig(0), gpu = other_gpu(1), mig = mig(1), gpu = other_gpu(2), mig = mig(2),
            gpu = other_gpu(3), mig = mig(3), gpu = other_gpu(4), mig = mig(4), gpu = other_gpu(5), mig = mig(5),
            gpu = other_gpu(6), mig = mig(6), gpu = other_gpu(7), mig = mig(7),
            "lease {lease} of {user} on {names} {what}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        modes::scene::{mig_gpu, mig_member},
        state::{State, leases::tests::record, tests::host_of},
    };

    fn named(members: &[LeaseMember], host: &HostState) -> Vec<String> {
        let lease = LeaseRecord { members: members.to_vec(), ..record(1, 1000, "GPU-0") };
        devices(&lease, host).into_iter().map(|device| device.name).collect()
    }

    #[test]
    fn devices_of_a_lease_are_named_as_in_status() {
        let host = host_of(vec![mig_gpu(&["3g.40gb@4"])]);
        let of = |target: &str| named(&[mig_member("GPU-0", target, "3g.40gb")], &host);
        assert_eq!(of("MIG-0"), ["MIG device 0:3g.40gb@4"]);
        assert_eq!(of("GPU-0"), ["GPU 0"]);
        assert_eq!(of(""), ["GPU 0"], "the device is being created");
        assert_eq!(of("MIG-gone"), ["MIG device MIG-gone"]);
        assert_eq!(named(&[mig_member("GPU-9", "GPU-9", "3g.40gb")], &State::empty().now()), ["GPU-9"]);
    }

    #[test]
    fn device_with_several_shares_is_logged_once() {
        let host = host_of(vec![mig_gpu(&["3g.40gb@4", "3g.40gb@0"])]);
        let member = |target| mig_member("GPU-0", target, "3g.40gb");
        let names = named(&[member("MIG-0"), member("MIG-1"), member("MIG-0")], &host);
        assert_eq!(names, ["MIG device 0:3g.40gb@0", "MIG device 0:3g.40gb@4"]);
    }

    #[test]
    fn text_of_a_request_in_the_log_is_short() {
        assert_eq!(short("mps=25".to_owned()), "mps=25");
        assert_eq!(short("\u{e4}".repeat(5000)).chars().count(), MOST + 1);
    }
}
