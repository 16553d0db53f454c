//! The needs of the tenants of a host, and contradictions between them.

use gpush_api::{ApiError, Code, MemoryLimit, Percentage};
use gpush_core::config::{Isolation, Workload};
use serde::Serialize;

use crate::packing_bound::Demand;

/// Who installs and updates the driver of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverOwner {
    /// The administrators of the host.
    Own,
    /// A cloud provider or another team.
    Managed,
}

/// The needs of the tenants. A tenant is a user, a service or a customer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Number of tenants of the host.
    pub tenants: u32,
    /// Isolation that the strictest tenant needs.
    pub isolation: Isolation,
    /// What the programs do.
    pub workload: Workload,
    /// Demand of one tenant on a GPU.
    pub demand: Demand,
    /// Who controls the driver.
    pub driver: DriverOwner,
    /// Whether the memory of each tenant must be bounded. Matters for inference only.
    pub bounded_memory: bool,
    /// Whether the tenants accept a limit of compute that is not exact. Matters if the memory must be bounded.
    pub soft_compute: bool,
    /// Whether the tenants accept that a fault of one ends the programs of others.
    pub shared_faults: bool,
}

impl Needs {
    /// Refuses needs that contradict each other.
    ///
    /// # Errors
    /// There are no tenants, or hard isolation is needed together with something that excludes it.
    pub fn check(&self) -> Result<(), ApiError> {
        if self.tenants == 0 {
            let error = ApiError::new(Code::BadRequest, "there is nothing to advise for 0 tenants");
            return Err(error.hint("give the number of users, services or customers: `--tenants 4`"));
        }
        if self.isolation == Isolation::Hard {
            let contradiction = [
                (self.shared_faults, "--shared-faults yes", "a fault of one tenant then ends the programs of others"),
                (self.soft_compute, "--soft-compute yes", "a program can exceed a soft limit"),
            ];
            if let Some((_, flag, why)) = contradiction.into_iter().find(|(given, ..)| *given) {
                let error = ApiError::new(Code::BadRequest, format!("`{flag}` contradicts `--isolation hard`"));
                return Err(error.cause(why).hint(format!("leave out `{flag}`, or write `--isolation shared`")));
            }
        }
        Ok(())
    }

    /// Refuses a demand that no GPU of the host meets. `gpus` has the name and the memory in MiB of each GPU.
    pub(crate) fn check_memory<'g>(&self, gpus: impl Iterator<Item = (&'g str, u64)>) -> Result<(), ApiError> {
        let Some(memory_mib) = self.demand.memory_mib else { return Ok(()) };
        let Some((name, largest)) = gpus.max_by_key(|(_, total)| *total) else { return Ok(()) };
        if memory_mib <= largest {
            return Ok(());
        }
        let asked = MemoryLimit::of_mib(memory_mib).map_or_else(|| format!("{memory_mib}M"), |limit| limit.to_string());
        let message = format!("a tenant needs {asked} of memory, more than any GPU of the host has");
        let cause = format!("the largest GPU, {name}, has {largest}M");
        let hint = format!("give at most `--memory {largest}M`");
        Err(ApiError::new(Code::BadRequest, message).cause(cause).hint(hint))
    }
}

impl Demand {
    /// Returns the part of a GPU in tenths of a percent; 0 if it is not known.
    pub(crate) fn compute_tenths(&self) -> u32 {
        self.compute.map_or(0, |part: Percentage| u32::from(part.tenths()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns needs of 8 tenants that trust each other.
    pub(crate) fn needs(isolation: Isolation, workload: Workload) -> Needs {
        Needs {
            tenants: 8,
            isolation,
            workload,
            demand: Demand::default(),
            driver: DriverOwner::Own,
            bounded_memory: false,
            soft_compute: false,
            shared_faults: false,
        }
    }

    #[test]
    fn zero_tenants_are_refused() {
        let error = Needs { tenants: 0, ..needs(Isolation::Shared, Workload::Batch) }.check().unwrap_err();
        assert_eq!(error.code, Code::BadRequest);
        assert!(error.hint.is_some_and(|hint| hint.contains("--tenants")));
    }

    #[test]
    fn hard_isolation_contradicts_shared_faults_and_soft_limits() {
        let hard = || needs(Isolation::Hard, Workload::Inference);
        assert!(hard().check().is_ok());
        let error = Needs { shared_faults: true, ..hard() }.check().unwrap_err();
        assert_eq!(error.message, "`--shared-faults yes` contradicts `--isolation hard`");
        let error = Needs { soft_compute: true, ..hard() }.check().unwrap_err();
        assert_eq!(error.message, "`--soft-compute yes` contradicts `--isolation hard`");
        assert!(Needs { shared_faults: true, ..needs(Isolation::Shared, Workload::Batch) }.check().is_ok());
    }

    #[test]
    fn memory_above_the_largest_gpu_is_refused() {
        let demand = Demand { memory_mib: Some(90_000), compute: None };
        let needs = Needs { demand, ..needs(Isolation::Shared, Workload::Batch) };
        let error = needs.check_memory([("A30", 24_576), ("A100", 81_920)].into_iter()).unwrap_err();
        assert_eq!(error.causes, ["the largest GPU, A100, has 81920M"]);
        assert!(needs.check_memory([("A30", 24_576), ("H200", 143_771)].into_iter()).is_ok());
    }
}
