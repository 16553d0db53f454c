//! A queueing model of tenants that share one GPU.
//!
//! Each request needs `service` milliseconds of the whole GPU. Three models serve the same arrivals:
//!
//! - **MIG**: each tenant has a queue and an instance with 1/N of the GPU. A request takes N times as long.
//! - **MPS**: each tenant has a queue. When a request arrives, each tenant with an unfinished request makes it 18 %
//!   longer. The tenant of the request counts too.
//! - **Time-slicing**: one queue for all tenants, and 0.8 ms for each change of tenant.
//!
//! Latency is waiting time plus service. Only requests that finish within the period count as served. Percentiles are
//! interpolated linearly. The constants of the models are those of the published table that the tests reproduce.

use gpush_api::{ApiError, Code};
use serde::Serialize;

mod arrivals;
mod hostile_tenant;
mod latency;
mod simulate;

pub use self::{
    arrivals::{Arrival, Load, parse, poisson},
    hostile_tenant::{Hostile, Victims, hostile},
    latency::Latency,
    simulate::{Served, ServiceModel, Setup, simulate},
};

/// The result of a mechanism for the arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Row {
    /// The mechanism.
    pub mechanism: ServiceModel,
    /// The latency; `None` if the mechanism cannot serve so many tenants.
    #[serde(flatten)]
    pub latency: Option<Latency>,
}

/// Returns the result of each mechanism.
///
/// # Errors
/// The setup is impossible, or there are no arrivals.
pub fn table(arrivals: &[Arrival], setup: &Setup) -> Result<Vec<Row>, ApiError> {
    setup.check()?;
    if arrivals.is_empty() {
        let error = ApiError::new(Code::BadRequest, "no request arrives in this period");
        return Err(error.hint("give a higher `--rate` or a longer `--period`"));
    }
    let row = |mechanism| Row {
        mechanism,
        latency: simulate(mechanism, arrivals, setup, |_| setup.service_s).map(|served| Latency::of(&served, |_| true)),
    };
    Ok(ServiceModel::ALL.map(row).to_vec())
}

#[cfg(test)]
mod tests;
