//! The shares that the caller may lease on this host. Hints for command lines without a usable share name no others.

use gpush_api::{Gpu, GpuState, LeaseKind, Mode, QuotaResource, QuotaView, TargetUuid};
use gpush_client::{Client, QuotaQuery};
use gpush_core::{layout::DYNAMIC, lease::request};

use crate::{
    args::{Global, OfferedShare, Offers},
    socket,
};

/// Returns what the host offers to the caller; `None` if gpushd does not answer in time.
pub(crate) fn offers(global: &Global) -> Option<Offers> {
    let runtime = super::runtime().ok()?;
    let mut client = Client::new(socket::chosen(global)).deadline(global.request_timeout);
    let (gpus, quotas) = runtime
        .block_on(async {
            let gpus = client.gpus(false).await?;
            client.quotas(QuotaQuery::Caller).await.map(|quotas| (gpus, quotas))
        })
        .ok()?;
    Some(of(&gpus, quotas.first()))
}

fn of(gpus: &[Gpu], quota: Option<&QuotaView>) -> Offers {
    let is_of_mig = |gpu: &&Gpu| gpu.mode == Mode::Mig;
    let mig_gpus = gpus.iter().filter(is_of_mig).map(|gpu| gpu.index.to_string()).collect();
    let default = quota.and_then(|quota| quota.default_request.as_deref());
    let default = default.and_then(|default| {
        let kind = request::parse_default(default).ok()?.share.kind()?;
        Some(OfferedShare { kind, flags: request::flags(default).split(' ').map(str::to_owned).collect() })
    });
    let is_of_slurm = |gpu: &Gpu| quota.is_some_and(|quota| quota.slurm_gpus.contains(&gpu.index));
    let only_slurm = quota.is_some_and(|quota| is_only_of_slurm(gpus, quota));
    let is_included = |gpu: &Gpu| only_slurm || !is_of_slurm(gpu);
    let shares_now = shares(gpus, quota, |gpu| is_included(gpu) && gpu.state == GpuState::Ready);
    let later = shares(gpus, quota, is_included).iter().map(|share| share.kind).collect();
    let slurm_gpus = gpus.iter().filter(|gpu| is_of_slurm(gpu)).count();
    let has_mig = gpus.iter().any(|gpu| gpu.mode == Mode::Mig || gpu.mig.as_ref().is_some_and(|mig| mig.enabled));
    let mps_percent = mps_percent(quota);
    Offers { shares: shares_now, kinds: later, default, only_slurm, slurm_gpus, mig_gpus, has_mig, mps_percent }
}

/// Returns whether only Slurm jobs can lease the GPUs that have a rule.
pub(super) fn is_only_of_slurm(gpus: &[Gpu], quota: &QuotaView) -> bool {
    let mut leased = gpus.iter().filter(|gpu| !matches!(gpu.mode, Mode::NoRule | Mode::Unmanaged)).peekable();
    leased.peek().is_some() && leased.all(|gpu| quota.slurm_gpus.contains(&gpu.index))
}

/// Percentage of an MPS share in a hint, if the quota allows it.
const USUAL_PERCENT: u32 = 25;

/// Returns the largest MPS percentage that the quota allows now, or if the leases of the caller use all of it, the largest
/// one at all. Returns `None` if the quota has no limit below 100 %.
fn mps_percent(quota: Option<&QuotaView>) -> Option<u32> {
    let limit = quota?.limits.iter().find(|limit| limit.resource == QuotaResource::MpsPercent)?;
    let percent = |amount: f64| (1..100).rev().find(|percent| f64::from(*percent) <= amount);
    let most = limit.maximum.filter(|most| limit.amount_left.unwrap_or(*most) < 100.0)?;
    limit.amount_left.and_then(percent).or_else(|| percent(most))
}

/// Returns a share of each kind that the caller may lease on the GPUs that are included.
fn shares(gpus: &[Gpu], quota: Option<&QuotaView>, is_included: impl Fn(&Gpu) -> bool) -> Vec<OfferedShare> {
    let may_use = |gpu: &&Gpu| {
        let is_closed = quota.is_some_and(|quota| quota.closed_gpus.contains(&gpu.index));
        let allowed = quota.and_then(|quota| quota.allowed_gpus.as_ref());
        is_included(gpu) && !is_closed && allowed.is_none_or(|allowed| allowed.contains(&gpu.index))
    };
    let gpus: Vec<&Gpu> = gpus.iter().filter(may_use).collect();
    let has = |mode: Mode| gpus.iter().any(|gpu| gpu.mode == mode);
    let has_shared_devices = gpus.iter().any(|gpu| gpu.mode == Mode::Mig && !gpu.mps_daemons.is_empty());
    let percent = mps_percent(quota).map_or(USUAL_PERCENT, |most| most.min(USUAL_PERCENT)).to_string();
    let flags = |kind: LeaseKind| -> Option<Vec<String>> {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match kind {
            LeaseKind::Mig => smallest_device(&gpus).map(|profile| owned(&["--mig", profile])),
            LeaseKind::Mps => (has(Mode::Mps) || has_shared_devices).then(|| owned(&["--mps", &percent])),
            LeaseKind::Timeslice => has(Mode::Timeslice).then(|| owned(&["--timeslice"])),
            LeaseKind::Whole => has(Mode::Exclusive).then(|| owned(&["--whole"])),
        }
    };
    let allowed_kinds = quota.and_then(|quota| quota.allowed_kinds.as_ref());
    let kinds = LeaseKind::ALL.into_iter().filter(|kind| allowed_kinds.is_none_or(|allowed| allowed.contains(kind)));
    kinds.filter_map(|kind| Some(OfferedShare { kind, flags: flags(kind)? })).collect()
}

/// Returns the profile of the smallest MIG device that the GPUs have, or can create for a lease.
fn smallest_device<'g>(gpus: &[&'g Gpu]) -> Option<&'g str> {
    let of_mode = gpus.iter().filter(|gpu| gpu.mode == Mode::Mig);
    let profiles = of_mode.filter_map(|gpu| Some((*gpu, gpu.mig.as_ref()?))).flat_map(|(gpu, mig)| {
        let is_dynamic = gpu.layout.as_ref().is_some_and(|layout| *layout == [DYNAMIC]);
        let possible = mig.profiles.iter().filter(move |_| is_dynamic);
        let possible = possible.map(|profile| (profile.slices, profile.name.as_str()));
        let devices = mig.instances.iter().flat_map(|one| one.compute.iter().map(move |device| (one, device)));
        let is_shared = |target: &TargetUuid| gpu.mps_daemons.contains(target);
        let devices = devices.filter(move |(_, device)| !device.uuid.as_ref().is_some_and(is_shared));
        possible.chain(devices.map(|(one, device)| (one.placement.size, device.profile.as_str())))
    });
    profiles.min().map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use gpush_api::QuotaLimit;

    use super::*;

    /// Returns a host with one GPU of each mode, and GPUs without a rule.
    fn gpus() -> Vec<Gpu> {
        let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
        let modes = [Mode::Exclusive, Mode::Mig, Mode::Mps, Mode::Unmanaged];
        gpus.iter_mut().zip(modes).for_each(|(gpu, mode)| gpu.mode = mode);
        gpus[1].layout = Some(vec![DYNAMIC.to_owned()]);
        gpus
    }

    fn flags(gpus: &[Gpu], quota: Option<&QuotaView>) -> Vec<String> {
        of(gpus, quota).shares.iter().map(|share| share.flags.join(" ")).collect()
    }

    fn quota() -> QuotaView {
        QuotaView {
            uid: 1000,
            user: None,
            quota: None,
            ignored_quotas: Vec::new(),
            allowed_kinds: None,
            allowed_gpus: None,
            closed_gpus: Vec::new(),
            slurm_gpus: Vec::new(),
            longest_s: None,
            default_request: None,
            limits: Vec::new(),
        }
    }

    #[test]
    fn shares_are_those_of_ready_gpus() {
        let mut gpus = gpus();
        assert_eq!(flags(&gpus, None), ["--mig 1g.10gb", "--mps 25", "--whole"]);
        assert_eq!(of(&gpus, None).mig_gpus, ["1"]);
        gpus[2].state = GpuState::Cordoned;
        assert_eq!(flags(&gpus, None), ["--mig 1g.10gb", "--whole"]);
        gpus[1].layout = None;
        assert_eq!(flags(&gpus, None), ["--whole"], "the GPU has no MIG device");
        assert!(flags(&[], None).is_empty());
    }

    /// Fault: hints named shares that the quota or the rule of the GPU does not allow.
    #[test]
    fn shares_are_those_that_quota_and_rules_allow() {
        let index = gpush_api::GpuIndex;
        let kinds = Some(vec![LeaseKind::Mig, LeaseKind::Whole]);
        for (quota, expected) in [
            (QuotaView { allowed_kinds: kinds.clone(), ..quota() }, &["--mig 1g.10gb", "--whole"][..]),
            (QuotaView { allowed_kinds: kinds, closed_gpus: vec![index(0)], ..quota() }, &["--mig 1g.10gb"]),
            (QuotaView { allowed_gpus: Some(vec![index(2)]), ..quota() }, &["--mps 25"]),
            (QuotaView { slurm_gpus: vec![index(0)], ..quota() }, &["--mig 1g.10gb", "--mps 25"]),
        ] {
            assert_eq!(flags(&gpus(), Some(&quota)), expected, "{quota:?}");
        }
    }

    /// Fault: a hint named `--mps 25`, although the quota allows 20 %.
    #[test]
    fn mps_share_is_at_most_what_the_quota_leaves() {
        let of_quota = |maximum: Option<f64>, amount_left: Option<f64>| {
            let limit = QuotaLimit { resource: QuotaResource::MpsPercent, used: 0.0, maximum, amount_left };
            let offers = of(&gpus()[2..3], Some(&QuotaView { limits: vec![limit], ..quota() }));
            (offers.shares[0].flags.join(" "), offers.mps_percent)
        };
        assert_eq!(of_quota(Some(20.0), Some(20.0)), ("--mps 20".to_owned(), Some(20)));
        assert_eq!(of_quota(Some(50.0), Some(10.5)), ("--mps 10".to_owned(), Some(10)));
        assert_eq!(of_quota(Some(50.0), Some(0.0)), ("--mps 25".to_owned(), Some(50)));
        assert_eq!(of_quota(Some(200.0), Some(150.0)), ("--mps 25".to_owned(), None));
        assert_eq!(of_quota(None, None), ("--mps 25".to_owned(), None));
    }

    #[test]
    fn default_request_is_named_before_other_shares() {
        let default = Some("mig=1g.10gb,for=4h".to_owned());
        let offers = of(&gpus(), Some(&QuotaView { default_request: default, ..quota() }));
        assert_eq!(offers.default.unwrap().flags, ["--mig", "1g.10gb", "--for", "4h"]);
        assert_eq!(offers.shares.len(), 3);
    }

    #[test]
    fn host_of_slurm_offers_shares_to_jobs_only() {
        let gpus = gpus();
        let all: Vec<gpush_api::GpuIndex> = gpus.iter().map(|gpu| gpu.index).collect();
        let offers = of(&gpus, Some(&QuotaView { slurm_gpus: all, ..quota() }));
        assert!(offers.only_slurm);
        assert_eq!(offers.shares.len(), 3);
        assert!(!of(&gpus, Some(&quota())).only_slurm);
    }
}
