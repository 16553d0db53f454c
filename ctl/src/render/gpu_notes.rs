//! The notes below a GPU: its state, cordons, drift, a pending reset, an old reading.
//!
//! `!` marks faults and drift, and `*` marks conditions that a user requested.

use anstyle::Style;
use gpush_api::{Gpu, GpuState};
use gpush_core::{holders, refusal};

use super::{
    Appearance,
    appearance::{BAD, NOTE, paint},
    names, overrides,
};

/// Mark in front of a note about a condition that a user requested, such as an override. Faults and drift have `!`.
const REQUESTED: &str = "*";

/// A reading of at least this age, in seconds, counts as old.
const OLD: i64 = 3;

/// Returns the notes about a GPU: its state, drift, a pending reset, an old reading.
pub(crate) fn of(gpu: &Gpu, look: &Appearance) -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |style: Style, label: &str, text: &str| {
        let first = if label == REQUESTED { format!("  {REQUESTED} ") } else { format!("  ! {label}") };
        let lines = look.wrap(&first, &look.clean(text));
        notes.extend(lines.iter().map(|line| paint(style, line)));
    };
    let (word, style) = names::state(gpu.state);
    let by_gpushd = gpu.cordons.iter().any(|cordon| cordon.by.is_none());
    let mark = match gpu.state {
        GpuState::Changing | GpuState::Maintenance => REQUESTED,
        GpuState::Cordoned if !by_gpushd => REQUESTED,
        GpuState::Cordoned
        | GpuState::Ready
        | GpuState::Held
        | GpuState::Degraded
        | GpuState::Unknown
        | GpuState::Lost => "",
    };
    if gpu.state != GpuState::Ready && gpu.reasons.is_empty() {
        note(style, mark, &format!("{word}: {}", unexplained(gpu.state)));
    }
    for reason in &gpu.reasons {
        let printed = reason.starts_with(word);
        note(style, mark, &if printed { reason.clone() } else { format!("{word}: {reason}") });
    }
    // In other states than `cordoned`, the reasons do not contain the cordons, so show them here.
    for cordon in gpu.cordons.iter().filter(|_| gpu.state != GpuState::Cordoned) {
        let by = cordon
            .by
            .as_ref()
            .map_or_else(|| "gpushd".to_owned(), |by| by.user.clone().unwrap_or_else(|| format!("uid {}", by.uid)));
        let mark = if cordon.by.is_some() { REQUESTED } else { "" };
        note(NOTE, mark, &format!("cordoned by {by}: {}", cordon.reason));
    }
    match &gpu.mig {
        Some(mig) if mig.reset_pending => {
            let when = if gpu.passed_through { "reboot of this virtual machine" } else { "GPU reset" };
            let does = if mig.pending_mode() { "enables" } else { "disables" };
            note(NOTE, "", &format!("the next {when} {does} MIG mode"));
        }
        Some(_) | None => {}
    }
    if let Some((style, text)) = overrides::note(gpu, look) {
        note(style, if style == NOTE { REQUESTED } else { "" }, &text);
    }
    // Drift contains the changes that wait for an apply.
    for change in gpu.pending.iter().filter(|change| !change.leases.is_empty()) {
        note(NOTE, REQUESTED, &format!("pending: {}", change.describe(gpu.index)));
    }
    for drift in &gpu.drift {
        // Pad the first word, so that the texts of missing and extra instances are aligned.
        let (label, text) = ["missing", "extra"]
            .iter()
            .find_map(|word| Some((format!("drift: {word:<7} "), drift.strip_prefix(word)?.strip_prefix(' ')?)))
            .unwrap_or_else(|| ("drift: ".to_owned(), drift.as_str()));
        note(NOTE, &label, text);
    }
    for one in &gpu.unleased {
        let device = one.device.as_ref().map_or_else(String::new, |device| format!(" on {device}"));
        note(BAD, "", &format!("unleased: {}{device}: {}", refusal::holder(&one.process), one.why));
    }
    for holder in &gpu.blocked_by {
        note(NOTE, "", &format!("gpushd cannot apply the config yet: held by {}", holders::describe(holder)));
    }
    // Add a note only for an old reading. An age of some seconds is usual: a reading is fresh for one second, and then
    // a slow driver takes some time for the next reading.
    let age = look.now.as_second().saturating_sub(gpu.observed_at.as_second());
    let read = look.ago(gpu.observed_at);
    if gpu.stale {
        match gpu.state {
            // The driver lost the GPU after the last reading, so show the note even if the reading is recent.
            GpuState::Lost => {
                note(BAD, "", &format!("last read {read}; the present instances are not known"));
            }
            GpuState::Changing => {
                note(NOTE, REQUESTED, &format!("last read {read}, while the change was running"));
            }
            GpuState::Maintenance if age >= OLD => {
                note(NOTE, REQUESTED, &format!("last read {read}"));
            }
            GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Held | GpuState::Unknown
                if age >= OLD =>
            {
                note(NOTE, "", &format!("last read {read}: the driver has not answered since"));
            }
            GpuState::Ready
            | GpuState::Cordoned
            | GpuState::Degraded
            | GpuState::Held
            | GpuState::Unknown
            | GpuState::Maintenance => {}
        }
    }
    notes
}

fn unexplained(state: GpuState) -> &'static str {
    match state {
        GpuState::Ready => "",
        GpuState::Cordoned => "the GPU takes no new work until an administrator runs `gpushctl gpu uncordon GPU`",
        GpuState::Held => {
            "gpushd does not know who may use the GPU: `gpushctl status` shows the command that releases it"
        }
        GpuState::Maintenance => {
            "gpushd does not open the GPU until an administrator runs `gpushctl maintenance leave`"
        }
        GpuState::Changing => "an operation is changing the GPU: see `gpushctl operation list`",
        GpuState::Degraded => "a change of the GPU failed, and its rollback failed too",
        GpuState::Unknown => "the driver has not answered a request about the GPU",
        GpuState::Lost => "the GPU fell off the bus; an administrator must reboot the host",
    }
}
