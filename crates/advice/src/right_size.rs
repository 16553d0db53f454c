//! The smallest share that would have been enough for a lease, from its recorded use.
//!
//! A share is enough if it has the memory and the multiprocessors that the lease needed:
//!
//! - memory: the larger of p98 + 15 % and peak + 5 %. p98 is the memory that was not exceeded in 98 % of the time.
//! - multiprocessors: their mean activity while the lease worked + 15 %. If the activity is not known, memory decides
//!   alone, and of profiles with equally many memory slices, the one with the most multiprocessors is advised.
//!
//! The profiles are those that the driver reports for the GPU, so no profile is advised that the GPU does not have.

use std::cmp::Reverse;

use gpush_api::{Gpu, GpuIndex, GpuProfile, GpuUuid, LeaseId, LeaseKind, UsedLease, UsedTarget};
use serde::Serialize;

use crate::{
    evidence::{Evidence, LEAST_KNOWN_S},
    fit::plain,
};

/// Margin over the memory that was not exceeded in 98 % of the time, in percent.
pub const P98_MARGIN: u64 = 15;
/// Margin over the largest memory, in percent. A sample can miss a short peak.
pub const PEAK_MARGIN: u64 = 5;
/// Margin over the mean activity of the multiprocessors, in percent.
const ACTIVITY_MARGIN: f64 = 1.15;

/// The need of a lease on one target.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ObservedNeed {
    /// Memory in MiB that was not exceeded in 98 % of the time.
    pub memory_p98_mib: u64,
    /// Largest memory in MiB.
    pub memory_peak_mib: u64,
    /// Memory with the margin, in MiB.
    pub needed_mib: u64,
    /// Whether the margin over the peak decides, not that over p98.
    #[serde(skip)]
    pub is_of_peak: bool,
    /// Part of the multiprocessors of the whole GPU, with the margin; `None` if it is not known.
    pub needed_compute: Option<f64>,
}

/// Why no smaller share is advised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoAdvice {
    /// No smaller share has what the lease needed.
    NeedsItsShare,
    /// The memory is known for less than an hour.
    TooFewSamples,
    /// The lease did no work.
    NoWork,
    /// The GPU has no MIG, so a whole GPU does not have smaller parts with separate memory.
    NoMig,
    /// A time-slice replica reserves neither memory nor compute.
    NothingReserved,
    /// gpushd does not know the GPU or the profile any more, or the MIG device is only a part of its GPU instance.
    UnknownShare,
}

/// The result for one target of a lease.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum SizeVerdict {
    /// A smaller MIG device would have been enough.
    SmallerDevice {
        /// Its profile.
        profile: String,
        /// Its memory in MiB.
        enough_mib: u64,
        /// Memory slices that it frees.
        freed_slices: u32,
        /// Memory slices of the GPU.
        memory_slices: u32,
    },
    /// A smaller memory limit would have been enough for an MPS lease.
    SmallerLimit {
        /// The limit in MiB.
        enough_mib: u64,
        /// Memory that it frees, in MiB.
        freed_mib: u64,
    },
    /// No advice.
    None {
        /// Why.
        #[serde(rename = "no_advice")]
        why: NoAdvice,
    },
}

/// The advice for one target of a lease.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SizeAdvice {
    /// Lease.
    pub lease_id: LeaseId,
    /// The user that the lease is charged to.
    pub user: String,
    /// UUID of the GPU.
    pub gpu_uuid: GpuUuid,
    /// Index of the GPU; `None` if the host does not have it any more.
    #[serde(rename = "gpu")]
    pub index: Option<GpuIndex>,
    /// The share: a profile, or the kind of the share.
    #[serde(rename = "held_share")]
    pub share: String,
    /// Time for which the lease held it, in seconds.
    pub held_s: u64,
    /// Memory slices that the lease held; 0 without MIG devices.
    #[serde(skip)]
    pub held_slices: u32,
    /// The observed need; `None` without enough samples.
    pub observed_need: Option<ObservedNeed>,
    /// The result.
    #[serde(flatten)]
    pub verdict: SizeVerdict,
    /// How sure the result is.
    pub evidence: Evidence,
}

impl SizeAdvice {
    /// Returns the memory slices that the advice frees.
    #[must_use]
    pub fn freed_slices(&self) -> u32 {
        match &self.verdict {
            SizeVerdict::SmallerDevice { freed_slices, .. } => *freed_slices,
            SizeVerdict::SmallerLimit { .. } | SizeVerdict::None { .. } => 0,
        }
    }

    /// Returns whether a smaller share is advised.
    #[must_use]
    pub fn is_smaller(&self) -> bool {
        match &self.verdict {
            SizeVerdict::SmallerDevice { .. } | SizeVerdict::SmallerLimit { .. } => true,
            SizeVerdict::None { .. } => false,
        }
    }
}

/// Returns the advice for each target of each lease. `gpus` must have their profiles.
#[must_use]
pub fn right_sizes(leases: &[UsedLease], gpus: &[Gpu]) -> Vec<SizeAdvice> {
    let of_lease = |lease: &UsedLease| -> Vec<SizeAdvice> {
        lease.used_targets.iter().map(|target| right_size(lease, target, gpus)).collect()
    };
    leases.iter().flat_map(of_lease).collect()
}

fn right_size(lease: &UsedLease, target: &UsedTarget, gpus: &[Gpu]) -> SizeAdvice {
    let gpu = gpus.iter().find(|gpu| gpu.uuid == target.gpu_uuid);
    let held = gpu.and_then(|gpu| held_size(gpu, target));
    let needed_compute = gpu.zip(held.as_ref()).and_then(|(gpu, held)| needed_compute(target, held, gpu));
    let observed_need = need(target, needed_compute);
    SizeAdvice {
        lease_id: lease.lease_id,
        user: lease.user.clone(),
        gpu_uuid: target.gpu_uuid.clone(),
        index: gpu.map(|gpu| gpu.index),
        share: target.profile.clone().unwrap_or_else(|| target.share_kind.clone()),
        held_s: target.held_s,
        held_slices: held.as_ref().map_or(0, |held| held.memory_slices),
        verdict: verdict(target, gpu, held.as_ref(), observed_need.as_ref()),
        evidence: Evidence::of(target, needed_compute.is_some()),
        observed_need,
    }
}

/// The size of the part of a GPU that a lease holds.
struct HeldSize {
    memory_slices: u32,
    /// Number of streaming multiprocessors.
    sm: u32,
}

/// Returns the size of a MIG device or a whole GPU; `None` for other shares, and if the size is not known.
fn held_size(gpu: &Gpu, target: &UsedTarget) -> Option<HeldSize> {
    let mig = gpu.mig.as_ref()?;
    if target.share_kind == LeaseKind::Whole.name() {
        return Some(HeldSize { memory_slices: mig.memory_slices.into(), sm: whole_sm(gpu) });
    }
    let name = target.profile.as_ref()?;
    let profile = mig.profiles.iter().find(|profile| profile.name == *name)?;
    Some(HeldSize { memory_slices: memory_slices(profile), sm: profile.sm })
}

/// Returns the memory slices of one instance.
pub(crate) fn memory_slices(profile: &GpuProfile) -> u32 {
    profile.placements.iter().map(|placement| u32::from(placement.size)).min().unwrap_or(0)
}

/// Returns the multiprocessors of the largest profile.
fn whole_sm(gpu: &Gpu) -> u32 {
    plain(gpu).map(|profile| profile.sm).max().unwrap_or_default()
}

/// Returns the memory with the margin. `None` without enough samples, or if the lease did no work.
fn need(target: &UsedTarget, needed_compute: Option<f64>) -> Option<ObservedNeed> {
    let (p98, peak) = (target.memory_p98_mib?, target.memory_peak_mib?);
    let is_activity_known = target.sm_mean.is_some() && target.activity_known_s >= target.held_s / 2;
    let has_worked = peak > 0 && (target.busy_s > 0 || !is_activity_known);
    if target.memory_known_s < LEAST_KNOWN_S || !has_worked {
        return None;
    }
    let (of_p98, of_peak) = (with_margin(p98, P98_MARGIN), with_margin(peak, PEAK_MARGIN));
    Some(ObservedNeed {
        memory_p98_mib: p98,
        memory_peak_mib: peak,
        needed_mib: of_p98.max(of_peak),
        is_of_peak: of_peak > of_p98,
        needed_compute,
    })
}

fn with_margin(mib: u64, percent: u64) -> u64 {
    let wide = u128::from(mib) * u128::from(100 + percent);
    u64::try_from(wide.div_ceil(100)).unwrap_or(u64::MAX)
}

/// Returns the part of the multiprocessors of the whole GPU that the lease used while it worked, with the margin. The
/// activity of a MIG device is relative to the device.
fn needed_compute(target: &UsedTarget, held: &HeldSize, gpu: &Gpu) -> Option<f64> {
    let mean = target.sm_mean.filter(|mean| mean.is_finite())?;
    // A mean over a small part of the time says little about the rest.
    if target.activity_known_s < target.held_s / 2 || target.busy_s == 0 || whole_sm(gpu) == 0 {
        return None;
    }
    let while_busy = mean * seconds(target.activity_known_s) / seconds(target.busy_s.min(target.activity_known_s));
    let part = f64::from(held.sm) / f64::from(whole_sm(gpu));
    Some((while_busy.clamp(mean, 1.0) * part * ACTIVITY_MARGIN).min(1.0))
}

#[expect(clippy::cast_precision_loss, reason = "the seconds of a lease have fewer than 53 bits")]
fn seconds(seconds: u64) -> f64 {
    seconds as f64
}

fn verdict(
    target: &UsedTarget,
    gpu: Option<&Gpu>,
    held: Option<&HeldSize>,
    need: Option<&ObservedNeed>,
) -> SizeVerdict {
    let none = |why| SizeVerdict::None { why };
    let kind = LeaseKind::ALL.into_iter().find(|kind| kind.name() == target.share_kind);
    if kind == Some(LeaseKind::Timeslice) {
        return none(NoAdvice::NothingReserved);
    }
    if target.memory_known_s < LEAST_KNOWN_S {
        return none(NoAdvice::TooFewSamples);
    }
    let Some(need) = need else { return none(NoAdvice::NoWork) };
    match (kind, gpu, held) {
        (Some(LeaseKind::Mps), ..) => smaller_limit(target, need),
        (Some(LeaseKind::Whole), Some(gpu), _) if gpu.mig.is_none() => none(NoAdvice::NoMig),
        (Some(LeaseKind::Whole | LeaseKind::Mig), Some(gpu), Some(held)) => smaller_device(gpu, held, need),
        (None | Some(LeaseKind::Whole | LeaseKind::Mig | LeaseKind::Timeslice), ..) => none(NoAdvice::UnknownShare),
    }
}

/// Returns the smallest profile that is enough, if it has fewer memory slices than the lease holds.
fn smaller_device(gpu: &Gpu, held: &HeldSize, need: &ObservedNeed) -> SizeVerdict {
    let whole = f64::from(whole_sm(gpu).max(1));
    let is_enough = |profile: &&GpuProfile| {
        profile.memory_mib >= need.needed_mib
            && memory_slices(profile) < held.memory_slices
            && profile.sm <= held.sm
            && need.needed_compute.is_none_or(|needed| f64::from(profile.sm) / whole >= needed)
    };
    // Without a known activity, more multiprocessors are safer.
    let compute = |profile: &GpuProfile| match need.needed_compute {
        Some(_) => (profile.sm, Reverse(0)),
        None => (0, Reverse(profile.sm)),
    };
    let found = plain(gpu).filter(is_enough).min_by_key(|profile| (memory_slices(profile), compute(profile)));
    let memory_slices_of_gpu = gpu.mig.as_ref().map_or(0, |mig| u32::from(mig.memory_slices));
    found.map_or(SizeVerdict::None { why: NoAdvice::NeedsItsShare }, |profile| SizeVerdict::SmallerDevice {
        profile: profile.name.clone(),
        enough_mib: profile.memory_mib,
        freed_slices: held.memory_slices - memory_slices(profile),
        memory_slices: memory_slices_of_gpu,
    })
}

/// Returns the limit in whole GiB that is enough for an MPS lease, if it is smaller than what the lease holds.
fn smaller_limit(target: &UsedTarget, need: &ObservedNeed) -> SizeVerdict {
    let enough_mib = need.needed_mib.div_ceil(1024).saturating_mul(1024);
    if enough_mib >= target.share_memory_mib {
        return SizeVerdict::None { why: NoAdvice::NeedsItsShare };
    }
    SizeVerdict::SmallerLimit { enough_mib, freed_mib: target.share_memory_mib - enough_mib }
}

#[cfg(test)]
pub(crate) mod tests;
