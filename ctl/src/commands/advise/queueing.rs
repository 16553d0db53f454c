//! `gpushctl advise queue`: the latency of tenants that share one GPU.

use gpush_advice::{
    GAINS, packing_of_models,
    queueing::{Arrival, Hostile, Load, Setup, hostile, parse, poisson, table},
};
use gpush_api::{ApiError, Code};

use super::{demand, gpus};
use crate::{
    args::{AdviseQueueArgs, Global},
    exit::{Failure, Outcome},
    offline,
    output::Output,
    render::advise::queueing::{QueueEstimate, estimate},
};

/// Number of tenants, and requests each second, without flags.
const TENANTS: u32 = 7;
const RATE: f64 = 12.0;

/// Most tenants of one GPU.
const MOST_TENANTS: u32 = 1000;

pub(super) fn run(global: &Global, args: &AdviseQueueArgs, out: &Output) -> Outcome {
    let arrivals = arrivals(args)?;
    let period_s = args.period.as_secs_f64();
    let setup = Setup { service_s: args.service / 1000.0, period_s, instances: args.instances };
    let estimates = table(&arrivals, &setup)?;
    let with_hostile_tenant = if args.hostile {
        let first = arrivals.iter().map(|arrival| arrival.tenant).min().unwrap_or_default();
        let tenant = Hostile { tenant: first, service_factor: 10.0, rate_factor: 2.0, seed: args.seed };
        hostile(&arrivals, &setup, &tenant)?
    } else {
        Vec::new()
    };
    let own = demand(args.demand);
    let models = if own.memory_mib.is_some() || own.compute.is_some() {
        packing_of_models(&own, &gpus(global, args.offline.as_deref())?)
    } else if args.offline.is_some() {
        let error = ApiError::new(Code::BadRequest, "`--offline` has no effect without the demand of a tenant");
        return Err(error.hint("add `--memory 6G` or `--compute 12`, or leave out `--offline`").into());
    } else {
        Vec::new()
    };
    let found = QueueEstimate {
        offered: arrivals.len(),
        tenants: number_of_tenants(&arrivals),
        service_ms: args.service,
        period_s,
        instances: args.instances,
        estimates,
        with_hostile_tenant,
        models,
        gains: &GAINS,
    };
    out.show(&found, |look| estimate(&found, look))?;
    Ok(0)
}

fn number_of_tenants(arrivals: &[Arrival]) -> usize {
    let mut tenants: Vec<u32> = arrivals.iter().map(|arrival| arrival.tenant).collect();
    tenants.sort_unstable();
    tenants.dedup();
    tenants.len()
}

/// Returns the arrivals: those of the file, or random ones.
fn arrivals(args: &AdviseQueueArgs) -> Result<Vec<Arrival>, Failure> {
    if let Some(path) = &args.arrivals {
        let bytes = offline::read(path)?;
        let name = offline::name(path);
        let text = String::from_utf8(bytes).map_err(|_| {
            let error = ApiError::new(Code::BadRequest, format!("{name} is not UTF-8"));
            error.hint("write CSV with the columns arrival_s and tenant")
        })?;
        return Ok(parse(&text, &name)?);
    }
    Ok(poisson(&Load { rates: rates(args)?, period_s: args.period.as_secs_f64(), seed: args.seed })?)
}

/// Returns the rate of each tenant.
fn rates(args: &AdviseQueueArgs) -> Result<Vec<f64>, ApiError> {
    if let Some(tenants) = args.tenants.filter(|tenants| *tenants > MOST_TENANTS) {
        let error = ApiError::new(Code::BadRequest, format!("{tenants} tenants cannot share one GPU in this model"));
        return Err(error.hint(format!("give at most `--tenants {MOST_TENANTS}`")));
    }
    let count = |tenants: u32| usize::try_from(tenants).unwrap_or(usize::MAX);
    match (args.rates.as_slice(), args.tenants) {
        ([], tenants) => Ok(vec![RATE; count(tenants.unwrap_or(TENANTS))]),
        ([one], tenants) => Ok(vec![*one; count(tenants.unwrap_or(TENANTS))]),
        (several, None) => Ok(several.to_vec()),
        (several, Some(tenants)) if several.len() == count(tenants) => Ok(several.to_vec()),
        (several, Some(tenants)) => {
            let message = format!("`--rate` has {} values for {tenants} tenants", several.len());
            Err(ApiError::new(Code::BadRequest, message).hint("give one value, or one for each tenant"))
        }
    }
}
