//! Draws `gpushctl advise queue`.

use gpush_advice::{
    Gain, ModelPacking,
    queueing::{Latency, Row, Victims},
};
use serde::Serialize;

use super::{packing_lines, remark};
use crate::render::{
    Appearance,
    appearance::{STRONG, count, paint, product},
    names::gpu_numbers,
    table::{Align, table},
};

/// The output of `gpushctl advise queue --json`.
#[derive(Debug, Serialize)]
pub(crate) struct QueueEstimate {
    /// Number of requests that arrive in the period.
    pub(crate) offered: usize,
    /// Number of tenants that send a request.
    pub(crate) tenants: usize,
    /// Milliseconds of the whole GPU for a request.
    pub(crate) service_ms: f64,
    /// Length of the period.
    pub(crate) period_s: f64,
    /// Number of MIG instances.
    #[serde(skip)]
    pub(crate) instances: u32,
    /// What each mechanism achieves.
    pub(crate) estimates: Vec<Row>,
    /// What a hostile tenant costs the others; empty if this was not asked for.
    pub(crate) with_hostile_tenant: Vec<Victims>,
    /// How many tenants fit on the GPUs of the host; empty if the demand is not known.
    pub(crate) models: Vec<ModelPacking>,
    /// Measured gains.
    pub(crate) gains: &'static [Gain],
}

impl QueueEstimate {
    /// Returns the part of the whole GPU that the requests need, in percent.
    #[expect(clippy::cast_precision_loss, reason = "the number of requests has fewer than 53 bits")]
    fn load_percent(&self) -> f64 {
        if self.period_s > 0.0 { self.offered as f64 * self.service_ms / 10.0 / self.period_s } else { 0.0 }
    }
}

/// Draws the estimate.
pub(crate) fn estimate(estimate: &QueueEstimate, look: &Appearance) -> String {
    let mut out = look
        .wrap(
            "",
            &format!(
                "{}, {} in {} s, each {} ms of the whole GPU",
                count(estimate.tenants, "tenant"),
                count(estimate.offered, "request"),
                estimate.period_s,
                estimate.service_ms
            ),
        )
        .join("\n");
    out += "\n";
    let load = estimate.load_percent();
    if load > 100.0 {
        let text = format!(
            "The requests need {load:.0} % of the GPU, so no mechanism can serve all of them for long. The model of MPS has no \
             such limit: its latency is too good here."
        );
        out += &(look.wrap("", &text).join("\n") + "\n");
    }
    out += "\n";
    let rows = estimate.estimates.iter().map(|row| of_row(row, estimate)).collect();
    let columns =
        [("MECHANISM", Align::Left), ("SERVED", Align::Right), ("P50 ms", Align::Right), ("P99 ms", Align::Right)];
    out += &table(&columns, rows, 0, look);
    if !estimate.with_hostile_tenant.is_empty() {
        out += "\nThe other tenants, if one sends twice as many requests of 10 times the length:\n\n";
        let columns = [
            ("MECHANISM", Align::Left),
            ("SERVED", Align::Right),
            ("P50 ms", Align::Right),
            ("P99 ms", Align::Right),
            ("P99 BEFORE", Align::Right),
            ("PRICE", Align::Right),
        ];
        out += &table(&columns, estimate.with_hostile_tenant.iter().map(of_victims).collect(), 0, look);
    }
    for model in &estimate.models {
        let heading =
            format!("{}: {} x {}", gpu_numbers(&model.gpus), model.gpus.len(), look.clean(product(&model.name)));
        out += &format!("\n{}\n", paint(STRONG, &heading));
        for line in packing_lines(&model.packing).iter().flat_map(|line| look.wrap("  ", line)) {
            out += &(line + "\n");
        }
    }
    out.push('\n');
    out += "Measured gains:\n";
    for gain in estimate.gains {
        for line in look.wrap("  ", &format!("{}: {} ({})", gain.what, gain.range, gain.source)) {
            out += &(line + "\n");
        }
    }
    out.push('\n');
    out += &remark("The tables are a model, not a measurement: compare mechanisms with them, not hosts.", look);
    out
}

fn of_row(row: &Row, estimate: &QueueEstimate) -> Vec<String> {
    match row.latency {
        Some(latency) => {
            let [served, p50, p99] = of_latency(latency);
            vec![row.mechanism.name().to_owned(), served, p50, p99]
        }
        // Only MIG limits the number of tenants.
        None => {
            let why = format!("{}, at most {} tenants", row.mechanism.name(), estimate.instances);
            vec![why, "-".to_owned(), "-".to_owned(), "-".to_owned()]
        }
    }
}

fn of_victims(victims: &Victims) -> Vec<String> {
    let none = || "-".to_owned();
    let [served, p50, p99] = victims.after.map_or_else(|| [none(), none(), none()], of_latency);
    let [_, _, before] = victims.before.map_or_else(|| [none(), none(), none()], of_latency);
    let price = victims.price.map_or_else(none, |price| format!("{price:.1} times"));
    vec![victims.mechanism.name().to_owned(), served, p50, p99, before, price]
}

fn of_latency(latency: Latency) -> [String; 3] {
    if latency.served == 0 {
        return ["0".to_owned(), "-".to_owned(), "-".to_owned()];
    }
    [latency.served.to_string(), format!("{:.2}", latency.p50_ms), format!("{:.2}", latency.p99_ms)]
}
