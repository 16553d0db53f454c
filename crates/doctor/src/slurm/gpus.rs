//! The GPUs that Slurm uses, and those that gpushd knows.

use gpush_api::{GpuIndex, LeaseOwner};
use gpush_core::slurm::{
    GresDevice,
    numbering::{Numbering, count, is_whole, used},
};

use crate::{Agent, Area, Finding};

/// Checks that gpush knows which GPU has which index, if slurmd finds the devices itself. Without
/// this knowledge, jobs fail.
pub(super) fn order(agent: &Agent, path: &str, numbering: &Numbering, has_owner: bool) -> Option<Finding> {
    let (gpus, _) = agent.gpus();
    let cause = match numbering {
        Numbering::Listed(_) => return None,
        Numbering::Unknown(why) => why.to_string(),
        // Without gpushd, the devices are not known.
        Numbering::Nvml { .. } if gpus.is_empty() => return None,
        Numbering::Nvml { devices, minors } => {
            if used(gpus, *devices, minors).is_some() || !gpus.iter().any(is_whole) {
                return None;
            }
            let total: usize = gpus.iter().map(count).sum();
            let listed = if minors.is_empty() { "" } else { ", and gres.conf lists other GPUs" };
            format!(
                "slurm.conf counts {devices} GPUs and MIG devices for the node, and the driver counts {total}{listed}"
            )
        }
    };
    let message = "gpush cannot match Slurm's GPU indexes to GPUs, so jobs that need gpush on whole GPUs fail";
    let hint = format!(
        "write the lines that `gpushctl slurm gres-conf` prints to {path}, and its Gres= to slurm.conf; unless it \
        prints MIG devices, also set AutoDetect=off in {path}; then restart slurmctld and slurmd"
    );
    let found = if has_owner { Finding::problem } else { Finding::warning };
    Some(found(Area::Slurm, message, hint).cause(cause))
}

/// Reports GPUs of Slurm that users can also lease. A job and a user's lease could then have the
/// same GPU.
pub(super) fn leased_by_users(agent: &Agent, path: &str, numbering: &Numbering) -> Option<Finding> {
    let (gpus, rules) = agent.gpus();
    let minors: Option<Vec<u32>> = match numbering {
        Numbering::Listed(conf) => Some(conf.gpus().iter().filter_map(GresDevice::minor).collect()),
        Numbering::Nvml { minors, .. } if !minors.is_empty() => Some(minors.clone()),
        // slurmd uses every GPU that it finds, so check all GPUs.
        Numbering::Nvml { .. } | Numbering::Unknown(_) => None,
    };
    let of_users = rules.iter().filter(|rule| rule.lease.is_some_and(|terms| terms.owner == LeaseOwner::Users));
    let of_users: Vec<GpuIndex> = of_users.flat_map(|rule| rule.claims.iter().copied()).collect();
    let of_both = gpus.iter().filter(|gpu| minors.as_ref().is_none_or(|minors| minors.contains(&gpu.minor)));
    let of_both: Vec<String> =
        of_both.filter(|gpu| of_users.contains(&gpu.index)).map(|gpu| gpu.index.to_string()).collect();
    if of_both.is_empty() {
        return None;
    }
    let list = of_both.join(", ");
    let message = format!("a Slurm job and the lease of a user can have the same GPU at the same time: GPU {list}");
    let cause = format!("{path} gives these GPUs to Slurm, but their rules in gpush lack owner = \"slurm\"");
    let config = agent.config_path();
    let hint = format!(
        "add owner = \"slurm\" to the rules in {config} and run `gpushctl config reload`; or remove the GPUs from \
        gres.conf: `gpushctl slurm gres-conf GPU…` prints the lines of the GPUs that you name"
    );
    Some(Finding::warning(Area::Slurm, message, hint).cause(cause))
}
