//! `gpushctl slurm gres-conf` for administrators, and `check-spec` for the SPANK plugin.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, GpuIndex, LeaseOwner};
use gpush_core::{lease::request::parse, slurm::gres_lines};
use serde_json::json;

use crate::{
    args::{Global, Gpus},
    exit::Outcome,
    output::Output,
};

/// Prints the lines of gres.conf for the GPUs of this node.
pub(super) fn run(global: &Global, which: &Gpus, node: Option<&str>, out: &Output) -> Outcome {
    let node = match node {
        Some(node) => node.to_owned(),
        None => host_name()?,
    };
    super::super::ask(global, async |client| {
        let gpus = client.gpus(false).await?;
        let gpus = super::super::select_of(client, gpus, &which.selectors()).await?;
        let rules = client.config().await?.rules;
        let of_users = rules.iter().filter(|rule| rule.lease.is_some_and(|terms| terms.owner == LeaseOwner::Users));
        let of_users: BTreeSet<GpuIndex> = of_users.flat_map(|rule| &rule.claims).copied().collect();
        let of_users: Vec<GpuIndex> =
            gpus.iter().map(|gpu| gpu.index).filter(|index| of_users.contains(index)).collect();
        let lines = gres_lines(&node, &gpus).leased_by_users(&of_users);
        let value = json!({ "gres_conf": lines.gres_conf(), "node": node, "gres": lines.node_gres() });
        out.show(&value, |_| lines.to_string())?;
        Ok(0)
    })
}

/// Checks the request of a job. Does not need gpushd.
pub(super) fn check(spec: &str) -> Outcome {
    match parse(spec) {
        Ok(_) => Ok(0),
        Err(error) => Err(ApiError::new(Code::BadRequest, error.to_string()).hint(error.hint()).into()),
    }
}

/// Returns the name of this host without its domain, which slurmd uses as NodeName by default.
fn host_name() -> Result<String, ApiError> {
    let unknown =
        || ApiError::new(Code::NotFound, "the name of this host is not known").hint("name the node with --node NAME");
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(|_| unknown())?;
    let name = name.trim().split('.').next().unwrap_or_default();
    if name.is_empty() { Err(unknown()) } else { Ok(name.to_owned()) }
}
