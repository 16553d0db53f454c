use gpush_advice::{
    Demand, DriverOwner, GAINS, Needs, advise, packing_of_models,
    queueing::{Hostile, Load, Setup, hostile, poisson, table},
};
use gpush_core::{
    config::{Isolation, Workload},
    preset,
};
use insta::assert_snapshot;

use super::*;
use crate::render::{Charset, fixtures};

fn needs(tenants: u32, isolation: Isolation, workload: Workload) -> Needs {
    Needs {
        tenants,
        isolation,
        workload,
        demand: Demand::default(),
        driver: DriverOwner::Own,
        bounded_memory: false,
        soft_compute: false,
        shared_faults: false,
    }
}

/// Draws the advice at 80 columns. Checks that only config lines, which users copy, are longer.
fn drawn(needs: &Needs, host: &str, charset: Charset) -> String {
    let found = advise(needs, &preset::gpus(host).unwrap()).unwrap();
    let look = fixtures::look(80, charset);
    let text = fixtures::plain(&advice(&found, Some(host), &look));
    for line in text.lines().filter(|line| !found.text.contains(line)) {
        assert!(super::super::appearance::width(line) <= 80, "{line}");
    }
    assert!(!text.lines().any(|line| line.ends_with(' ')), "{text}");
    text
}

#[test]
fn course_on_eight_a100() {
    let course = needs(120, Isolation::Hard, Workload::Notebooks);
    assert_snapshot!(drawn(&course, "dgx-a100", Charset::Utf8));
}

#[test]
fn mixed_fleet_with_hard_isolation() {
    let tenants = needs(12, Isolation::Hard, Workload::Inference);
    assert_snapshot!(drawn(&tenants, "mixed", Charset::Ascii));
}

#[test]
fn small_models_through_mps_with_packing() {
    let demand = Demand { memory_mib: Some(6 * 1024), compute: "12".parse().ok() };
    let tenants = Needs { demand, shared_faults: true, ..needs(64, Isolation::Shared, Workload::Inference) };
    assert_snapshot!(drawn(&tenants, "dgx-a100", Charset::Utf8));
}

#[test]
fn hami_with_its_variables() {
    let tenants =
        Needs { bounded_memory: true, soft_compute: true, ..needs(16, Isolation::Shared, Workload::Inference) };
    assert_snapshot!(drawn(&tenants, "a30x4", Charset::Utf8));
}

#[test]
fn estimate_with_hostile_tenant_and_packing() {
    let setup = Setup { service_s: 0.01, period_s: 60.0, instances: 7 };
    let arrivals = poisson(&Load { rates: vec![12.0; 7], period_s: 60.0, seed: 1 }).unwrap();
    let tenant = Hostile { tenant: 0, service_factor: 10.0, rate_factor: 2.0, seed: 1 };
    let demand = Demand { memory_mib: Some(6 * 1024), compute: "12".parse().ok() };
    let found = queueing::QueueEstimate {
        offered: arrivals.len(),
        tenants: 7,
        service_ms: 10.0,
        period_s: 60.0,
        instances: 7,
        estimates: table(&arrivals, &setup).unwrap(),
        with_hostile_tenant: hostile(&arrivals, &setup, &tenant).unwrap(),
        models: packing_of_models(&demand, &preset::gpus("dgx-a100").unwrap()),
        gains: &GAINS,
    };
    let look = fixtures::look(80, Charset::Utf8);
    assert_snapshot!(fixtures::plain(&queueing::estimate(&found, &look)));
    let overloaded = queueing::QueueEstimate { service_ms: 20.0, ..found };
    let text = fixtures::plain(&queueing::estimate(&overloaded, &look));
    assert!(text.contains("The requests need 171 % of the GPU"), "{text}");
}
