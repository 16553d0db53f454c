//! The report about the queue: which rule lets requests wait least, and leases most of the host.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use gpush_core::{geometry::Geometry, schedule::ReservationLimits};
use serde_json::{Value, json};

use crate::{
    GPUS, LARGEST_HOST,
    arrivals::Demand,
    mixes::MIXES,
    queueing::{QueueRules, Waits, saturated, waits},
};

/// Requests of one seed. The first tenth is not measured.
const REQUESTS: usize = 20_000;
const SEEDS: u64 = 8;
/// Offered load for the waits, in percent of the host's memory slices.
const LOAD: usize = 80;
/// Requests that always wait in the measurement of the leased slices, and leases that end.
const SATURATED: (usize, usize) = (60, 10_000);
/// The same for the times of decisions, on the largest host.
const TIMED: (usize, usize) = (200, 1_000);

const NEVER: u32 = u32::MAX;
/// The rule of gpushd before it limited reservations, and its present rule.
const BEFORE: QueueRules = rules("every request reserves", usize::MAX, NEVER, false);
const GPUSHD: QueueRules = QueueRules { name: "gpushd", limits: ReservationLimits::DEFAULT, uses_ends: true };

const fn rules(name: &'static str, most: usize, overtaken_per_gpu: u32, uses_ends: bool) -> QueueRules {
    QueueRules { name, limits: ReservationLimits { most, overtaken_per_gpu }, uses_ends }
}

/// The rules that are compared with the first mix.
const RULES: [QueueRules; 7] = [
    BEFORE,
    rules("no request reserves", 0, NEVER, false),
    rules("the first two reserve", 2, NEVER, false),
    rules("the first two reserve, with known ends", 2, NEVER, true),
    rules("the same, and after 4 overtakings a GPU", 2, 4, true),
    rules("the same, and after 64 overtakings a GPU", 2, 64, true),
    GPUSHD,
];

/// Other mixes, as indexes of [`MIXES`].
const OTHERS: [usize; 2] = [1, 4];

/// The measurements of one mix with one rule.
struct Row {
    mix: usize,
    rules: QueueRules,
    waits: Waits,
    saturated: Waits,
}

impl Row {
    fn measure(geometry: &Geometry, (mix, rules): (usize, QueueRules)) -> Self {
        let demand = Demand::new(geometry, MIXES[mix].1, LOAD, GPUS);
        let (waiting, ends) = SATURATED;
        Self {
            mix,
            rules,
            waits: waits(geometry, &demand, rules, (GPUS, REQUESTS), SEEDS),
            saturated: saturated(geometry, &demand, rules, (GPUS, waiting), (ends, false)),
        }
    }

    fn cells(&self) -> Vec<String> {
        let wait = |kind| {
            let mean = self.waits.mean(Some(kind));
            if mean.is_nan() { "–".to_owned() } else { format!("{mean:.2}") }
        };
        vec![
            format!("{}: {}", MIXES[self.mix].0, self.rules.name),
            format!("{:.1} %", self.saturated.leased()),
            format!("{:.1}", self.saturated.quantile(1.0)),
            format!("{:.3}", self.waits.mean(None)),
            format!("{:.2}", self.waits.quantile(0.99)),
            format!("{:.1}", self.waits.quantile(1.0)),
            wait(0),
            wait(3),
            wait(5),
        ]
    }
}

/// Measures all rows, on all processors.
fn measure(geometry: &Geometry) -> Vec<Row> {
    let all: Vec<(usize, QueueRules)> = RULES
        .iter()
        .map(|rules| (0, *rules))
        .chain(OTHERS.iter().flat_map(|mix| [(*mix, BEFORE), (*mix, GPUSHD)]))
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut rows = Vec::new();
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            rows.push(Row::measure(geometry, *one));
        }
        rows
    };
    let mut rows: Vec<Row> = thread::scope(|scope| {
        let workers: Vec<_> =
            (0..thread::available_parallelism().map_or(1, usize::from)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).flatten().collect()
    });
    let place = |row: &Row| all.iter().position(|(mix, rules)| (*mix, rules.name) == (row.mix, row.rules.name));
    rows.sort_by_key(place);
    rows
}

/// Returns the 99th percentile of the time of a decision about a long queue of a large host.
fn decision(geometry: &Geometry, rules: QueueRules) -> Duration {
    let demand = Demand::new(geometry, MIXES[0].1, LOAD, LARGEST_HOST);
    let (waiting, ends) = TIMED;
    let mut times = saturated(geometry, &demand, rules, (LARGEST_HOST, waiting), (ends, true)).decisions;
    times.sort_unstable();
    times.get(times.len() * 99 / 100).copied().unwrap_or_default()
}

/// Compares the rules of the queue.
pub(crate) fn queue(geometry: &Geometry) -> Value {
    // Measure the times first, while no other thread works.
    let [before, now] = [BEFORE, GPUSHD].map(|rules| decision(geometry, rules).as_secs_f64() * 1e3);
    let rows = measure(geometry);
    let find = |rules: QueueRules| rows.iter().find(|row| row.mix == 0 && row.rules.name == rules.name);
    let value = |rules, value: fn(&Row) -> f64| find(rules).map_or(f64::NAN, value);
    let change = |of: fn(&Row) -> f64| 100.0 * (value(GPUSHD, of) / value(BEFORE, of) - 1.0);
    let leased = |row: &Row| row.saturated.leased();
    let (mean, p99, whole) = (
        change(|row| row.waits.mean(None)),
        change(|row| row.waits.quantile(0.99)),
        change(|row| row.waits.mean(Some(5))),
    );
    let gained = value(GPUSHD, leased) - value(BEFORE, leased);
    let (waiting, ends) = SATURATED;
    json!({
        "title": "Queue",
        "note": format!(
            "Requests for MIG devices of {GPUS} A100 80GB GPUs wait in gpushd's queue. Waits are in mean durations of a \
             lease. They are measured at a load of {LOAD} %, with {SEEDS} times {REQUESTS} requests. With a full queue, \
             {waiting} requests wait at any time, and {ends} leases end. Half of the requests name a duration, which is \
             one to five times too long; gpushd ends no lease early. The rules: every request reserves a GPU (gpushd \
             before this rule), no request reserves, the first two reserve. *Known ends*: a reservation waits for known \
             ends, and a short lease may use reserved capacity. gpushd: a request that was overtaken {} times for each \
             GPU reserves too. With {} requests in the queue of {LARGEST_HOST} GPUs, p99 of a decision about all of them \
             is {now:.1} ms; it is {before:.1} ms if every request reserves.",
            ReservationLimits::DEFAULT.overtaken_per_gpu,
            TIMED.0,
        ),
        "columns": [
            "mix, rule", "full queue: slices leased", "full queue: longest wait", "mean wait", "p99", "longest wait",
            "mean wait: 1g.10gb", "3g.40gb", "7g.80gb",
        ],
        "rows": rows.iter().map(Row::cells).collect::<Vec<_>>(),
        "targets": [{
            "what": "slices leased with a full queue, mixed", "wanted": "3 points more than if every request reserves",
            "measured": format!("{gained:+.1} points, to {:.1} %", value(GPUSHD, leased)), "met": gained >= 3.0,
        }, {
            "what": "mean wait in the queue, mixed", "wanted": "25 % less than if every request reserves",
            "measured": format!("{mean:+.0} %"), "met": mean <= -25.0,
        }, {
            "what": "p99 of the wait in the queue, mixed", "wanted": "8 % less than if every request reserves",
            "measured": format!("{p99:+.0} %"), "met": p99 <= -8.0,
        }, {
            "what": "mean wait for a `7g.80gb`, mixed", "wanted": "at most 2 % more than if every request reserves",
            "measured": format!("{whole:+.0} %"), "met": whole <= 2.0,
        }, {
            "what": format!("a decision about {} waiting requests on {LARGEST_HOST} GPUs", TIMED.0),
            "wanted": "p99 at most 5 ms", "measured": format!("{now:.1} ms"), "met": now <= 5.0,
        }],
    })
}
