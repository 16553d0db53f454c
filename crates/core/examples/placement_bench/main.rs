//! Measures fragmentation: how much of the requested work gets MIG devices. Compares gpush's placement, first fit, the
//! driver's own choice, and, on small hosts, the exact optimum.
//!
//! ```text
//! cargo run --release -p gpush-core --example placement_bench -- [--optimum | --queue] [--json]
//! ```
//!
//! Requests of mixed profiles arrive one at a time. A granted request keeps its instance for a random time; a request that
//! does not fit is dropped. Every strategy gets the same requests, from fixed seeds. The result depends neither on time nor
//! on the machine.
//!
//! *Work met* is the number of granted memory slices per requested memory slice. The owner of a GPU loses work, not
//! requests: a refused `7g.80gb` counts as much as eight refused `1g.10gb`.

use std::collections::BTreeMap;

use gpush_core::{geometry::Geometry, lease::placement::PlacementPolicy};

mod arrivals;
mod mixes;
mod optimum;
mod queue_report;
mod queueing;
mod strategies;

use arrivals::{Counts, Demand};
use mixes::{LOADS, MIXES, MODEL};
use optimum::Optimum;
use serde_json::{Value, json};
use strategies::{Driver, FirstFit, Gpush, Strategy};

/// Number of GPUs of the large host.
const GPUS: u32 = 8;
/// Numbers of GPUs of the hosts for which the optimum is computed.
const SMALL_HOSTS: [u32; 3] = [1, 2, 3];
/// Number of GPUs of the host on which placements are timed.
const LARGEST_HOST: u32 = 64;
const STRATEGIES: [&str; 4] = ["pack", "first fit", "driver's choice", "spread"];

fn strategy(name: &str, geometry: &Geometry, gpus: u32) -> Box<dyn Strategy> {
    match name {
        "pack" => Box::new(Gpush::new(geometry, gpus, PlacementPolicy::Pack)),
        "spread" => Box::new(Gpush::new(geometry, gpus, PlacementPolicy::Spread)),
        "first fit" => Box::new(FirstFit::new(geometry, gpus)),
        _ => Box::new(Driver::new(MODEL, geometry, gpus)),
    }
}

/// Returns the smallest lead of `pack` over first fit and the driver's choice.
fn lead(counts: &BTreeMap<&str, Counts>, value: impl Fn(&Counts) -> f64) -> f64 {
    let others = ["first fit", "driver's choice"].iter().map(|other| value(&counts["pack"]) - value(&counts[other]));
    others.fold(f64::INFINITY, f64::min)
}

/// Returns the cells of one value, in the order of [`STRATEGIES`].
fn cells(counts: &BTreeMap<&str, Counts>, value: impl Fn(&Counts) -> f64) -> Vec<String> {
    STRATEGIES.iter().map(|name| format!("{:.1} %", value(&counts[name]))).collect()
}

/// Returns the columns of a value, one for each strategy.
fn columns(value: &str) -> impl Iterator<Item = String> {
    STRATEGIES.iter().map(move |name| format!("{value}: {name}"))
}

/// Compares the strategies on a large host.
fn large_host(geometry: &Geometry) -> Value {
    let (mut rows, mut worst) = (Vec::new(), f64::INFINITY);
    for (mix, weights) in MIXES {
        for load in LOADS {
            let demand = Demand::new(geometry, weights, load, GPUS);
            let counts = counts(geometry, &demand, GPUS);
            worst = worst.min(lead(&counts, Counts::work_met));
            let created = counts["pack"].created as f64 / counts["pack"].granted as f64;
            let mut row = vec![format!("{mix}, {load} %")];
            row.extend(cells(&counts, Counts::work_met));
            row.extend(cells(&counts, Counts::requests_met));
            row.push(format!("{created:.2}"));
            rows.push(row);
        }
    }
    let mut largest = Gpush::timed(geometry, LARGEST_HOST, PlacementPolicy::Pack);
    Demand::new(geometry, MIXES[0].1, 100, LARGEST_HOST).offer(&mut largest, 0, &mut Counts::default());
    let p99 = largest.p99();
    let columns: Vec<String> = std::iter::once("mix, offered load".to_owned())
        .chain(columns("work met"))
        .chain(columns("requests met"))
        .chain(["instances created per lease: pack".to_owned()])
        .collect();
    json!({
        "title": "Fragmentation",
        "note": format!(
            "Each row offers {} requests for MIG devices to {GPUS} A100 80GB GPUs, with seeded arrivals and durations. \
             Work met is the number of granted memory slices per requested slice. `pack` and `spread` are gpush's \
             placement strategies. They keep an instance when its lease ends, and reuse it. `first fit` and `driver's \
             choice` use the first GPU with room, and destroy an instance when its lease ends. Mixes: {}.",
            arrivals::TOTAL,
            mixes::text()
        ),
        "columns": columns,
        "rows": rows,
        "targets": [{
            "what": "work met by `pack` on 8 GPUs", "wanted": "no less than first fit and the driver's choice, in every row",
            "measured": format!("{worst:+.1} points at worst"), "met": worst >= 0.0,
        }, {
            "what": format!("a placement on {LARGEST_HOST} GPUs"), "wanted": "p99 at most 1 ms",
            "measured": format!("{:.2} ms", p99.as_secs_f64() * 1e3), "met": p99.as_millis() < 1,
        }],
    })
}

/// Compares the strategies with the optimum on small hosts.
fn small_hosts(geometry: &Geometry) -> Value {
    let (mut rows, mut gaps, mut closed) = (Vec::new(), 0.0, 0.0);
    for (mix, weights) in MIXES {
        for gpus in SMALL_HOSTS {
            let demand = Demand::new(geometry, weights, 100, gpus);
            let optimum = Optimum::new(geometry, &demand, gpus);
            let counts = counts(geometry, &demand, gpus);
            let best = demand.offered_to(|| Box::new(optimum.strategy())).work_met();
            let [pack, first_fit] = ["pack", "first fit"].map(|name| counts[name].work_met());
            (gaps, closed) = (gaps + best - first_fit, closed + pack - first_fit);
            let mut row = vec![format!("{gpus}, {mix}")];
            row.extend(cells(&counts, Counts::work_met));
            row.extend([format!("{best:.1} %"), format!("{:.1} %", optimum.work_met())]);
            rows.push(row);
        }
    }
    let share = 100.0 * closed / gaps;
    let columns: Vec<String> = std::iter::once("GPUs, mix".to_owned())
        .chain(columns("work met"))
        .chain(["optimum, same requests", "optimum, exact"].map(str::to_owned))
        .collect();
    json!({
        "title": "Fragmentation, compared with the optimum",
        "note": "The mixes of the previous section at a load of 100 %. The optimum knows the demand, and grants each \
                 request that fits. It comes from a Markov decision process over all states of the host, so no placement \
                 rule can meet more work. It gets the same requests as the others. The last column is its exact value.",
        "columns": columns,
        "rows": rows,
        "targets": [{
            "what": "part of the work between first fit and the optimum that `pack` meets", "wanted": "at least 80 %",
            "measured": format!("{share:.0} %"), "met": share >= 80.0,
        }],
    })
}

fn counts(geometry: &Geometry, demand: &Demand, gpus: u32) -> BTreeMap<&'static str, Counts> {
    STRATEGIES.iter().map(|name| (*name, demand.offered_to(|| strategy(name, geometry, gpus)))).collect()
}

fn main() {
    let Some(model) = gpush_geometry::model(MODEL) else { return };
    let geometry = Geometry::of_model(&model);
    let has = |option: &str| std::env::args().any(|argument| argument == option);
    let report = match (has("--optimum"), has("--queue")) {
        (true, _) => small_hosts(&geometry),
        (false, true) => queue_report::queue(&geometry),
        (false, false) => large_host(&geometry),
    };
    if has("--json") {
        println!("{report}");
    } else {
        println!("{report:#}");
    }
}
