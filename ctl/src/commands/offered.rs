//! The shares that the caller may lease on this host. Hints for command lines without a usable share name no others.

use gpush_api::{Gpu, GpuState, LeaseKind, Mode, QuotaView, TargetUuid};
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
    let mut leased = gpus.iter().filter(|gpu| !matches!(gpu.mode, Mode::NoRule | Mode::Unmanaged)).peekable();
    let only_slurm = leased.peek().is_some() && leased.all(is_of_slurm);
    let is_included = |gpu: &Gpu| only_slurm || !is_of_slurm(gpu);
    let shares_now = shares(gpus, quota, |gpu| is_included(gpu) && gpu.state == GpuState::Ready);
    let later = shares(gpus, quota, is_included).iter().map(|share| share.kind).collect();
    Offers { shares: shares_now, kinds: later, default, only_slurm, mig_gpus }
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
    let flags = |kind: LeaseKind| -> Option<Vec<String>> {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match kind {
            LeaseKind::Mig => smallest_device(&gpus).map(|profile| owned(&["--mig", profile])),
            LeaseKind::Mps => (has(Mode::Mps) || has_shared_devices).then(|| owned(&["--mps", "25"])),
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
