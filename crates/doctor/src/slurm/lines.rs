//! The lines of gres.conf, compared with the GPUs, MIG devices and rules that gpushd knows.

use std::collections::BTreeSet;

use gpush_api::{Gpu, LeaseOwner, Mode};
use gpush_core::slurm::{AutoDetect, GresConf, GresDevice, node_gres};
use gpush_host::capability_files;

use crate::{Agent, Area, Finding, Host};

const PRINT: &str = "write the lines that `gpushctl slurm gres-conf` prints, then restart slurmd";

/// Reports lines whose type or files differ from the device.
pub(super) fn types(host: &Host, agent: &Agent, path: &str, conf: &GresConf) -> Vec<Finding> {
    let (gpus, _) = agent.gpus();
    let of = |device: &GresDevice| gpus.iter().find(|gpu| Some(gpu.minor) == device.minor());
    let mut findings = Vec::new();
    for device in conf.gpus() {
        let (Some(gpu), Some(gres_type)) = (of(device), device.gres_type.as_deref()) else { continue };
        // Another finding names the file.
        if device.files.iter().any(|file| !host.has(file)) {
            continue;
        }
        if device.files.len() > 1 {
            findings.extend(mig_device(host, path, gpu, device, gres_type));
        } else if let Some(model) = model(gres_type)
            && !gpu.name.to_ascii_lowercase().contains(&model)
        {
            let message = format!("{path} gives {} the type {gres_type}, but the GPU is a {}", device.file, gpu.name);
            findings.push(Finding::warning(Area::Slurm, message, PRINT).cause(format!("line {}", device.place)));
        }
    }
    findings
}

/// Reports a MIG device with the type of another profile, and files of a MIG device that does not exist.
fn mig_device(host: &Host, path: &str, gpu: &Gpu, device: &GresDevice, gres_type: &str) -> Option<Finding> {
    let caps: BTreeSet<u32> =
        device.files.iter().filter_map(|file| file.rsplit_once("nvidia-cap")?.1.parse().ok()).collect();
    let known = capability_files::read(&host.path("proc")).ok().filter(|known| !known.minors.is_empty())?;
    let mut instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let found = instances.find(|instance| {
        instance.compute.iter().any(|compute| {
            let is_of = |ci: Option<u32>| {
                let mut all = known.minors.iter();
                all.find(|(one, _)| one.gpu == gpu.minor && one.gi == instance.id && one.ci == ci)
                    .map(|(_, minor)| *minor)
            };
            let of_device: BTreeSet<u32> = [is_of(None), is_of(Some(compute.id))].into_iter().flatten().collect();
            of_device == caps
        })
    });
    let Some(instance) = found else {
        let files = device.files.join(",");
        let message = format!("{path} names {files}, which are not the files of one MIG device of GPU {}", gpu.index);
        let cause = "Slurm gives jobs a device that does not exist, and their Prolog fails";
        return Some(
            Finding::problem(Area::Slurm, message, PRINT).cause(cause).cause(format!("line {}", device.place)),
        );
    };
    let profile = instance.profile.split('+').next().unwrap_or_default();
    // Without `AutoDetect`, a type may be any word, so only a type with another profile is wrong.
    let lower = gres_type.to_ascii_lowercase();
    let has_a_profile =
        lower.match_indices("g.").any(|(at, _)| lower[..at].ends_with(|one: char| one.is_ascii_digit()));
    if !has_a_profile || lower.contains(&profile.to_ascii_lowercase()) {
        return None;
    }
    let message = format!("{path} gives a MIG device of GPU {} the type {gres_type}, but it is a {profile}", gpu.index);
    let cause = format!("line {}: jobs that request {gres_type} get a {profile}", device.place);
    Some(Finding::problem(Area::Slurm, message, PRINT).cause(cause))
}

/// Returns the model in a type, such as `h100` in `h100mps`; `None` if the type does not begin with a model.
fn model(gres_type: &str) -> Option<String> {
    let lower = gres_type.to_ascii_lowercase();
    let letters = lower.bytes().take_while(u8::is_ascii_lowercase).count();
    let digits = lower[letters..].bytes().take_while(u8::is_ascii_digit).count();
    ((1..=2).contains(&letters) && (1..=4).contains(&digits)).then(|| lower[..letters + digits].to_owned())
}

/// Reports types that slurmd does not find in the names of the GPUs, with `AutoDetect=nvml`.
pub(super) fn detected_types(agent: &Agent, files: &str, gres: &str, auto: Option<&AutoDetect>) -> Option<Finding> {
    let (gpus, _) = agent.gpus();
    if auto != Some(&AutoDetect::Nvml)
        || gpus.is_empty()
        || gpus.iter().any(|gpu| gpu.mig.as_ref().is_some_and(|mig| mig.enabled))
    {
        return None;
    }
    let names: Vec<String> = gpus.iter().map(|gpu| gpu.name.to_ascii_lowercase().replace(' ', "_")).collect();
    let is_known = |one: &str| names.iter().any(|name| name.contains(&one.to_ascii_lowercase()));
    let unknown = node_gres(gres).filter(|one| one.name == "gpu" && one.count > 0).filter_map(|one| one.gres_type);
    let unknown = unknown.into_iter().find(|one| !is_known(one))?;
    let message = format!("{files} has the type {unknown}, which is not a part of the name of any GPU");
    let hint = "with AutoDetect=nvml, use a part of the name, as `slurmd -G` prints it; or write AutoDetect=off";
    let cause = format!(
        "slurmd finds {}",
        names.into_iter().collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(", ")
    );
    Some(Finding::problem(Area::Slurm, message, hint).cause(cause))
}

/// Reports GPUs that only jobs can lease, but that Slurm does not have.
pub(super) fn without_line(agent: &Agent, path: &str, minors: &[u32]) -> Option<Finding> {
    let (gpus, rules) = agent.gpus();
    let of_slurm = rules.iter().filter(|rule| rule.lease.is_some_and(|terms| terms.owner == LeaseOwner::Slurm));
    let claims: Vec<_> = of_slurm.flat_map(|rule| rule.claims.iter().copied()).collect();
    let missing = gpus.iter().filter(|gpu| claims.contains(&gpu.index) && !minors.contains(&gpu.minor));
    let missing: Vec<String> = missing.map(|gpu| gpu.index.to_string()).collect();
    if missing.is_empty() {
        return None;
    }
    let list = missing.join(", ");
    let message = format!("only Slurm jobs can lease GPU {list}, but Slurm does not have it, so it stays unused");
    let hint = format!(
        "add the lines of `gpushctl slurm gres-conf {}` to {path} and its Gres= to slurm.conf; or remove owner = \"slurm\" \
         from the rule in {}",
        missing.join(" "),
        agent.config_path()
    );
    Some(Finding::warning(Area::Slurm, message, hint))
}

/// Reports gres/mps and gres/shard if no GPU of Slurm has a mode that offers such shares.
pub(super) fn modes(agent: &Agent, path: &str, gres: &str, minors: &[u32]) -> Vec<Finding> {
    let (gpus, _) = agent.gpus();
    let of_slurm: Vec<&Gpu> = gpus.iter().filter(|gpu| minors.contains(&gpu.minor)).collect();
    if of_slurm.is_empty() {
        return Vec::new();
    }
    let count = |name: &str| node_gres(gres).filter(|one| one.name == name).map(|one| one.count).sum::<u64>();
    let has = |modes: &[Mode]| of_slurm.iter().any(|gpu| modes.contains(&gpu.mode));
    let kinds: [(&str, &[Mode], &str); 2] =
        [("mps", &[Mode::Mps], "mps"), ("shard", &[Mode::Mps, Mode::Timeslice], "mps or timeslice")];
    let wrong = kinds.into_iter().filter(|(name, modes, _)| count(name) > 0 && !has(modes));
    let findings = wrong.map(|(name, _, modes)| {
        let message = format!("the node has gres/{name}, but no GPU of Slurm has mode {modes}, so gpushd refuses these jobs");
        let hint = format!(
            "set mode = \"{}\" in the rule in {} and run `gpushctl config reload` and `gpushctl apply`; or remove {name} from \
             {path} and from Gres=",
            modes.split(' ').next().unwrap_or_default(),
            agent.config_path()
        );
        Finding::warning(Area::Slurm, message, hint).cause(format!("Gres={gres}"))
    });
    findings.collect()
}
