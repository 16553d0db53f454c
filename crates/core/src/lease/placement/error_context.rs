//! What an error about a refused request needs to know: the host, and which shares the quota of the user allows.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{Gpu, GpuIndex, LeaseKind, LeaseRequest, LeaseShare, MemoryLimit, Percentage};

use super::{GpuOffer, Host, RequestedDevice, error::example, nominal_mib};
use crate::lease::{
    quota::{Allowance, Size},
    request,
};

/// Number of compute slices of a whole GPU.
const SLICES: u32 = 7;

/// What an error needs to know about the host in addition to the reason.
#[derive(Debug, Clone, Copy)]
pub struct ErrorContext<'a> {
    /// The host without the reservations of the queue.
    pub host: &'a Host,
    /// The GPUs as the caller may see them.
    pub gpus: &'a [Gpu],
    /// Indexes of the GPUs that the caller may lease; `None` for all GPUs.
    pub allowed: Option<&'a BTreeSet<GpuIndex>>,
    /// Duration of the requested lease, for the commands in hints.
    pub duration: Option<Duration>,
    /// What the holder may lease in addition; `None` for no limit. Hints name no other shares.
    pub allowance: Option<Allowance<'a>>,
}

/// Formats tenths of a percent as users write them: `12.5`.
pub(super) fn percent(tenths: u32) -> String {
    match tenths % 10 {
        0 => (tenths / 10).to_string(),
        rest => format!("{}.{rest}", tenths / 10),
    }
}

impl ErrorContext<'_> {
    fn gpu_mib(&self, index: GpuIndex) -> u64 {
        self.gpus.iter().find(|gpu| gpu.index == index).map_or(0, |gpu| gpu.memory.total_mib)
    }

    /// Returns whether the quota allows a MIG device of this profile on a GPU.
    pub(super) fn permits_device(&self, gpu: GpuIndex, profile: &str) -> bool {
        let memory_mib = nominal_mib(profile).unwrap_or_default();
        self.allowance.is_none_or(|allowance| allowance.permits_device(memory_mib, self.gpu_mib(gpu)))
    }

    /// Returns whether the quota allows a MIG device of this profile on a GPU of the host.
    pub(super) fn permits_device_somewhere(&self, profile: &str) -> bool {
        self.gpus.is_empty() || self.gpus.iter().any(|gpu| self.permits_device(gpu.index, profile))
    }

    /// Returns the largest MPS percentage up to `most_tenths` that the quota allows on a target of a GPU, in tenths of a
    /// percent; `None` if it allows no percentage.
    pub(super) fn largest_percentage(&self, gpu: GpuIndex, target_mib: u64, most_tenths: u32) -> Option<u32> {
        match self.allowance {
            Some(allowance) => allowance.largest_percentage(most_tenths, target_mib, self.gpu_mib(gpu)),
            None => Some(most_tenths),
        }
    }

    /// Returns a request of each kind that the user may lease on this host: one that the GPUs can meet when idle, and that
    /// the quota and the rules allow.
    #[must_use]
    pub fn possible(&self) -> Vec<(LeaseKind, String)> {
        let is_allowed = |gpu: &&GpuOffer| self.allowed.is_none_or(|allowed| allowed.contains(&gpu.index));
        let host = Host { gpus: self.host.gpus.iter().filter(is_allowed).cloned().collect() };
        let kinds = host.kinds().into_iter();
        kinds.filter_map(|kind| Some((kind, self.permitted(&host, &example(&host, kind))?))).collect()
    }

    /// Returns requests of other kinds that give at least the memory and the compute of a MIG device. The GPUs of `host`
    /// can meet them when idle, and the quota allows them.
    pub(super) fn large_enough(&self, host: &Host, device: &RequestedDevice) -> Vec<String> {
        let (memory_mib, slices) = match device {
            RequestedDevice::AtLeast { memory_mib, slices } => (*memory_mib, u32::from(*slices)),
            RequestedDevice::Profile(name) => {
                let slices = name.rsplit_once("g.").and_then(|(slices, _)| slices.rsplit('.').next()?.parse().ok());
                (nominal_mib(name).unwrap_or_default(), slices.unwrap_or_default())
            }
        };
        let whole = host.gpus.iter().filter(|gpu| gpu.whole.is_some() && self.gpu_mib(gpu.index) >= memory_mib);
        let whole = Host { gpus: whole.cloned().collect() };
        let of_compute = (slices * 100).div_ceil(SLICES);
        let share = |gpu: GpuIndex, target_mib: u64| {
            let of_memory = u32::try_from(memory_mib.saturating_mul(100).div_ceil(target_mib.max(1))).ok()?;
            let percentage = of_compute.max(of_memory);
            let tenths = percentage.saturating_mul(10);
            (percentage <= 100 && self.largest_percentage(gpu, target_mib, tenths) == Some(tenths))
                .then_some(percentage)
        };
        let targets = host.gpus.iter().flat_map(|gpu| gpu.mps.iter().map(move |mps| (gpu.index, mps.memory_mib)));
        let percentage = targets.filter_map(|(gpu, memory_mib)| share(gpu, memory_mib)).min();
        let mps = percentage.and_then(|percentage| {
            let percentage = Percentage::of_tenths(u16::try_from(percentage.max(1)).ok()? * 10)?;
            let memory_limit_mib = MemoryLimit::of_mib(memory_mib);
            let share = LeaseShare::Mps { percentage: Some(percentage), memory_limit_mib, priority: None };
            Some(request::spec(&LeaseRequest { share, ..LeaseRequest::default() }))
        });
        let whole = (!whole.gpus.is_empty()).then(|| self.permitted(&whole, "whole")).flatten();
        mps.into_iter().chain(whole).collect()
    }

    /// Returns the request of `offered`, or a smaller one that the quota allows; `None` if the quota allows none. `offered`
    /// is a request that the GPUs of `host` can meet.
    pub(super) fn permitted(&self, host: &Host, offered: &str) -> Option<String> {
        let Some(allowance) = self.allowance else { return Some(offered.to_owned()) };
        let share = request::parse(offered).ok()?.share;
        let is_permitted = match &share {
            LeaseShare::MigProfile { profile } => host.gpus.iter().any(|gpu| self.permits_device(gpu.index, profile)),
            LeaseShare::Mps { .. } => {
                let targets = host.gpus.iter().flat_map(|gpu| gpu.mps.iter().map(move |mps| (gpu.index, mps)));
                let tenths = targets.filter_map(|(gpu, mps)| self.largest_percentage(gpu, mps.memory_mib, 250));
                return tenths.max().map(|tenths| format!("mps={}", percent(tenths)));
            }
            LeaseShare::Whole {} => host.gpus.iter().filter(|gpu| gpu.whole.is_some()).any(|gpu| {
                let mib = self.gpu_mib(gpu.index);
                allowance.permits(LeaseKind::Whole, Size::of_one(mib, mib, 0))
            }),
            LeaseShare::Timeslice {} => host.gpus.iter().any(|gpu| {
                let mib = self.gpu_mib(gpu.index);
                let of_replica = |replicas: u32| Size::of_one(mib.div_ceil(replicas.max(1).into()), mib, 0);
                gpu.timeslice.is_some_and(|offer| allowance.permits(LeaseKind::Timeslice, of_replica(offer.replicas)))
            }),
            LeaseShare::Default {} | LeaseShare::MigSize { .. } => true,
        };
        is_permitted.then(|| offered.to_owned())
    }
}
