//! gres.conf and the GPUs of the host.

use std::{collections::BTreeMap, fs};

use gpush_core::slurm::{AutoDetect, GpuPlugin, GresConf, GresDevice, node_gres, numbering::Numbering};

use super::{counts, daemon, files::Files, gpus, lines};
use crate::{Agent, Area, Finding, Host, host::Process};

const PRINT: &str = "compare gres.conf with the output of `gpushctl slurm gres-conf`";

pub(super) fn examine(host: &Host, agent: &Agent, files: &Files, has_owner: bool) -> Vec<Finding> {
    let Some((node, gres)) = files.node(host) else {
        let message = format!("{} has no NodeName for this host", files.path);
        let hint = "add the lines that `gpushctl slurm gres-conf` prints";
        return vec![Finding::warning(Area::Slurm, message, hint)];
    };
    let mut findings = Vec::new();
    let counts = totals(&gres);
    if counts.contains_key("mps") && counts.contains_key("shard") {
        let message = format!("node {node} has both gres/mps and gres/shard, so Slurm computes wrong percentages");
        let hint = format!(
            "remove `mps` or `shard` from Gres= of the node in {}, then restart slurmctld and slurmd",
            files.path
        );
        findings.push(Finding::problem(Area::Slurm, message, hint).cause(format!("Gres={gres}")));
    }
    findings.extend(counts::gres_types(files, &node, &gres));
    let path = files.sibling("gres.conf");
    findings.extend(daemon::examine(host, &path, has_owner));
    let text = host.read(&path).unwrap_or_default();
    let conf = match GresConf::parse(&text, &node, |name| host.read(files.sibling(name))) {
        Ok(conf) => conf,
        Err(error) => {
            let message = format!("{path} cannot be used: {error}");
            findings.push(Finding::problem(Area::Slurm, message, PRINT));
            return findings;
        }
    };
    for unknown in &conf.unknown_keys {
        let message = format!("{path}: {}: key `{}` is not known", unknown.place, unknown.key);
        findings.push(Finding::warning(
            Area::Slurm,
            message,
            "check the file with `slurmd -G`, which refuses keys that it does not know",
        ));
    }
    // If slurmd's GPU plugin is not known, for example because slurmd does not run, assume that slurmd can load NVML's
    // library.
    let assumed = (conf.auto_detect == Some(AutoDetect::Nvml)).then_some(GpuPlugin::Nvml);
    let plugin = gpu_plugin(host).or(assumed);
    let configured = counts.get("gpu").copied().unwrap_or_default();
    let listed = conf.gpus().len() as u64;
    let uses_lines = conf.auto_detect == Some(AutoDetect::Nvml) && plugin == Some(GpuPlugin::Other);
    if uses_lines {
        let message = format!("{path} has AutoDetect=nvml, but the running slurmd has not loaded NVML");
        let cause = format!("slurmd uses the lines of the file instead: the file lists {listed} of {configured} GPUs");
        let hint = "if the file was changed after slurmd started, restart slurmd; otherwise install Slurm's NVML \
            plugin and the library libnvidia-ml.so, or write AutoDetect=off and list all GPUs, then restart slurmd";
        findings.push(Finding::warning(Area::Slurm, message, hint).cause(cause));
    }
    let (auto_detect, all) = (conf.auto_detect.clone(), conf.clone());
    let numbering = Numbering::of(conf, Some(&gres), plugin);
    // Report GPUs only if slurm.conf gives some to the node: a gres.conf for all nodes can also list GPUs of a node on
    // which Slurm uses no GPU.
    if ["gpu", "mps", "shard"].iter().any(|name| counts.get(*name).is_some_and(|count| *count > 0)) {
        findings.extend(gpus::order(agent, &path, &numbering, has_owner));
        findings.extend(gpus::leased_by_users(agent, &path, &numbering));
        findings.extend(lines::detected_types(agent, &files.path, &gres, auto_detect.as_ref()));
    }
    // If the numbering is not `Listed`, slurmd finds the devices itself and compares them with gres.conf. So the checks
    // below do not apply.
    let Numbering::Listed(conf) = numbering else { return findings };
    // If `uses_lines` is true, the finding above already has both numbers, and slurmd may have read an older file.
    if configured > listed && !uses_lines {
        let message =
            format!("gres.conf lists fewer GPUs for node {node} than slurm.conf, so Slurm marks the node as invalid");
        let cause = format!("slurm.conf has Gres={gres}, but {path} lists {listed} GPUs for the node");
        findings.push(Finding::problem(Area::Slurm, message, PRINT).cause(cause));
    }
    if configured == listed {
        findings.extend(counts::types(files, &path, &node, &gres, &all));
    }
    findings.extend(counts::unused(files, &path, &node, &gres, &all));
    let minors: Vec<u32> = conf.gpus().iter().filter_map(GresDevice::minor).collect();
    let has_files = conf.gpus().iter().all(|gpu| host.has(&gpu.file));
    if configured > 0 && !uses_lines {
        // The other findings already name a line that is missing or wrong.
        findings
            .extend((configured == listed && has_files).then(|| lines::without_line(agent, &path, &minors)).flatten());
        if !(counts.contains_key("mps") && counts.contains_key("shard")) {
            findings.extend(counts::shares(&path, &node, &gres, &all));
            findings.extend(lines::modes(agent, &path, &gres, &minors));
        }
    }
    findings.extend(lines::types(host, agent, &path, &conf));
    for file in conf.gpus().iter().flat_map(|gpu| &gpu.files).filter(|file| !host.has(file)) {
        let message = format!("{path} names {file}, which does not exist, so slurmd does not start");
        findings.push(Finding::problem(Area::Slurm, message, PRINT));
    }
    findings.extend(order(host, &path, conf.gpus()));
    findings
}

/// Compares two orders of the GPUs. The indexes in Slurm's CUDA_VISIBLE_DEVICES are in the order of gres.conf, but CUDA
/// reads indexes in the order of PCI addresses.
fn order(host: &Host, path: &str, gpus: &[GresDevice]) -> Option<Finding> {
    let here: Vec<u32> = gpus.iter().filter(|gpu| gpu.files.len() == 1).filter_map(GresDevice::minor).collect();
    // The names of the directories are PCI addresses. `names` returns them sorted.
    let by_address: Vec<u32> = host
        .names("proc/driver/nvidia/gpus")
        .iter()
        .filter_map(|address| {
            let text = host.read(format!("proc/driver/nvidia/gpus/{address}/information"))?;
            let line =
                text.lines().find_map(|line| line.strip_prefix("Device Minor:").map(str::trim).map(str::to_owned))?;
            line.parse().ok()
        })
        .filter(|minor| here.contains(minor))
        .collect();
    if by_address.len() != here.len() || by_address == here {
        return None;
    }
    let list = |minors: &[u32]| minors.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let message = format!(
        "{path} lists the GPUs in a different order than CUDA, so Slurm sets CUDA_VISIBLE_DEVICES to wrong GPUs"
    );
    let cause =
        format!("order of the minor numbers: {} in gres.conf, {} by PCI address", list(&here), list(&by_address));
    let hint = "jobs with a lease get UUIDs and need no change; for other jobs, write the lines to gres.conf in the \
        order of `gpushctl slurm gres-conf`";
    Some(Finding::warning(Area::Slurm, message, hint).cause(cause))
}

/// Returns the GPU plugin of the running slurmd; `None` if the plugin is not known.
fn gpu_plugin(host: &Host) -> Option<GpuPlugin> {
    let is_slurmd = |process: &Process| process.name == "slurmd" && host.owner(process.pid) == Some(0);
    let slurmds = host.processes().into_iter().filter(is_slurmd);
    GpuPlugin::agreed(
        slurmds.filter_map(|slurmd| fs::read_to_string(host.path(format!("proc/{}/maps", slurmd.pid))).ok()),
    )
}

/// Returns the count of each GRES in `Gres=`.
fn totals(gres: &str) -> BTreeMap<&str, u64> {
    let mut counts = BTreeMap::new();
    for gres in node_gres(gres) {
        let count: &mut u64 = counts.entry(gres.name).or_default();
        *count = count.saturating_add(gres.count);
    }
    counts
}
