use proptest::prelude::*;

use super::*;

/// The published arrivals: 7 tenants with 12 requests each second, 60 s.
const PUBLISHED: &str = include_str!("../../tests/arrivals-7x12rps-60s.csv");

const SETUP: Setup = Setup { service_s: 0.010, period_s: 60.0, instances: 7 };

fn published() -> Vec<Arrival> {
    parse(PUBLISHED, "arrivals-7x12rps-60s.csv").unwrap()
}

fn shown(rows: &[Row]) -> Vec<(&'static str, usize, String, String)> {
    let shown = |row: &Row| {
        let latency = row.latency.unwrap();
        (row.mechanism.name(), latency.served, format!("{:.2}", latency.p50_ms), format!("{:.2}", latency.p99_ms))
    };
    rows.iter().map(shown).collect()
}

#[test]
fn published_table_is_reproduced_to_the_digit() {
    let arrivals = published();
    assert_eq!(arrivals.len(), 5067);
    let text = |text: &str| text.to_owned();
    assert_eq!(
        shown(&table(&arrivals, &SETUP).unwrap()),
        [
            ("MIG", 5039, text("200.92"), text("1029.04")),
            ("MPS", 5065, text("11.80"), text("30.47")),
            ("time-slicing", 5063, text("39.92"), text("208.21")),
        ]
    );
}

/// The tenant sends twice as many requests, each of which takes ten times as long.
#[test]
fn hostile_tenant_costs_the_others_nothing_with_mig_only() {
    let hostile_tenant = Hostile { tenant: 0, service_factor: 10.0, rate_factor: 2.0, seed: 1 };
    let found = hostile(&published(), &SETUP, &hostile_tenant).unwrap();
    let [mig, mps, timeslice] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(mig.before, mig.after);
    assert_eq!(mig.price.map(|price| format!("{price:.3}")).as_deref(), Some("1.000"));
    let (mps, timeslice) = (mps.price.unwrap(), timeslice.price.unwrap());
    // Under MPS, the hostile tenant is one more active tenant. With time-slicing, its requests are in the one queue.
    assert!((1.05..3.0).contains(&mps), "{mps}");
    assert!(timeslice > 20.0, "{timeslice}");
}

#[test]
fn hostile_tenant_needs_other_tenants() {
    let alone: Vec<Arrival> = published().into_iter().filter(|arrival| arrival.tenant == 0).collect();
    let hostile_tenant = Hostile { tenant: 0, service_factor: 10.0, rate_factor: 2.0, seed: 1 };
    assert!(hostile(&alone, &SETUP, &hostile_tenant).is_err());
    assert!(hostile(&published(), &SETUP, &Hostile { tenant: 9, ..hostile_tenant }).is_err());
}

#[test]
fn more_tenants_than_instances_have_no_mig_row() {
    let rows = table(&published(), &Setup { instances: 3, ..SETUP }).unwrap();
    assert!(rows[0].latency.is_none() && rows[1].latency.is_some());
}

#[test]
fn impossible_setups_are_refused() {
    for setup in [
        Setup { service_s: 0.0, ..SETUP },
        Setup { service_s: f64::NAN, ..SETUP },
        Setup { period_s: -1.0, ..SETUP },
        Setup { instances: 0, ..SETUP },
        Setup { instances: 9, ..SETUP },
    ] {
        assert_eq!(table(&published(), &setup).unwrap_err().code, Code::BadRequest, "{setup:?}");
    }
    assert!(table(&[], &SETUP).unwrap_err().message.contains("no request"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// No request is faster than its service, a mechanism never serves more than arrived, and a tenant alone on a GPU with
    /// one instance has the same latency with MIG and time-slicing.
    #[test]
    fn latency_is_at_least_the_service(tenants in 1usize..8, rate in 1u32..20, service_ms in 1u32..20, seed: u64) {
        let setup = Setup { service_s: f64::from(service_ms) / 1000.0, period_s: 20.0, instances: 7 };
        let load = Load { rates: vec![f64::from(rate); tenants], period_s: 20.0, seed };
        let arrivals = poisson(&load).unwrap();
        prop_assume!(!arrivals.is_empty());
        for mechanism in ServiceModel::ALL {
            let served = simulate(mechanism, &arrivals, &setup, |_| setup.service_s).unwrap();
            prop_assert!(served.len() <= arrivals.len());
            prop_assert!(served.iter().all(|request| request.latency_s >= setup.service_s - 1e-9));
        }
        let one: Vec<Arrival> = arrivals.iter().filter(|arrival| arrival.tenant == 0).copied().collect();
        let whole = Setup { instances: 1, ..setup };
        let run = |mechanism| simulate(mechanism, &one, &whole, |_| whole.service_s);
        prop_assert_eq!(run(ServiceModel::Mig), run(ServiceModel::Timeslice));
    }

    /// A wall of hardware: with MIG, nothing that a tenant does changes the latency of another.
    #[test]
    fn mig_isolates_the_other_tenants(factor in 1u32..50, rate in 1u32..10, tenants in 2usize..8, seed: u64) {
        let load = Load { rates: vec![5.0; tenants], period_s: 20.0, seed };
        let arrivals = poisson(&load).unwrap();
        let setup = Setup { period_s: 20.0, ..SETUP };
        let hostile_tenant =
            Hostile { tenant: 1, service_factor: f64::from(factor), rate_factor: f64::from(rate), seed };
        let Ok(found) = hostile(&arrivals, &setup, &hostile_tenant) else { return Ok(()) };
        prop_assert_eq!(found[0].before, found[0].after);
    }
}
