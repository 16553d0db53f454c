//! `gpushctl advise`: which mechanism and layout, what latency to expect, and what would have been enough.

mod questions;
mod queueing;
mod recorded_use;

use clap::ValueEnum as _;
use gpush_advice::{Advice, Demand, DriverOwner, Needs};
use gpush_api::{ApiError, Code, Gpu};
use gpush_core::config::{Isolation, Workload};

use crate::{
    args::{Advise, AdviseMechanismArgs, DemandFlags, DriverName, Global, IsolationName, WorkloadName, YesNo},
    exit::{Failure, Outcome},
    offline,
    output::Output,
    render,
};

pub(super) fn run(global: &Global, command: Advise, out: &Output) -> Outcome {
    match command {
        Advise::Mechanism(args) => mechanism(global, args, out),
        Advise::Queue(args) => queueing::run(global, &args, out),
        Advise::FromUse(args) => super::ask(global, async |client| recorded_use::run(client, &args, out).await),
    }
}

fn mechanism(global: &Global, args: AdviseMechanismArgs, out: &Output) -> Outcome {
    let args = if out.can_ask() { questions::complete(args, &mut |question| out.answer(question))? } else { args };
    let needs = needs(&args)?;
    needs.check()?;
    let gpus = gpus(global, args.offline.as_deref())?;
    let advice: Advice = gpush_advice::advise(&needs, &gpus)?;
    out.show(&advice, |look| render::advise::advice(&advice, args.offline.as_deref(), look))?;
    Ok(0)
}

/// Returns the needs that the flags describe. A flag that is missing has its default.
///
/// # Errors
/// A flag without a default is missing.
fn needs(args: &AdviseMechanismArgs) -> Result<Needs, ApiError> {
    // For one tenant, the isolation does not matter.
    let isolation = args.isolation.or((args.tenants == Some(1)).then_some(IsolationName::Shared));
    let (Some(tenants), Some(isolation), Some(workload)) = (args.tenants, isolation, args.workload) else {
        let missing = [
            (args.tenants.is_none(), "--tenants"),
            (isolation.is_none(), "--isolation"),
            (args.workload.is_none(), "--workload"),
        ];
        let missing: Vec<&str> = missing.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).collect();
        let message = format!("the advice needs {}", missing.join(", "));
        let name = |value: Option<clap::builder::PossibleValue>, example: &str| {
            value.map_or_else(|| example.to_owned(), |value| value.get_name().to_owned())
        };
        let command = format!(
            "gpushctl advise mechanism --tenants {} --isolation {} --workload {}",
            args.tenants.unwrap_or(8),
            name(args.isolation.and_then(|one| one.to_possible_value()), "hard"),
            name(args.workload.and_then(|one| one.to_possible_value()), "inference"),
        );
        return Err(ApiError::new(Code::BadRequest, message).hint(format!("for example `{command}`")));
    };
    let yes = |answer: Option<YesNo>| answer == Some(YesNo::Yes);
    Ok(Needs {
        tenants,
        isolation: match isolation {
            IsolationName::Hard => Isolation::Hard,
            IsolationName::Shared => Isolation::Shared,
        },
        workload: match workload {
            WorkloadName::Training => Workload::Training,
            WorkloadName::Batch => Workload::Batch,
            WorkloadName::Inference => Workload::Inference,
            WorkloadName::Notebooks => Workload::Notebooks,
            WorkloadName::Kernels => Workload::Kernels,
        },
        demand: demand(args.demand),
        driver: match args.driver {
            Some(DriverName::Managed) => DriverOwner::Managed,
            Some(DriverName::Own) | None => DriverOwner::Own,
        },
        bounded_memory: yes(args.bounded_memory),
        soft_compute: yes(args.soft_compute),
        shared_faults: yes(args.shared_faults),
    })
}

fn demand(flags: DemandFlags) -> Demand {
    Demand { memory_mib: flags.memory.map(gpush_api::MemoryLimit::mib), compute: flags.compute }
}

/// Returns the GPUs of an offline host, else those of gpushd.
fn gpus(global: &Global, host: Option<&str>) -> Result<Vec<Gpu>, Failure> {
    let gpus = match host {
        Some(host) => offline::host(host)?,
        None => super::with_agent(global, async |client| {
            client.gpus(true).await.map_err(|error| {
                let error = ApiError::from(error);
                let preset = "without gpushd, add a similar host: `--offline dgx-a100`";
                Failure::from(if error.code == Code::Unreachable { error.hint(preset) } else { error })
            })
        })?,
    };
    if gpus.is_empty() {
        return Err(super::no_gpu().into());
    }
    Ok(gpus)
}

#[cfg(test)]
pub(super) mod tests {
    use gpush_advice::{
        GAINS, packing_of_models,
        queueing::{Hostile, Load, Setup, hostile, poisson, table},
    };
    use gpush_core::preset;

    pub(in crate::commands) use super::recorded_use::tests::all as from_use;
    use super::*;
    use crate::render::advise::queueing::QueueEstimate;

    fn arguments() -> AdviseMechanismArgs {
        AdviseMechanismArgs {
            tenants: Some(20),
            isolation: Some(IsolationName::Shared),
            workload: Some(WorkloadName::Inference),
            demand: DemandFlags { memory: "6G".parse().ok(), compute: "12".parse().ok() },
            bounded_memory: Some(YesNo::Yes),
            soft_compute: Some(YesNo::No),
            ..AdviseMechanismArgs::default()
        }
    }

    /// Returns advice whose JSON document has all fields.
    pub(in crate::commands) fn advice() -> Advice {
        gpush_advice::advise(&needs(&arguments()).unwrap(), &preset::gpus("mixed").unwrap()).unwrap()
    }

    /// Returns an estimate whose JSON document has all fields.
    pub(in crate::commands) fn estimate() -> QueueEstimate {
        let setup = Setup { service_s: 0.01, period_s: 5.0, instances: 7 };
        let arrivals = poisson(&Load { rates: vec![12.0; 7], period_s: 5.0, seed: 1 }).unwrap();
        let tenant = Hostile { tenant: 0, service_factor: 10.0, rate_factor: 2.0, seed: 1 };
        QueueEstimate {
            offered: arrivals.len(),
            tenants: 7,
            service_ms: 10.0,
            period_s: 5.0,
            instances: 7,
            estimates: table(&arrivals, &setup).unwrap(),
            with_hostile_tenant: hostile(&arrivals, &setup, &tenant).unwrap(),
            models: packing_of_models(&demand(arguments().demand), &preset::gpus("mixed").unwrap()),
            gains: &GAINS,
        }
    }

    #[test]
    fn missing_flags_are_named() {
        let error = needs(&AdviseMechanismArgs { tenants: Some(4), ..AdviseMechanismArgs::default() }).unwrap_err();
        assert_eq!(error.message, "the advice needs --isolation, --workload");
        let command = "`gpushctl advise mechanism --tenants 4 --isolation hard --workload inference`";
        assert_eq!(error.hint, Some(format!("for example {command}")));
        let one = AdviseMechanismArgs { tenants: Some(1), workload: Some(WorkloadName::Batch), ..Default::default() };
        assert_eq!(needs(&one).unwrap().tenants, 1);
    }
}
