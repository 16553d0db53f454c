use gpush_advice::{Totaled, layout_advice, right_sizes, size_totals};
use gpush_api::{GpuInstance, LeaseId, Mode, Placement, RequestDay, RequestLine, UsageHistory, UsedLease, UsedTarget};
use gpush_core::preset;
use insta::assert_snapshot;

use super::*;
use crate::render::{Charset, fixtures};

/// Returns three A100 in mode `mig`: one with small devices, one with two halves, one with a dynamic layout.
pub(crate) fn host() -> Vec<Gpu> {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    gpus.truncate(3);
    let layouts: [&[&str]; 3] = [&["1g.10gb"; 7], &["3g.40gb"; 2], &[]];
    for (gpu, profiles) in gpus.iter_mut().zip(layouts) {
        gpu.mode = Mode::Mig;
        gpu.layout = (!profiles.is_empty()).then(|| profiles.iter().map(|&name| name.to_owned()).collect());
        let instance = |(id, name): (u32, &&str)| GpuInstance {
            id,
            profile_id: 0,
            profile: (*name).to_owned(),
            placement: Placement { start: 0, size: 1 },
            memory: None,
            compute: Vec::new(),
            processes: Vec::new(),
        };
        gpu.mig.as_mut().unwrap().instances = (0..).zip(profiles).map(instance).collect();
    }
    gpus
}

fn lease(number: u64, user: &str, gpu: usize, share: &str, memory: (u64, u64)) -> UsedLease {
    let hours = 2 + number % 40;
    let begun_at: Timestamp = "2026-11-24T08:00:00Z".parse().unwrap();
    let target = UsedTarget {
        gpu_uuid: host()[gpu].uuid.clone(),
        share_kind: if share.contains('g') { "mig" } else { share }.to_owned(),
        profile: share.contains('g').then(|| share.to_owned()),
        compute_part: 0.5,
        share_memory_mib: 20_480,
        held_s: hours * 3600,
        busy_s: hours * 1800,
        memory_known_s: hours * 3600,
        memory_peak_mib: Some(memory.1),
        memory_p98_mib: Some(memory.0),
        activity_known_s: if user == "ben" { hours * 3600 } else { 0 },
        sm_mean: (user == "ben").then_some(0.04),
    };
    UsedLease {
        lease_id: LeaseId(number),
        user: user.to_owned(),
        begun_at,
        ended_at: Some(begun_at + jiff::SignedDuration::from_hours(i64::try_from(hours).unwrap())),
        waited_s: 0,
        used_targets: vec![target],
    }
}

/// Returns a history with each kind of result.
pub(crate) fn history() -> UsageHistory {
    let mut short = lease(20, "anna", 0, "1g.10gb", (100, 100));
    short.used_targets[0].memory_known_s = 60;
    let refused = |kind: &str, profile: &str, no_capacity| RequestLine {
        share_kind: kind.to_owned(),
        profile: profile.to_owned(),
        no_capacity,
        ..RequestLine::default()
    };
    UsageHistory {
        from: "2026-11-23T08:00:00Z".parse().unwrap(),
        until: "2026-11-30T08:12:00Z".parse().unwrap(),
        user: None,
        has_older_leases: false,
        used_leases: vec![
            lease(27, "anna", 1, "3g.40gb", (8_100, 8_200)),
            lease(18, "ben", 1, "3g.40gb", (4_000, 12_000)),
            lease(19, "ben", 2, "mps", (4_000, 4_100)),
            short,
            lease(21, "anna", 0, "1g.10gb", (9_000, 9_000)),
            lease(22, "anna", 0, "1g.10gb", (0, 0)),
            lease(23, "carl", 1, "timeslice", (5, 5)),
        ],
        request_days: vec![RequestDay {
            day: "2026-11-24T00:00:00Z".parse().unwrap(),
            request_lines: vec![refused("mig", "3g.40gb", 6), refused("mps", "", 3)],
        }],
    }
}

fn empty() -> FromUse {
    let history = history();
    FromUse {
        from: history.from,
        until: history.until,
        subject: "lease",
        has_older_leases: false,
        is_named: false,
        is_own: false,
        size_advice: Vec::new(),
        size_totals: Vec::new(),
        layout_advice: None,
    }
}

fn drawn(found: &FromUse, charset: Charset) -> String {
    let text = fixtures::plain(&from_use(found, &host(), &fixtures::look(80, charset)));
    for line in text.lines() {
        assert!(super::super::super::appearance::width(line) <= 80, "{line}");
        assert!(!line.ends_with(' '), "{line}");
    }
    text
}

#[test]
fn advice_for_leases() {
    let size_advice = right_sizes(&history().used_leases, &host());
    assert_snapshot!(drawn(&FromUse { size_advice, ..empty() }, Charset::Utf8));
}

/// Fault: a named lease without advice was drawn as an id after a reason, without its figures.
#[test]
fn advice_for_named_leases_has_the_figures_of_each() {
    let named = |advice: &SizeAdvice| ["L18", "L20", "L21"].contains(&advice.lease_id.to_string().as_str());
    let size_advice = right_sizes(&history().used_leases, &host()).into_iter().filter(named).collect();
    assert_snapshot!(drawn(&FromUse { size_advice, is_named: true, ..empty() }, Charset::Utf8));
}

/// Fault: the hint was `mig apply`, which the rule of an exclusive GPU refuses.
#[test]
fn layout_for_an_exclusive_gpu_needs_another_rule() {
    let mut gpus = host();
    gpus.truncate(1);
    gpus[0].mode = Mode::Exclusive;
    gpus[0].layout = None;
    let used_leases = (1..=3).map(|number| lease(number, "anna", 0, "1g.10gb", (900, 900))).collect();
    let history = UsageHistory { used_leases, request_days: Vec::new(), ..history() };
    let layout_advice = Some(layout_advice(&history, &gpus));
    let found = FromUse { subject: "host", layout_advice, ..empty() };
    let text = fixtures::plain(&from_use(&found, &gpus, &fixtures::look(200, Charset::Utf8)));
    let expected = "To partition GPU 0, set `mode = \"mig\"` and `layout = [\"1g.10gb*7\"]` in its rule.";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn advice_for_users_and_gpus() {
    let advice = right_sizes(&history().used_leases, &host());
    let users = FromUse { subject: "user", size_totals: size_totals(&advice, Totaled::ByUser), ..empty() };
    let gpus = FromUse { subject: "gpu", size_totals: size_totals(&advice, Totaled::ByGpu), ..empty() };
    assert_snapshot!(drawn(&users, Charset::Utf8) + "\n" + &drawn(&gpus, Charset::Ascii));
}

#[test]
fn advice_for_the_layouts_of_a_host() {
    let layout_advice = Some(layout_advice(&history(), &host()));
    assert_snapshot!(drawn(&FromUse { subject: "host", layout_advice, ..empty() }, Charset::Utf8));
}

#[test]
fn empty_history_says_so() {
    let text = drawn(&FromUse { has_older_leases: true, ..empty() }, Charset::Ascii);
    assert!(text.contains("No lease was held in this period") && text.contains("older leases"), "{text}");
    let none = UsageHistory { used_leases: Vec::new(), request_days: Vec::new(), ..history() };
    let layout_advice = Some(layout_advice(&none, &host()));
    assert_snapshot!(drawn(&FromUse { subject: "host", layout_advice, ..empty() }, Charset::Ascii));
}

#[test]
fn many_leases_are_shortened_unless_wide() {
    let leases: Vec<UsedLease> = (1..=30).map(|number| lease(number, "anna", 1, "3g.40gb", (900, 900))).collect();
    let found = FromUse { size_advice: right_sizes(&leases, &host()), ..empty() };
    let text = drawn(&found, Charset::Utf8);
    assert!(text.contains("10 leases more: add `-o wide`."), "{text}");
    let wide = Appearance { wide: true, ..fixtures::look(80, Charset::Utf8) };
    assert_eq!(from_use(&found, &host(), &wide).matches("1g.10gb fits").count(), 30);
}
