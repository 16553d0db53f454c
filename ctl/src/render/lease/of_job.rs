//! What the leases of a Slurm job were used for, as a table.

use gpush_api::{Lease, LeaseUsageSummary};
use gpush_core::duration;

use super::{
    NONE, share, state,
    usage::{EnergyUnit, percent},
    user,
};
use crate::render::{
    Appearance,
    appearance::{gib, paint},
    listing::Listing,
    table::{Align, Narrow},
};

/// Lists the leases of `gpushctl slurm usage`, with a line for their sums if there are several.
pub(crate) fn of_job(leases: &[Lease], look: &Appearance) -> Listing {
    let energy = |lease: &Lease| lease.usage.as_ref().and_then(|usage| usage.energy_j);
    let all: f64 = leases.iter().filter_map(energy).sum();
    let unit = EnergyUnit::of(std::iter::once(all));
    let names = if look.exact {
        ["HELD S", "BUSY S", "MEMORY PEAK MIB", "ENERGY J"]
    } else {
        ["HELD", "BUSY", "MEMORY PEAK", unit.heading()]
    };
    let mut columns =
        vec![("LEASE", Align::Left), ("USER", Align::Left), ("STATE", Align::Left), ("SHARE", Align::Left)];
    columns.extend(names.map(|name| (name, Align::Right)));
    columns.push(("ENERGY METHOD", Align::Left));
    let cells = |usage: Option<&LeaseUsageSummary>| match usage {
        Some(usage) if look.exact => exact(usage),
        Some(usage) => rounded(usage, unit),
        None => std::array::from_fn(|_| if look.exact { String::new() } else { NONE.to_owned() }),
    };
    let row = |lease: &Lease| {
        let (word, style) = state(lease.state);
        let first = [lease.id.to_string(), user(lease, look), paint(style, word), share(lease, look)];
        first.into_iter().chain(cells(lease.usage.as_ref())).collect::<Vec<_>>()
    };
    let mut rows: Vec<Vec<String>> = leases.iter().map(row).collect();
    if leases.len() > 1 && !look.exact {
        let held: u64 = leases.iter().filter_map(|lease| lease.usage.as_ref()).map(held_s).sum();
        let busy: u64 = leases.iter().filter_map(|lease| lease.usage.as_ref()).map(|usage| usage.busy_s).sum();
        let peak = leases.iter().filter_map(|lease| lease.usage.as_ref()?.memory_peak_mib).max();
        let parts = [duration::rough(held), part(busy, held), memory(peak), unit.text(all)];
        let empty = |_| String::new();
        let mut line: Vec<String> = std::iter::once("(all)".to_owned()).chain((1..4).map(empty)).collect();
        line.extend(parts);
        line.push(String::new());
        rows.push(line);
    }
    Listing::new(&columns, rows, Narrow::spare(&["STATE", "USER"]), look)
        .names(leases.iter().map(|lease| lease.id.to_string()))
        .uuids(leases.iter().flat_map(|lease| &lease.members).map(|member| member.target.clone()))
}

fn held_s(usage: &LeaseUsageSummary) -> u64 {
    usage.busy_s + usage.idle_s + usage.empty_s + usage.unknown_s
}

fn part(busy_s: u64, held_s: u64) -> String {
    if held_s == 0 { NONE.to_owned() } else { percent(busy_s, held_s) }
}

fn memory(mib: Option<u64>) -> String {
    mib.map_or_else(|| NONE.to_owned(), |mib| format!("{} GiB", gib(mib)))
}

fn rounded(usage: &LeaseUsageSummary, unit: EnergyUnit) -> [String; 5] {
    let held = held_s(usage);
    [
        duration::rough(held),
        part(usage.busy_s, held),
        memory(usage.memory_peak_mib),
        usage.energy_j.map_or_else(|| NONE.to_owned(), |joules| unit.text(joules)),
        usage.energy_j.map_or_else(|| NONE.to_owned(), |_| usage.energy_method.name().to_owned()),
    ]
}

fn exact(usage: &LeaseUsageSummary) -> [String; 5] {
    [
        held_s(usage).to_string(),
        usage.busy_s.to_string(),
        usage.memory_peak_mib.map(|mib| mib.to_string()).unwrap_or_default(),
        usage.energy_j.map(|joules| format!("{joules:.3}")).unwrap_or_default(),
        usage.energy_j.map(|_| usage.energy_method.name().to_owned()).unwrap_or_default(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn leases_of_a_job_have_sums() {
        let used = Lease { usage: Some(fixtures::lease::usage()), ..fixtures::lease::mig() };
        let leases = [used.clone(), Lease { usage: None, ..fixtures::lease::mps() }];
        let text = fixtures::plain(of_job(&leases, &fixtures::look(100, Charset::Ascii)).text());
        insta::assert_snapshot!(text);
        let exact = Appearance { exact: true, wraps: false, ..fixtures::look(80, Charset::Ascii) };
        let csv = of_job(&leases, &exact).csv(true);
        assert_eq!(csv.lines().count(), 3, "{csv}");
        assert!(
            csv.starts_with("lease,user,state,share,held_s,busy_s,memory_peak_mib,energy_j,energy_method\n"),
            "{csv}"
        );
        assert!(csv.contains(",11160,3600,10240,43200.000,gpm\n"), "{csv}");
    }
}
