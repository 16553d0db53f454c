//! The figures for the API, as a caller may see them: administrators see all leases, users their own.

use std::collections::BTreeMap;

use gpush_api::{
    ClockLimit, DeviceActivity, Gpu, GpuUsage, GpuUuid, HostUsage, InstanceUsage, LeaseId, LeaseUsage, SignalSource,
    TargetUsage, UnknownReason,
};
use gpush_nvml::sample::{Activity, Ratio, Sample};
use gpush_usage::{
    input,
    ledger::{GpuFigures, LeaseFigures, MemberFigures},
    moment::Moment,
    share::GPU_UNITS,
};
use tokio::time::Instant;

use super::{Accounts, LastSample, Usage, clock::timestamp};
use crate::{
    requests::caller::Viewer,
    state::{HostState, OpenLease},
};

/// Returns the figures that a viewer may see.
pub(super) fn figures(usage: &Usage, viewer: Viewer) -> HostUsage {
    let host = usage.0.context.state.now();
    let now = usage.0.clock.now();
    let interval = usage.0.demand.needs(Instant::now(), usage.samples_leases(&host)).map(|needs| needs.interval);
    let accounts = usage.0.accounts.lock();
    let sums: BTreeMap<GpuUuid, GpuFigures> =
        accounts.ledger.gpus(now).map(|figures| (figures.gpu.clone(), figures)).collect();
    HostUsage {
        interval_ms: interval.and_then(|interval| u64::try_from(interval.as_millis()).ok()),
        gpu_usage: host
            .gpus
            .iter()
            .map(|one| {
                let uuid = &one.gpu.uuid;
                let figures = sums.get(uuid);
                // Metrics show it as a counter, which must not fall after a crash.
                let unattributed_mj = if usage.records() {
                    accounts.recorded.unattributed_mj.get(uuid).copied()
                } else {
                    figures.map(|figures| figures.sums.unattributed_mj)
                };
                let shown = gpu(&one.gpu, accounts.last.get(uuid), figures, now);
                GpuUsage { unattributed_j: joules(unattributed_mj.unwrap_or(0)), ..shown }
            })
            .collect(),
        lease_usage: visible(&host, viewer).filter_map(|id| lease(id, &accounts, now)).collect(),
    }
}

/// Returns the leases whose use a viewer may see.
pub(super) fn visible(host: &HostState, viewer: Viewer) -> impl Iterator<Item = LeaseId> {
    let is_visible = move |lease: &&OpenLease| viewer.may_see(Some(lease.record.holder.uid));
    host.leases.holding().filter(is_visible).map(OpenLease::id)
}

fn gpu(gpu: &Gpu, last: Option<&LastSample>, figures: Option<&GpuFigures>, now: Moment) -> GpuUsage {
    let part = |units: u32| f64::from(units) / f64::from(GPU_UNITS);
    let mut shown = GpuUsage {
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        sampled_at: None,
        failure: None,
        source: SignalSource::None,
        activity: DeviceActivity::default(),
        memory_used_mib: None,
        power_w: None,
        power_limit_w: None,
        energy_j: None,
        unattributed_j: 0.0,
        temperature_c: None,
        memory_temperature_c: None,
        sm_clock_mhz: None,
        memory_clock_mhz: None,
        limited_by: None,
        leased: figures.map(|figures| part(figures.leased)),
        unused: figures.and_then(|figures| figures.unused).map(part),
        unusable: figures.map(|figures| part(figures.unusable)),
        instance_usage: Vec::new(),
    };
    if let Some(LastSample::Failed(error)) = last {
        shown.failure = Some(error.to_string());
    }
    if let Some(taken) = last.and_then(|last| last.recent(now)) {
        shown.sampled_at = Some(taken.at);
        add_sample(&mut shown, gpu, &taken.sample);
        hide_refuted(&mut shown, figures.map(|figures| figures.refuted.as_slice()).unwrap_or_default());
    }
    shown
}

fn add_sample(shown: &mut GpuUsage, gpu: &Gpu, sample: &Sample) {
    let watts = |milliwatts: Option<u32>| milliwatts.map(|milliwatts| f64::from(milliwatts) / 1000.0);
    shown.source = sample.activity.source;
    shown.activity = activity(&sample.activity);
    shown.memory_used_mib = sample.memory.map(|memory| memory.used_bytes >> 20);
    (shown.power_w, shown.power_limit_w) = (watts(sample.power_mw), watts(sample.power_limit_mw));
    shown.energy_j = sample.energy_mj.map(joules);
    (shown.temperature_c, shown.memory_temperature_c) = (sample.temperature_c, sample.memory_temperature_c);
    (shown.sm_clock_mhz, shown.memory_clock_mhz) = (sample.sm_clock_mhz, sample.memory_clock_mhz);
    shown.limited_by = sample.event_reasons.map(limits);
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    shown.instance_usage = instances
        .filter_map(|instance| {
            let sampled = sample.instances.iter().find(|one| one.instance.gi == instance.id)?;
            shown.source = sampled.activity.source;
            Some(InstanceUsage {
                gi: instance.id,
                profile: instance.profile.clone(),
                activity: activity(&sampled.activity),
                memory_used_mib: sampled.memory.map(|memory| memory.used_bytes >> 20),
                memory_total_mib: sampled.memory.map(|memory| memory.total_bytes >> 20),
            })
        })
        .collect();
}

/// Removes activities of 0 that the power of the board refutes.
fn hide_refuted(shown: &mut GpuUsage, refuted: &[Option<u32>]) {
    if refuted.contains(&None) {
        shown.activity = DeviceActivity::default();
    }
    let instances = shown.instance_usage.iter_mut().filter(|instance| refuted.contains(&Some(instance.gi)));
    instances.for_each(|instance| instance.activity = DeviceActivity::default());
}

fn lease(id: LeaseId, accounts: &Accounts, now: Moment) -> Option<LeaseUsage> {
    let figures = accounts.ledger.lease(id, now)?;
    let totals = accounts.ledger.totals(id, now)?.sums();
    let (reason, weak) = (state_reason(&figures), figures.is_weak());
    let LeaseFigures { state, since, unused_since, times, members, .. } = figures;
    let seconds = |ms: u64| ms / 1000;
    Some(LeaseUsage {
        lease_id: id,
        state,
        reason,
        weak,
        since: timestamp(since),
        unused_since: unused_since.map(timestamp),
        unused_s: unused_since.map(|since| seconds(now.ms_since(since))),
        busy_s: seconds(times.busy_ms),
        idle_s: seconds(times.idle_ms),
        empty_s: seconds(times.empty_ms),
        unknown_s: seconds(times.unknown_ms),
        energy_j: joules(totals.energy_mj),
        energy_method: totals.energy_method(),
        energy_mixed: totals.is_energy_mixed(),
        target_usage: members.iter().map(target).collect(),
    })
}

/// Returns why the state of a lease is unknown.
pub(super) fn state_reason(figures: &LeaseFigures) -> Option<UnknownReason> {
    let members = figures.members.iter().filter(|member| member.judgement.state == figures.state);
    members.into_iter().find_map(|member| member.judgement.reason)
}

fn target(member: &MemberFigures) -> TargetUsage {
    let ratio = |ratio: Option<input::Ratio>| ratio.map(|ratio| f64::from(ratio.millionths()) / 1e6);
    let sums = &member.totals.sums;
    TargetUsage {
        target: member.totals.hold.target.clone(),
        gpu_uuid: member.totals.hold.gpu.clone(),
        source: member.judgement.source,
        estimate: member.judgement.is_estimate,
        weak: member.judgement.is_weak,
        sm_activity: ratio(member.sm),
        dram_activity: ratio(member.dram),
        sm_mean: sums.sm.mean().and_then(|mean| u32::try_from(mean).ok()).map(|mean| f64::from(mean) / 1e6),
        memory_mib: member.memory_mib,
        memory_peak_mib: Some(sums.memory_peak_mib).filter(|_| sums.memory.mean().is_some()),
        memory_p98_mib: member.totals.memory_p98_mib,
    }
}

fn activity(activity: &Activity) -> DeviceActivity {
    let ratio = |ratio: Option<Ratio>| ratio.map(Ratio::get);
    DeviceActivity {
        busy: ratio(activity.busy),
        sm_activity: ratio(activity.sm),
        occupancy: ratio(activity.occupancy),
        tensor_activity: ratio(activity.tensor),
        dram_activity: ratio(activity.dram),
    }
}

pub(super) fn joules(millijoules: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a counter of a board has fewer than 53 bits for centuries")]
    let millijoules = millijoules as f64;
    millijoules / 1000.0
}

/// Bits of `nvmlClocksEventReasons`, and their meanings. An idle GPU is not limited.
const LIMITS: [(u64, ClockLimit); 7] = [
    (0x02, ClockLimit::Setting),
    (0x04, ClockLimit::Power),
    (0x08, ClockLimit::Hardware),
    (0x10, ClockLimit::Sync),
    (0x20, ClockLimit::Thermal),
    (0x40, ClockLimit::Thermal),
    (0x80, ClockLimit::Hardware),
];

/// Returns the limits that the bits of the driver report.
fn limits(reasons: u64) -> Vec<ClockLimit> {
    let mut limits: Vec<ClockLimit> =
        LIMITS.iter().filter(|(bit, _)| reasons & bit != 0).map(|(_, limit)| *limit).collect();
    limits.sort_unstable();
    limits.dedup();
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_clocks_are_not_a_limit() {
        assert_eq!(limits(0x01), []);
        assert_eq!(limits(0x04 | 0x40 | 0x20), [ClockLimit::Power, ClockLimit::Thermal]);
    }
}
