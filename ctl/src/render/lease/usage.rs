//! What a lease is or was used for, in words.

use gpush_api::{EnergyMethod, Lease, LeaseUsage, LeaseUsageSummary, TargetUsage, UnknownReason, UseState};
use gpush_core::duration;

use super::user;
use crate::render::{Appearance, appearance::gib};

/// Describes what an open lease does: `busy, 9.1 GiB`. Empty if it is not known.
pub(crate) fn now(usage: &LeaseUsageSummary) -> String {
    let for_time = |seconds: Option<u64>| seconds.map_or_else(String::new, |seconds| format!(" for {}", time(seconds)));
    let memory = usage.memory_mib.map_or_else(String::new, |memory| format!(", {} GiB", gib(memory)));
    match usage.state {
        Some(UseState::Busy) => format!("busy{memory}"),
        Some(UseState::Idle) => {
            let certainty = if usage.weak { " (not certain)" } else { "" };
            format!("idle{}{certainty}{memory}", for_time(usage.unused_s))
        }
        Some(UseState::Empty) => format!("no process{}", for_time(usage.unused_s)),
        Some(UseState::Unknown) => format!("use not known{memory}"),
        None => String::new(),
    }
}

/// Describes what an open lease does in a few columns: `idle 2h5m`, or `idle? 2h5m` if it is not certain. Empty if gpushd
/// does not report it.
pub(crate) fn brief(usage: &LeaseUsageSummary) -> String {
    let for_time = usage.unused_s.map_or_else(String::new, |seconds| format!(" {}", time(seconds)));
    match usage.state {
        Some(UseState::Busy) => "busy".to_owned(),
        Some(UseState::Idle) => format!("{}{for_time}", idle(usage.weak)),
        Some(UseState::Empty) => format!("empty{for_time}"),
        Some(UseState::Unknown) => "unknown".to_owned(),
        None => String::new(),
    }
}

/// Returns the word for an idle lease in a few columns. A question mark means that it is not certain.
pub(crate) fn idle(is_weak: bool) -> &'static str {
    if is_weak { "idle?" } else { "idle" }
}

/// Says why it is not certain that a lease is idle.
pub(crate) const IDLE_NOT_CERTAIN: &str = "idle, not certain: other work on the same GPU needs power, so the power of the \
                                           GPU cannot confirm that this lease does no work";

/// What else is known about the use of a lease.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Surroundings<'a> {
    /// The use of leases on each of their targets.
    pub(crate) usage: &'a [LeaseUsage],
    /// The leases of the host.
    pub(crate) leases: &'a [Lease],
    /// Whether the driver can limit the memory of a cgroup.
    pub(crate) has_memory_limits: bool,
}

impl Surroundings<'_> {
    /// Returns the leases that hold a share of the same GPUs now: `L18 of bob (busy)`.
    fn neighbours(&self, lease: &Lease, look: &Appearance) -> Vec<String> {
        let is_here = |other: &Lease| {
            let gpus = || lease.members.iter().map(|member| &member.gpu_uuid);
            other.members.iter().any(|member| gpus().any(|gpu| *gpu == member.gpu_uuid))
        };
        let others = self.leases.iter().filter(|other| other.id != lease.id && other.state.holds_capacity());
        let text = |other: &Lease| {
            let state = other.usage.as_ref().and_then(|usage| usage.state);
            let state = state.map_or_else(String::new, |state| format!(" ({})", state.name()));
            format!("{} of {}{state}", other.id, user(other, look))
        };
        others.filter(|other| is_here(other)).map(text).collect()
    }
}

/// Returns the usual memory and the activity on each target of a lease: name and value. With `is_after_memory`, the memory
/// continues the fact before it.
fn figures_of_targets(usage: &LeaseUsage, is_after_memory: bool) -> Vec<(&'static str, String)> {
    let all = |text: fn(&TargetUsage) -> Option<String>| {
        let known: Vec<String> = usage.target_usage.iter().filter_map(text).collect();
        (known.len() == usage.target_usage.len() && !known.is_empty()).then(|| known.join(", "))
    };
    let mean = all(|target| Some(format!("{:.0} %", target.sm_mean? * 100.0)));
    let p98 = all(|target| Some(format!("{} GiB", gib(target.memory_p98_mib?))));
    let estimate = if usage.target_usage.iter().any(|target| target.estimate) { " (estimate)" } else { "" };
    let mean = mean.map(|mean| ("activity", format!("SM {mean} on average{estimate}")));
    let p98 =
        p98.map(|p98| (if is_after_memory { "" } else { "memory" }, format!("at most {p98} in 98 % of the time")));
    p98.into_iter().chain(mean).collect()
}

/// Returns the facts of `lease show`: name and value.
pub(super) fn facts(lease: &Lease, surroundings: &Surroundings<'_>, look: &Appearance) -> Vec<(&'static str, String)> {
    let Some(usage) = &lease.usage else { return Vec::new() };
    let mut facts = Vec::new();
    // The name of the fact is `use`.
    let mut state = now(usage).trim_start_matches("use ").to_owned();
    if let Some(number) = usage.process_count.filter(|number| *number > 0 && !state.is_empty()) {
        state += &if number == 1 { ", 1 process".to_owned() } else { format!(", {number} processes") };
    }
    if let (Some(UseState::Unknown), Some(reason)) = (usage.state, usage.reason) {
        state += &format!(": {}", unknown(reason));
    }
    if !state.is_empty() {
        facts.push(("use", state));
    }
    if usage.weak {
        facts.push(("", IDLE_NOT_CERTAIN.to_owned()));
    }
    facts.push(("time", times(usage)));
    if let Some(peak) = usage.memory_peak_mib {
        facts.push(("memory", format!("at most {} GiB", gib(peak))));
    }
    if let Some(targets) = surroundings.usage.iter().find(|targets| targets.lease_id == lease.id) {
        let is_after_memory = usage.memory_peak_mib.is_some();
        facts.extend(figures_of_targets(targets, is_after_memory));
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
    let neighbours = surroundings.neighbours(lease, look);
    if facts.last().is_some_and(|(name, _)| *name == "slowed") && !neighbours.is_empty() {
        facts.push(("", format!("on the same GPU now: {}", neighbours.join(", "))));
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

/// A unit of energy. A column has one unit, so that readers can compare its figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EnergyUnit {
    Joule,
    WattHour,
    KilowattHour,
}

impl EnergyUnit {
    /// Returns the unit that fits the largest energy of a column, in J.
    pub(crate) fn of(energies: impl Iterator<Item = f64>) -> Self {
        match energies.fold(0.0, f64::max) / 3600.0 {
            hours if hours < 1.0 => Self::Joule,
            hours if hours < 1000.0 => Self::WattHour,
            _ => Self::KilowattHour,
        }
    }

    /// Returns the heading of the column.
    pub(crate) fn heading(self) -> &'static str {
        match self {
            Self::Joule => "JOULES",
            Self::WattHour => "WH",
            Self::KilowattHour => "KWH",
        }
    }

    /// Returns energy in this unit. Small figures share the unit of large ones, so they have more digits than a single
    /// figure.
    pub(crate) fn text(self, joules: f64) -> String {
        let watt_hours = joules / 3600.0;
        match self {
            Self::Joule => format!("{joules:.0}"),
            Self::WattHour => format!("{watt_hours:.1}"),
            Self::KilowattHour => format!("{:.3}", watt_hours / 1000.0),
        }
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
        UnknownReason::SourceFailed => "a reading is missing",
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
    use gpush_api::{LeaseId, SignalSource};

    use super::*;
    use crate::render::{Charset, fixtures};

    fn usage(seconds: [u64; 4]) -> LeaseUsageSummary {
        let [busy_s, idle_s, empty_s, unknown_s] = seconds;
        LeaseUsageSummary {
            state: Some(UseState::Idle),
            reason: None,
            weak: false,
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
        assert_eq!(
            now(&LeaseUsageSummary { state: Some(UseState::Unknown), ..idle.clone() }),
            "use not known, 9.1 GiB"
        );
        assert_eq!(now(&LeaseUsageSummary { state: Some(UseState::Empty), ..idle }), "no process for 2h5m");
    }

    #[test]
    fn column_of_energies_has_the_unit_of_the_largest() {
        let column = |energies: &[f64]| {
            let unit = EnergyUnit::of(energies.iter().copied());
            (unit.heading(), energies.iter().map(|joules| unit.text(*joules)).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(column(&[2_625.0, 0.0]), ("JOULES", "2625 0".to_owned()));
        assert_eq!(column(&[2_625.0, 10_800.0]), ("WH", "0.7 3.0".to_owned()));
        assert_eq!(column(&[2_625.0, 10_800.0, 8_640_000.0]), ("KWH", "0.001 0.003 2.400".to_owned()));
        assert_eq!(column(&[]), ("JOULES", String::new()));
    }

    /// Fault: a slowed lease did not show which leases share its GPU.
    #[test]
    fn slowed_lease_is_shown_with_its_neighbours_and_usual_figures() {
        let look = fixtures::look(80, Charset::Ascii);
        let slowed = LeaseUsageSummary { power_limited: Some(0.12), ..fixtures::lease::usage() };
        let lease = Lease { usage: Some(slowed), ..fixtures::lease::mps() };
        let busy = LeaseUsageSummary { state: Some(UseState::Busy), ..fixtures::lease::usage() };
        let neighbour = Lease { id: LeaseId(30), usage: Some(busy), ..fixtures::lease::mps() };
        let leases = [lease.clone(), neighbour, fixtures::lease::mig(), fixtures::lease::foreign()];
        let target = TargetUsage {
            target: lease.members[0].target.clone(),
            gpu_uuid: lease.members[0].gpu_uuid.clone(),
            source: SignalSource::Processes,
            estimate: true,
            weak: false,
            sm_activity: None,
            dram_activity: None,
            sm_mean: Some(0.52),
            memory_mib: None,
            memory_peak_mib: None,
            memory_p98_mib: Some(8_192),
        };
        let usage = LeaseUsage {
            lease_id: lease.id,
            state: UseState::Idle,
            reason: None,
            weak: false,
            since: look.now,
            unused_since: None,
            unused_s: None,
            busy_s: 0,
            idle_s: 0,
            empty_s: 0,
            unknown_s: 0,
            energy_j: 0.0,
            energy_method: EnergyMethod::None,
            energy_mixed: false,
            target_usage: vec![target],
        };
        let surroundings = Surroundings { usage: &[usage], leases: &leases, has_memory_limits: false };
        let text: Vec<String> =
            facts(&lease, &surroundings, &look).into_iter().map(|(name, value)| format!("{name}: {value}")).collect();
        insta::assert_snapshot!(text.join("\n"), @r"
        use: idle for 2h5m, 9.1 GiB, 2 processes
        time: busy 32 %, idle 67 %, not known below 1 % of 3h6m
        memory: at most 10.0 GiB
        : at most 8.0 GiB in 98 % of the time
        activity: SM 52 % on average (estimate)
        energy: 12 Wh (by the activity of the GPU instance)
        slowed: 12 % of the time, by the power limit of the GPU
        : on the same GPU now: L30 of alice (busy), L22 of uid 1001
        ");
        let slowed = lease.usage.clone().map(|usage| LeaseUsageSummary { memory_peak_mib: None, ..usage });
        let without_peak = facts(&Lease { usage: slowed, ..lease.clone() }, &surroundings, &look);
        assert_eq!(without_peak[2], ("memory", "at most 8.0 GiB in 98 % of the time".to_owned()));
        let alone = facts(&lease, &Surroundings::default(), &look);
        assert!(alone.iter().all(|(_, value)| !value.contains("same GPU")));
    }

    /// Fault: an activity of 0 that a working neighbor hides looked like proven idleness.
    #[test]
    fn idle_state_that_is_not_certain_is_marked() {
        let look = fixtures::look(80, Charset::Ascii);
        let weak = LeaseUsageSummary { weak: true, ..fixtures::lease::usage() };
        assert_eq!(now(&weak), "idle for 2h5m (not certain), 9.1 GiB");
        assert_eq!((brief(&weak), brief(&fixtures::lease::usage())), ("idle? 2h5m".to_owned(), "idle 2h5m".to_owned()));
        let lease = Lease { usage: Some(weak), ..fixtures::lease::mps() };
        let facts = facts(&lease, &Surroundings::default(), &look);
        assert_eq!(facts[0], ("use", "idle for 2h5m (not certain), 9.1 GiB, 2 processes".to_owned()));
        assert_eq!(facts[1], ("", IDLE_NOT_CERTAIN.to_owned()));
        let busy = LeaseUsageSummary { state: Some(UseState::Busy), ..fixtures::lease::usage() };
        assert!(!now(&busy).contains("certain"));
    }

    #[test]
    fn energy_has_a_readable_unit() {
        assert_eq!([950.0, 43_200.0, 4_680_000.0].map(energy), ["950 J", "12 Wh", "1.3 kWh"]);
    }
}
