//! Percentiles of the latency of served requests.

use serde::Serialize;

use super::simulate::Served;

/// Number of served requests, and their latency.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Latency {
    /// Number of requests that finished within the period.
    #[serde(rename = "served")]
    pub served: usize,
    /// Median in milliseconds; 0 if nothing was served.
    pub p50_ms: f64,
    /// 99th percentile in milliseconds; 0 if nothing was served.
    pub p99_ms: f64,
}

impl Latency {
    /// Returns the latency of the requests of the tenants for which `counts` is true.
    pub fn of(served: &[Served], counts: impl Fn(u32) -> bool) -> Self {
        let own = served.iter().filter(|request| counts(request.tenant));
        let mut latencies: Vec<f64> = own.map(|request| request.latency_s * 1000.0).collect();
        latencies.sort_by(f64::total_cmp);
        Self { served: latencies.len(), p50_ms: percentile(&latencies, 50), p99_ms: percentile(&latencies, 99) }
    }
}

/// Returns a percentile of sorted values, interpolated linearly between the two nearest ranks; 0 without values.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let hundredths = last * percent;
    let (below, rest) = (hundredths / 100, hundredths % 100);
    let low = sorted.get(below).copied().unwrap_or_default();
    let high = sorted.get(below + 1).copied().unwrap_or(low);
    // `rest` is below 100, so the conversion is exact.
    low + (high - low) * f64::from(u8::try_from(rest).unwrap_or_default()) / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_interpolates_between_ranks() {
        assert_eq!(percentile(&[], 50).total_cmp(&0.0), std::cmp::Ordering::Equal);
        let close = |found: f64, expected: f64| (found - expected).abs() < 1e-9;
        assert!(close(percentile(&[7.0], 99), 7.0));
        assert!(close(percentile(&[1.0, 2.0], 50), 1.5));
        assert!(close(percentile(&[0.0, 10.0, 20.0, 30.0], 99), 29.7));
    }
}
