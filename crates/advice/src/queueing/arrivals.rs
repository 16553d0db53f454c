//! Arrivals of requests: from a file, or random.

use gpush_api::{ApiError, Code};

/// A request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// Time since the start in seconds.
    pub at_s: f64,
    /// Number of the tenant.
    pub tenant: u32,
}

/// The load of random arrivals.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Requests per second of each tenant.
    pub rates: Vec<f64>,
    /// Length of the period in seconds.
    pub period_s: f64,
    /// Start value of the random numbers. Equal values give equal arrivals.
    pub seed: u64,
}

/// Most requests that the model serves.
const MOST_REQUESTS: f64 = 2_000_000.0;

/// Returns random arrivals of tenants that are independent of each other (Poisson processes), in the order of time.
///
/// # Errors
/// There is no tenant, a rate is not above 0, or there are too many requests.
pub fn poisson(load: &Load) -> Result<Vec<Arrival>, ApiError> {
    if load.rates.is_empty() {
        let error = ApiError::new(Code::BadRequest, "the model needs at least 1 tenant");
        return Err(error.hint("write for example `--tenants 7`"));
    }
    if let Some(rate) = load.rates.iter().find(|rate| !(**rate > 0.0 && rate.is_finite())) {
        let error = ApiError::new(Code::BadRequest, format!("a tenant cannot send {rate} requests each second"));
        return Err(error.hint("write a number above 0: `--rate 12`"));
    }
    let expected = load.rates.iter().sum::<f64>() * load.period_s;
    if expected > MOST_REQUESTS {
        let message = format!("the period has about {expected:.0} requests; the model serves {MOST_REQUESTS:.0}");
        let error = ApiError::new(Code::BadRequest, message);
        return Err(error.hint("give a shorter `--period`, or a lower `--rate`"));
    }
    let mut all = Vec::new();
    for (tenant, rate) in (0..).zip(&load.rates) {
        all.extend(stream(tenant, *rate, load.period_s, load.seed));
    }
    sort(&mut all);
    Ok(all)
}

pub(super) fn sort(arrivals: &mut [Arrival]) {
    arrivals.sort_by(|one, other| one.at_s.total_cmp(&other.at_s).then(one.tenant.cmp(&other.tenant)));
}

/// Returns the arrivals of one tenant. They do not depend on the other tenants.
pub(super) fn stream(tenant: u32, rate: f64, period_s: f64, seed: u64) -> Vec<Arrival> {
    let mut random = fastrand::Rng::with_seed(seed ^ (u64::from(tenant) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut at_s = 0.0;
    let mut arrivals = Vec::new();
    loop {
        at_s -= (1.0 - random.f64()).ln() / rate;
        if at_s >= period_s {
            return arrivals;
        }
        arrivals.push(Arrival { at_s, tenant });
    }
}

/// Parses arrivals from CSV with the columns `arrival_s` and `tenant`. Errors refer to the file as `source`.
///
/// # Errors
/// The file has another format, or the times are not in order.
pub fn parse(text: &str, source: &str) -> Result<Vec<Arrival>, ApiError> {
    let wrong = |line: usize, cause: &str| {
        ApiError::new(Code::BadRequest, format!("{source}:{line}: {cause}"))
            .hint("write a line `arrival_s,tenant`, then lines such as `0.48,3`, in the order of time")
    };
    let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    match lines.next() {
        Some((_, "arrival_s,tenant")) => {}
        Some(_) | None => return Err(wrong(1, "the heading is not `arrival_s,tenant`")),
    }
    let mut arrivals: Vec<Arrival> = Vec::new();
    for (number, line) in lines.filter(|(_, line)| !line.is_empty()) {
        let fields = line.split_once(',').and_then(|(at, tenant)| Some((at.parse().ok()?, tenant.parse().ok()?)));
        let Some((at_s, tenant)) = fields else {
            return Err(wrong(number, "the line is not a time and a tenant number, such as `0.48,3`"));
        };
        let at_s: f64 = at_s;
        if !(at_s >= 0.0 && at_s.is_finite()) {
            return Err(wrong(number, "the time is not a number of seconds"));
        }
        if arrivals.last().is_some_and(|last| last.at_s > at_s) {
            return Err(wrong(number, "the time is before that of the previous line"));
        }
        arrivals.push(Arrival { at_s, tenant });
    }
    Ok(arrivals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_arrivals_are_ordered_repeatable_and_near_their_rate() {
        let load = Load { rates: vec![12.0; 7], period_s: 60.0, seed: 1 };
        let arrivals = poisson(&load).unwrap();
        assert_eq!(arrivals, poisson(&load).unwrap());
        assert_ne!(arrivals, poisson(&Load { seed: 2, ..load }).unwrap());
        assert!(arrivals.windows(2).all(|two| two[0].at_s <= two[1].at_s));
        // 5040 are expected; the standard deviation is 71.
        assert!((4680..5400).contains(&arrivals.len()), "{}", arrivals.len());
    }

    #[test]
    fn impossible_loads_are_refused() {
        let refused = |rates: Vec<f64>, period_s| poisson(&Load { rates, period_s, seed: 1 }).unwrap_err().message;
        assert_eq!(refused(Vec::new(), 60.0), "the model needs at least 1 tenant");
        assert_eq!(refused(vec![0.0], 60.0), "a tenant cannot send 0 requests each second");
        assert!(refused(vec![f64::NAN], 60.0).contains("NaN"));
        assert!(refused(vec![1000.0; 10], 86_400.0).contains("the model serves 2000000"));
    }

    #[test]
    fn wrong_line_of_a_file_is_named() {
        let wrong = |text: &str| parse(text, "a.csv").unwrap_err().message;
        assert_eq!(wrong(""), "a.csv:1: the heading is not `arrival_s,tenant`");
        assert_eq!(
            wrong("arrival_s,tenant\n0.5,1\nx,2\n"),
            "a.csv:3: the line is not a time and a tenant number, such as `0.48,3`"
        );
        assert_eq!(wrong("arrival_s,tenant\n0.5,1\n0.4,2\n"), "a.csv:3: the time is before that of the previous line");
        assert_eq!(wrong("arrival_s,tenant\n-1,1\n"), "a.csv:2: the time is not a number of seconds");
        assert_eq!(parse("arrival_s,tenant\n0.5,1\n\n", "a.csv").unwrap(), [Arrival { at_s: 0.5, tenant: 1 }]);
    }
}
