use std::collections::BTreeMap;

use gpush_api::{LeaseId, LeaseKind};
use proptest::prelude::*;

use super::*;
use crate::{
    input::Hold,
    judge::UseState,
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour},
    moment::HOUR_MS,
    share::{GPU_UNITS, Share},
};

fn owner(number: u64) -> LeaseOwner {
    let group = (!number.is_multiple_of(2)).then(|| "students".to_owned());
    LeaseOwner { user: format!("user{number}"), group, account: None, job: (number == 3).then(|| "ci/7".to_owned()) }
}

fn hour(lease: u64, gpu: u8, kind: LeaseKind, hour: i64, ms: u64) -> LeaseHour {
    let share = Share { units: GPU_UNITS / 4, charged: GPU_UNITS / 2 };
    let gpu = format!("GPU-{gpu}");
    let hold =
        Hold { gpu: gpu.as_str().into(), target: gpu.as_str().into(), kind, share, instance: None, memory_mib: 10 };
    let mut sums = HoldSums::default();
    sums.add_time(share, if ms.is_multiple_of(2) { UseState::Busy } else { UseState::Empty }, ms);
    sums.add_memory(ms, ms);
    sums.add_energy(ms * 3, crate::energy::EnergyMethod::Gpm);
    LeaseHour { lease: LeaseId(lease), hold, number: 0, hour_ms: hour * HOUR_MS, sums }
}

fn owners() -> BTreeMap<LeaseId, LeaseOwner> {
    (0..5).map(|number| (LeaseId(number), owner(number % 4))).collect()
}

#[test]
fn hours_of_a_day_become_one_row_for_each_owner_kind_and_gpu() {
    let hours = [
        hour(1, 0, LeaseKind::Mps, 23, 1_000),
        hour(1, 0, LeaseKind::Mps, 22, 500),
        hour(1, 0, LeaseKind::Mps, 24, 100),
        hour(1, 1, LeaseKind::Mps, 22, 7),
        hour(1, 0, LeaseKind::Whole, 22, 9),
        hour(2, 0, LeaseKind::Mps, 22, 11),
    ];
    let owners = owners();
    let days = fold_leases(&hours, |hour| &owners[&hour.lease]);
    let held: Vec<_> = days
        .iter()
        .map(|day| (day.day_ms / HOUR_MS, &*day.owner.user, day.kind, day.gpu.as_str(), day.sums.times.held_ms()))
        .collect();
    assert_eq!(
        held,
        [
            (0, "user1", LeaseKind::Mps, "GPU-0", 1_500),
            (0, "user1", LeaseKind::Mps, "GPU-1", 7),
            (0, "user1", LeaseKind::Whole, "GPU-0", 9),
            (0, "user2", LeaseKind::Mps, "GPU-0", 11),
            (24, "user1", LeaseKind::Mps, "GPU-0", 100),
        ]
    );
}

#[test]
fn report_groups_by_each_key() {
    let hours: Vec<LeaseHour> = (0..4).map(|lease| hour(lease, 0, LeaseKind::Whole, 1, lease + 1)).collect();
    let owners = owners();
    let days = fold_leases(&hours, |hour| &owners[&hour.lease]);
    let keys = |by| -> Vec<(Option<String>, u64)> {
        report(&days, &[], &[], by).lines.into_iter().map(|line| (line.key, line.sums.times.held_ms())).collect()
    };
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(keys(Grouping::Group), [(None, 1 + 3), (some("students"), 2 + 4)]);
    assert_eq!(keys(Grouping::Job), [(None, 6), (some("ci/7"), 4)]);
    assert_eq!(keys(Grouping::Account), [(None, 10)]);
    assert_eq!(keys(Grouping::Kind), [(some("whole"), 10)]);
    assert_eq!(keys(Grouping::Gpu), [(some("GPU-0"), 10)]);
    assert_eq!(keys(Grouping::User).len(), 4);
    for by in Grouping::ALL {
        assert_eq!(by.name().parse(), Ok(by));
        assert_eq!(serde_json::to_value(by).unwrap(), by.name());
    }
    assert!("users".parse::<Grouping>().is_err());
}

#[test]
fn report_counts_requests_beside_leases() {
    let owners = owners();
    let hours = [hour(1, 0, LeaseKind::Mps, 1, 5)];
    let days = fold_leases(&hours, |hour| &owners[&hour.lease]);
    let mut sums = RequestSums::default();
    sums.add(true, 100);
    sums.add(false, 20);
    let request = |number, kind| RequestDay { day_ms: 0, owner: owner(number), kind, sums };
    let requests = [request(1, Some(LeaseKind::Mps)), request(2, None)];
    let by_user = report(&days, &requests, &[], Grouping::User);
    let lines: Vec<_> = by_user.lines.iter().map(|line| (line.sums.times.held_ms(), line.requests.granted)).collect();
    assert_eq!(lines, [(5, 1), (0, 1)]);
    assert_eq!(by_user.requests, RequestSums { granted: 2, refused: 2, waited_ms: 240 });
    let by_kind = report(&days, &requests, &[], Grouping::Kind);
    assert_eq!(by_kind.lines.iter().map(|line| line.key.as_deref()).collect::<Vec<_>>(), [None, Some("mps")]);
    let by_gpu = report(&days, &requests, &[], Grouping::Gpu);
    assert_eq!(by_gpu.lines[0].requests.refused, 2, "a request has no GPU");
}

#[test]
fn rows_round_trip_through_json() {
    let hours = [hour(3, 0, LeaseKind::Mig, 1, 5)];
    let owners = owners();
    let days = fold_leases(&hours, |hour| &owners[&hour.lease]);
    let json = serde_json::to_string(&days).unwrap();
    assert_eq!(serde_json::from_str::<Vec<LeaseDay>>(&json).unwrap(), days);
}

proptest! {
    /// Folding and grouping lose nothing, in any order of the rows.
    #[test]
    fn folded_rows_and_reports_keep_all_sums(
        rows in prop::collection::vec((0..5_u64, 0..3_u8, 0..4_usize, 0..200_i64, 1..3_600_000_u64), 0..60),
    ) {
        let hours: Vec<LeaseHour> =
            rows.iter().map(|(lease, gpu, kind, at, ms)| hour(*lease, *gpu, LeaseKind::ALL[*kind], *at, *ms)).collect();
        let mut all = HoldSums::default();
        for hour in &hours {
            all.merge(&hour.sums);
        }
        let owners = owners();
        let days = fold_leases(&hours, |hour| &owners[&hour.lease]);
        let reversed: Vec<&LeaseHour> = hours.iter().rev().collect();
        prop_assert_eq!(&fold_leases(reversed, |hour| &owners[&hour.lease]), &days);
        let capacity: Vec<GpuHour> = hours
            .iter()
            .map(|hour| {
                let mut sums = GpuSums::default();
                sums.add_time(u64::from(GPU_UNITS), 7, 0, hour.sums.times.held_ms());
                GpuHour { gpu: hour.hold.gpu.clone(), number: 0, hour_ms: hour.hour_ms, sums }
            })
            .collect();
        let gpus = fold_gpus(&capacity);
        for by in Grouping::ALL {
            let report = report(&days, &[], &gpus, by);
            prop_assert_eq!(report.all, all);
            let mut lines = HoldSums::default();
            for line in &report.lines {
                lines.merge(&line.sums);
            }
            prop_assert_eq!(lines, all);
            prop_assert_eq!(report.gpus.known_ms, all.times.held_ms());
        }
    }
}
