//! Checks bills against the column tables of FOCUS 1.2.
//!
//! The table below has the columns that gpush writes: their type, whether null is allowed, and the allowed values. The
//! checker reads the CSV with another reader than the writer's own code.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

use std::collections::BTreeMap;

use gpush_api::{GpuUuid, LeaseId, LeaseKind};
use gpush_usage::{
    account::LeaseOwner,
    bill::{
        Adjustment, Bill, BillModel, BillRows, BilledGpu, FOCUS_COLUMNS, FocusSite, Price, PriceList, bill, focus_csv,
    },
    input::Hold,
    ledger::{LeaseHour, Ledger},
    moment::Moment,
    share::{GPU_UNITS, Share},
};
use jiff::Timestamp;
use rust_decimal::Decimal;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Text,
    Number,
    Time,
    Json,
    OneOf(&'static [&'static str]),
}

/// Name, type, whether null is allowed, whether FOCUS 1.2 demands the column.
const TABLE: [(&str, Kind, bool, bool); 39] = [
    ("BilledCost", Kind::Number, false, true),
    ("EffectiveCost", Kind::Number, false, true),
    ("ListCost", Kind::Number, false, true),
    ("ContractedCost", Kind::Number, false, true),
    ("BillingCurrency", Kind::Text, false, true),
    ("BillingAccountId", Kind::Text, false, true),
    ("BillingAccountName", Kind::Text, true, true),
    ("BillingPeriodStart", Kind::Time, false, true),
    ("BillingPeriodEnd", Kind::Time, false, true),
    ("ChargePeriodStart", Kind::Time, false, true),
    ("ChargePeriodEnd", Kind::Time, false, true),
    ("ChargeCategory", Kind::OneOf(&["Usage", "Purchase", "Tax", "Credit", "Adjustment"]), false, true),
    ("ChargeClass", Kind::OneOf(&["Correction"]), true, true),
    ("ChargeDescription", Kind::Text, true, true),
    ("InvoiceIssuerName", Kind::Text, false, true),
    ("ProviderName", Kind::Text, false, true),
    ("PublisherName", Kind::Text, false, true),
    ("ServiceCategory", Kind::OneOf(&["Compute"]), false, true),
    ("ServiceName", Kind::Text, false, true),
    ("PricingQuantity", Kind::Number, true, true),
    ("PricingUnit", Kind::OneOf(&["GPU-Hours"]), true, true),
    ("ChargeFrequency", Kind::OneOf(&["One-Time", "Recurring", "Usage-Based"]), false, false),
    ("ConsumedQuantity", Kind::Number, true, false),
    ("ConsumedUnit", Kind::OneOf(&["GPU-Hours"]), true, false),
    ("ContractedUnitPrice", Kind::Number, true, false),
    ("InvoiceId", Kind::Text, true, false),
    ("ListUnitPrice", Kind::Number, true, false),
    ("PricingCategory", Kind::OneOf(&["Standard", "Dynamic", "Committed", "Other"]), true, false),
    ("RegionId", Kind::Text, true, false),
    ("ResourceId", Kind::Text, true, false),
    ("ResourceName", Kind::Text, true, false),
    ("ResourceType", Kind::Text, true, false),
    ("ServiceSubcategory", Kind::OneOf(&["Other (Compute)"]), false, false),
    ("SkuId", Kind::Text, true, false),
    ("SkuMeter", Kind::Text, true, false),
    ("SkuPriceId", Kind::Text, true, false),
    ("SubAccountId", Kind::Text, true, false),
    ("SubAccountName", Kind::Text, true, false),
    ("Tags", Kind::Json, true, false),
];

/// Returns what is wrong with a file.
fn violations(text: &str) -> Vec<String> {
    let mut reader = csv::ReaderBuilder::new().from_reader(text.as_bytes());
    let columns: Vec<String> = reader.headers().unwrap().iter().map(str::to_owned).collect();
    let mut wrong = Vec::new();
    let standard = columns.iter().take_while(|name| !name.starts_with("x_")).count();
    for (at, name) in columns.iter().enumerate() {
        let is_known = TABLE.iter().any(|row| row.0 == name);
        if !is_known && !name.starts_with("x_") {
            wrong.push(format!("{name} is not a column of FOCUS"));
        }
        if at >= standard && !name.starts_with("x_") {
            wrong.push(format!("{name} comes after an own column"));
        }
    }
    for (name, _, _, is_mandatory) in TABLE {
        if is_mandatory && !columns.iter().any(|column| column == name) {
            wrong.push(format!("{name} is missing"));
        }
    }
    for (number, record) in reader.records().enumerate() {
        let record = record.unwrap();
        let row: BTreeMap<&str, &str> = columns.iter().map(String::as_str).zip(record.iter()).collect();
        wrong.extend(row_violations(&row).into_iter().map(|text| format!("row {number}: {text}")));
    }
    wrong
}

fn row_violations(row: &BTreeMap<&str, &str>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, kind, is_nullable, _) in TABLE {
        let Some(cell) = row.get(name).copied() else { continue };
        if cell.is_empty() {
            if !is_nullable {
                wrong.push(format!("{name} is null"));
            }
            continue;
        }
        let is_valid = match kind {
            Kind::Text => !["null", "NULL", "N/A", "None"].contains(&cell),
            Kind::Number => cell.parse::<Decimal>().is_ok() && !cell.contains(['+', ',', 'e', 'E']),
            Kind::Time => cell.len() == 20 && cell.ends_with('Z') && cell.parse::<Timestamp>().is_ok(),
            Kind::Json => serde_json::from_str::<BTreeMap<String, String>>(cell).is_ok(),
            Kind::OneOf(values) => values.contains(&cell),
        };
        if !is_valid {
            wrong.push(format!("{name} is {cell}"));
        }
    }
    for column in row.keys().filter(|name| name.starts_with("x_")) {
        if row[column] == "null" {
            wrong.push(format!("{column} is not empty"));
        }
    }
    let cell = |name: &str| row.get(name).copied().unwrap_or_default();
    let number = |name: &str| cell(name).parse::<Decimal>().ok();
    let together =
        ["PricingQuantity", "PricingUnit", "ConsumedQuantity", "ConsumedUnit", "SkuPriceId", "ListUnitPrice"];
    if together.iter().any(|name| cell(name).is_empty()) && together.iter().any(|name| !cell(name).is_empty()) {
        wrong.push("only a part of the pricing columns is null".to_owned());
    }
    for (cost, price) in [("ListCost", "ListUnitPrice"), ("ContractedCost", "ContractedUnitPrice")] {
        if let (Some(price), Some(quantity)) = (number(price), number("PricingQuantity"))
            && number(cost) != Some(price * quantity)
        {
            wrong.push(format!("{cost} is not price times quantity"));
        }
    }
    if cell("ChargeClass") == "Correction" && cell("ChargeCategory") == "Usage" {
        wrong.push("a correction has the category Usage".to_owned());
    }
    let time = |name: &str| cell(name).parse::<Timestamp>().unwrap_or_default();
    let (start, end) = (time("ChargePeriodStart"), time("ChargePeriodEnd"));
    if start >= end || start < time("BillingPeriodStart") || end > time("BillingPeriodEnd") {
        wrong.push("the charge period is not inside the billing period".to_owned());
    }
    wrong
}

fn site() -> FocusSite {
    FocusSite {
        name: "@Example University".to_owned(),
        account_id: "hpc".to_owned(),
        account_name: "High \"performance\" computing, GPUs".to_owned(),
        region: "cluster-1".to_owned(),
        currency: "EUR".to_owned(),
    }
}

/// A bill of two leases over a month end, with a correction and hostile texts.
fn some_bill(model: BillModel, month: &str) -> Bill {
    let start: Timestamp = "2026-10-31T22:30:00Z".parse().unwrap();
    let now = Moment { boot: 1, monotonic_ms: 0, wall_ms: start.as_millisecond() };
    let mut ledger = Ledger::new();
    let hold = |units: u32, charged: u32, target: &str| Hold {
        gpu: "GPU-1".into(),
        target: target.into(),
        kind: LeaseKind::Mig,
        share: Share { units, charged },
        instance: None,
        memory_mib: 1_000,
    };
    ledger.set_lease(LeaseId(1), vec![hold(GPU_UNITS / 7, GPU_UNITS / 8, "MIG-1")], now);
    ledger.set_lease(LeaseId(2), vec![hold(GPU_UNITS / 7 * 3, GPU_UNITS / 2, "MIG-2")], now.plus_ms(1_234_567));
    let end = now.plus_ms(4 * 3_600_000);
    let _ = (ledger.end_lease(LeaseId(1), end), ledger.end_lease(LeaseId(2), end));
    let _ = ledger.remove_gpu(&"GPU-1".into(), end);
    let closed = ledger.take_closed();
    let owner = |user: &str, account: Option<&str>| LeaseOwner {
        user: user.to_owned(),
        group: Some("-2+3".to_owned()),
        account: account.map(str::to_owned),
        job: Some("cluster/\"7\"\n".to_owned()),
    };
    let owners = BTreeMap::from([(LeaseId(1), owner("=alice", None)), (LeaseId(2), owner("bob", Some("physics, x")))]);
    let model_of_gpu = BilledGpu { model: "NVIDIA H100 80GB HBM3".to_owned(), slices: 7 };
    let models: BTreeMap<GpuUuid, BilledGpu> = BTreeMap::from([("GPU-1".into(), model_of_gpu)]);
    let adjustments = [Adjustment {
        hour_ms: start.as_millisecond(),
        owner: owner("carol", None),
        lease: None,
        amount: "-1.5".parse().unwrap(),
        description: "-1.5: September".to_owned(),
    }];
    let prices = PriceList::new(vec![Price {
        kind: None,
        model: None,
        per_slice_hour: "0.123457".parse().unwrap(),
        per_lease: "5".parse().unwrap(),
        currency: "EUR".to_owned(),
    }])
    .unwrap();
    let rows = BillRows {
        leases: &closed.leases as &[LeaseHour],
        gpus: &closed.gpus,
        owners: &owners,
        models: &models,
        adjustments: &adjustments,
        late_leases: &closed.leases[..1],
        late_gpus: &[],
    };
    bill(month.parse().unwrap(), model, &prices, rows)
}

#[test]
fn bills_of_all_models_follow_the_column_tables() {
    for model in BillModel::ALL {
        for (month, least) in [("2026-10", 6), ("2026-11", 9)] {
            let bill = some_bill(model, month);
            assert!(bill.lines.len() >= least, "{model:?} {month}: {}", bill.lines.len());
            let text = focus_csv(&bill, &site()).unwrap();
            assert_eq!(violations(&text), Vec::<String>::new(), "{model:?} {month}\n{text}");
        }
    }
}

#[test]
fn every_column_has_a_value_in_some_row() {
    let text = focus_csv(&some_bill(BillModel::Requested, "2026-10"), &site()).unwrap();
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let records: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    for (at, name) in FOCUS_COLUMNS.iter().enumerate() {
        assert!(records.iter().any(|record| !record[at].is_empty()), "{name} is always empty");
    }
    assert_eq!(&records[0][FOCUS_COLUMNS.iter().position(|name| *name == "SubAccountId").unwrap()], "'=alice");
}

/// The checker must find each kind of mistake, or the test above shows nothing.
#[test]
fn checker_finds_wrong_files() {
    let text = focus_csv(&some_bill(BillModel::Requested, "2026-10"), &site()).unwrap();
    for (from, to, found) in [
        ("BilledCost,", "BilledCosts,", "BilledCosts is not a column of FOCUS"),
        ("PricingUnit,", "x_PricingUnit,", "PricingUnit is missing"),
        ("2026-10-31T22:00:00Z", "2026-10-31 22:00", "ChargePeriodStart is 2026-10-31 22:00"),
        ("GPU-Hours", "GPU hours", "PricingUnit is GPU hours"),
        ("Correction", "N/A", "ChargeClass is N/A"),
        ("EUR", "", "BillingCurrency is null"),
        ("Standard", "Cheap", "PricingCategory is Cheap"),
    ] {
        let wrong = violations(&text.replace(from, to));
        assert!(wrong.iter().any(|line| line.contains(found)), "{from} → {to}: {wrong:?}");
    }
}
