//! The counts of GRES in slurm.conf, compared with gres.conf, and combinations that Slurm does not support.

use std::collections::{BTreeMap, BTreeSet};

use gpush_core::slurm::{GresConf, node_gres};

use super::files::Files;
use crate::{Area, Finding};

/// Reports gres/gpu, gres/mps and gres/shard of a node that are not in `GresTypes`.
pub(super) fn gres_types(files: &Files, node: &str, gres: &str) -> Vec<Finding> {
    let known: BTreeSet<&str> = files.all("GresTypes").into_iter().map(str::trim).collect();
    let is_unknown = |name: &&str| ["gpu", "mps", "shard"].contains(name) && !known.contains(name);
    let used = node_gres(gres).filter(|one| one.count > 0).map(|one| one.name).filter(is_unknown);
    let used: BTreeSet<&str> = used.collect();
    let unknown = used.into_iter().map(|name| {
        let message =
            format!("GresTypes in {} lacks {name}, so Slurm does not accept Gres= of node {node}", files.path);
        let all: Vec<&str> = known.iter().copied().chain([name]).collect();
        let hint = format!(
            "set GresTypes={} in {} on all hosts, then restart slurmctld and slurmd",
            all.join(","),
            files.path
        );
        Finding::problem(Area::Slurm, message, hint).cause(format!("Gres={gres}"))
    });
    unknown.collect()
}

/// Compares the number of GPUs of each type. The caller has compared the total numbers.
pub(super) fn types(files: &Files, path: &str, node: &str, gres: &str, conf: &GresConf) -> Option<Finding> {
    let lower = |text: &str| text.to_ascii_lowercase();
    let mut configured: BTreeMap<String, u64> = BTreeMap::new();
    for one in node_gres(gres).filter(|one| one.name == "gpu") {
        *configured.entry(lower(one.gres_type?)).or_default() += one.count;
    }
    let mut listed: BTreeMap<String, u64> = BTreeMap::new();
    for gpu in conf.gpus() {
        *listed.entry(gpu.gres_type.as_deref().map(lower).unwrap_or_default()).or_default() += 1;
    }
    let differ = |(name, count): (&String, &u64)| listed.get(name).copied().unwrap_or_default() < *count;
    if !configured.iter().any(differ) {
        return None;
    }
    let list = |counts: &BTreeMap<String, u64>| {
        let word = |(name, count): (&String, &u64)| {
            if name.is_empty() { format!("{count} without a type") } else { format!("{count} of type {name}") }
        };
        counts.iter().map(word).collect::<Vec<_>>().join(", ")
    };
    let message = format!("the types of the GPUs of node {node} differ, so Slurm marks the node as invalid");
    let cause = format!("{} has {}, and {path} has {}", files.path, list(&configured), list(&listed));
    let hint =
        "write the lines that `gpushctl slurm gres-conf` prints into both files, then restart slurmctld and slurmd";
    Some(Finding::problem(Area::Slurm, message, hint).cause(cause))
}

/// Reports GPUs of gres.conf that slurm.conf does not give to the node.
pub(super) fn unused(files: &Files, path: &str, node: &str, gres: &str, conf: &GresConf) -> Option<Finding> {
    let configured: u64 = node_gres(gres).filter(|one| one.name == "gpu").map(|one| one.count).sum();
    let listed = conf.gpus().len() as u64;
    if configured == 0 || listed <= configured {
        return None;
    }
    let message = format!("Slurm does not use all GPUs of node {node} that {path} lists");
    let cause = format!("{} has Gres={gres}, but {path} lists {listed} GPUs for the node", files.path);
    let hint = format!("raise the count in Gres= of the node in {}, then restart slurmctld and slurmd", files.path);
    Some(Finding::warning(Area::Slurm, message, hint).cause(cause))
}

/// Reports gres/mps and gres/shard in combinations that Slurm does not serve.
pub(super) fn shares(path: &str, node: &str, gres: &str, conf: &GresConf) -> Vec<Finding> {
    let count = |name: &str| node_gres(gres).filter(|one| one.name == name).map(|one| one.count).sum::<u64>();
    let mut findings = Vec::new();
    let shared: Vec<&str> = ["mps", "shard"].into_iter().filter(|name| count(name) > 0).collect();
    let types = conf.gpus().iter().filter(|gpu| gpu.files.len() > 1).filter_map(|gpu| gpu.gres_type.as_deref());
    let mig_types: BTreeSet<String> = types.map(str::to_ascii_lowercase).collect();
    if let [name, ..] = shared.as_slice()
        && mig_types.len() > 1
    {
        let message =
            format!("node {node} has gres/{name} and MIG devices of several types, which Slurm counts wrongly");
        let types = mig_types.into_iter().collect::<Vec<_>>().join(", ");
        let hint = format!("remove {name} from Gres= of the node and from {path}, or give all MIG devices one type");
        findings.push(Finding::problem(Area::Slurm, message, hint).cause(format!("types: {types}")));
    }
    let mps: Vec<_> = conf.records.iter().filter(|record| record.name.eq_ignore_ascii_case("mps")).collect();
    let files: usize = mps.iter().map(|record| record.files.len()).sum();
    let gpus = if mps.iter().any(|record| record.files.is_empty()) { conf.gpus().len() } else { files };
    if count("mps") > 0 && gpus > 1 {
        let message = format!("gres/mps is on {gpus} GPUs of node {node}, but Slurm uses it on only one GPU at a time");
        let hint = format!(
            "in {path}, name one GPU in the line of mps (Name=mps Count=100 File=/dev/nvidia0); for several GPUs, use \
             gres/shard and the mode mps of gpush"
        );
        findings.push(Finding::warning(Area::Slurm, message, hint));
    }
    findings
}
