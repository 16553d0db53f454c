//! Warnings about quotas under which this host grants no lease: no allowed GPU offers a permitted share.
//!
//! gpushd refuses each request of such a quota's users, with the reason. These warnings tell the administrator before a
//! request fails.

use std::collections::BTreeSet;

use gpush_api::{Gpu, GpuIndex, LeaseKind, LeaseOwner, LeaseShare, Mode, MpsPolicy};

use super::{DesiredState, claims, desired_states};
use crate::{
    config::{Config, QuotaRule, Rule},
    layout::Entry,
    lease::{
        placement::nominal_mib,
        quota::{MemoryAmount, Subject},
        request::DefaultRequest,
    },
};

/// What one GPU offers when it has its desired state.
struct Offer {
    kind: LeaseKind,
    /// Profile of the MIG device.
    profile: Option<OfferedProfile>,
    /// Memory of the GPU or MIG device in MiB.
    memory_mib: u64,
    /// Maximum MPS percentage of one lease, in tenths of a percent.
    mps_tenths: u32,
    /// Whether only Slurm's hooks lease the GPU.
    is_for_jobs: bool,
}

/// The profile of an offered MIG device.
struct OfferedProfile {
    /// `3g.40gb`, or `1c.3g.40gb` for a part of the GPU instance.
    name: String,
    /// Compute slices of the GPU instance.
    slices: u8,
    /// Whether the device is a part of its GPU instance.
    is_part: bool,
    /// Whether leases create the devices: then each compute profile of the GPU instance profile is offered too.
    is_dynamic: bool,
}

/// Returns one sentence for each limit of a quota that permits no lease on this host.
pub(super) fn without_effect(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let of_gpu = |((desired, gpu), claimed): ((&DesiredState, &Gpu), Option<usize>)| {
        let rule = claimed.and_then(|position| config.rules.get(position));
        let mut offers = offers(desired, gpu)?;
        // The shares of Slurm's jobs come from Slurm, so nothing is known about them.
        let is_slurm = rule.is_some_and(|rule| rule.lease.is_some_and(|terms| terms.owner == LeaseOwner::Slurm));
        if is_slurm {
            offers.iter_mut().for_each(|offer| offer.is_for_jobs = true);
        }
        let most = rule.map(|rule| most_tenths(&rule.mps_policy()));
        offers.iter_mut().for_each(|offer| offer.mps_tenths = most.unwrap_or(0));
        Some((gpu.index, offers))
    };
    let states = desired_states(config, gpus);
    let offers: Option<Vec<(GpuIndex, Vec<Offer>)>> =
        states.iter().zip(gpus).zip(claims(config, gpus)).map(of_gpu).collect();
    let offers = offers.unwrap_or_default();
    let nothing_offered = offers.iter().all(|(_, of_gpu)| of_gpu.is_empty());
    let mut findings = Vec::new();
    for (position, quota) in config.quotas.iter().enumerate() {
        let mut find = |text: String| findings.push(format!("quota {}: {text}", position + 1));
        closed_to(config, quota, gpus).into_iter().for_each(&mut find);
        if !nothing_offered {
            findings_of(quota, gpus, &offers).into_iter().for_each(find);
        }
    }
    findings
}

fn findings_of(quota: &QuotaRule, gpus: &[Gpu], offers: &[(GpuIndex, Vec<Offer>)]) -> Vec<String> {
    let limits = quota.limits(gpus);
    let is_allowed = |gpu: &GpuIndex| limits.gpus.as_ref().is_none_or(|allowed| allowed.contains(gpu));
    let offered: Vec<&Offer> =
        offers.iter().filter(|(gpu, _)| is_allowed(gpu)).flat_map(|(_, of_gpu)| of_gpu).collect();
    if limits.gpus.as_ref().is_some_and(BTreeSet::is_empty) || limits.leases == Some(0) {
        // Selectors without a GPU are reported elsewhere. A quota without leases is on purpose.
        return Vec::new();
    }
    if offered.iter().any(|offer| offer.is_for_jobs) {
        return Vec::new();
    }
    if offered.is_empty() {
        return vec!["`gpus` allows only GPUs that no rule offers to leases".to_owned()];
    }
    let mut findings = Vec::new();
    let permitted: Vec<&Offer> = offered
        .into_iter()
        .filter(|offer| limits.kinds.as_ref().is_none_or(|kinds| kinds.contains(&offer.kind)))
        .collect();
    if permitted.is_empty() {
        let kinds: Vec<&str> = limits.kinds.iter().flatten().map(|kind| kind.name()).collect();
        return vec![format!("no GPU that it allows offers a lease of kind {}", kinds.join(" or "))];
    }
    if let Some(MemoryAmount::Mib(most)) = limits.memory {
        // A share of a daemon or of the time of a GPU counts as less than its device.
        let smallest = |offer: &&Offer| match offer.kind {
            LeaseKind::Mig | LeaseKind::Whole => offer.memory_mib,
            LeaseKind::Mps | LeaseKind::Timeslice => 0,
        };
        let least = permitted.iter().map(smallest).min().unwrap_or(0);
        if least > most {
            findings.push(format!("`memory` is {most} MiB, but each device that it allows has at least {least} MiB"));
        }
    }
    let is_mps = permitted.iter().all(|offer| offer.kind == LeaseKind::Mps);
    let least = permitted.iter().map(|offer| offer.mps_tenths).min().filter(|_| is_mps && quota.default.is_none());
    if let (Some(most), Some(least)) = (quota.mps_percentage, least)
        && least > most.saturating_mul(10)
    {
        findings.push(format!(
            "`mps_percentage` is {most}, but a lease without a percentage gets {} %, so gpushd refuses it; write \
             default = \"mps={most}\"",
            written_tenths(least)
        ));
    }
    if let Some(default) = &quota.default
        && !permitted.iter().any(|offer| meets(offer, &default.share))
    {
        let DefaultRequest { share, .. } = default;
        let text = DefaultRequest { share: share.clone(), duration_s: None }.text();
        let offered = permitted.first().map_or_else(String::new, |offer| {
            let share = match (&offer.profile, offer.kind) {
                (Some(profile), LeaseKind::Mig) => format!("mig={}", profile.name),
                (_, LeaseKind::Mps) => format!("mps={}", written_tenths(offer.mps_tenths)),
                (_, kind) => kind.name().to_owned(),
            };
            format!("; write for example default = \"{share}\"")
        });
        findings.push(format!("no GPU that it allows offers its default, {text}{offered}"));
    }
    findings
}

fn written_tenths(tenths: u32) -> String {
    match tenths % 10 {
        0 => (tenths / 10).to_string(),
        tenth => format!("{}.{tenth}", tenths / 10),
    }
}

/// Returns a sentence if the rules of all GPUs that a quota allows permit only other groups.
fn closed_to(config: &Config, quota: &QuotaRule, gpus: &[Gpu]) -> Option<String> {
    let groups: Option<Vec<&String>> = quota
        .subjects
        .iter()
        .map(|subject| match subject {
            Subject::Group(name) => Some(name),
            // The groups of a user are not known here.
            Subject::User(_) | Subject::Everybody => None,
        })
        .collect();
    let groups = groups?;
    let allowed = quota.limits(gpus).gpus;
    let claimed = gpus.iter().zip(claims(config, gpus));
    let rules: Vec<(usize, &Rule)> = claimed
        .filter(|(gpu, _)| allowed.as_ref().is_none_or(|allowed| allowed.contains(&gpu.index)))
        .filter_map(|(_, by)| by.and_then(|position| Some((position, config.rules.get(position)?))))
        .filter(|(_, rule)| rule.lease.is_some())
        .collect();
    let is_closed = |(_, rule): &(usize, &Rule)| {
        let access = rule.access.as_ref();
        access.is_some_and(|access| !groups.iter().any(|group| access.groups.contains(group)))
    };
    let (position, first) = rules.first().filter(|_| rules.iter().all(is_closed))?;
    let only = first.access.as_ref()?;
    let label = first.label(*position);
    Some(format!("its users can lease no GPU that it allows, because {label} permits only {only}"))
}

/// Returns the maximum percentage of one lease, in tenths of a percent.
fn most_tenths(policy: &MpsPolicy) -> u32 {
    u32::from(policy.settings.percentage.tenths()).min(policy.total_percentage.saturating_mul(10))
}

/// Returns what a GPU offers; `None` if its profiles are not known.
fn offers(desired: &DesiredState, gpu: &Gpu) -> Option<Vec<Offer>> {
    let whole =
        |kind| vec![Offer { kind, profile: None, memory_mib: gpu.memory.total_mib, mps_tenths: 0, is_for_jobs: false }];
    match desired.mode {
        Mode::NoRule | Mode::Unmanaged => Some(Vec::new()),
        Mode::Exclusive => Some(whole(LeaseKind::Whole)),
        Mode::Mps => Some(whole(LeaseKind::Mps)),
        Mode::Timeslice => Some(whole(LeaseKind::Timeslice)),
        Mode::Mig => {
            let Some(mig) = &gpu.mig else { return Some(Vec::new()) };
            if mig.profiles.is_empty() {
                return None;
            }
            let dynamic =
                desired.dynamic.then(|| mig.profiles.iter().map(|one| (LeaseKind::Mig, one.name.as_str(), None)));
            let fixed = desired.layout.iter().flat_map(|layout| &layout.entries).map(kind_of);
            let devices = dynamic.into_iter().flatten().chain(fixed).filter_map(|(kind, profile, compute)| {
                let of = mig.profiles.iter().find(|one| one.name == profile)?;
                let name = compute.map_or_else(|| profile.to_owned(), |slices| format!("{slices}c.{profile}"));
                let profile =
                    OfferedProfile { name, slices: of.slices, is_part: compute.is_some(), is_dynamic: desired.dynamic };
                Some(Offer {
                    kind,
                    profile: Some(profile),
                    memory_mib: of.memory_mib,
                    mps_tenths: 0,
                    is_for_jobs: false,
                })
            });
            Some(devices.collect())
        }
    }
}

/// Returns the kind of lease, the profile and the compute slices of the MIG devices of an entry.
fn kind_of(entry: &Entry) -> (LeaseKind, &str, Option<u8>) {
    let kind = if entry.share.is_some() { LeaseKind::Mps } else { LeaseKind::Mig };
    (kind, entry.profile.as_str(), entry.compute_slices)
}

/// Returns whether an offer meets a requested share.
fn meets(offer: &Offer, share: &LeaseShare) -> bool {
    if share.kind().is_some_and(|kind| kind != offer.kind) {
        return false;
    }
    match (share, &offer.profile) {
        (LeaseShare::MigProfile { profile: wanted }, Some(offered)) => {
            offered.name == *wanted
                || (offered.is_dynamic && wanted.split_once("c.").is_some_and(|(_, base)| base == offered.name))
        }
        (LeaseShare::MigSize { memory_mib, slices }, Some(offered)) => {
            let nominal = nominal_mib(&offered.name).unwrap_or(0).max(offer.memory_mib);
            !offered.is_part
                && memory_mib.is_none_or(|least| nominal >= least)
                && slices.is_none_or(|least| offered.slices >= least)
        }
        (LeaseShare::MigProfile { .. } | LeaseShare::MigSize { .. }, None) => false,
        (LeaseShare::Mps { percentage, memory_limit_mib, .. }, _) => {
            memory_limit_mib.is_none_or(|wanted| wanted.mib() <= offer.memory_mib)
                && percentage.is_none_or(|wanted| u32::from(wanted.tenths()) <= offer.mps_tenths)
        }
        (LeaseShare::Default {} | LeaseShare::Timeslice {} | LeaseShare::Whole {}, _) => true,
    }
}

#[cfg(test)]
mod tests {
    use crate::{config::Config, desired::findings, preset};

    const RULES: &str = "[[gpu]]\nmatch = \"0-1\"\nmode = \"mig\"\nlayout = [\"1g.10gb*3\", \"3g.40gb:mps\"]\n\
                         [[gpu]]\nmatch = \"2\"\nmode = \"mig\"\nlayout = \"dynamic\"\n\
                         [[gpu]]\nmatch = \"3\"\nmode = \"exclusive\"\n\
                         [[gpu]]\nmatch = \"4\"\nmode = \"timeslice\"\ntimeslice = { replicas = 4 }\n\
                         [[gpu]]\nmatch = \"5\"\nmode = \"mps\"\nmps = { percentage = 50 }\n\
                         [[gpu]]\nmatch = \"6\"\nmode = \"exclusive\"\nowner = \"slurm\"\n";

    fn of(quota: &str) -> Vec<String> {
        let text = format!("{RULES}[[quota]]\neverybody = true\n{quota}\n");
        findings::remarks(&Config::parse(&text, "config.toml").unwrap(), &preset::gpus("dgx-a100").unwrap())
    }

    #[test]
    fn quota_that_permits_no_lease_is_found() {
        for (quota, finding) in [
            ("gpus = \"7\"", "quota 1: `gpus` allows only GPUs that no rule offers to leases"),
            ("gpus = \"3\"\nkinds = [\"mig\"]", "quota 1: no GPU that it allows offers a lease of kind mig"),
            (
                "gpus = \"0\"\nkinds = [\"whole\", \"timeslice\"]",
                "quota 1: no GPU that it allows offers a lease of kind timeslice or whole",
            ),
            (
                "gpus = \"0\"\nkinds = [\"mig\"]\nmemory = \"4G\"",
                "quota 1: `memory` is 4096 MiB, but each device that it allows has at least 9728 MiB",
            ),
            (
                "gpus = \"0\"\ndefault = \"mig=2g.20gb\"",
                "quota 1: no GPU that it allows offers its default, mig=2g.20gb; write for example default = \"mig=1g.10gb\"",
            ),
            (
                "gpus = \"2\"\ndefault = \"mig=9g.90gb\"",
                "quota 1: no GPU that it allows offers its default, mig=9g.90gb; write for example default = \"mig=1g.10gb\"",
            ),
            (
                "gpus = \"0\"\ndefault = \"memory=30G\"",
                "quota 1: no GPU that it allows offers its default, memory=30G; write for example default = \"mig=1g.10gb\"",
            ),
            (
                "gpus = \"2-4\"\ndefault = \"mps=25\"",
                "quota 1: no GPU that it allows offers its default, mps=25; write for example default = \"mig=1g.10gb\"",
            ),
            (
                "gpus = \"5\"\ndefault = \"mps=75\"",
                "quota 1: no GPU that it allows offers its default, mps=75; write for example default = \"mps=50\"",
            ),
            (
                "gpus = \"5\"\nmps_percentage = 20",
                "quota 1: `mps_percentage` is 20, but a lease without a percentage gets 50 %, so gpushd refuses it; write \
                 default = \"mps=20\"",
            ),
        ] {
            assert_eq!(of(quota), [finding], "{quota}");
        }
    }

    #[test]
    fn quota_that_permits_a_lease_has_no_finding() {
        for quota in [
            "leases = 2",
            "leases = 0",
            "kinds = [\"mps\"]",
            "memory = \"10G\"",
            "kinds = [\"mps\"]\nmemory = \"1G\"",
            "memory = \"0.5 GPUs\"",
            "default = \"mig=1g.10gb,for=4h\"",
            "gpus = \"2\"\ndefault = \"mig=2g.20gb\"",
            "gpus = \"2\"\ndefault = \"mig=1c.2g.20gb\"",
            "gpus = \"0\"\ndefault = \"memory=10G\"",
            "default = \"mps=25,memory=8G\"",
            "default = \"whole\"",
            "default = \"timeslice\"",
            "gpus = \"6\"\nkinds = [\"mps\"]",
        ] {
            assert_eq!(of(quota), [""; 0], "{quota}");
        }
    }

    #[test]
    fn quota_whose_rules_permit_other_groups_is_found() {
        let find = |group: &str, gpus: &str| {
            let text = format!(
                "[[gpu]]\nmatch = \"0\"\nmode = \"exclusive\"\ngroups = [\"ml\"]\n\
                 [[gpu]]\nmatch = \"1\"\nmode = \"exclusive\"\n\
                 [[quota]]\ngroups = [\"{group}\"]\ngpus = {gpus}\n"
            );
            let config = Config::parse(&text, "config.toml").unwrap();
            super::without_effect(&config, &preset::gpus("dgx-a100").unwrap())
        };
        let found = find("bio", "\"0\"");
        assert!(found.len() == 1 && found[0].contains("because rule 1 permits only"), "{found:?}");
        assert_eq!(find("ml", "\"0\""), [""; 0]);
        assert_eq!(find("bio", "\"0-1\""), [""; 0]);
    }

    /// gpushd does not know the profiles of a GPU that it cannot read.
    #[test]
    fn quota_of_gpus_with_unknown_profiles_has_no_finding() {
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        for gpu in &mut gpus {
            gpu.mig.as_mut().unwrap().profiles = std::sync::Arc::default();
        }
        let text = format!("{RULES}[[quota]]\neverybody = true\ngpus = \"0\"\nkinds = [\"whole\"]\n");
        assert_eq!(findings::remarks(&Config::parse(&text, "config.toml").unwrap(), &gpus), [""; 0]);
    }
}
