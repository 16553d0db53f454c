//! The part of a target's description that follows from the report about its daemon.

use std::cmp::Ordering;

use gpush_api::{Gpu, MpsDaemon, MpsServer};

use super::target::MpsTarget;
use crate::sharing;

/// Compares targets in the order of lists: by GPU and MIG device.
#[must_use]
pub fn in_order(one: &MpsDaemon, other: &MpsDaemon) -> Ordering {
    (one.gpu, &one.device, &one.uuid).cmp(&(other.gpu, &other.device, &other.uuid))
}

/// Describes a target. Its clients, leases and users are not filled in.
pub(super) fn summary(gpus: &[Gpu], target: &MpsTarget) -> MpsDaemon {
    let seen = &target.report;
    // If no rule requires the target any more, find its GPU and MIG device in the current layouts.
    let place = match &target.desired {
        Some(desired) => Some((desired.gpu, desired.device.clone())),
        None => sharing::locate_target(gpus, &target.uuid),
    };
    let pid = |pid: i32| u32::try_from(pid).ok();
    MpsDaemon {
        target: target.short.clone(),
        uuid: target.uuid.clone(),
        gpu: place.as_ref().map(|(gpu, _)| *gpu),
        device: place.and_then(|(_, device)| device),
        state: seen.shown_state(),
        reasons: target.reasons(),
        findings: Vec::new(),
        wanted: seen.policy.clone().unwrap_or_default(),
        rule: None,
        in_force: seen.in_force.clone(),
        pid: seen.pid.and_then(pid),
        since: seen.since,
        next_start_at: seen.next_start,
        clients_end_at: seen.until,
        failures: u32::try_from(seen.failures).unwrap_or(u32::MAX),
        ends: None,
        protocol: seen.protocol.clone(),
        pipe_directory: seen.pipe.as_ref().map(|path| path.display().to_string()),
        log_directory: seen.logs.as_ref().map(|path| path.display().to_string()),
        uid: None,
        user: None,
        servers: seen
            .servers
            .iter()
            .filter_map(|(server, state)| {
                Some(MpsServer { pid: Some(pid(*server)?), uid: None, user: None, state: *state })
            })
            .collect(),
        clients: Vec::new(),
        clients_known: seen.clients_known,
        leases: Vec::new(),
        granted_percent: 0,
        stays_stopped: false,
    }
}
