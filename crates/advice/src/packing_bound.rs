//! The packing bound: how many tenants fit on one GPU, which resource binds, and which mechanism can realise it.
//!
//! n ≤ min(M / m, C / c), where M and C are the memory and the compute of the GPU, and m and c those of one tenant.
//! The utilization of n tenants is at most min(1, n × c).

use gpush_api::Percentage;
use serde::Serialize;

/// The demand of one tenant on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand {
    /// Memory in MiB; `None` if it is not known.
    pub memory_mib: Option<u64>,
    /// Part of the multiprocessors of a whole GPU; `None` if it is not known.
    pub compute: Option<Percentage>,
}

/// A resource that limits the number of tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Device memory.
    Memory,
    /// Multiprocessors.
    Compute,
}

/// How many tenants a mechanism can place on the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Realization {
    /// Mode in the config.
    pub mechanism: &'static str,
    /// Number of tenants.
    pub tenants: u32,
    /// What the mechanism does with the two resources, as a clause.
    pub remark: String,
}

/// The bound for one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Packing {
    /// How many tenants the memory admits; `None` if the demand is not known.
    pub memory_admits: Option<u32>,
    /// How many tenants the compute admits; `None` if the demand is not known.
    pub compute_admits: Option<u32>,
    /// The smaller number; `None` if neither demand is known.
    pub most_tenants: Option<u32>,
    /// The resource with the smaller number; memory if both are equal.
    pub binds: Option<Resource>,
    /// Highest utilization of the packed GPU in percent; `None` if the compute of a tenant is not known.
    pub utilization_percent: Option<u32>,
    /// What each mechanism can realise; empty if neither demand is known.
    pub mechanisms: Vec<Realization>,
}

/// Most clients of an MPS daemon of a whole GPU on Volta and later.
const MPS_CLIENTS: u32 = gpush_api::MPS_CLIENTS;

/// Returns the bound for a GPU with this memory. `instances` is the largest number of equal MIG instances of which each
/// meets the demand; `None` if the GPU has no MIG.
#[must_use]
pub fn packing(demand: &Demand, gpu_memory_mib: u64, instances: Option<(&str, u32)>) -> Packing {
    let memory_admits = demand.memory_mib.map(|own| small(gpu_memory_mib / own.max(1)));
    let compute_admits = demand.compute.map(|own| 1000 / u32::from(own.tenths()).max(1));
    let bound = [(memory_admits, Resource::Memory), (compute_admits, Resource::Compute)];
    let binding =
        bound.into_iter().filter_map(|(admits, resource)| Some((admits?, resource))).min_by_key(|(admits, _)| *admits);
    let most_tenants = binding.map(|(admits, _)| admits);
    let utilization_percent = demand.compute.zip(most_tenants).map(|(own, tenants)| {
        let tenths = u32::from(own.tenths()).saturating_mul(tenants);
        (tenths / 10).min(100)
    });
    Packing {
        memory_admits,
        compute_admits,
        most_tenants,
        binds: binding.map(|(_, resource)| resource),
        utilization_percent,
        mechanisms: most_tenants.map(|most| realizations(demand, most, memory_admits, instances)).unwrap_or_default(),
    }
}

fn realizations(
    demand: &Demand,
    most: u32,
    memory_admits: Option<u32>,
    instances: Option<(&str, u32)>,
) -> Vec<Realization> {
    let mig = match instances {
        Some((profile, count)) => Realization {
            mechanism: "mig",
            tenants: count.min(most),
            remark: format!("{count} instances of {profile}, which divide memory and compute in hardware"),
        },
        None => Realization { mechanism: "mig", tenants: 0, remark: "no MIG instance meets the demand".to_owned() },
    };
    let ceiling = demand.compute.map_or_else(String::new, |own| format!(" of {own} %"));
    let mps = Realization {
        mechanism: "mps",
        tenants: most.min(MPS_CLIENTS),
        remark: format!("ceilings{ceiling} that cooperating programs keep"),
    };
    let timeslice = Realization {
        mechanism: "timeslice",
        tenants: memory_admits.unwrap_or(most).min(most),
        remark: "one program computes at a time, and nothing bounds memory".to_owned(),
    };
    vec![mig, mps, timeslice]
}

fn small(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn demand(memory_mib: u64, tenths: u16) -> Demand {
        Demand { memory_mib: Some(memory_mib), compute: Percentage::of_tenths(tenths) }
    }

    /// A model of 2 billion parameters: 2 GB of weights and 4 GB of cache, 12 % of an 80 GB GPU.
    #[test]
    fn compute_binds_a_small_model_on_an_80_gb_gpu() {
        let found = packing(&demand(6 * 1024, 120), 80 * 1024, Some(("1g.10gb", 7)));
        assert_eq!((found.memory_admits, found.compute_admits), (Some(13), Some(8)));
        assert_eq!((found.most_tenants, found.binds), (Some(8), Some(Resource::Compute)));
        assert_eq!(found.utilization_percent, Some(96));
        let realised: Vec<_> = found.mechanisms.iter().map(|one| (one.mechanism, one.tenants)).collect();
        assert_eq!(realised, [("mig", 7), ("mps", 8), ("timeslice", 8)]);
    }

    #[test]
    fn memory_binds_a_large_model() {
        let found = packing(&demand(30 * 1024, 120), 80 * 1024, Some(("3g.40gb", 2)));
        assert_eq!((found.most_tenants, found.binds), (Some(2), Some(Resource::Memory)));
    }

    #[test]
    fn unknown_demand_has_no_bound() {
        let found = packing(&Demand::default(), 80 * 1024, None);
        assert_eq!((found.most_tenants, found.binds, found.mechanisms.len()), (None, None, 0));
    }

    proptest! {
        #[test]
        fn packed_tenants_fit_and_one_more_does_not(memory in 1u64..200_000, tenths in 1u16..=1000, total in 1u64..200_000) {
            let found = packing(&demand(memory, tenths), total, None);
            let most = u64::from(found.most_tenants.unwrap());
            let part = u64::from(tenths);
            prop_assert!(most * memory <= total && most * part <= 1000);
            prop_assert!((most + 1) * memory > total || (most + 1) * part > 1000);
            prop_assert!(found.utilization_percent.unwrap() <= 100);
            prop_assert!(found.mechanisms.iter().all(|one| u64::from(one.tenants) <= most));
        }
    }
}
