//! Who used how much in a period, as a table.

use gpush_api::{
    CapacitySums, Gpu, RequestLine, RequestTotals, UsageGrouping, UsageLine, UsageReport, UsageSums, text::local_time,
};
use gpush_core::duration;

use super::{
    Appearance,
    lease::usage::{EnergyUnit, energy, percent},
    listing::Listing,
    table::{Align, Narrow},
};

const NONE: &str = "-";

/// Draws the report of `gpushctl usage`.
pub(crate) fn list(report: &UsageReport, gpus: &[Gpu], look: &Appearance) -> Listing {
    let unit = EnergyUnit::of(report.lines.iter().map(|line| line.sums.energy_j));
    // A list for programs has no units in its cells.
    let names = if look.exact {
        ["HELD S", "BUSY S", "IDLE S", "EMPTY S", "UNKNOWN S", "GPU HOURS", "GIB HOURS", "ENERGY J"]
    } else {
        ["HELD", "BUSY", "IDLE", "EMPTY", "UNKNOWN", "GPU HOURS", "GIB HOURS", unit.heading()]
    };
    let mut columns = vec![(heading(report.by), Align::Left)];
    columns.extend(names.map(|name| (name, Align::Right)));
    columns.extend([(if look.exact { "WAITED S" } else { "WAITED" }, Align::Right), ("REFUSED", Align::Right)]);
    let key = |key: Option<&String>| key.map_or_else(|| NONE.to_owned(), |key| name(key, report.by, gpus, look));
    let line = |name: String, UsageLine { sums, request_sums, .. }: &UsageLine| {
        let cells = if look.exact { exact(sums) } else { rounded(sums, unit, look) };
        let cells = cells.into_iter().chain(requests_of(request_sums, look));
        let more = (look.wide || look.exact).then(|| [hours(sums.busy_gpu_hours, look), method(sums)]);
        std::iter::once(name).chain(cells).chain(more.into_iter().flatten()).collect::<Vec<_>>()
    };
    if look.wide || look.exact {
        columns.extend([("BUSY GPU HOURS", Align::Right), ("ENERGY METHOD", Align::Left)]);
    }
    let mut lines: Vec<&UsageLine> = report.lines.iter().collect();
    if report.by == UsageGrouping::Gpu {
        let is_of = |gpu: &&Gpu, line: &UsageLine| line.key.as_deref() == Some(gpu.uuid.as_str());
        // GPUs that the driver does not list come last.
        lines.sort_by_key(|line| gpus.iter().find(|gpu| is_of(gpu, line)).map_or(u32::MAX, |gpu| gpu.index.0));
    }
    let rows: Vec<Vec<String>> = lines.iter().map(|one| line(key(one.key.as_ref()), one)).collect();
    // `--user` accepts a uid as a number.
    let names = lines.iter().map(|line| match (report.by, &line.key) {
        (UsageGrouping::User, Some(user)) => look.clean(user),
        (_, name) => key(name.as_ref()),
    });
    let names: Vec<String> = names.collect();
    let period = format!("From {} to {}", local_time(report.from), local_time(report.until));
    let recorded = recorded(report);
    let capacity = report.capacity.as_ref().map_or_else(String::new, capacity);
    let requests: String = report.request_lines.iter().filter_map(|line| refusals(line, look)).collect();
    let after: Vec<String> = look.wrap("", &format!("{period}.{recorded}{capacity}{requests}"));
    Listing::new(&columns, rows, Narrow::spare(&["WAITED", "REFUSED", "GIB HOURS", "EMPTY", "UNKNOWN"]), look)
        .names(names)
        .or_empty("No lease was held in this period.")
        .after(&(after.join("\n") + "\n"))
}

/// Describes the time from which the use is recorded, if this is not the whole period.
fn recorded(report: &UsageReport) -> String {
    match report.recorded_since {
        None => String::new(),
        Some(since) if since < report.until => {
            format!(" The records begin at {}: the use before is not in the figures.", local_time(since))
        }
        Some(_) => " gpushd has no records of this period.".to_owned(),
    }
}

/// Returns the cells of a line, rounded for a terminal. Parts of the time are in percent of the held time.
fn rounded(sums: &UsageSums, unit: EnergyUnit, look: &Appearance) -> [String; 8] {
    let all = held(sums);
    let part = |seconds: u64| if all == 0 { NONE.to_owned() } else { percent(seconds, all) };
    [
        duration::rough(all),
        part(sums.busy_s),
        part(sums.idle_s),
        part(sums.empty_s),
        part(sums.unknown_s),
        hours(sums.held_gpu_hours, look),
        sums.memory_gib_hours.map_or_else(|| NONE.to_owned(), |hours| format!("{hours:.1}")),
        unit.text(sums.energy_j),
    ]
}

/// Returns the cells about the requests of a line: the time that they waited, and the number of the refused ones.
fn requests_of(sums: &RequestTotals, look: &Appearance) -> [String; 2] {
    let waited = if look.exact { sums.waited_s.to_string() } else { duration::rough(sums.waited_s) };
    [waited, sums.refused_requests.to_string()]
}

/// Returns the method that determined most of the energy, with `+` if another method determined a part of it.
fn method(sums: &UsageSums) -> String {
    let mixed = if sums.energy_mixed { "+" } else { "" };
    format!("{}{mixed}", sums.energy_method.name())
}

/// Returns GPU hours. `-o wide` has digits for leases of seconds.
fn hours(hours: f64, look: &Appearance) -> String {
    if look.wide || look.exact { format!("{hours:.6}") } else { format!("{hours:.1}") }
}

/// Returns the cells of a line for programs: seconds, hours and joules.
fn exact(sums: &UsageSums) -> [String; 8] {
    [
        held(sums).to_string(),
        sums.busy_s.to_string(),
        sums.idle_s.to_string(),
        sums.empty_s.to_string(),
        sums.unknown_s.to_string(),
        format!("{:.6}", sums.held_gpu_hours),
        sums.memory_gib_hours.map_or_else(String::new, |hours| format!("{hours:.6}")),
        format!("{:.3}", sums.energy_j),
    ]
}

fn held(sums: &UsageSums) -> u64 {
    sums.busy_s + sums.idle_s + sums.empty_s + sums.unknown_s
}

/// Describes the capacity of the GPUs in the period.
fn capacity(sums: &CapacitySums) -> String {
    let all = sums.capacity_gpu_hours;
    if all <= 0.0 {
        return String::new();
    }
    let part = |hours: f64| format!("{:.0} %", hours / all * 100.0);
    format!(
        " The GPUs had {all:.1} GPU hours: {} leased, {} free, {} unusable. They needed {}, of which {} belong to no lease.",
        part(sums.leased_gpu_hours),
        part(sums.free_gpu_hours),
        part(sums.unusable_gpu_hours),
        energy(sums.energy_j),
        energy(sums.unattributed_j),
    )
}

/// Says how many requests for a share were refused because the capacity was in use.
fn refusals(line: &RequestLine, look: &Appearance) -> Option<String> {
    let all = line.all();
    if line.no_capacity == 0 {
        return None;
    }
    let share = if line.profile.is_empty() { line.share_kind.clone() } else { line.profile.clone() };
    let part = percent(line.no_capacity, all);
    Some(format!(
        " {}: {} of {all} requests ({part}) refused because the capacity was in use.",
        look.clean(&share),
        line.no_capacity
    ))
}

pub(super) fn heading(by: UsageGrouping) -> &'static str {
    match by {
        UsageGrouping::User => "USER",
        UsageGrouping::Group => "GROUP",
        UsageGrouping::Job => "JOB",
        UsageGrouping::Account => "ACCOUNT",
        UsageGrouping::Kind => "KIND",
        UsageGrouping::Gpu => "GPU",
    }
}

/// Returns the key of a line. A GPU is shown by its index if it is known.
pub(super) fn name(key: &str, by: UsageGrouping, gpus: &[Gpu], look: &Appearance) -> String {
    match by {
        UsageGrouping::Gpu => {
            let gpu = gpus.iter().find(|gpu| gpu.uuid.as_str() == key);
            gpu.map_or_else(|| look.clean(key), |gpu| gpu.index.to_string())
        }
        // A user without a name is a uid, which other lists show as `uid 1001`.
        UsageGrouping::User if key.parse::<u32>().is_ok() => format!("uid {key}"),
        UsageGrouping::User
        | UsageGrouping::Group
        | UsageGrouping::Job
        | UsageGrouping::Account
        | UsageGrouping::Kind => look.clean(key),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use gpush_api::EnergyMethod;

    use super::*;
    use crate::render::{Charset, fixtures};

    pub(crate) fn report() -> UsageReport {
        let anna = UsageSums {
            busy_s: 40_000,
            idle_s: 10_000,
            empty_s: 0,
            unknown_s: 400,
            held_gpu_hours: 14.0,
            busy_gpu_hours: 11.1,
            memory_gib_hours: Some(560.2),
            energy_j: 15_000_000.0,
            energy_method: EnergyMethod::Gpm,
            energy_mixed: true,
        };
        let requests = RequestTotals { granted_requests: 4, refused_requests: 3, waited_s: 754 };
        let ben = UsageSums { busy_s: 0, idle_s: 0, empty_s: 7_200, memory_gib_hours: None, ..anna };
        UsageReport {
            from: "2026-11-28T08:00:00Z".parse().unwrap(),
            until: "2026-11-29T08:12:00Z".parse().unwrap(),
            recorded_since: None,
            by: UsageGrouping::User,
            lines: vec![
                UsageLine { key: Some("anna".to_owned()), sums: anna, request_sums: requests },
                UsageLine { key: Some("ben".to_owned()), sums: ben, request_sums: RequestTotals::default() },
                UsageLine { key: None, sums: UsageSums::default(), request_sums: RequestTotals::default() },
            ],
            total: anna,
            total_requests: requests,
            capacity: Some(CapacitySums {
                capacity_gpu_hours: 192.0,
                leased_gpu_hours: 28.0,
                free_gpu_hours: 160.0,
                unusable_gpu_hours: 4.0,
                energy_j: 60_000_000.0,
                unattributed_j: 30_000_000.0,
            }),
            request_lines: vec![RequestLine {
                share_kind: "mig".to_owned(),
                profile: "7g.80gb".to_owned(),
                granted_requests: 4,
                no_capacity: 10,
                ..RequestLine::default()
            }],
        }
    }

    #[test]
    fn report_is_drawn_for_readers_and_exact_for_programs() {
        let look = fixtures::look(80, Charset::Ascii);
        insta::assert_snapshot!(fixtures::plain(list(&report(), &[], &look).text()));
        let exact = Appearance { exact: true, ..fixtures::look(80, Charset::Ascii) };
        let csv = list(&report(), &[], &exact).csv(true);
        assert!(
            csv.starts_with(
                "user,held_s,busy_s,idle_s,empty_s,unknown_s,gpu_hours,gib_hours,energy_j,waited_s,refused,busy_gpu_hours,energy_method\nanna,50400,40000,10000,0,400,14.000000,"
            ),
            "{csv}"
        );
    }

    /// Fault: three recorded days looked like the use of 30 days.
    #[test]
    fn report_says_when_the_records_begin() {
        let look = fixtures::look(80, Charset::Ascii);
        let text = |recorded_since| {
            let report = UsageReport { recorded_since, capacity: None, request_lines: Vec::new(), ..report() };
            let text = fixtures::plain(list(&report, &[], &look).text());
            text.split_once("From ").map_or(text.clone(), |(_, rest)| format!("From {rest}"))
        };
        let texts = [text(None), text("2026-11-29T05:20:00Z".parse().ok()), text(Some(report().until))];
        insta::assert_snapshot!("usage-records", texts.join("---\n"));
    }

    /// Fault: the GPUs were in the order of their UUIDs.
    #[test]
    fn gpus_are_in_the_order_of_their_indexes() {
        let gpus: Vec<Gpu> = [(0, "GPU-b"), (1, "GPU-c"), (2, "GPU-a")]
            .into_iter()
            .map(|(index, uuid)| Gpu { uuid: uuid.into(), ..fixtures::gpu(index, "A100", 40_960, None) })
            .collect();
        let line = |key: &str| UsageLine { key: Some(key.to_owned()), ..report().lines[0].clone() };
        let lines = ["GPU-a", "GPU-b", "GPU-c", "GPU-gone"].map(line).to_vec();
        let by_gpu = UsageReport { by: UsageGrouping::Gpu, lines, ..report() };
        let listing = list(&by_gpu, &gpus, &fixtures::look(80, Charset::Ascii));
        assert_eq!(listing.name_lines(), "0\n1\n2\nGPU-gone\n");
    }

    #[test]
    fn user_without_a_name_is_a_uid() {
        let look = fixtures::look(80, Charset::Ascii);
        assert_eq!(name("1001", UsageGrouping::User, &[], &look), "uid 1001");
        assert_eq!(name("anna", UsageGrouping::User, &[], &look), "anna");
        assert_eq!(name("1001", UsageGrouping::Job, &[], &look), "1001");
    }

    #[test]
    fn wide_report_has_the_same_digits_for_held_and_busy_hours() {
        let mut short = report();
        short.lines.truncate(1);
        (short.lines[0].sums.held_gpu_hours, short.lines[0].sums.busy_gpu_hours) = (0.000_4, 0.000_2);
        let look = Appearance { wide: true, ..fixtures::look(160, Charset::Ascii) };
        let text = fixtures::plain(list(&short, &[], &look).text());
        assert!(text.contains("0.000400") && text.contains("0.000200"), "{text}");
    }

    #[test]
    fn report_without_leases_says_so() {
        let empty = UsageReport { lines: Vec::new(), capacity: None, request_lines: Vec::new(), ..report() };
        let text = fixtures::plain(list(&empty, &[], &fixtures::look(80, Charset::Ascii)).text());
        assert!(text.contains("No lease was held in this period."), "{text}");
    }
}
