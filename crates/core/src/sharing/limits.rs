//! Limits of a target: its memory and its number of clients.

use gpush_api::{
    ApiError, Architecture, Code, Gpu, GpuInstance, MPS_CLIENTS, MemoryLimit, Mig, Mode, MpsSettings, TimesliceLevel,
};

use super::{SharingTarget, label, mps_unsupported_reason};
use crate::{config::Config, desired};

/// Returns the maximum number of clients of a MIG device. According to NVIDIA's MIG guide, this
/// maximum is proportional to the size of the compute instance. If `wanted` is more than a GPU's
/// default, this function assumes that the driver supports `wanted` clients.
#[must_use]
pub fn max_device_clients(wanted: u32, slices: u8, of: u8) -> u32 {
    let whole = wanted.max(MPS_CLIENTS);
    let part = whole * u32::from(slices) / u32::from(of).max(1);
    wanted.min(part.max(1))
}

/// Refuses settings that exceed the memory of a target. `label` is the target's name in the
/// message.
///
/// # Errors
/// The memory limit is higher than the memory, so the limit would have no effect.
pub fn check_memory_limit(settings: &MpsSettings, memory_mib: u64, label: &str) -> Result<(), ApiError> {
    match excessive_limit(settings, memory_mib) {
        Some(limit) => Err(ApiError::new(Code::BadRequest, limit_message(limit, label, memory_mib))
            .hint(format!("use at most {memory_mib}M, or leave the limit out"))),
        None => Ok(()),
    }
}

/// Returns the problem that [`check_memory_limit`] reports, as a clause.
pub(super) fn memory_problem(target: &SharingTarget) -> Option<String> {
    let memory_mib = target.memory_mib?;
    excessive_limit(&target.policy.settings, memory_mib).map(|limit| limit_message(limit, "the device", memory_mib))
}

/// Returns one sentence for each setting of a rule that its GPU does not support, regardless of the
/// GPU's current instances. So a config check finds such settings before a GPU is shared.
#[must_use]
pub fn unfit_settings(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let mut findings = Vec::new();
    let desired_states = desired::desired_states(config, gpus).into_iter().zip(desired::claims(config, gpus));
    for (gpu, (desired_state, claimed)) in gpus.iter().zip(desired_states) {
        let Some(rule) = claimed.and_then(|position| config.rules.get(position)) else { continue };
        let settings = rule.mps_policy().settings;
        let mut check = |memory_mib: u64, label: &str| {
            findings
                .extend(excessive_limit(&settings, memory_mib).map(|limit| limit_message(limit, label, memory_mib)));
        };
        match desired_state.mode {
            Mode::Mps => {
                check(gpu.memory.total_mib, &label(gpu.index, None));
                findings
                    .extend(mps_unsupported_reason(gpu).map(|reason| format!("{}: {reason}", label(gpu.index, None))));
            }
            Mode::Mig => {
                let entries = desired_state.layout.iter().flat_map(|layout| &layout.entries);
                for entry in entries.filter(|entry| entry.share.is_some()) {
                    let profiles = gpu.mig.iter().flat_map(|mig| mig.profiles.iter());
                    if let Some(profile) = profiles.into_iter().find(|profile| profile.name == entry.profile) {
                        check(profile.memory_mib, &label(gpu.index, Some(&profile.name)));
                    }
                }
            }
            Mode::Timeslice => {
                let level = rule
                    .timeslice
                    .as_ref()
                    .map(|policy| policy.level)
                    .filter(|level| *level != TimesliceLevel::Default);
                let reported = level.filter(|_| !may_support_levels(gpu.architecture));
                let what = |level| {
                    format!(
                        "{}: {} is older than Turing and does not support time-slice levels such as {level}",
                        label(gpu.index, None),
                        gpu.name
                    )
                };
                findings.extend(reported.map(what));
            }
            Mode::NoRule | Mode::Unmanaged | Mode::Exclusive => {}
        }
    }
    findings.dedup();
    findings
}

/// Returns whether `nvidia-smi compute-policy` may be able to set time-slice levels. Only an
/// attempt shows whether the GPU supports levels.
fn may_support_levels(architecture: Architecture) -> bool {
    match architecture {
        Architecture::Legacy | Architecture::Volta => false,
        Architecture::Turing
        | Architecture::Ampere
        | Architecture::Ada
        | Architecture::Hopper
        | Architecture::Blackwell
        | Architecture::Unknown => true,
    }
}

/// Returns the memory of a GPU instance. Its compute instances share this memory.
pub(super) fn memory_of(mig: &Mig, instance: &GpuInstance) -> Option<u64> {
    let profile = mig.profiles.iter().find(|profile| profile.id == instance.profile_id);
    let reported = instance.memory.map(|memory| memory.total_mib);
    reported.or(profile.map(|profile| profile.memory_mib)).filter(|mib| *mib > 0)
}

/// Returns the memory limit if it is higher than the memory. Returns `None` if the memory is
/// unknown.
fn excessive_limit(settings: &MpsSettings, memory_mib: u64) -> Option<MemoryLimit> {
    settings.memory_limit_mib.filter(|limit| memory_mib > 0 && limit.mib() > memory_mib)
}

fn limit_message(limit: MemoryLimit, label: &str, memory_mib: u64) -> String {
    let limit = match (limit.mib() / 1024, limit.mib() % 1024) {
        (gib, 0) => format!("{gib}G"),
        _ => limit.to_string(),
    };
    // Rounds down, so that the message never shows more memory than the GPU has.
    let memory = match (memory_mib / 1024, memory_mib % 1024 * 10 / 1024) {
        (0, _) => format!("{memory_mib} MiB"),
        (gib, 0) => format!("{gib} GiB"),
        (gib, tenth) => format!("{gib}.{tenth} GiB"),
    };
    format!("memory limit {limit} is more than the {memory} that {label} has")
}
