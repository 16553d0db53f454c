//! Bills of closed months of released versions: every later version makes the same bytes of them.
//!
//! Each version writes its own document and bills. The command is
//! `GPUSH_WRITE_FIXTURE=1 cargo test -p gpush-usage --test closed_months`. They never change after the release of their
//! version.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

use std::{fs, path::PathBuf};

use gpush_api::{LeaseId, LeaseKind};
use gpush_usage::{
    account::LeaseOwner,
    bill::{Adjustment, BillModel, BilledGpu, FocusSite, Month, MonthInputs, Price, PriceList, bill_csv, focus_csv},
    input::Hold,
    ledger::Ledger,
    moment::{HOUR_MS, Moment},
    share::{GPU_UNITS, Share},
};

/// Released versions. The last one is this version.
const RELEASES: [&str; 1] = ["v0.1"];

/// If this environment variable is set, the files of this version are written again.
const WRITE: &str = "GPUSH_WRITE_FIXTURE";

fn path(release: &str, what: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(format!("closed-{release}.{what}"))
}

/// Returns the bills of a document, each with its name.
fn bills(inputs: &MonthInputs) -> Vec<(String, String)> {
    let site = FocusSite {
        name: "gpu1".to_owned(),
        account_id: "gpu1".to_owned(),
        account_name: "gpu1".to_owned(),
        region: "gpu1".to_owned(),
        currency: "XXX".to_owned(),
    };
    let of = |model: BillModel| {
        let bill = inputs.bill(model);
        let name = model.name();
        [
            (format!("{name}.csv"), bill_csv(&bill).unwrap()),
            (format!("{name}.focus.csv"), focus_csv(&bill, &site).unwrap()),
        ]
    };
    BillModel::ALL.into_iter().flat_map(of).collect()
}

/// Makes a document with every kind of row: a change of the month, two kinds of leases, unallocated capacity, a row that
/// was recorded late, and a correction.
fn document() -> MonthInputs {
    let month: Month = "2026-11".parse().unwrap();
    let start = Moment { boot: 1, monotonic_ms: 0, wall_ms: month.start_ms() - HOUR_MS / 2 };
    let mut ledger = Ledger::new();
    let hold = |target: &str, kind, units: u32, charged: u32| Hold {
        gpu: "GPU-1".into(),
        target: target.into(),
        kind,
        share: Share { units, charged },
        instance: None,
        memory_mib: 10_000,
    };
    ledger.add_gpu(&"GPU-1".into(), start);
    ledger.set_lease(LeaseId(1), vec![hold("MIG-1", LeaseKind::Mig, GPU_UNITS / 7 * 2, GPU_UNITS / 4)], start);
    ledger.set_lease(
        LeaseId(2),
        vec![hold("MIG-2", LeaseKind::Mps, GPU_UNITS / 14, GPU_UNITS / 8)],
        start.plus_ms(1_234),
    );
    let end = start.plus_ms(3 * 3_600_000 + 567);
    let _ = (ledger.end_lease(LeaseId(1), end), ledger.end_lease(LeaseId(2), end));
    let _ = ledger.remove_gpu(&"GPU-1".into(), end);
    let price = |kind, per_slice_hour: &str| Price {
        kind,
        model: None,
        per_slice_hour: per_slice_hour.parse().unwrap(),
        per_lease: "2.5".parse().unwrap(),
        currency: "EUR".to_owned(),
    };
    let prices = PriceList::new(vec![price(Some(LeaseKind::Mig), "0.123457"), price(None, "0.5")]).unwrap();
    let mut inputs = MonthInputs::new(month, prices);
    inputs.models.insert("GPU-1".into(), BilledGpu { model: "NVIDIA H100 80GB HBM3".to_owned(), slices: 7 });
    let owner = |lease: LeaseId| LeaseOwner {
        user: if lease.0 == 1 { "anna" } else { "=ben" }.to_owned(),
        group: Some("lab, x".to_owned()),
        account: Some("physics".to_owned()),
        job: Some("ci/812".to_owned()),
    };
    let closed = ledger.take_closed();
    closed.leases.into_iter().for_each(|hour| inputs.add_lease(owner(hour.lease), hour));
    closed.gpus.into_iter().for_each(|hour| inputs.add_gpu(hour));
    inputs.adjustments.push(Adjustment {
        hour_ms: month.start_ms() + 5 * HOUR_MS,
        owner: owner(LeaseId(1)),
        lease: Some(LeaseId(1)),
        amount: "-3.10".parse().unwrap(),
        description: "October: the GPU had failed".to_owned(),
    });
    inputs
}

#[test]
fn closed_month_of_each_release_gives_the_same_bytes() {
    let this = RELEASES[RELEASES.len() - 1];
    if std::env::var_os(WRITE).is_some() {
        let inputs = document();
        fs::write(path(this, "json"), serde_json::to_string_pretty(&inputs).unwrap() + "\n").unwrap();
        for (name, text) in bills(&inputs) {
            fs::write(path(this, &name), text).unwrap();
        }
    }
    for release in RELEASES {
        let inputs: MonthInputs = serde_json::from_str(&fs::read_to_string(path(release, "json")).unwrap()).unwrap();
        for (name, text) in bills(&inputs) {
            assert!(text == fs::read_to_string(path(release, &name)).unwrap(), "{release}: {name} differs:\n{text}");
            assert!(text.lines().count() >= 10, "{name}: {text}");
        }
    }
    let stored = fs::read_to_string(path(this, "json")).unwrap();
    assert_eq!(serde_json::from_str::<MonthInputs>(&stored).unwrap(), document(), "set {WRITE}=1");
}
