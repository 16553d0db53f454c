//! The bill of a month, as a table.

use gpush_api::{Bill, BillLine, BillSums, Gpu, UsageGrouping};
use gpush_core::duration;

use super::{
    Appearance,
    lease::usage::{EnergyUnit, percent},
    listing::Listing,
    table::{Align, Narrow},
    usage_report::{heading, name},
};

const NONE: &str = "-";

/// Draws the bill of `gpushctl bill`.
pub(crate) fn list(bill: &Bill, gpus: &[Gpu], look: &Appearance) -> Listing {
    let all = bill.lines.iter().map(|line| &line.sums).chain(&bill.unallocated).chain([&bill.total]);
    let unit = EnergyUnit::of(all.clone().map(|sums| sums.energy_j));
    let has_corrections = all.clone().any(|sums| !is_zero(&sums.corrections));
    let has_slices = all.clone().any(|sums| !is_zero(&sums.slice_hours));
    let mut columns = vec![
        (heading(bill.by), Align::Left),
        ("LEASES", Align::Right),
        ("HELD", Align::Right),
        ("BUSY", Align::Right),
        ("GPU HOURS", Align::Right),
    ];
    if has_slices {
        columns.push(("SLICE HOURS", Align::Right));
    }
    columns.push((unit.heading(), Align::Right));
    if has_corrections {
        columns.push(("CORRECTIONS", Align::Right));
    }
    columns.push(("AMOUNT", Align::Right));
    let row = |name: String, sums: &BillSums| {
        let mut cells = vec![name, sums.lease_count.to_string(), held(sums), busy(sums)];
        cells.push(rounded(&sums.charged_gpu_hours, 1, look));
        if has_slices {
            cells.push(rounded(&sums.slice_hours, 1, look));
        }
        cells.push(unit.text(sums.energy_j));
        if has_corrections {
            cells.push(rounded(&sums.corrections, 2, look));
        }
        cells.push(rounded(&sums.amount, 2, look));
        cells
    };
    let key = |line: &BillLine| line.key.as_ref().map_or_else(|| NONE.to_owned(), |key| name(key, bill.by, gpus, look));
    let mut rows: Vec<Vec<String>> = bill.lines.iter().map(|line| row(key(line), &line.sums)).collect();
    let has_unallocated = bill.unallocated.as_ref().filter(|sums| !is_zero(&sums.charged_gpu_hours));
    let is_empty = rows.is_empty() && has_unallocated.is_none();
    rows.extend(has_unallocated.map(|sums| row("(unallocated)".to_owned(), sums)));
    if !is_empty {
        rows.push(row("(total)".to_owned(), &bill.total));
    }
    let names: Vec<String> = bill
        .lines
        .iter()
        .map(|line| match (bill.by, &line.key) {
            (UsageGrouping::User, Some(user)) => look.clean(user),
            _ => key(line),
        })
        .collect();
    let after = look.wrap("", &about(bill, is_empty, look));
    Listing::new(&columns, rows, Narrow::spare(&["HELD", "BUSY", "LEASES"]), look)
        .names(names)
        .or_empty("No lease was held in this month.")
        .after(&(after.join("\n") + "\n"))
}

/// Describes the bill: its month, its model, its currency and its notes.
fn about(bill: &Bill, is_empty: bool, look: &Appearance) -> String {
    let whose = bill.user.as_ref().map_or_else(String::new, |user| format!(" of {}", look.clean(user)));
    let currency = match &bill.currency {
        Some(currency) if !is_empty && look.wide => format!(" Amounts are in {}.", look.clean(currency)),
        Some(currency) if !is_empty => {
            format!(" Amounts are in {}, rounded; -o wide has exact ones.", look.clean(currency))
        }
        Some(_) | None => String::new(),
    };
    let notes: String = bill.notes.iter().map(|note| format!(" {}", look.clean(note))).collect();
    format!("Bill{whose} for {} (UTC), model {}.{currency}{notes}", look.clean(&bill.month), bill.model.name())
}

fn held(sums: &BillSums) -> String {
    if sums.held_s == 0 { NONE.to_owned() } else { duration::rough(sums.held_s) }
}

fn busy(sums: &BillSums) -> String {
    if sums.held_s == 0 { NONE.to_owned() } else { percent(sums.busy_s, sums.held_s) }
}

fn is_zero(decimal: &str) -> bool {
    decimal.bytes().all(|byte| matches!(byte, b'0' | b'.' | b'-'))
}

/// Rounds a decimal for readers. `-o wide` has all digits.
fn rounded(decimal: &str, places: usize, look: &Appearance) -> String {
    match decimal.parse::<f64>() {
        Ok(number) if !look.wide => format!("{number:.places$}"),
        Ok(_) | Err(_) => look.clean(decimal),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use gpush_api::{BillModel, BillState};

    use super::*;
    use crate::render::{Charset, fixtures};

    fn nothing() -> BillSums {
        let zero = || "0".to_owned();
        BillSums {
            charged_gpu_hours: zero(),
            slice_hours: zero(),
            amount: zero(),
            corrections: zero(),
            ..BillSums::default()
        }
    }

    pub(crate) fn bill() -> Bill {
        let anna = BillSums {
            lease_count: 12,
            held_s: 400_000,
            busy_s: 300_000,
            charged_gpu_hours: "31.746031746".to_owned(),
            slice_hours: "222.222222222".to_owned(),
            amount: "55.5555555555".to_owned(),
            corrections: "0".to_owned(),
            energy_j: 150_000_000.0,
        };
        let ben = BillSums { amount: "-3.1".to_owned(), corrections: "-3.1".to_owned(), ..nothing() };
        let unallocated = BillSums { lease_count: 0, held_s: 0, busy_s: 0, ..anna.clone() };
        Bill {
            month: "2026-11".to_owned(),
            state: BillState::Running,
            model: BillModel::Requested,
            currency: Some("EUR".to_owned()),
            user: None,
            by: UsageGrouping::User,
            lines: vec![
                BillLine { key: Some("anna".to_owned()), sums: anna.clone() },
                BillLine { key: Some("ben".to_owned()), sums: ben },
                BillLine { key: None, sums: nothing() },
            ],
            unallocated: Some(unallocated),
            total: BillSums { amount: "108.011111111".to_owned(), corrections: "-3.1".to_owned(), ..anna },
            notes: vec!["The month 2026-11 is not over: the bill has the use so far.".to_owned()],
        }
    }

    #[test]
    fn bill_has_sums_and_says_that_the_month_is_not_over() {
        let look = fixtures::look(80, Charset::Ascii);
        insta::assert_snapshot!(fixtures::plain(list(&bill(), &[], &look).text()));
    }

    #[test]
    fn wide_bill_has_all_digits_and_no_empty_columns() {
        let flat = Bill { model: BillModel::Flat, user: Some("anna".to_owned()), unallocated: None, ..bill() };
        let sums =
            BillSums { slice_hours: "0".to_owned(), corrections: "0".to_owned(), ..bill().lines[0].sums.clone() };
        let lines = vec![BillLine { key: Some("anna".to_owned()), sums: sums.clone() }];
        let flat = Bill { lines, total: sums, state: BillState::Closed, notes: Vec::new(), ..flat };
        let look = Appearance { wide: true, ..fixtures::look(120, Charset::Ascii) };
        let listing = list(&flat, &[], &look);
        let text = fixtures::plain(listing.text());
        assert!(text.contains("55.5555555555") && text.contains("Bill of anna for 2026-11"), "{text}");
        assert!(!text.contains("SLICE") && !text.contains("CORRECTIONS") && !text.contains("unallocated"), "{text}");
        assert_eq!(listing.name_lines(), "anna\n");
    }

    #[test]
    fn bill_without_leases_says_so() {
        let empty = Bill { lines: Vec::new(), unallocated: None, total: nothing(), ..bill() };
        let text = fixtures::plain(list(&empty, &[], &fixtures::look(80, Charset::Ascii)).text());
        assert!(text.starts_with("No lease was held in this month."), "{text}");
    }
}
