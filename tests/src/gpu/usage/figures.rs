//! The arithmetic of the checks: errors of signals, parts of energy, times of calls.

use std::time::Duration;

use serde::Serialize;

/// How far the values of a signal are from the truth. All figures are in percentage points.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct SignalError {
    /// Number of windows with a value.
    pub(super) known: usize,
    /// Number of windows without a value.
    pub(super) unknown: usize,
    /// Mean of the values.
    pub(super) mean: f64,
    /// Mean less the truth.
    pub(super) bias: f64,
    /// Largest distance of a value from the truth.
    pub(super) largest: f64,
}

impl SignalError {
    /// Compares the values of a signal with the truth; both are parts of the time from 0 to 1. `None` if no value is known.
    pub(super) fn of(values: &[Option<f64>], truth: f64) -> Option<Self> {
        let known: Vec<f64> = values.iter().flatten().copied().collect();
        let mean = mean(&known)?;
        let largest = known.iter().map(|value| (value - truth).abs()).fold(0.0, f64::max);
        Some(Self {
            known: known.len(),
            unknown: values.len() - known.len(),
            mean: mean * 100.0,
            bias: (mean - truth) * 100.0,
            largest: largest * 100.0,
        })
    }

    /// Returns the cell of a table: the mean, and the largest error in brackets.
    pub(super) fn cell(error: Option<Self>) -> String {
        error.map_or_else(|| "not reported".to_owned(), |error| format!("{:.1} (±{:.1})", error.mean, error.largest))
    }
}

/// Returns the mean; `None` of nothing.
#[expect(clippy::cast_precision_loss, reason = "a measurement has few values")]
pub(super) fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Returns whether a signal is known at each duty and grows with it.
pub(super) fn grows(errors: &[Option<SignalError>]) -> bool {
    let means: Option<Vec<f64>> = errors.iter().map(|error| error.map(|error| error.mean)).collect();
    means.is_some_and(|means| means.windows(2).all(|two| two[0] < two[1]))
}

/// Returns the part of each value in their sum; zeros if the sum is not above 0.
pub(super) fn parts(values: &[f64]) -> Vec<f64> {
    let sum: f64 = values.iter().sum();
    values.iter().map(|value| if sum > 0.0 { value / sum } else { 0.0 }).collect()
}

/// Returns the energy of each client above its part of the energy that the idle GPU needs. Each client holds the same part
/// of the whole GPU.
#[expect(clippy::cast_precision_loss, reason = "a few clients")]
pub(super) fn active_energy(energies_j: &[f64], idle_w: f64, seconds: f64) -> Vec<f64> {
    let idle_j = idle_w * seconds / energies_j.len() as f64;
    energies_j.iter().map(|energy| (energy - idle_j).max(0.0)).collect()
}

/// Times of a driver call.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct CallTimes {
    /// Median in µs.
    pub(super) median_us: f64,
    /// Longest time in µs.
    pub(super) longest_us: f64,
}

impl CallTimes {
    /// Summarizes times; `None` of nothing.
    pub(super) fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let us = |time: &Duration| time.as_secs_f64() * 1e6;
        Some(Self { median_us: us(times.get(times.len() / 2)?), longest_us: us(times.last()?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(left: f64, right: f64) -> bool {
        (left - right).abs() < 1e-9
    }

    #[test]
    fn error_of_a_signal_has_bias_and_largest_distance() {
        let error = SignalError::of(&[Some(0.28), None, Some(0.34)], 0.3).unwrap();
        assert_eq!((error.known, error.unknown), (2, 1));
        assert!(close(error.mean, 31.0) && close(error.bias, 1.0) && close(error.largest, 4.0), "{error:?}");
        assert_eq!(SignalError::cell(Some(error)), "31.0 (±4.0)");
        assert_eq!(SignalError::of(&[None, None], 0.3), None);
        assert_eq!((SignalError::of(&[], 0.3), SignalError::cell(None)), (None, "not reported".to_owned()));
    }

    #[test]
    fn signal_grows_only_if_it_is_known_everywhere() {
        let at = |value: f64| SignalError::of(&[Some(value)], 0.5);
        assert!(grows(&[at(0.1), at(0.3), at(0.9)]));
        assert!(!grows(&[at(0.1), at(0.1)]), "a signal that does not move says nothing");
        assert!(!grows(&[at(0.1), None, at(0.9)]));
    }

    #[test]
    fn energy_is_split_without_the_power_of_the_idle_gpu() {
        let active = active_energy(&[500.0, 350.0], 60.0, 10.0);
        assert!(close(active[0], 200.0) && close(active[1], 50.0), "{active:?}");
        let parts = parts(&active);
        assert!(close(parts[0], 0.8) && close(parts[1], 0.2), "{parts:?}");
        assert_eq!(active_energy(&[10.0, 10.0], 60.0, 10.0), [0.0, 0.0]);
        assert_eq!(super::parts(&[0.0, 0.0]), [0.0, 0.0]);
    }

    #[test]
    fn times_of_a_call_are_summarized() {
        let times = CallTimes::of([30, 10, 20].map(Duration::from_micros).to_vec()).unwrap();
        assert!(close(times.median_us, 20.0) && close(times.longest_us, 30.0), "{times:?}");
        assert_eq!(CallTimes::of(Vec::new()), None);
    }
}
