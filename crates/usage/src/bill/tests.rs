use std::collections::BTreeMap;

use gpush_api::{GpuUuid, LeaseId, LeaseKind};
use proptest::prelude::*;
use rust_decimal::Decimal;

use super::*;
use crate::{
    account::{Grouping, LeaseOwner},
    input::Hold,
    judge::UseState,
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour, RowBound},
    moment::HOUR_MS,
    share::{GPU_UNITS, Share},
};

fn decimal(text: &str) -> Decimal {
    text.parse().unwrap()
}

fn month(text: &str) -> Month {
    text.parse().unwrap()
}

fn price(kind: Option<LeaseKind>, model: Option<&str>, per_slice_hour: &str) -> Price {
    Price {
        kind,
        model: model.map(str::to_owned),
        per_slice_hour: decimal(per_slice_hour),
        per_lease: decimal("12.5"),
        currency: "EUR".to_owned(),
    }
}

/// An hour of a lease on 2 of 7 slices that is charged for a quarter, of which it worked half.
fn lease_hour(lease: u64, hour: i64, number: u64) -> LeaseHour {
    let share = Share { units: GPU_UNITS / 7 * 2, charged: GPU_UNITS / 4 };
    let hold = Hold {
        gpu: "GPU-1".into(),
        target: "MIG-1".into(),
        kind: LeaseKind::Mig,
        share,
        instance: Some(1),
        memory_mib: 20_000,
    };
    let mut sums = HoldSums::default();
    sums.add_time(share, UseState::Busy, 1_800_000);
    sums.add_time(share, UseState::Idle, 1_800_000);
    sums.add_energy(3_600_000 + number * 1_000_000, crate::energy::EnergyMethod::Gpm);
    LeaseHour { lease: LeaseId(lease), hold, number, hour_ms: hour * HOUR_MS, sums }
}

fn gpu_hour(hour: i64) -> GpuHour {
    let mut sums = GpuSums::default();
    sums.add_time(u64::from(GPU_UNITS / 7 * 2), u64::from(GPU_UNITS / 4), 0, 3_600_000);
    GpuHour { gpu: "GPU-1".into(), number: 0, hour_ms: hour * HOUR_MS, sums }
}

struct Site {
    leases: Vec<LeaseHour>,
    gpus: Vec<GpuHour>,
    owners: BTreeMap<LeaseId, LeaseOwner>,
    models: BTreeMap<GpuUuid, BilledGpu>,
    adjustments: Vec<Adjustment>,
    late: (Vec<LeaseHour>, Vec<GpuHour>),
    prices: PriceList,
}

impl Site {
    fn new(leases: Vec<LeaseHour>, gpus: Vec<GpuHour>) -> Self {
        let owner = LeaseOwner { user: "alice".to_owned(), group: Some("=cmd()".to_owned()), account: None, job: None };
        Self {
            leases,
            gpus,
            owners: (1..9).map(|lease| (LeaseId(lease), owner.clone())).collect(),
            models: [("GPU-1".into(), BilledGpu { model: "NVIDIA H100, 80GB".to_owned(), slices: 7 })].into(),
            adjustments: Vec::new(),
            late: (Vec::new(), Vec::new()),
            prices: PriceList::new(vec![price(None, None, "0.3")]).unwrap(),
        }
    }

    fn bill(&self, month: Month, model: BillModel) -> Bill {
        let Self { leases, gpus, owners, models, adjustments, late, prices } = self;
        let (late_leases, late_gpus) = (&late.0, &late.1);
        bill(month, model, prices, BillRows { leases, gpus, owners, models, adjustments, late_leases, late_gpus })
    }
}

/// Start of November 2026, in hours since 1970.
fn november() -> i64 {
    month("2026-11").start_ms() / HOUR_MS
}

#[test]
fn month_is_a_range_in_utc() {
    let november = month("2026-11");
    assert_eq!(november.to_string(), "2026-11");
    assert_eq!((november.end_ms() - november.start_ms()) / HOUR_MS, 30 * 24);
    assert_eq!(month("2026-12").end_ms(), month("2027-01").start_ms());
    assert!(november.contains(november.start_ms()) && !november.contains(november.end_ms()));
    assert_eq!((Month::of(november.start_ms()), Month::of(november.end_ms() - 1)), (november, november));
    assert_eq!(Month::of(november.end_ms()).to_string(), "2026-12");
    assert_eq!(Month::of(-1).to_string(), "1969-12");
    let text = serde_json::to_string(&november).unwrap();
    assert_eq!((text.as_str(), serde_json::from_str::<Month>(&text).unwrap()), ("\"2026-11\"", november));
    for wrong in ["2026", "2026-13", "2026-1", "26-11", "2026-00", "2026-11-01", "+026-11", "x"] {
        assert_eq!(wrong.parse::<Month>(), Err(BadMonth), "{wrong}");
    }
}

#[test]
fn first_fitting_price_applies() {
    let prices = PriceList::new(vec![
        price(Some(LeaseKind::Mig), Some("nvidia h100"), "0.5"),
        price(Some(LeaseKind::Mig), None, "0.4"),
        price(None, Some("NVIDIA L4"), "0.1"),
    ])
    .unwrap();
    let found = |kind, model| prices.find(kind, model).map(|price| price.per_slice_hour);
    assert_eq!(found(LeaseKind::Mig, "NVIDIA H100"), Some(decimal("0.5")));
    assert_eq!(found(LeaseKind::Mig, "NVIDIA A100"), Some(decimal("0.4")));
    assert_eq!(found(LeaseKind::Mps, "NVIDIA L4"), Some(decimal("0.1")));
    assert_eq!(found(LeaseKind::Mps, "NVIDIA A100"), None);
}

#[test]
fn wrong_prices_are_refused() {
    let with = |change: &dyn Fn(&mut Price)| {
        let mut one = price(None, None, "1");
        change(&mut one);
        PriceList::new(vec![price(None, None, "1"), one]).unwrap_err().to_string()
    };
    assert_eq!(
        with(&|price| price.currency = "eur".to_owned()),
        "`eur` is not a currency: write three capital letters, as in EUR"
    );
    assert_eq!(
        with(&|price| price.currency = "USD".to_owned()),
        "the prices have two currencies, EUR and USD: write one"
    );
    for wrong in ["-1", "1000000.1", "0.0000001"] {
        let message = with(&|price| price.per_lease = decimal(wrong));
        assert_eq!(message, format!("{wrong} is not a price: write 0 to 1000000 with at most 6 decimals"));
    }
}

#[test]
fn each_model_charges_what_it_says() {
    let site = Site::new(vec![lease_hour(1, november(), 0), lease_hour(1, november() + 1, 1)], Vec::new());
    let amounts = |model| -> Vec<String> {
        site.bill(month("2026-11"), model).lines.iter().map(|line| line.amount.to_string()).collect()
    };
    // A quarter of 7 slices for an hour, at 0.3.
    assert_eq!(amounts(BillModel::Requested), ["0.525", "0.525"]);
    assert_eq!(amounts(BillModel::Used), ["0.2625", "0.2625"]);
    assert_eq!(amounts(BillModel::Flat), ["12.5", "0"], "once for each lease and month");
    for model in BillModel::ALL {
        assert_eq!(serde_json::to_value(model).unwrap(), model.name());
    }
}

/// A MIG device of an A100 reports no activity. Its lease is billed although its state is unknown.
#[test]
fn unknown_time_is_billed_as_used() {
    let mut hour = lease_hour(1, november(), 0);
    hour.sums = HoldSums::default();
    hour.sums.add_time(hour.hold.share, UseState::Unknown, 1_800_000);
    hour.sums.add_time(hour.hold.share, UseState::Empty, 1_800_000);
    let site = Site::new(vec![hour], Vec::new());
    let amount = |model| site.bill(month("2026-11"), model).sum(ChargeKind::Usage);
    assert_eq!((amount(BillModel::Used), amount(BillModel::Requested)), (decimal("0.2625"), decimal("0.525")));
}

#[test]
fn rows_of_other_months_are_left_out() {
    let hours = month("2026-11").end_ms() / HOUR_MS;
    let site = Site::new(vec![lease_hour(1, hours - 1, 0), lease_hour(1, hours, 1)], vec![gpu_hour(hours)]);
    assert_eq!(site.bill(month("2026-11"), BillModel::Requested).lines.len(), 1);
    assert_eq!(site.bill(month("2026-12"), BillModel::Requested).lines.len(), 2);
    assert_eq!(site.bill(month("2026-12"), BillModel::Flat).sum(ChargeKind::Usage), decimal("12.5"));
}

#[test]
fn unallocated_capacity_is_a_line_of_its_own() {
    let site = Site::new(vec![lease_hour(1, november(), 0)], vec![gpu_hour(november())]);
    let bill = site.bill(month("2026-11"), BillModel::Requested);
    let quantities: Vec<_> = bill.lines.iter().map(|line| (line.charge, line.quantity.unwrap())).collect();
    assert_eq!(quantities, [(ChargeKind::Usage, decimal("1.75")), (ChargeKind::Unallocated, decimal("5.25"))]);
    assert_eq!(bill.sum(ChargeKind::Unallocated), decimal("1.575"));
}

#[test]
fn correction_is_a_line_of_the_month_in_which_it_is_made() {
    let mut site = Site::new(Vec::new(), Vec::new());
    site.adjustments.push(Adjustment {
        hour_ms: november() * HOUR_MS + 5,
        owner: LeaseOwner { user: "alice".to_owned(), ..LeaseOwner::default() },
        lease: Some(LeaseId(1)),
        amount: decimal("-3.10"),
        description: "October: the GPU had failed".to_owned(),
    });
    assert_eq!(site.bill(month("2026-10"), BillModel::Requested).lines, []);
    let bill = site.bill(month("2026-11"), BillModel::Requested);
    assert_eq!(bill.sum(ChargeKind::Adjustment), decimal("-3.1"));
    let text = bill_csv(&bill).unwrap();
    let line = text.lines().nth(1).unwrap();
    assert_eq!(
        line,
        "adjustment,2026-11-01T00:00:00Z,2026-11-01T01:00:00Z,L1,alice,,,,,,,,,,,,,,,-3.1,EUR,,,October: the GPU had failed"
    );
}

/// A row that is recorded after its month was closed is billed in a later month, with all its amounts.
#[test]
fn late_hour_is_a_correction_in_the_next_month() {
    let mut site = Site::new(Vec::new(), Vec::new());
    site.late = (vec![lease_hour(1, november() - 1, 0)], vec![gpu_hour(november() - 1)]);
    for (model, amount) in [(BillModel::Requested, "2.1"), (BillModel::Used, "1.8375"), (BillModel::Flat, "0")] {
        let bill = site.bill(month("2026-11"), model);
        assert_eq!(bill.sum(ChargeKind::Adjustment), decimal(amount), "{model:?}");
        assert!(bill.lines.iter().all(|line| line.from_ms == month("2026-11").start_ms() && line.quantity.is_none()));
    }
    let text = bill_csv(&site.bill(month("2026-11"), BillModel::Requested)).unwrap();
    assert!(text.contains(",\"use at 2026-10-31T23:00:00Z, recorded after that month was closed\""), "{text}");
}

#[test]
fn summary_adds_up_to_the_bill() {
    let leases = vec![lease_hour(1, november(), 0), lease_hour(2, november() + 1, 1), lease_hour(9, november(), 2)];
    let mut site = Site::new(leases, vec![gpu_hour(november())]);
    site.adjustments.push(Adjustment {
        hour_ms: november() * HOUR_MS,
        owner: LeaseOwner { user: "alice".to_owned(), ..LeaseOwner::default() },
        lease: None,
        amount: decimal("-0.05"),
        description: "a fault".to_owned(),
    });
    let bill = site.bill(month("2026-11"), BillModel::Requested);
    let BillSummary { lines, unallocated, total } = summary(&bill, Grouping::User);
    let shown: Vec<_> = lines.iter().map(|line| (line.key.as_deref(), line.sum.leases, line.sum.amount)).collect();
    // The third lease has no owner.
    assert_eq!(shown, [(Some(""), 1, decimal("0.525")), (Some("alice"), 2, decimal("1"))]);
    assert_eq!((lines[1].sum.corrections, unallocated.amount), (decimal("-0.05"), decimal("1.575")));
    assert_eq!(total.amount, bill.lines.iter().map(|line| line.amount).sum::<Decimal>().normalize());
    assert_eq!((total.leases, total.amount), (3, decimal("3.1")));
}

/// The document of a month gives the same bill after it was stored, and a user sees only their own leases in it.
#[test]
fn stored_document_gives_the_same_bill() {
    let mut inputs = MonthInputs::new(month("2026-11"), PriceList::new(vec![price(None, None, "0.3")]).unwrap());
    inputs.models.insert("GPU-1".into(), BilledGpu { model: "NVIDIA H100".to_owned(), slices: 7 });
    for (lease, user) in [(1, "alice"), (2, "bob")] {
        let owner = LeaseOwner { user: user.to_owned(), ..LeaseOwner::default() };
        inputs.add_lease(owner.clone(), lease_hour(lease, november(), lease));
        inputs.add_lease(owner, lease_hour(lease, november() - 1, lease + 10));
    }
    inputs.add_gpu(gpu_hour(november()));
    inputs.add_gpu(gpu_hour(november() - 1));
    assert_eq!(
        (inputs.leases.len(), inputs.late_leases.len(), inputs.gpus.len(), inputs.late_gpus.len()),
        (2, 2, 1, 1)
    );
    let stored = serde_json::to_string(&inputs).unwrap();
    let read: MonthInputs = serde_json::from_str(&stored).unwrap();
    for model in BillModel::ALL {
        assert_eq!(bill_csv(&inputs.bill(model)).unwrap(), bill_csv(&read.bill(model)).unwrap());
    }
    let own = bill_csv(&read.of_user("bob").bill(BillModel::Requested)).unwrap();
    assert!(!own.contains("alice") && !own.contains("unallocated"), "{own}");
    assert_eq!(own.lines().count(), 3, "{own}");
    let closed = RowBound { until_ms: month("2026-11").start_ms(), number: 12 };
    let hour = (november() - 1) * HOUR_MS;
    assert!(closed.contains(hour, 11) && !closed.contains(hour, 12) && !closed.contains(hour + HOUR_MS, 11));
}

#[test]
fn csv_is_quoted_and_guarded() {
    let site = Site::new(vec![lease_hour(1, november(), 0)], Vec::new());
    let text = bill_csv(&site.bill(month("2026-11"), BillModel::Requested)).unwrap();
    let lines: Vec<&str> = text.split("\r\n").collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(
        lines[1],
        "usage,2026-11-01T00:00:00Z,2026-11-01T01:00:00Z,L1,alice,'=cmd(),,,mig,GPU-1,\"NVIDIA H100, 80GB\",MIG-1,\
         0.25,1800,1800,0,0,1.75,0.3,0.525,EUR,0.001,gpm,"
    );
    for (cell, guarded) in [("=1", "'=1"), ("+1", "'+1"), ("-1", "'-1"), ("@a", "'@a"), ("\ta", "'\ta"), ("a=1", "a=1")]
    {
        assert_eq!(csv::text(cell), guarded);
    }
}

#[test]
fn quantities_are_rounded_to_nine_decimals() {
    assert_eq!(gpu_hours(u64::from(GPU_UNITS) * 3_600_000), Decimal::ONE);
    assert_eq!(gpu_hours(1), Decimal::ZERO);
    assert_eq!(slice_hours(u64::from(GPU_UNITS) * 1_200_000, 7).to_string(), "2.333333331");
    assert_eq!(seconds(1_234_567).to_string(), "1234.567");
    assert_eq!(kilowatt_hours(3_600_000_000).to_string(), "1");
    // 64 GPUs for 400 days.
    let most = u64::from(GPU_UNITS) * 64 * 400 * 86_400_000;
    assert_eq!(slice_hours(most, 12), Decimal::from(64 * 400 * 24 * 12));
}

#[test]
fn lease_without_a_price_or_model_costs_nothing() {
    let mut site = Site::new(vec![lease_hour(1, november(), 0)], Vec::new());
    site.prices = PriceList::default();
    site.models.clear();
    let bill = site.bill(month("2026-11"), BillModel::Requested);
    assert_eq!((bill.lines[0].amount, bill.currency), (Decimal::ZERO, None));
    assert_eq!(bill.lines[0].quantity, Some(decimal("0.25")));
}

proptest! {
    /// A bill depends only on the rows, not on their order. Every row is billed once.
    #[test]
    fn bill_has_the_same_bytes_in_any_order_of_rows(
        rows in prop::collection::vec((1..4_u64, 90..120_i64), 0..40),
        turn in 0..40_usize,
    ) {
        let leases: Vec<LeaseHour> =
            rows.iter().zip(0..).map(|((lease, at), number)| lease_hour(*lease, november() - 100 + at, number)).collect();
        let gpus: Vec<GpuHour> = rows.iter().map(|(_, at)| gpu_hour(november() + at)).collect();
        let mut turned = Site::new(leases.clone(), gpus.clone());
        let site = Site::new(leases, gpus);
        turned.leases.reverse();
        turned.leases.rotate_left(turn.checked_rem(rows.len()).unwrap_or(0));
        turned.gpus.reverse();
        for model in BillModel::ALL {
            let bill = site.bill(month("2026-11"), model);
            prop_assert_eq!(bill_csv(&bill).unwrap(), bill_csv(&turned.bill(month("2026-11"), model)).unwrap());
            let billed = bill.lines.iter().filter(|line| line.charge == ChargeKind::Usage).count();
            let held = site.leases.iter().filter(|row| month("2026-11").contains(row.hour_ms)).count();
            prop_assert_eq!(billed, held);
            for line in &bill.lines {
                if let (Some(quantity), Some(price)) = (line.quantity, line.unit_price) {
                    prop_assert_eq!(quantity * price, line.amount);
                }
            }
        }
    }
}
