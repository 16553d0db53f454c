//! The history of a MIG device: where it is, the operations that destroyed it, and its leases.

use std::fmt::Write as _;

use gpush_api::{GpuIndex, OperationState, text::local_time};
use jiff::Timestamp;
use serde::Serialize;

use super::Appearance;

/// What is known about a MIG device: the output of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct History {
    pub(crate) uuid: String,
    /// Name of the device in commands, such as `0:3g.40gb@4`, if it exists.
    pub(crate) device: Option<String>,
    /// The operations that destroyed it, the last one first. Includes failed operations that may have destroyed it.
    pub(crate) destroyed_by: Vec<Destroyed>,
    /// Its leases, the last one first.
    pub(crate) used_by: Vec<UsedBy>,
}

/// An operation that destroyed the device, or may have destroyed it.
#[derive(Debug, Serialize)]
pub(crate) struct Destroyed {
    pub(crate) operation_id: String,
    /// `done`, or `failed` for an operation that may have destroyed the device.
    pub(crate) operation_state: OperationState,
    pub(crate) kind: String,
    pub(crate) user: String,
    pub(crate) at: Timestamp,
    pub(crate) gpu: GpuIndex,
    /// Name of the device in commands at that time, such as `0:3g.40gb@4`. Without the placement if the plan does not
    /// contain it.
    pub(crate) place: String,
    /// MIG devices that the GPU has now, by name.
    pub(crate) present_devices: Vec<String>,
}

/// A lease of the device.
#[derive(Debug, Serialize)]
pub(crate) struct UsedBy {
    pub(crate) lease_id: String,
    pub(crate) user: String,
    pub(crate) from: Option<Timestamp>,
    pub(crate) until: Option<Timestamp>,
}

/// Describes the history. `operations` and `leases` are the numbers of operations and leases that were searched.
pub(crate) fn text(history: &History, operations: usize, leases: usize, look: &Appearance) -> String {
    let clean = |text: &str| look.clean(text);
    let uuid = clean(&history.uuid);
    let mut text = match &history.device {
        Some(device) => format!("{uuid} is the MIG device {}\n", clean(device)),
        None => format!("{uuid} does not exist now\n"),
    };
    for one in &history.destroyed_by {
        let _ = writeln!(text, "  {}", destroyed(one, look));
    }
    let last = history.destroyed_by.first().filter(|_| history.device.is_none());
    if let Some(last) = last {
        let now = if last.present_devices.is_empty() {
            "no MIG device".to_owned()
        } else {
            clean(&last.present_devices.join(", "))
        };
        let _ = writeln!(text, "  GPU {} has now: {now}", last.gpu);
    }
    for one in &history.used_by {
        let from = one.from.map_or_else(String::new, |from| format!(" from {}", local_time(from)));
        let until = one.until.map_or_else(String::new, |until| format!(" until {}", local_time(until)));
        let _ = writeln!(text, "  leased by {} ({}){from}{until}", clean(&one.user), one.lease_id);
    }
    if history.device.is_none() && history.destroyed_by.is_empty() && history.used_by.is_empty() {
        let _ = writeln!(
            text,
            "  no operation of the last {operations} destroyed it, and no lease of the last {leases} had it: a reboot \
            or a reset removes all MIG devices"
        );
    }
    if history.device.is_none() {
        // The command in the hint must work, so a device must have this place now.
        let command = last
            .filter(|last| last.present_devices.contains(&last.place))
            .map(|last| format!("`gpushctl run --target {} -- COMMAND`; ", clean(&last.place)));
        let _ = writeln!(
            text,
            "hint: in units and compose files, name the place of the device instead of its UUID: {}`gpushctl mig \
            list` shows the places",
            command.unwrap_or_default()
        );
    }
    text
}

/// Describes what an operation did to the device.
fn destroyed(one: &Destroyed, look: &Appearance) -> String {
    let operation = look.clean(&one.operation_id);
    let origin = format!("{} of {}", look.clean(&one.kind), look.clean(&one.user));
    let (at, place) = (local_time(one.at), look.clean(&one.place));
    match one.operation_state {
        OperationState::Failed => {
            format!("{operation} ({origin}) failed at {at} and may have destroyed it: it was {place}")
        }
        _ => format!("destroyed by {operation} ({origin}) at {at}: it was {place}"),
    }
}
