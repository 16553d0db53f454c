//! Offers in refusals: only shares that the quota of the user allows.

use gpush_api::{Gpu, LeaseId};

use super::{super::smaller, *};
use crate::lease::quota::{Allowance, Effective, HeldLease, Limits, MemoryAmount, Size};

fn gpus() -> Vec<Gpu> {
    crate::preset::gpus("dgx-a100").unwrap()
}

/// Returns the hint of the refusal of a request, for a user with these limits.
fn hint(host: &Host, request: &PlacementRequest, limits: Limits) -> Option<String> {
    let (effective, gpus) = (Effective::without_quota(limits), gpus());
    let allowance = Some(Allowance { effective: &effective, held: &[] });
    let why = place(host, request, PlacementPolicy::Pack).unwrap_err();
    why.error(request, ErrorContext { gpus: &gpus, allowance, ..context(host) }).hint
}

fn kinds<const N: usize>(kinds: [LeaseKind; N]) -> Limits {
    Limits { kinds: Some(BTreeSet::from(kinds)), ..Limits::default() }
}

fn memory(gib: u64) -> Limits {
    Limits { memory: Some(MemoryAmount::Mib(gib * 1024)), ..Limits::default() }
}

#[test]
fn offered_kinds_are_those_of_the_quota() {
    let host = Host { gpus: vec![mig(0, "a100-80", true, ""), mps(1, 0, None)] };
    let request = wanted(RequestedShare::Whole, 1);
    let of = |limits| hint(&host, &request, limits).unwrap();
    assert!(of(Limits::default()).starts_with("request `--mig 1g.10gb` or `--mps 25`, as with"));
    assert!(of(kinds([LeaseKind::Mps, LeaseKind::Whole])).starts_with("request `--mps 25`, as with"));
    // A quarter of 80 GiB is more than 10 GiB.
    assert!(of(memory(10)).starts_with("request `--mig 1g.10gb` or `--mps 12.5`, as with"), "{}", of(memory(10)));
    assert_eq!(of(kinds([LeaseKind::Whole])), "choose other GPUs; `gpushctl quota` shows what you may lease");
    let why = place(&host, &request, PlacementPolicy::Pack).unwrap_err();
    let (effective, gpus) = (Effective::without_quota(kinds([LeaseKind::Mps])), gpus());
    let allowance = Some(Allowance { effective: &effective, held: &[] });
    let for_job = why.hint_for_job(&request, ErrorContext { gpus: &gpus, allowance, ..context(&host) });
    assert_eq!(for_job.as_deref(), Some("submit the job with `--comment=gpush:mps=25`"));
}

#[test]
fn free_share_is_offered_only_as_far_as_the_quota_allows() {
    let full = Host { gpus: vec![mig(0, "a100-80", false, "1g.10gb@6 used, 4g.40gb@0")] };
    let request = wanted(profile("1g.10gb"), 1);
    assert_eq!(hint(&full, &request, Limits::default()).as_deref(), Some("request `--mig 4g.40gb`"));
    assert_eq!(hint(&full, &request, memory(20)), None);
    let half = Host { gpus: vec![mps(0, 500, None)] };
    let request = wanted(some_mps("60"), 1);
    assert_eq!(hint(&half, &request, Limits::default()).as_deref(), Some("request 50 % or less"));
    assert_eq!(hint(&half, &request, memory(20)).as_deref(), Some("request 25 % or less"));
    let limits = Limits { mps_tenths: Some(100), ..Limits::default() };
    assert_eq!(hint(&half, &request, limits).as_deref(), Some("request 10 % or less"));
}

/// The user of a Slurm job cannot type the options of gpushctl.
#[test]
fn free_device_is_offered_to_a_job_as_a_comment() {
    let for_job = |host: &Host, request: &PlacementRequest| {
        let gpus = gpus();
        let why = place(host, request, PlacementPolicy::Pack).unwrap_err();
        why.hint_for_job(request, ErrorContext { gpus: &gpus, ..context(host) })
    };
    let full = Host { gpus: vec![mig(0, "a100-80", false, "1g.10gb@6 used, 4g.40gb@0")] };
    let text = "submit the job with `--comment=gpush:mig=4g.40gb`";
    assert_eq!(for_job(&full, &wanted(profile("1g.10gb"), 1)).as_deref(), Some(text));
    let small = Host { gpus: vec![mig(0, "a100-80", false, "1g.10gb@6")] };
    let text = "request `--comment=gpush:mig=1g.10gb`";
    assert_eq!(for_job(&small, &wanted(profile("4g.40gb"), 1)).as_deref(), Some(text));
}

#[test]
fn devices_of_a_layout_are_offered_only_as_far_as_the_quota_allows() {
    let host = Host { gpus: vec![mig(0, "a100-80", false, "3g.40gb@0, 2g.20gb@4, 1g.10gb@6 used")] };
    let request = wanted(profile("4g.40gb"), 1);
    let all = "request `--mig 3g.40gb` or `--mig 2g.20gb` or `--mig 1g.10gb`";
    assert_eq!(hint(&host, &request, Limits::default()).as_deref(), Some(all));
    assert_eq!(hint(&host, &request, memory(20)).as_deref(), Some("request `--mig 2g.20gb` or `--mig 1g.10gb`"));
}

/// Of several shares that the quota allows, a denial proposes the largest one.
#[test]
fn smaller_request_fits_the_quota() {
    let host = Host { gpus: vec![mig(0, "a100-80", true, "3g.40gb@0"), mps(1, 0, None), whole(2, true)] };
    let of = |share, count: usize, gib: u64, held: &[HeldLease]| {
        let (effective, gpus) = (Effective::without_quota(memory(gib)), gpus());
        let allowance = Allowance { effective: &effective, held };
        let size = Size { members: count, memory_mib: 80 * 1024, gpu_thousandths: 1000, mps_tenths: 0 };
        smaller(&host, &gpus, &wanted(share, count), size, allowance)
    };
    let flags = |flags: &str| Some(flags.to_owned());
    assert_eq!(of(profile("7g.80gb"), 1, 30, &[]), flags("--mig 2g.20gb"));
    assert_eq!(of(profile("4g.40gb"), 2, 45, &[]), flags("--count 1"));
    assert_eq!(of(profile("4g.40gb"), 2, 15, &[]), flags("--mig 1g.10gb"));
    assert_eq!(of(some_mps("100"), 1, 30, &[]), flags("--mps 37"));
    assert_eq!(of(RequestedShare::Whole, 1, 30, &[]), None);
    let size = Size::of_one(25 * 1024, 80 * 1024, 0);
    let held = [HeldLease { id: LeaseId(1), queued: false, size, releasable: true }];
    assert_eq!(of(profile("7g.80gb"), 1, 30, &held), None, "5 GiB are left");
}

/// Faults: the hint for a request that no MIG device can meet named a smaller device, although the host had a whole GPU or
/// an MPS target that is large enough.
#[test]
fn request_that_no_device_meets_leads_to_a_share_that_does() {
    let small = || mig(0, "a100-80", false, "1g.10gb@0, 1g.10gb@1");
    let host = Host { gpus: vec![small(), mps(1, 0, None), whole(2, true)] };
    let of = |host: &Host, memory_gib: u64, slices: u8, limits: Limits| {
        let device = RequestedDevice::AtLeast { memory_mib: memory_gib * 1024, slices };
        hint(host, &wanted(RequestedShare::Mig(device), 1), limits).unwrap()
    };
    let none = Limits::default;
    let less = "; or less: `--mig 1g.10gb`";
    for (gib, slices, limits, expected) in [
        (20, 0, none(), format!("request `--mps 25 --memory 20G` or `--whole`{less}")),
        (0, 3, none(), format!("request `--mps 43` or `--whole`{less}")),
        (20, 7, none(), format!("request `--mps 100 --memory 20G` or `--whole`{less}")),
        (20, 0, kinds([LeaseKind::Mig, LeaseKind::Whole]), format!("request `--whole`{less}")),
        (40, 0, memory(30), "request less: `--mig 1g.10gb`".to_owned()),
        (200, 0, none(), "request less: `--mig 1g.10gb`".to_owned()),
    ] {
        assert_eq!(of(&host, gib, slices, limits), expected, "{gib} GiB, {slices} slices");
    }
    assert_eq!(of(&Host { gpus: vec![small()] }, 20, 0, none()), "request less: `--mig 1g.10gb`");
    let by_size = of(&Host { gpus: vec![mps(0, 0, None)] }, 8, 0, none());
    assert_eq!(by_size, "request `--mps 10 --memory 8G`, as with `gpushctl run --mps 10 --memory 8G -- COMMAND`");
    let named = wanted(profile("3g.40gb"), 1);
    let expected = "request `--mps 50 --memory 40G` or `--whole` or `--mig 1g.10gb`";
    assert_eq!(hint(&host, &named, none()).as_deref(), Some(expected));
}

/// Fault: the hint was "request 1 or fewer", although the quota does not allow one either.
#[test]
fn smaller_number_of_members_fits_the_quota() {
    let host = Host { gpus: vec![whole(0, true), whole(1, true)] };
    let request = wanted(RequestedShare::Whole, 3);
    assert_eq!(hint(&host, &request, Limits::default()).as_deref(), Some("request 2 or fewer"));
    assert_eq!(hint(&host, &request, memory(100)).as_deref(), Some("request 1 or fewer"));
    assert_eq!(hint(&host, &request, memory(10)).as_deref(), Some("request at most 10 GiB"));
    let (effective, gpus) = (Effective::without_quota(memory(80)), gpus());
    let size = Size::of_one(80 * 1024, 80 * 1024, 0);
    let held = [HeldLease { id: LeaseId(6), queued: false, size, releasable: true }];
    let allowance = Some(Allowance { effective: &effective, held: &held });
    let why = place(&host, &request, PlacementPolicy::Pack).unwrap_err();
    let hint = why.error(&request, ErrorContext { gpus: &gpus, allowance, ..context(&host) }).hint;
    assert_eq!(hint.as_deref(), Some("release a lease: `gpushctl lease end L6`"));
}
