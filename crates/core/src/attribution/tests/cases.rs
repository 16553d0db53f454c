//! Each row of the table in the documentation of the module, and faults of earlier rules.

use super::*;

const ALICE: u32 = 1000;
const BOB: u32 = 1001;
const SESSION: &str = "/user.slice/user-1000.slice/session-4.scope";
const SCOPE: &str = "/gpulease.slice/gpulease-1000.slice/gpulease-e-2.scope";
const SERVICE: &str = "/system.slice/jupyter.service";

fn free(id: u64) -> Leased {
    Leased::new(id, ALICE, LeaseBinding::None)
}

#[test]
fn process_in_a_scope_belongs_to_its_lease_despite_its_environment() {
    let leases = [free(1), Leased::new(2, ALICE, scope(SCOPE))];
    for path in [SCOPE.to_owned(), format!("{SCOPE}/below")] {
        let process = Process::new(ALICE, &path).named(Name::Lease(1));
        assert_eq!(on_gpu(&process, &leases), certain(2, Evidence::Scope));
        assert!(!process.has_read_environment.get(), "the environment cannot change the answer");
    }
    // The path of another scope begins with the same text.
    let other = Process::new(ALICE, &format!("{SCOPE}x"));
    assert_eq!(on_gpu(&other, &leases), perhaps(1, Doubt::NoEvidence));
}

#[test]
fn process_in_the_cgroup_of_a_job_belongs_to_its_lease() {
    let leases = [free(1), Leased::new(2, ALICE, job("ci", 0))];
    for node in [None, Some("n1")] {
        let process = Process::new(ALICE, "/").named(Name::Lease(1)).in_job(node);
        assert_eq!(on_gpu(&process, &leases), certain(2, Evidence::Job));
    }
    let of_other_node = Process::new(ALICE, "/").named(Name::Lease(1)).in_job(Some("n2"));
    assert_eq!(on_gpu(&of_other_node, &leases), certain(1, Evidence::Environment));
}

#[test]
fn job_id_of_two_clusters_does_not_identify_the_job() {
    let leases = [Leased::new(1, ALICE, job("ci", 0)), Leased::new(2, ALICE, job("hpc", 0))];
    let process = Process::new(ALICE, "/").in_job(None);
    let both = Attribution::Perhaps { leases: vec![LeaseId(1), LeaseId(2)], doubt: Doubt::SeveralJobs };
    assert_eq!(on_gpu(&process, &leases), both);
    let elsewhere = leases[1].clone().on("GPU-1", "GPU-1", shared());
    assert_eq!(on_gpu(&process, &[leases[0].clone(), elsewhere]), perhaps(1, Doubt::SeveralJobs));
    // A job of another user has another uid.
    let other = Leased::new(2, BOB, job("hpc", 0));
    assert_eq!(on_gpu(&process, &[leases[0].clone(), other]), certain(1, Evidence::Job));
}

/// All runs of a requeued job have the same cgroup. If the lease of the first run has not ended, its end must not end
/// the processes of the second run.
#[test]
fn process_of_a_requeued_job_belongs_to_the_last_run() {
    let runs = [Leased::new(1, ALICE, job("ci", 0)), Leased::new(2, ALICE, job("ci", 1))];
    let process = Process::new(ALICE, "/").in_job(None);
    let found = on_gpu(&process, &runs);
    assert_eq!((found.matches(LeaseId(1)), found.matches(LeaseId(2))), (LeaseMatch::PerhapsThis, LeaseMatch::This));
    // The device of the first run keeps its lease until the process ends.
    let moved = [runs[0].clone(), runs[1].clone().on("GPU-1", "GPU-1", shared())];
    assert_eq!(on_gpu(&process, &moved), perhaps(1, Doubt::LaterRun));
}

#[test]
fn environment_identifies_a_lease_of_the_same_user_only() {
    let leases = [free(1), free(2), Leased::new(3, BOB, LeaseBinding::None)];
    let named = |id| Process::new(ALICE, SESSION).named(Name::Lease(id));
    assert_eq!(on_gpu(&named(2), &leases), certain(2, Evidence::Environment));
    assert_eq!(on_gpu(&named(3), &leases), perhaps(1, Doubt::NoEvidence));
    assert_eq!(on_gpu(&named(9), &leases), perhaps(1, Doubt::NoEvidence), "an ended lease");
}

#[test]
fn environment_proves_nothing_about_a_job() {
    let leases = [free(1), Leased::new(2, ALICE, job("ci", 0))];
    let process = Process::new(ALICE, SESSION).named(Name::Lease(2));
    assert_eq!(on_gpu(&process, &leases), perhaps(2, Doubt::NamesJob));
    assert!(on_gpu(&process, &leases).is_identified());
    assert_eq!(attribute(&process, GpuUse::None, leases.iter().map(Leased::view)), Attribution::NoLease);
}

/// Fault: if gpushd could not read the environment of a process outside the job's cgroup, it counted this as a failure of
/// the node. So a user could make Epilog drain the node.
#[test]
fn environment_outside_of_a_job_on_the_jobs_device_is_not_read() {
    let own = Leased::new(1, ALICE, job("ci", 0)).on("GPU-0", "MIG-a", mig());
    let process = Process::new(ALICE, SESSION).named(Name::Unreadable);
    assert_eq!(on("MIG-a", &process, std::slice::from_ref(&own)), perhaps(1, Doubt::OutsideJob));
    assert!(!process.has_read_environment.get());
    let whole = own.on("GPU-0", "GPU-0", MemberShare::Whole);
    assert_eq!(on_gpu(&process, &[whole]), perhaps(1, Doubt::OutsideJob));
    assert_eq!(
        on_gpu(&process.clone().named(Name::None), &[Leased::new(1, ALICE, job("ci", 0))]),
        perhaps(1, Doubt::OutsideJob)
    );
}

#[test]
fn session_identifies_its_only_lease_on_the_device() {
    let in_session = |id| Leased::new(id, ALICE, within(SESSION));
    let leases = [free(1), in_session(2)];
    let process = Process::new(ALICE, SESSION);
    assert_eq!(on_gpu(&process, &leases), certain(2, Evidence::Cgroup));
    assert_eq!(on_gpu(&process.clone().named(Name::Lease(1)), &leases), certain(1, Evidence::Environment));
    let elsewhere = in_session(3).on("GPU-1", "GPU-1", shared());
    assert_eq!(on_gpu(&process, &[free(1), in_session(2), elsewhere]), certain(2, Evidence::Cgroup));
    assert_eq!(on_gpu(&process, &[free(1), in_session(2), in_session(3)]), perhaps(2, Doubt::SeveralLeases));
    assert_eq!(on_gpu(&Process::new(ALICE, SCOPE), &leases), perhaps(1, Doubt::NoEvidence));
}

/// Fault: a program with `setproctitle` overwrote the name of its lease before gpushd had read it. It counted for the
/// lease of its session, and ended together with that lease.
#[test]
fn overwritten_environment_may_have_named_any_lease_on_the_device() {
    let leases = [Leased::new(1, ALICE, within(SESSION)), free(2)];
    let process = Process::new(ALICE, SESSION).named(Name::Overwritten);
    assert_eq!(on_gpu(&process, &leases), perhaps(1, Doubt::Overwritten));
    assert_eq!(on_gpu(&process, &leases[..1]), certain(1, Evidence::Cgroup), "no other lease is on the device");
    assert_eq!(on_gpu(&process, &[free(2), free(3)]), perhaps(2, Doubt::Overwritten));
}

#[test]
fn process_that_nothing_identifies_counts_for_the_oldest_lease() {
    let leases = [free(7), free(3), free(5)];
    assert_eq!(on_gpu(&Process::new(ALICE, "/"), &leases), perhaps(3, Doubt::NoEvidence));
    assert_eq!(on_gpu(&Process::new(BOB, "/"), &leases), Attribution::NoLease);
    assert_eq!(on("GPU-1", &Process::new(ALICE, "/"), &leases), Attribution::NoLease);
}

/// A process that cleared its environment may have done this on purpose, so gpushd does not end it.
#[test]
fn inherited_name_identifies_a_lease_but_is_no_reason_to_end() {
    let leases = [free(1), free(2)];
    let process = Process { inherited: Ok(Some(2)), ..Process::new(ALICE, "/") };
    let found = on_gpu(&process, &leases);
    assert_eq!(found, certain(2, Evidence::Inherited));
    assert_eq!((found.matches(LeaseId(2)), found.matches(LeaseId(1))), (LeaseMatch::PerhapsThis, LeaseMatch::Another));
    assert_eq!((found.shown(), found.is_identified()), (Some((LeaseId(2), false)), true));
    assert_eq!(on_gpu(&process.named(Name::Lease(1)), &leases), certain(1, Evidence::Environment));
}

/// Fault: a process in the scope of one lease used the GPU of another lease. It ended together with the other lease.
#[test]
fn process_in_a_scope_is_not_ended_with_a_lease_on_another_device() {
    let first = Leased::new(2, ALICE, scope(SCOPE)).on("GPU-1", "GPU-1", MemberShare::Whole);
    let leases = [first, free(3), free(4)];
    let process = Process::new(ALICE, SCOPE);
    assert_eq!(on("GPU-1", &process, &leases), certain(2, Evidence::Scope));
    assert_eq!(on_gpu(&process, &leases), perhaps(3, Doubt::OtherDevice { is_named: false }));
    assert_eq!(on_gpu(&process.named(Name::Lease(4)), &leases), perhaps(4, Doubt::OtherDevice { is_named: true }));
}

/// Fault: a process whose environment names a lease on one device used a device of another lease. It ended with the
/// other lease, because the other lease had the session of the process.
#[test]
fn process_that_names_a_lease_is_not_ended_with_a_lease_on_another_device() {
    let named = free(1).on("GPU-1", "GPU-1", MemberShare::Whole);
    let leases = [named, Leased::new(2, ALICE, within(SESSION))];
    let process = Process::new(ALICE, SESSION).named(Name::Lease(1));
    assert_eq!(on("GPU-1", &process, &leases), certain(1, Evidence::Environment));
    assert_eq!(on_gpu(&process, &leases), perhaps(2, Doubt::OtherDevice { is_named: false }));
}

/// Fault: gpushd ended a process that did not name the lease of the device. `ps` showed this process as
/// `perhaps lease L1`, which says that gpushd does not end it.
#[test]
fn process_on_a_device_belongs_to_its_lease_only_if_it_names_it() {
    for share in [mig(), MemberShare::Whole] {
        let lease = free(1).on("GPU-0", "GPU-0", share);
        let found = |name| on_gpu(&Process::new(ALICE, "/").named(name), std::slice::from_ref(&lease));
        assert_eq!(found(Name::Lease(1)), certain(1, Evidence::Environment));
        for name in [Name::None, Name::Lease(2)] {
            assert_eq!(found(name), perhaps(1, Doubt::NoEvidence));
        }
    }
}

/// Fault: `ps` reported such a process as unleased, and the policy `end` ended it.
#[test]
fn setuid_program_and_root_of_a_container_count_for_the_lease_of_their_cgroup() {
    let leases = [free(1), Leased::new(2, ALICE, within(SERVICE)), Leased::new(3, ALICE, within(SERVICE))];
    for (uid, path) in [(0, SERVICE), (100_000, "/system.slice/jupyter.service/payload")] {
        let process = Process::new(uid, path).named(Name::Lease(3));
        assert_eq!(on_gpu(&process, &leases), perhaps(2, Doubt::OtherUser), "the environment does not count");
        assert_eq!(on("GPU-1", &process, &leases), Attribution::NoLease);
    }
    for (binding, process) in
        [(scope(SCOPE), Process::new(BOB, SCOPE)), (job("ci", 0), Process::new(BOB, "/").in_job(None))]
    {
        assert_eq!(on_gpu(&process, &[Leased::new(1, ALICE, binding)]), perhaps(1, Doubt::OtherUser));
    }
    // If the user has a lease there, the process counts for a lease of this user.
    let with_own = [leases[1].clone(), Leased::new(4, BOB, LeaseBinding::None)];
    assert_eq!(on_gpu(&Process::new(BOB, SERVICE), &with_own), perhaps(4, Doubt::NoEvidence));
    assert_eq!(on_gpu(&Process::new(BOB, SESSION), &leases), Attribution::NoLease);
}

/// Fault: if gpushd could not read the files of a process, it attributed the process to another lease. The lease to
/// which the process belonged ended.
#[test]
fn process_that_cannot_be_read_keeps_each_lease_on_the_device() {
    let leases = [free(1), free(2), Leased::new(3, BOB, within(SERVICE)), free(4).on("GPU-1", "GPU-1", shared())];
    let unknown = |ids: &[u64], fact| Attribution::Unknown {
        leases: ids.iter().map(|id| LeaseId(*id)).collect(),
        unreadable: unreadable(fact),
    };
    let process = Process::new(ALICE, SESSION);
    let without_user = Process { uid: Err(unreadable(FactName::User)), ..process.clone() };
    assert_eq!(on_gpu(&without_user, &leases), unknown(&[1, 2, 3], FactName::User));
    assert_eq!(on_gpu(&without_user, &leases).shown(), None, "it may belong to another user");
    let without_cgroup = Process { cgroups: Err(unreadable(FactName::Cgroups)), ..process.clone() };
    assert_eq!(on_gpu(&without_cgroup, &leases), unknown(&[1, 2], FactName::Cgroups));
    let of_other = Process { uid: Ok(2000), ..without_cgroup };
    assert_eq!(on_gpu(&of_other, &leases), unknown(&[3], FactName::Cgroups));
    assert_eq!(on_gpu(&of_other, &leases[..2]), Attribution::NoLease, "no lease there has a cgroup");
    let without_environment = process.named(Name::Unreadable);
    let found = on_gpu(&without_environment, &leases);
    assert_eq!(found, unknown(&[1, 2], FactName::Environment));
    assert_eq!(found.matches(LeaseId(2)), LeaseMatch::Unread(&unreadable(FactName::Environment)));
    assert_eq!(on("GPU-9", &without_environment, &leases), Attribution::NoLease);
    let inherited = Err(unreadable(FactName::Environment));
    let without_ancestors = Process { inherited, ..without_environment.named(Name::None) };
    assert_eq!(on_gpu(&without_ancestors, &leases), unknown(&[1, 2], FactName::Environment));
}

/// A login shell does not keep the lease of its session open.
#[test]
fn process_without_a_gpu_belongs_to_a_lease_only_by_scope_job_or_environment() {
    let leases = [
        Leased::new(1, ALICE, within(SESSION)),
        Leased::new(2, ALICE, scope(SCOPE)),
        Leased::new(3, ALICE, job("ci", 0)),
    ];
    let found = |process: &Process| attribute(process, GpuUse::None, leases.iter().map(Leased::view));
    assert_eq!(found(&Process::new(ALICE, SESSION)), Attribution::NoLease);
    assert_eq!(found(&Process { inherited: Ok(Some(1)), ..Process::new(ALICE, "/") }), Attribution::NoLease);
    assert_eq!(found(&Process::new(ALICE, "/").named(Name::Lease(1))), certain(1, Evidence::Environment));
    assert_eq!(found(&Process::new(ALICE, SCOPE).named(Name::Lease(1))), certain(2, Evidence::Scope));
    assert_eq!(found(&Process::new(ALICE, "/").in_job(None)), certain(3, Evidence::Job));
    assert_eq!(found(&Process::new(BOB, SCOPE)), Attribution::NoLease);
    let unknown = found(&Process::new(ALICE, "/").named(Name::Unreadable));
    assert!(matches!(unknown, Attribution::Unknown { leases, .. } if leases == [LeaseId(1), LeaseId(2)]));
}

/// The driver lists a process on a GPU instance that has no compute instance.
#[test]
fn process_somewhere_on_a_gpu_counts_for_a_lease_on_any_of_its_devices() {
    let leases = [
        free(1).on("GPU-0", "MIG-a", mig()),
        free(2).on("GPU-0", "MIG-b", mig()),
        free(3).on("GPU-1", "GPU-1", MemberShare::Whole),
    ];
    let found = |name| {
        let process = Process::new(ALICE, "/").named(name);
        attribute(&process, GpuUse::Gpu(&"GPU-0".into()), leases.iter().map(Leased::view))
    };
    assert_eq!(found(Name::Lease(2)), certain(2, Evidence::Environment));
    assert_eq!(found(Name::None), perhaps(1, Doubt::NoEvidence));
    assert_eq!(found(Name::Lease(3)), perhaps(1, Doubt::OtherDevice { is_named: false }));
}

#[test]
fn nothing_is_below_the_root_cgroup() {
    assert!(is_at_or_below("/a/b", "/a") && is_at_or_below("/a", "/a"));
    assert!(!is_at_or_below("/ab", "/a") && !is_at_or_below("/a", "/a/b"));
    assert!(!is_at_or_below("/a", "/") && !is_at_or_below("/a", ""));
}
