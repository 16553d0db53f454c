//! A hostile tenant, and how much longer the other tenants wait because of it.

use gpush_api::{ApiError, Code};
use serde::Serialize;

use super::{
    Arrival, Latency, ServiceModel, Setup,
    arrivals::{sort, stream},
    simulate,
};

/// The additional load of the hostile tenant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hostile {
    /// Number of the tenant.
    pub tenant: u32,
    /// Factor of the time of its requests.
    pub service_factor: f64,
    /// Factor of the number of its requests.
    pub rate_factor: f64,
    /// Start value of the random arrivals of the tenant.
    pub seed: u64,
}

/// The other tenants, without and with the hostile tenant.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Victims {
    /// The mechanism.
    pub mechanism: ServiceModel,
    /// Their latency while the tenant behaves; `None` if the mechanism cannot serve so many tenants.
    #[serde(rename = "latency_before")]
    pub before: Option<Latency>,
    /// Their latency with the hostile tenant.
    #[serde(rename = "latency_after")]
    pub after: Option<Latency>,
    /// Their 99th percentile with the hostile tenant, divided by the one without it; `None` without latencies.
    pub price: Option<f64>,
}

/// Returns the effect of a hostile tenant on the others with each mechanism.
///
/// # Errors
/// The tenant sends no request, or it is the only one.
pub fn hostile(arrivals: &[Arrival], setup: &Setup, hostile: &Hostile) -> Result<Vec<Victims>, ApiError> {
    setup.check()?;
    let own = arrivals.iter().filter(|arrival| arrival.tenant == hostile.tenant).count();
    if own == 0 || own == arrivals.len() {
        let error = ApiError::new(Code::BadRequest, "the hostile tenant needs other tenants that it can disturb");
        return Err(error.hint("write for example `--tenants 7`"));
    }
    let own = f64::from(u32::try_from(own).unwrap_or(u32::MAX));
    let rate = own / setup.period_s * hostile.rate_factor;
    let mut with: Vec<Arrival> = arrivals.iter().filter(|one| one.tenant != hostile.tenant).copied().collect();
    with.extend(stream(hostile.tenant, rate, setup.period_s, hostile.seed));
    sort(&mut with);
    let is_other = |tenant: u32| tenant != hostile.tenant;
    let service = |tenant: u32| {
        if is_other(tenant) { setup.service_s } else { setup.service_s * hostile.service_factor }
    };
    let victims = |mechanism| {
        let before = simulate(mechanism, arrivals, setup, |_| setup.service_s);
        let before = before.map(|served| Latency::of(&served, is_other));
        let after = simulate(mechanism, &with, setup, service).map(|served| Latency::of(&served, is_other));
        let both = before.zip(after).filter(|(before, after)| before.served > 0 && after.served > 0);
        Victims { mechanism, before, after, price: both.map(|(before, after)| after.p99_ms / before.p99_ms) }
    };
    Ok(ServiceModel::ALL.map(victims).to_vec())
}
