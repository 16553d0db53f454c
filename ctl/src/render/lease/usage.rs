//! What a lease is or was used for, in words.

use gpush_api::{EnergyMethod, Lease, LeaseUsageSummary, UnknownReason, UseState};
use gpush_core::duration;

use crate::render::appearance::gib;

/// Describes what an open lease does: `busy, 9.1 GiB`. Empty if it is not known.
pub(crate) fn now(usage: &LeaseUsageSummary) -> String {
    let for_time = |seconds: Option<u64>| seconds.map_or_else(String::new, |seconds| format!(" for {}", time(seconds)));
    let memory = usage.memory_mib.map_or_else(String::new, |memory| format!(", {} GiB", gib(memory)));
    match usage.state {
        Some(UseState::Busy) => format!("busy{memory}"),
        Some(UseState::Idle) => format!("idle{}{memory}", for_time(usage.unused_s)),
        Some(UseState::Empty) => format!("no process{}", for_time(usage.unused_s)),
        Some(UseState::Unknown) | None => String::new(),
    }
}

/// Returns the facts of `lease show`: name and value.
pub(super) fn facts(lease: &Lease) -> Vec<(&'static str, String)> {
    let Some(usage) = &lease.usage else { return Vec::new() };
    let mut facts = Vec::new();
    let mut state = now(usage);
    if let (true, Some(reason)) = (state.is_empty(), usage.reason) {
        state = format!("not known: {}", unknown(reason));
    }
    if !state.is_empty() {
        facts.push(("use", state));
    }
    facts.push(("time", times(usage)));
    if let Some(peak) = usage.memory_peak_mib {
        facts.push(("memory", format!("at most {} GiB", gib(peak))));
    }
    if let Some(joules) = usage.energy_j {
        let others = if usage.energy_mixed { ", a part by other methods" } else { "" };
        facts.push(("energy", format!("{} ({}{others})", energy(joules), method(usage.energy_method))));
    }
    for (part, limit) in [(usage.power_limited, "power limit"), (usage.thermal_limited, "temperature")] {
        if let Some(part) = part.filter(|part| *part >= 0.005) {
            facts.push(("slowed", format!("{:.0} % of the time, by the {limit} of the GPU", part * 100.0)));
        }
    }
    facts
}

/// Describes how the time of a lease was used: `busy 62 %, idle 20 % of 3h 2m`.
pub(crate) fn times(usage: &LeaseUsageSummary) -> String {
    let parts = [
        ("busy", usage.busy_s),
        ("idle", usage.idle_s),
        ("without a process", usage.empty_s),
        ("not known", usage.unknown_s),
    ];
    let all: u64 = parts.iter().map(|(_, seconds)| seconds).sum();
    if all == 0 {
        return "less than 1s".to_owned();
    }
    let named = parts.iter().filter(|(_, seconds)| *seconds > 0);
    let named: Vec<String> = named.map(|(name, seconds)| format!("{name} {}", percent(*seconds, all))).collect();
    format!("{} of {}", named.join(", "), time(all))
}

/// Returns a part in percent. A small part is not 0 %, and an incomplete one not 100 %.
pub(crate) fn percent(part: u64, all: u64) -> String {
    match (part * 200 / all).div_ceil(2) {
        _ if part == 0 => "0 %".to_owned(),
        _ if part * 100 < all => "below 1 %".to_owned(),
        100.. if part < all => "99 %".to_owned(),
        rounded => format!("{rounded} %"),
    }
}

/// Returns a time with its two largest units.
fn time(seconds: u64) -> String {
    duration::rough(seconds)
}

/// Returns energy in the unit that fits: `950 J`, `12 Wh`, `1.3 kWh`.
pub(crate) fn energy(joules: f64) -> String {
    let watt_hours = joules / 3600.0;
    if watt_hours < 1.0 {
        format!("{joules:.0} J")
    } else if watt_hours < 1000.0 {
        format!("{watt_hours:.0} Wh")
    } else {
        format!("{:.1} kWh", watt_hours / 1000.0)
    }
}

/// Returns how energy was found.
fn method(method: EnergyMethod) -> &'static str {
    match method {
        EnergyMethod::None => "no active energy",
        EnergyMethod::Board => "counter of the GPU",
        EnergyMethod::Gpm => "by the activity of the GPU instance",
        EnergyMethod::Process => "estimate by the use of the processes",
        EnergyMethod::Slices => "estimate by the size of the share",
    }
}

/// Returns why a state is not known.
pub(crate) fn unknown(reason: UnknownReason) -> &'static str {
    match reason {
        UnknownReason::NoSample => "there is no recent sample",
        UnknownReason::SourceFailed => "a reading has failed",
        UnknownReason::MemoryOnly => "the GPU reports no activity in its mode, only memory and processes",
        UnknownReason::PowerDisagrees => "no activity, but the GPU needs more power than without work",
        UnknownReason::NoPowerLevel => "no activity, but the power of the GPU without work is not known yet",
        UnknownReason::MemoryChanged => "no activity, but the memory of a process has changed",
        UnknownReason::ProcessesChanged => "no activity, but a process has started or ended",
        UnknownReason::UncertainProcess => "a process may belong to this lease or to another",
        UnknownReason::SharedDevice => "the device is busy, and several leases use it",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(seconds: [u64; 4]) -> LeaseUsageSummary {
        let [busy_s, idle_s, empty_s, unknown_s] = seconds;
        LeaseUsageSummary {
            state: Some(UseState::Idle),
            reason: None,
            unused_since: None,
            unused_s: Some(7_500),
            busy_s,
            idle_s,
            empty_s,
            unknown_s,
            process_count: Some(1),
            memory_mib: Some(9_320),
            memory_peak_mib: None,
            energy_j: None,
            energy_method: EnergyMethod::None,
            energy_mixed: false,
            power_limited: None,
            thermal_limited: None,
        }
    }

    #[test]
    fn times_are_parts_of_the_held_time() {
        assert_eq!(times(&usage([3600, 0, 0, 0])), "busy 100 % of 1h");
        assert_eq!(times(&usage([3599, 0, 0, 1])), "busy 99 %, not known below 1 % of 1h");
        assert_eq!(times(&usage([1800, 900, 900, 0])), "busy 50 %, idle 25 %, without a process 25 % of 1h");
        assert_eq!(times(&usage([0; 4])), "less than 1s");
    }

    #[test]
    fn present_use_names_state_time_and_memory() {
        let idle = usage([0; 4]);
        assert_eq!(now(&idle), "idle for 2h5m, 9.1 GiB");
        assert_eq!(now(&LeaseUsageSummary { state: Some(UseState::Busy), ..idle.clone() }), "busy, 9.1 GiB");
        assert_eq!(now(&LeaseUsageSummary { state: Some(UseState::Unknown), ..idle.clone() }), "");
        assert_eq!(now(&LeaseUsageSummary { state: Some(UseState::Empty), ..idle }), "no process for 2h5m");
    }

    #[test]
    fn energy_has_a_readable_unit() {
        assert_eq!([950.0, 43_200.0, 4_680_000.0].map(energy), ["950 J", "12 Wh", "1.3 kWh"]);
    }
}
