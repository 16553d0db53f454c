//! The three models.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code};
use gpush_core::geometry::MOST_INSTANCES;
use serde::Serialize;

use super::Arrival;

/// Longer service for each tenant with an unfinished request, with MPS.
const MPS_INTERFERENCE: f64 = 0.18;

/// Time of a change of tenant, with time-slicing, in seconds.
const SWITCH_S: f64 = 0.000_8;

/// A way to share the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ServiceModel {
    /// An instance for each tenant.
    Mig,
    /// All tenants at the same time.
    Mps,
    /// One request at a time.
    Timeslice,
}

impl ServiceModel {
    /// All mechanisms.
    pub const ALL: [Self; 3] = [Self::Mig, Self::Mps, Self::Timeslice];

    /// Returns the name for texts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mig => "MIG",
            Self::Mps => "MPS",
            Self::Timeslice => "time-slicing",
        }
    }
}

/// The setup of the models.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setup {
    /// Seconds of the whole GPU for a request.
    pub service_s: f64,
    /// Length of the period in seconds.
    pub period_s: f64,
    /// Number of equal MIG instances.
    pub instances: u32,
}

impl Setup {
    /// Refuses a setup that has no meaning.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        let wrong = |message: &str, hint: &str| Err(ApiError::new(Code::BadRequest, message).hint(hint));
        if !(self.service_s > 0.0 && self.service_s.is_finite()) {
            return wrong("a request needs more than 0 ms of the GPU", "write for example `--service 10`");
        }
        if !(self.period_s > 0.0 && self.period_s.is_finite()) {
            return wrong("the period is longer than 0 s", "write for example `--period 60s`");
        }
        if self.instances == 0 {
            return wrong("a GPU with MIG has at least 1 instance", "write for example `--instances 7`");
        }
        if usize::try_from(self.instances).is_ok_and(|instances| instances > MOST_INSTANCES) {
            let message = format!("a GPU has at most {MOST_INSTANCES} MIG instances");
            return wrong(&message, "write for example `--instances 7`");
        }
        Ok(())
    }
}

/// A request that finished within the period.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Served {
    /// Number of the tenant.
    pub tenant: u32,
    /// Waiting time and service in seconds.
    pub latency_s: f64,
}

/// Returns the requests that finish within the period. `service` returns the service time of a tenant's requests in
/// seconds. Returns `None` for MIG if there are more tenants than instances. `arrivals` are in the order of time.
pub fn simulate(
    mechanism: ServiceModel,
    arrivals: &[Arrival],
    setup: &Setup,
    service: impl Fn(u32) -> f64,
) -> Option<Vec<Served>> {
    let finish: Box<dyn FnMut(&Arrival) -> f64> = match mechanism {
        ServiceModel::Mig => {
            let mut tenants: Vec<u32> = arrivals.iter().map(|arrival| arrival.tenant).collect();
            tenants.sort_unstable();
            tenants.dedup();
            if tenants.len() > usize::try_from(setup.instances).unwrap_or(usize::MAX) {
                return None;
            }
            let mut free: BTreeMap<u32, f64> = BTreeMap::new();
            Box::new(move |arrival| {
                let free = free.entry(arrival.tenant).or_default();
                *free = arrival.at_s.max(*free) + service(arrival.tenant) * f64::from(setup.instances);
                *free
            })
        }
        ServiceModel::Mps => {
            let mut free: BTreeMap<u32, f64> = BTreeMap::new();
            Box::new(move |arrival| {
                let active = free.values().filter(|end| **end > arrival.at_s).count();
                let active = f64::from(u32::try_from(active).unwrap_or(u32::MAX));
                let own = free.entry(arrival.tenant).or_default();
                *own = arrival.at_s.max(*own) + service(arrival.tenant) * (1.0 + MPS_INTERFERENCE * active);
                *own
            })
        }
        ServiceModel::Timeslice => {
            let (mut free, mut last) = (0.0_f64, None);
            Box::new(move |arrival| {
                let mut start = arrival.at_s.max(free);
                if last.is_some_and(|tenant| tenant != arrival.tenant) {
                    start += SWITCH_S;
                }
                last = Some(arrival.tenant);
                free = start + service(arrival.tenant);
                free
            })
        }
    };
    let mut finish = finish;
    let mut served = Vec::with_capacity(arrivals.len());
    for arrival in arrivals {
        let end = finish(arrival);
        if end <= setup.period_s {
            served.push(Served { tenant: arrival.tenant, latency_s: end - arrival.at_s });
        }
    }
    Some(served)
}
