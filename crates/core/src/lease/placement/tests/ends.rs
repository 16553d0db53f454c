//! Where a waiting request reserves, by the ends of the leases in its way.

use gpush_api::{GpuIndex, TargetUuid};

use super::*;

/// A lease for [`Host::set_ends`]: its target, its share in tenths of a percent, and its end.
type Lease<'a> = (&'a str, u32, KnownEnd);

/// Returns the GPU that a request reserves, and when it is free.
fn reserved(gpus: &[GpuOffer], leases: &[Lease<'_>], share: RequestedShare) -> (GpuIndex, KnownEnd) {
    let mut host = Host { gpus: gpus.to_vec() };
    let targets: Vec<TargetUuid> = leases.iter().map(|(target, ..)| (*target).into()).collect();
    let noted = leases.iter().zip(&targets);
    host.set_ends(noted.map(|((_, tenths, end), target)| LeaseEnd { target, tenths: *tenths, end: *end }));
    let (assignment, free_at) = host.reservation(&wanted(share, 1), PlacementPolicy::Pack).unwrap();
    (*assignment.gpus().first().unwrap(), free_at)
}

#[test]
fn whole_gpu_with_the_earliest_known_end_is_reserved() {
    let gpus = [whole(0, false), whole(1, false), whole(2, false)];
    let leases = [("GPU-0", 0, None), ("GPU-1", 0, Some(900)), ("GPU-2", 0, Some(300))];
    assert_eq!(reserved(&gpus, &leases, RequestedShare::Whole), (GpuIndex(2), Some(300)));
    assert_eq!(reserved(&gpus[..2], &leases, RequestedShare::Whole), (GpuIndex(1), Some(900)));
    assert_eq!(reserved(&gpus[..1], &leases, RequestedShare::Whole), (GpuIndex(0), None));
    assert_eq!(reserved(&gpus[..1], &[], RequestedShare::Whole), (GpuIndex(0), None), "a process without a lease");
}

#[test]
fn replica_is_reserved_where_a_lease_ends_first() {
    let gpus = [timeslice(0, 2, 2), timeslice(1, 2, 2)];
    let leases = [("GPU-0", 0, Some(500)), ("GPU-0", 0, None), ("GPU-1", 0, Some(600)), ("GPU-1", 0, Some(400))];
    assert_eq!(reserved(&gpus, &leases, RequestedShare::Timeslice), (GpuIndex(1), Some(400)));
}

#[test]
fn mps_share_is_reserved_where_enough_of_the_target_ends_first() {
    let share = |text: &str| RequestedShare::Mps { percentage: text.parse().ok(), memory_limit: None, priority: None };
    let gpus = [mps(0, 1000, Some(1000)), mps(1, 1000, Some(1000))];
    let leases = [("GPU-0", 300, Some(100)), ("GPU-0", 700, Some(800)), ("GPU-1", 1000, Some(500))];
    assert_eq!(reserved(&gpus, &leases, share("30")), (GpuIndex(0), Some(100)), "the first lease is enough");
    assert_eq!(reserved(&gpus, &leases, share("40")), (GpuIndex(1), Some(500)), "GPU 0 needs the end of both");
    let other = [mps(0, 200, Some(2000))];
    let leases = [("GPU-0", 100, Some(700)), ("GPU-0", 100, Some(900))];
    assert_eq!(reserved(&other, &leases, share("10")), (GpuIndex(0), Some(900)), "all leases of the other user end");
    let endless = [("GPU-0", 100, Some(700)), ("GPU-0", 100, None)];
    assert_eq!(reserved(&other, &endless, share("10")), (GpuIndex(0), None));
}

/// A gang waits for the last of its GPUs.
#[test]
fn gang_is_free_when_its_last_gpu_is_free() {
    let mut host = Host { gpus: vec![whole(0, false), whole(1, false), whole(2, false)] };
    let targets: [TargetUuid; 3] = ["GPU-0", "GPU-1", "GPU-2"].map(Into::into);
    let ends = [Some(900), Some(300), Some(500)];
    host.set_ends(targets.iter().zip(ends).map(|(target, end)| LeaseEnd { target, tenths: 0, end }));
    let (assignment, free_at) = host.reservation(&wanted(RequestedShare::Whole, 2), PlacementPolicy::Pack).unwrap();
    assert_eq!((assignment.gpus(), free_at), ([GpuIndex(1), GpuIndex(2)].into(), Some(500)));
}

#[test]
fn processes_without_a_lease_have_no_known_end() {
    let mut gpu = mig(0, "a100-80", true, "1g.10gb@0 used, 1g.10gb@4");
    for instance in &mut gpu.mig.as_mut().unwrap().instances {
        instance.devices[0].end = Some(700);
        // A process uses the second instance, although no lease has it.
        instance.busy = instance.placement.start == 4;
    }
    let at = |profile_name: &str| {
        let host = Host { gpus: vec![gpu.clone()] };
        host.reservation(&wanted(profile(profile_name), 1), PlacementPolicy::Pack).unwrap().1
    };
    assert_eq!(at("7g.80gb"), None);
    assert_eq!(at("4g.40gb"), Some(700), "only the lease is in its way");
}
