//! Properties of attribution, for random processes and leases.

use gpush_api::{GpuUuid, TargetUuid};
use std::sync::LazyLock;

use proptest::{collection::vec, option, prelude::*};

use super::*;

const PATHS: [&str; 4] = ["/", "/scope-1", "/scope-1/below", "/session"];
static TARGETS: LazyLock<[TargetUuid; 3]> = LazyLock::new(|| DEVICES.map(|(_, target)| target.into()));
static GPU_1: LazyLock<GpuUuid> = LazyLock::new(|| "GPU-1".into());
const DEVICES: [(&str, &str); 3] = [("GPU-0", "GPU-0"), ("GPU-1", "MIG-a"), ("GPU-1", "MIG-b")];

/// A uid that no random process has.
const STRANGER: u32 = 9;

fn bindings() -> impl Strategy<Value = LeaseBinding> {
    prop_oneof![
        (0..4_usize).prop_map(|path| scope(PATHS[path])),
        (0..4_usize).prop_map(|path| within(PATHS[path])),
        (any::<bool>(), 0..2_u32).prop_map(|(second, restart)| job(if second { "hpc" } else { "ci" }, restart)),
        Just(LeaseBinding::Process { pid: Some(7), start: Some(1) }),
        Just(LeaseBinding::Time),
        Just(LeaseBinding::None),
    ]
}

fn shares() -> impl Strategy<Value = MemberShare> {
    prop_oneof![Just(shared()), Just(mig()), Just(MemberShare::Whole)]
}

/// Leases with the ids 1 to 6. Real leases cannot all exist at the same time: several leases may have a device alone.
fn leases() -> impl Strategy<Value = Vec<Leased>> {
    let member = (0..DEVICES.len(), shares()).prop_map(|(at, share)| member(DEVICES[at].0, DEVICES[at].1, share));
    let lease = (1..3_u32, bindings(), vec(member, 1..3));
    vec(lease, 0..6).prop_map(|all| {
        let lease = |(id, (holder, binding, members)): (u64, (u32, LeaseBinding, Vec<LeaseMember>))| Leased {
            id,
            holder,
            binding,
            members,
        };
        (1..).zip(all).map(lease).collect()
    })
}

fn names() -> impl Strategy<Value = Name> {
    prop_oneof![4 => (1..8_u64).prop_map(Name::Lease), 2 => Just(Name::None), 1 => Just(Name::Overwritten)]
}

/// Readable processes.
fn processes() -> impl Strategy<Value = Process> {
    let cgroups = (0..4_usize, option::of(option::of(Just("n1"))));
    (1..3_u32, cgroups, names(), option::of(1..8_u64)).prop_map(|(uid, (path, job), name, inherited)| {
        let process = Process { inherited: Ok(inherited), ..Process::new(uid, PATHS[path]).named(name) };
        job.map_or(process.clone(), |node| process.in_job(node))
    })
}

fn gpu_uses() -> impl Strategy<Value = GpuUse<'static>> {
    prop_oneof![
        3 => (0..DEVICES.len()).prop_map(|at| GpuUse::Target(&TARGETS[at])),
        1 => Just(()).prop_map(|()| GpuUse::Gpu(&GPU_1)),
        1 => Just(GpuUse::None),
    ]
}

fn found(process: &Process, gpu_use: GpuUse<'_>, leases: &[Leased]) -> Attribution {
    attribute(process, gpu_use, leases.iter().map(Leased::view))
}

/// Returns the lease that a process may be ended with.
fn ended_with(found: &Attribution, leases: &[Leased]) -> Vec<u64> {
    leases.iter().map(|one| one.id).filter(|id| found.matches(LeaseId(*id)) == LeaseMatch::This).collect()
}

fn named_leases(found: &Attribution) -> Vec<LeaseId> {
    match found {
        Attribution::Lease { id, earlier_runs, .. } => [*id].into_iter().chain(earlier_runs.iter().copied()).collect(),
        Attribution::Perhaps { leases, .. } | Attribution::Unknown { leases, .. } => leases.clone(),
        Attribution::NoLease => Vec::new(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// At most one lease gets a process with certainty. This lease belongs to the user of the process, and has a share of
    /// the device. A scope, a job or the environment gives the same lease on every device.
    #[test]
    fn at_most_one_lease_gets_a_process_with_certainty(process in processes(), leases in leases()) {
        let mut identified = Vec::new();
        let uses = [GpuUse::Target(&"GPU-0".into()), GpuUse::Target(&"MIG-a".into()), GpuUse::Target(&"MIG-b".into()), GpuUse::None];
        for gpu_use in uses {
            let found = found(&process, gpu_use, &leases);
            let certain = ended_with(&found, &leases);
            prop_assert!(certain.len() <= 1, "{:?}", found);
            for id in &certain {
                let lease = leases.iter().find(|lease| lease.id == *id).unwrap();
                prop_assert_eq!(Ok(lease.holder), process.uid.clone());
                prop_assert!(gpu_use.is_of(&lease.view()));
            }
            if let Attribution::Lease { id, evidence: Evidence::Scope | Evidence::Job | Evidence::Environment, .. } = found {
                identified.push(id);
            }
        }
        identified.dedup();
        prop_assert!(identified.len() <= 1, "{:?}", identified);
    }

    /// If a user holds a lease on a device, each process of this user there counts for a lease there. No process counts
    /// for a lease on another device.
    #[test]
    fn process_of_a_holder_on_a_device_keeps_a_lease(
        process in processes(), gpu_use in gpu_uses(), leases in leases(), lost in option::of(0..3_u8),
    ) {
        let mut process = process;
        match lost {
            Some(0) => process.cgroups = Err(unreadable(FactName::Cgroups)),
            Some(1) => process.name = Name::Unreadable,
            Some(_) => process.inherited = Err(unreadable(FactName::Environment)),
            None => {}
        }
        let found = found(&process, gpu_use, &leases);
        let counted = named_leases(&found);
        let is_of = |id: &LeaseId| leases.iter().any(|one| one.id == id.0 && gpu_use.is_of(&one.view()));
        prop_assert!(counted.iter().all(is_of), "{:?}", found);
        let is_own = |one: &&Leased| Ok(one.holder) == process.uid && gpu_use.is_of(&one.view());
        if gpu_use != GpuUse::None && leases.iter().any(|one| is_own(&one)) {
            let is_kept = |one: &&Leased| is_own(one) && found.matches(LeaseId(one.id)) != LeaseMatch::Another;
            prop_assert!(leases.iter().any(|one| is_kept(&one)), "{:?}", found);
        }
        prop_assert!(found == Attribution::NoLease || !counted.is_empty());
    }

    /// If a fact is unreadable, and a process nevertheless belongs to a lease with certainty, then it belongs to this
    /// lease whatever the fact is.
    #[test]
    fn unreadable_fact_never_decides_with_which_lease_a_process_ends(
        process in processes(), other in processes(), gpu_use in gpu_uses(), leases in leases(), fact in 0..4_u8,
    ) {
        let with = |other: &Process| {
            let mut one = process.clone();
            match fact {
                0 => one.uid = other.uid.clone(),
                1 => one.cgroups = other.cgroups.clone(),
                2 => one.name = other.name,
                _ => one.inherited = other.inherited.clone(),
            }
            one
        };
        let unread = Process {
            uid: Err(unreadable(FactName::User)),
            cgroups: Err(unreadable(FactName::Cgroups)),
            name: Name::Unreadable,
            inherited: Err(unreadable(FactName::Environment)),
            ..other.clone()
        };
        let blind = found(&with(&unread), gpu_use, &leases);
        let certain = ended_with(&blind, &leases);
        if !certain.is_empty() {
            prop_assert_eq!(certain, ended_with(&found(&with(&other), gpu_use, &leases), &leases));
        }
        // Each lease with which the process may end keeps its capacity while the fact is unreadable.
        for id in ended_with(&found(&with(&other), gpu_use, &leases), &leases) {
            prop_assert!(blind.matches(LeaseId(id)) != LeaseMatch::Another, "{:?}", blind);
        }
    }

    /// Neither the order of the leases nor a lease of another user changes the answer for a user who holds a lease on the
    /// device. A lease of another user on another device never changes it.
    #[test]
    fn unrelated_lease_changes_nothing(
        process in processes(), gpu_use in gpu_uses(), leases in leases(), binding in bindings(), share in shares(),
        id in 0..20_u64,
    ) {
        let expected = found(&process, gpu_use, &leases);
        let mut reversed = leases.clone();
        reversed.reverse();
        prop_assert_eq!(&found(&process, gpu_use, &reversed), &expected);
        prop_assume!(leases.iter().all(|lease| lease.id != id));
        let with = |extra: Leased| [vec![extra], leases.clone()].concat();
        let elsewhere = Leased::new(id, STRANGER, binding.clone()).on("GPU-9", "GPU-9", share.clone());
        prop_assert_eq!(&found(&process, gpu_use, &with(elsewhere)), &expected);
        let is_own_here = |one: &Leased| Ok(one.holder) == process.uid && gpu_use.is_of(&one.view());
        if leases.iter().any(is_own_here) {
            let same_device = Leased::new(id, STRANGER, binding).on(DEVICES[1].0, DEVICES[1].1, share);
            prop_assert_eq!(&found(&process, gpu_use, &with(same_device)), &expected);
        }
    }

    /// The environment of a process of another user changes nothing.
    #[test]
    fn process_cannot_claim_a_lease_of_another_user(
        process in processes(), other in processes(), gpu_use in gpu_uses(), leases in leases(),
    ) {
        let stranger = |from: &Process| {
            Process { uid: Ok(STRANGER), name: from.name, inherited: from.inherited.clone(), ..process.clone() }
        };
        let one = found(&stranger(&process), gpu_use, &leases);
        prop_assert_eq!(&one, &found(&stranger(&other), gpu_use, &leases));
        prop_assert!(ended_with(&one, &leases).is_empty() && !one.is_identified());
    }
}
