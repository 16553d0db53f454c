//! What blocks a request.

use gpush_api::{GpuIndex, LeaseMember, MemberShare};

use super::*;

fn member(gpu: u32, target: &str, share: MemberShare) -> LeaseMember {
    let (target, gpu) = (target.to_owned(), format!("GPU-{gpu}"));
    LeaseMember { target: target.into(), gpu_uuid: gpu.into(), share, memory_mib: 0, gpu_memory_mib: 0 }
}

fn device(gpu: u32, target: &str) -> LeaseMember {
    member(gpu, target, MemberShare::Mig { profile: String::new() })
}

fn mps_share(gpu: u32, percentage: &str) -> LeaseMember {
    let percentage = percentage.parse().unwrap();
    let share = MemberShare::Mps { percentage, memory_limit_mib: None, priority: Priority::Normal };
    member(gpu, &format!("GPU-{gpu}"), share)
}

/// Returns the blockers as text. The first lease is 0.
fn found(host: &Host, request: &PlacementRequest, leases: &[LeaseMember]) -> String {
    let leases: Vec<(usize, Vec<&LeaseMember>)> = leases.iter().map(|one| vec![one]).enumerate().collect();
    let Blockers { leases, in_use, together } = blockers(host, request, PlacementPolicy::Pack, &leases);
    format!("{leases:?} {in_use:?}{}", if together { " together" } else { "" })
}

/// Fault: a refusal named every lease on the GPUs, also a lease of a device that does not meet the
/// request.
#[test]
fn only_leases_without_which_the_request_is_granted_are_named() {
    let host = Host { gpus: vec![mig(0, "a100-80", false, "3g.40gb@0 used, 2g.20gb@4 used, 1g.10gb@6 used")] };
    let leases = [device(0, "3g.40gb@0"), device(0, "2g.20gb@4"), device(0, "1g.10gb@6")];
    assert_eq!(found(&host, &wanted(profile("2g.20gb"), 1), &leases), "[1] []");
    assert_eq!(found(&host, &wanted(profile("4g.40gb"), 1), &leases), "[] []", "the layout does not have it");
    let dynamic = Host { gpus: vec![mig(0, "a100-80", true, "3g.40gb@0 used, 2g.20gb@4 used, 1g.10gb@6 used")] };
    assert_eq!(found(&dynamic, &wanted(profile("3g.40gb"), 1), &leases), "[0] []");
    assert_eq!(found(&dynamic, &wanted(profile("4g.40gb"), 1), &leases), "[0] []");
    assert_eq!(found(&dynamic, &wanted(profile("7g.80gb"), 1), &leases), "[0, 1, 2] [] together");
}

/// Case: 1g instances at 0, 1 and 5. Both placements of a 3g are blocked, but 1g@5 alone blocks the placement at 4.
#[test]
fn instance_that_alone_blocks_is_found() {
    let host = Host { gpus: vec![mig(0, "a100-80", true, "1g.10gb@0 used, 1g.10gb@1 used, 1g.10gb@5 used")] };
    let leases = [device(0, "1g.10gb@0"), device(0, "1g.10gb@1"), device(0, "1g.10gb@5")];
    let request = wanted(profile("3g.40gb"), 1);
    assert_eq!(found(&host, &request, &leases), "[2] []");
    let at = |start| (GpuIndex(0), gpush_api::Placement { start, size: 1 });
    let blocking = |request: &PlacementRequest| {
        instances_that_block(&host, request, PlacementPolicy::Pack, &[at(0), at(1), at(5)])
    };
    assert_eq!(blocking(&request), [at(5)]);
    // No single instance blocks a 7g, so all are named.
    assert_eq!(blocking(&wanted(profile("7g.80gb"), 1)).len(), 3);
}

#[test]
fn shares_are_summed_until_the_request_fits() {
    let mut host = Host { gpus: vec![mps(0, 900, None), mps(1, 1000, None)] };
    (host.gpus[0].mps[0].leases, host.gpus[1].mps[0].leases) = (3, 2);
    let leases = [mps_share(0, "30"), mps_share(0, "30"), mps_share(0, "30"), mps_share(1, "60"), mps_share(1, "40")];
    assert_eq!(found(&host, &wanted(some_mps("20"), 1), &leases), "[0, 1, 2, 3, 4] []");
    assert_eq!(found(&host, &wanted(some_mps("50"), 1), &leases), "[3] []");
    assert_eq!(found(&host, &wanted(some_mps("80"), 1), &leases), "[3, 4] [] together");
}

/// Fault: a refusal blamed the leases of a target whose daemon does not serve, although their end does not help.
/// gpushd offers no place for a lease on such a target.
#[test]
fn leases_of_a_target_that_does_not_serve_are_not_blamed() {
    let mut host = Host { gpus: vec![mps(0, 250, None)] };
    host.gpus[0].mps[0].leases = u32::MAX;
    assert_eq!(found(&host, &wanted(some_mps("20"), 1), &[mps_share(0, "25")]), "[] []");
}

/// Fault: only the first leases of the host were tested, so many leases of another kind hid the lease that blocks.
#[test]
fn leases_of_other_kinds_do_not_hide_the_lease_that_blocks() {
    let host = Host { gpus: vec![mps(0, 900, None), mig(1, "a100-80", false, "3g.40gb@0 used")] };
    let mut leases = vec![mps_share(0, "1"); 200];
    leases.push(device(1, "3g.40gb@0"));
    assert_eq!(found(&host, &wanted(profile("3g.40gb"), 1), &leases), "[200] []");
}

/// Fault: a refusal did not name the processes without a lease that use the capacity.
#[test]
fn targets_in_use_without_a_lease_are_found() {
    let mut used = whole(5, false);
    used.whole.as_mut().unwrap().leased = false;
    let mut host = Host { gpus: vec![used, mig(0, "a100-80", false, "3g.40gb@0 used, 3g.40gb@4 used")] };
    assert_eq!(found(&host, &wanted(RequestedShare::Whole, 1), &[]), "[] [\"GPU-5\"]");
    host.gpus[1].mig.as_mut().unwrap().instances[1].devices[0].leased = false;
    let lease = [device(0, "3g.40gb@0")];
    assert_eq!(found(&host, &wanted(profile("3g.40gb"), 1), &lease), "[0] [\"3g.40gb@4\"]");
    assert_eq!(found(&host, &wanted(profile("3g.40gb"), 2), &lease), "[0] [\"3g.40gb@4\"] together");
}

#[test]
fn closed_gpu_and_free_capacity_have_no_blockers() {
    let free = Host { gpus: vec![mig(0, "a100-80", false, "3g.40gb@0, 3g.40gb@4 used")] };
    let lease = [device(0, "3g.40gb@4")];
    assert_eq!(found(&free, &wanted(profile("3g.40gb"), 1), &lease), "[] []", "only the queue blocks it");
    let cordoned = GpuOffer { closed: Some(Closed::Cordoned), ..mig(0, "a100-80", false, "3g.40gb@4 used") };
    assert_eq!(found(&Host { gpus: vec![cordoned] }, &wanted(profile("3g.40gb"), 1), &lease), "[] []");
}

#[test]
fn reservation_names_the_targets_that_must_become_free() {
    let host = Host { gpus: vec![mig(0, "a100-80", true, "1g.10gb@4 used, 1g.10gb@0 used, 1g.10gb@5")] };
    let (reservation, _) = host.reservation(&wanted(profile("3g.40gb"), 1), PlacementPolicy::Pack).unwrap();
    assert_eq!(occupied_targets(&host, &reservation), BTreeSet::from(["1g.10gb@4".into()]));
}

/// Fault: a request for a target whose daemon served a client without a lease waited for up to 30 s after the client had
/// ended, because nothing reports this end.
#[test]
fn reading_may_show_the_end_of_processes_without_a_lease() {
    assert!(!mps(0, 0, None).may_improve_with_a_reading() && mps(0, 0, Some(1000)).may_improve_with_a_reading());
    let mut leased = mps(0, 0, Some(1000));
    leased.mps[0].leases = 1;
    assert!(!leased.may_improve_with_a_reading(), "the end of the lease wakes the scheduler");
    assert!(!whole(0, true).may_improve_with_a_reading());
}
