//! Unused leases: what happens to them, and who keeps them.

use crate::render::{
    Appearance,
    listing::{Listing, widened},
    names,
    table::{Align, Narrow},
};
use gpush_api::{
    IdleAction, IdleReport, Lease, LeaseIdle, LeaseKeep, LeaseState, UnusedLease, UseState, text::local_time,
};
use gpush_core::{duration, lease::unused::keep_command};

const COLUMNS: [(&str, Align); 7] = [
    ("LEASE", Align::Left),
    ("USER", Align::Left),
    ("STATE", Align::Left),
    ("UNUSED", Align::Left),
    ("WARNINGS", Align::Right),
    ("ACTION", Align::Left),
    ("WHEN", Align::Left),
];

/// Describes what happens to an unused lease, for `lease show`: `ends in 12m (2026-01-01 08:00:00)`.
pub(super) fn outlook(idle: &LeaseIdle, lease: &Lease, look: &Appearance) -> String {
    let at = format!("{} ({})", look.ahead(idle.due_at), local_time(idle.due_at));
    let keep = keep_command(lease.id, idle.longest_keep_s);
    let keep = keep.map_or_else(String::new, |keep| format!("; to keep it: `{keep}`"));
    match idle.action {
        IdleAction::Report | IdleAction::Warn => format!("reported {at}"),
        IdleAction::Release => format!("ends {at}{keep}"),
        IdleAction::End => format!("ends {at}, with its processes{keep}"),
    }
}

/// Describes the end of an unused lease in a few words, for lists: `, ends unused in 12m`. Empty if it does not end.
pub(super) fn brief(lease: &Lease, look: &Appearance) -> String {
    match &lease.idle {
        Some(idle) if idle.action.ends_leases() => format!(", ends unused {}", look.ahead(idle.due_at)),
        Some(_) | None => String::new(),
    }
}

/// Describes a keep, for `lease show`; `None` if it is over.
pub(super) fn kept(lease: &Lease, look: &Appearance) -> Option<String> {
    let LeaseKeep { by, reason, until, .. } = lease.keep.as_ref()?;
    let is_over = lease.state == LeaseState::Ended || *until <= look.now;
    let by = names::actor(by, look);
    let reason = look.clean(reason);
    (!is_over).then(|| format!("until {}, by {by}: {reason}", local_time(*until)))
}

/// Draws the result of `gpushctl lease keep`.
pub(crate) fn keeping(lease: &Lease, look: &Appearance) -> String {
    let until = lease.keep.as_ref().map_or_else(String::new, |keep| format!(" until {}", local_time(keep.until)));
    look.wrap(&format!("{}: ", lease.id), &format!("is kept{until}, although it may be unused")).join("\n") + "\n"
}

/// Draws `gpushctl lease idle`.
pub(crate) fn report(report: &IdleReport, look: &Appearance) -> Listing {
    let all: Vec<&UnusedLease> = report.unused_now.iter().chain(&report.would_have).collect();
    let present = report.unused_now.iter().map(|one| row(one, true, look));
    let past = report.would_have.iter().map(|one| row(one, false, look));
    let (mut columns, mut rows) = widened(
        &COLUMNS,
        present.chain(past).collect(),
        &all,
        &[("UNUSED SINCE", &|one| look.clock(one.unused_since)), ("DUE AT", &|one| look.clock(one.due_at))],
        look,
    );
    if look.exact {
        columns[3].0 = "UNUSED S";
        columns.push(("DRY RUN", Align::Left));
        let marks = std::iter::repeat_n("no", report.unused_now.len()).chain(std::iter::repeat("yes"));
        rows.iter_mut().zip(marks).for_each(|(row, mark)| row.push(mark.to_owned()));
    }
    let assumed = report.assumed_action.map_or_else(String::new, |action| format!(" with action {}", action.name()));
    let count = report.would_have.len();
    let dry_run = match count {
        0 => "no lease".to_owned(),
        1 => "1 lease".to_owned(),
        more => format!("{more} leases"),
    };
    let after = format!(
        "Unused now: {}. Dry run since {}{assumed}: {dry_run}.",
        report.unused_now.len(),
        local_time(report.from)
    );
    let after = look.wrap("", &after).join("\n") + "\n";
    Listing::new(&columns, rows, Narrow::spare(&["WARNINGS"]).prose(), look)
        .names(all.iter().map(|one| one.lease_id.to_string()))
        .or_empty("No lease is unused, and none would have been reported or ended. Unused times of less than 5 minutes do not count.")
        .after(&after)
}

fn row(one: &UnusedLease, is_now: bool, look: &Appearance) -> Vec<String> {
    let user = one.holder.user.as_ref().map_or_else(|| format!("uid {}", one.holder.uid), |user| look.clean(user));
    let state = match one.state {
        UseState::Empty => "no process",
        UseState::Idle => "idle",
        UseState::Busy => "busy",
        UseState::Unknown => "not known",
    };
    let end = if is_now { look.now } else { one.due_at };
    let unused = u64::try_from(end.duration_since(one.unused_since).as_secs()).unwrap_or(0);
    let when = match (look.exact, is_now) {
        (true, _) => look.clock(one.due_at),
        (false, true) => look.ahead(one.due_at),
        (false, false) => format!("{} (dry run)", look.ago(one.due_at)),
    };
    let unused = if look.exact { unused.to_string() } else { duration::rough(unused) };
    vec![
        one.lease_id.to_string(),
        user,
        state.to_owned(),
        unused,
        one.warning_count.to_string(),
        one.action.name().to_owned(),
        when,
    ]
}

#[cfg(test)]
mod tests {
    use gpush_api::Actor;
    use jiff::{SignedDuration, Timestamp};

    use super::*;
    use crate::render::{Charset, fixtures};

    fn at(seconds: i64) -> Timestamp {
        fixtures::look(80, Charset::Ascii).now + SignedDuration::from_secs(seconds)
    }

    #[test]
    fn report_tells_present_leases_from_the_dry_run() {
        let look = fixtures::look(100, Charset::Ascii);
        let text = fixtures::plain(report(&fixtures::lease::idle_report(), &look).text());
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("L17") && lines[1].contains("in 12m"), "{text}");
        assert!(lines[2].starts_with("L9") && lines[2].ends_with("(dry run)"), "{text}");
        assert!(text.contains("Unused now: 1. Dry run since"), "{text}");
        let none = IdleReport { unused_now: Vec::new(), would_have: Vec::new(), ..fixtures::lease::idle_report() };
        let none = fixtures::plain(report(&none, &look).text());
        assert!(none.contains("No lease is unused"), "{none}");
    }

    #[test]
    fn unused_lease_says_when_it_ends_and_how_to_keep_it() {
        let look = fixtures::look(100, Charset::Ascii);
        let idle =
            |action| LeaseIdle { action, unused_since: at(-60), due_at: at(600), warned: true, longest_keep_s: 28_800 };
        let lease = |action| Lease { idle: Some(idle(action)), ..fixtures::lease::mig() };
        let released = lease(IdleAction::Release);
        assert!(outlook(&idle(IdleAction::Release), &released, &look).starts_with("ends in 10m"));
        assert!(outlook(&idle(IdleAction::Release), &released, &look).contains("gpushctl lease keep L"));
        assert!(outlook(&idle(IdleAction::End), &released, &look).contains("with its processes"));
        assert_eq!(brief(&released, &look), ", ends unused in 10m");
        assert_eq!(brief(&lease(IdleAction::Warn), &look), "");
    }

    #[test]
    fn keep_is_shown_until_it_is_over() {
        let look = fixtures::look(100, Charset::Ascii);
        let by = Actor { uid: 1000, user: Some("anna".to_owned()), pid: None };
        let keep = |until| LeaseKeep { by: by.clone(), reason: "demo".to_owned(), at: at(-60), until };
        let lease = |until| Lease { keep: Some(keep(until)), ..fixtures::lease::mig() };
        assert!(kept(&lease(at(60)), &look).is_some_and(|text| text.contains("by anna: demo")));
        assert_eq!(kept(&lease(at(-1)), &look), None);
        assert!(keeping(&lease(at(60)), &look).contains("is kept until "));
    }
}
