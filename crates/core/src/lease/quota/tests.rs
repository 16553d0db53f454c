use gpush_api::GpuIndex;
use proptest::prelude::*;

use super::*;

fn group(name: &str, limits: Limits) -> Quota {
    Quota { subject: Subject::Group(name.to_owned()), limits, default: None }
}

fn held(id: u64, memory_mib: u64) -> HeldLease {
    let size = Size { members: 1, memory_mib, gpu_thousandths: u32::try_from(memory_mib / 80).unwrap(), mps_tenths: 0 };
    HeldLease { id: LeaseId(id), queued: false, size, releasable: true }
}

fn request(what: &str) -> DeniedRequest<'_> {
    DeniedRequest { what, holder: None, instead: None }
}

fn of(limits: Limits) -> Effective {
    Effective { subject: Some(Subject::Group("students".to_owned())), limits, default: None }
}

fn limits(leases: u32) -> Limits {
    Limits { leases: Some(leases), ..Limits::default() }
}

/// Uids and gids of the tests: `alice`, 1000; `students`, 100; `staff`, 200. No other user or group exists.
fn id_of(subject: &Subject) -> NamedId {
    match subject {
        Subject::User(name) if name == "alice" => NamedId::Known(1000),
        Subject::Group(name) if name == "students" => NamedId::Known(100),
        Subject::Group(name) if name == "staff" => NamedId::Known(200),
        Subject::User(_) | Subject::Group(_) | Subject::Everybody => NamedId::Absent,
    }
}

fn some_quotas() -> [Quota; 5] {
    [
        Quota { subject: Subject::User("alice".to_owned()), limits: limits(9), default: None },
        group("gone", limits(7)),
        group("students", limits(2)),
        group("staff", limits(4)),
        Quota { subject: Subject::Everybody, limits: limits(1), default: None },
    ]
}

#[test]
fn first_quota_that_names_the_user_applies_alone() {
    let leases = |uid, gids: &[u32]| {
        let user = User::Account { uid, gids, has_all_groups: true };
        effective(&some_quotas(), user, id_of, 8).unwrap().limits.leases
    };
    assert_eq!(leases(Some(1000), &[100]), Some(9));
    assert_eq!(leases(Some(1001), &[200, 100]), Some(2));
    assert_eq!(leases(Some(1002), &[]), Some(1));
    assert_eq!((leases(None, &[]), leases(None, &[200])), (Some(1), Some(4)));
    assert_eq!(effective(&some_quotas(), User::Root, id_of, 8).unwrap().limits, Limits::default());
    // A uid is not a gid.
    assert_eq!((leases(Some(100), &[]), leases(Some(1002), &[1000])), (Some(1), Some(1)));
}

#[test]
fn later_quotas_that_name_the_user_are_ignored() {
    let ignored = |uid, gids: &[u32], id_of: fn(&Subject) -> NamedId| {
        let user = User::Account { uid, gids, has_all_groups: true };
        let subjects = ignored(&some_quotas(), user, id_of);
        subjects.iter().map(Subject::label).collect::<Vec<_>>()
    };
    assert_eq!(ignored(Some(1000), &[100], id_of), ["group students", "everybody"]);
    assert!(ignored(Some(1002), &[], id_of).is_empty());
    let unanswered = |_: &Subject| NamedId::Unanswered;
    assert!(ignored(Some(1000), &[100], unanswered).is_empty(), "only the quota for everybody is known to apply");
}

/// Fault: if the name service did not answer within 50 ms, the next quota applied. A user with `leases = 0` then got
/// the GPU of the quota for everybody.
#[test]
fn unknown_identity_never_gets_the_next_quota() {
    let silent = |name: &'static str| {
        move |subject: &Subject| match subject {
            Subject::User(one) | Subject::Group(one) if one == name => NamedId::Unanswered,
            other => id_of(other),
        }
    };
    let quota = |uid, gids: &[u32], has_all_groups, id_of: &dyn Fn(&Subject) -> NamedId| {
        let user = User::Account { uid, gids, has_all_groups };
        effective(&some_quotas(), user, id_of, 8).map(|quota| quota.limits.leases)
    };
    let unknown = |subject| Err(UnknownQuota(subject));
    let (alice, students) = (Subject::User("alice".to_owned()), Subject::Group("students".to_owned()));
    assert_eq!(quota(Some(1000), &[], true, &silent("alice")), unknown(alice.clone()));
    assert_eq!(quota(Some(1001), &[200], true, &silent("alice")), unknown(alice), "1001 may be alice");
    assert_eq!(quota(Some(1001), &[200], true, &silent("students")), unknown(students.clone()));
    assert_eq!(quota(Some(1000), &[], true, &silent("students")), Ok(Some(9)), "an earlier quota applies");
    assert_eq!(quota(Some(1001), &[], false, &id_of), unknown(students), "the groups of the user are unknown");
    assert_eq!(quota(Some(1001), &[100], false, &id_of), Ok(Some(2)), "a known group is enough");
    assert_eq!(quota(None, &[], true, &silent("alice")), Ok(Some(1)), "an unknown uid is not alice");
    let error = gpush_api::ApiError::from(&UnknownQuota(Subject::Group("students".to_owned())));
    assert_eq!((error.code, error.retryable), (gpush_api::Code::Unavailable, true));
    assert!(error.hint.unwrap().contains("`getent group students`"));
}

#[test]
fn denial_names_the_quota_the_limit_and_the_leases() {
    let two = [held(21, 0), held(17, 0)];
    let denial = check_request(&of(limits(2)), &two, LeaseKind::Mig, None).unwrap_err();
    assert_eq!(denial.to_string(), "group students may hold 2 leases; the user holds L17, L21");
    assert_eq!(
        denial.hint(None),
        "use L17: `gpushctl run --lease L17 -- COMMAND`, or release it: `gpushctl lease end L17`"
    );
    assert_eq!(denial.hint_for_job(), "submit the job again when another job or lease of the user has ended");
    let error = denial.error(request("1g.10gb"));
    assert_eq!((error.code, error.retryable), (gpush_api::Code::Denied, false));
    // Fault: the hint named a lease of another uid of the account, which the caller may not release.
    let others = HeldLease { releasable: false, ..two[1] };
    let denial = check_request(&of(limits(2)), &[two[0], others], LeaseKind::Mig, None).unwrap_err();
    assert_eq!(
        denial.hint(None),
        "use L21: `gpushctl run --lease L21 -- COMMAND`, or release it: `gpushctl lease end L21`"
    );
    let denial = check_request(&of(limits(1)), &[others], LeaseKind::Mig, None).unwrap_err();
    assert!(denial.hint(None).starts_with("try again when one of these leases has ended"), "{}", denial.hint(None));

    let day = Limits { longest_s: Some(86_400), ..Limits::default() };
    let denial = check_request(&of(day.clone()), &[], LeaseKind::Mig, Some(90_000)).unwrap_err();
    assert_eq!(denial.to_string(), "group students may hold a lease for at most 1d; the request is for 1d1h");
    let denial = check_request(&of(day), &[], LeaseKind::Mig, None).unwrap_err();
    assert_eq!(denial.to_string(), "group students may hold a lease for at most 1d; the request has no end");
    assert_eq!(denial.hint(None), "use `--for 1d` or a shorter duration");
    let renewal = denial.of_renewal(LeaseId(5), 0).message;
    assert!(renewal.starts_with("cannot renew lease L5: group students may hold"), "{renewal}");

    let kinds = Some(BTreeSet::from([LeaseKind::Mig, LeaseKind::Mps]));
    let denial = check_request(&of(Limits { kinds, ..Limits::default() }), &[], LeaseKind::Whole, None).unwrap_err();
    assert_eq!(denial.to_string(), "group students may not hold leases of kind whole");
    assert_eq!(denial.hint(None), "request an allowed kind, such as `--memory 10G` or `--mps 25`");
    assert_eq!(denial.hint_for_job(), "request mig or mps", "waiting does not help");

    // Fault: the hint was to request less, although the user may hold no lease.
    let none = Limits { leases: Some(0), ..Limits::default() };
    let denial = check_request(&of(none), &[], LeaseKind::Whole, None).unwrap_err();
    assert_eq!(denial.hint(None), "ask an administrator to change the quota");

    let memory = Limits { memory: Some(MemoryAmount::Gpus(1500)), ..Limits::default() };
    let denial = check_size(&of(memory), &[held(17, 80_000)], held(0, 60_000).size).unwrap_err();
    let text = "group students may hold the memory of 1.5 GPUs; the request adds 0.75 GPUs; the user holds L17";
    assert_eq!(denial.to_string(), text);

    let memory = Limits { memory: Some(MemoryAmount::Mib(40 * 1024)), ..Limits::default() };
    let denial = check_size(&of(memory), &[], Size { members: 1, memory_mib: 81_920, ..Size::default() }).unwrap_err();
    let text = "group students may hold 40 GiB of GPU memory; the request adds 80 GiB";
    assert_eq!(denial.to_string(), text);
    assert_eq!(denial.hint(None), "request at most 40 GiB");
    // Fault: the limit was in GiB, and the request in MiB.
    let of_memory = |most: u64, wanted: u64| {
        let memory = Limits { memory: Some(MemoryAmount::Mib(most)), ..Limits::default() };
        let size = Size { members: 1, memory_mib: wanted, ..Size::default() };
        check_size(&of(memory), &[], size).unwrap_err().to_string()
    };
    let text = "group students may hold 50 GiB of GPU memory; the request adds 78.5 GiB";
    assert_eq!(of_memory(50 * 1024, 80_384), text);
    let text = "group students may hold 50 GiB of GPU memory; the request adds 50.1 GiB";
    assert_eq!(of_memory(50 * 1024, 50 * 1024 + 1), text);
    let text = "group students may hold 500 MiB of GPU memory; the request adds 2048 MiB";
    assert_eq!(of_memory(500, 2048), text);

    let percent = Limits { mps_tenths: Some(500), ..Limits::default() };
    let denial = check_size(&of(percent), &[], Size { members: 1, mps_tenths: 505, ..Size::default() }).unwrap_err();
    assert_eq!(denial.to_string(), "group students may hold MPS shares of 50 % in total; the request adds 50.5 %");
}

/// Returns a denied error as text: message, causes and hint.
fn text(error: &gpush_api::ApiError) -> String {
    let hint = error.hint.clone().unwrap_or_default();
    format!("{}\n{}\n{hint}", error.message, error.causes.join("\n"))
}

#[test]
fn error_of_a_denial_says_the_sums_and_a_command_that_helps() {
    let memory = |gib: u64| of(Limits { memory: Some(MemoryAmount::Mib(gib * 1024)), ..Limits::default() });
    let gib = |id, gib: u64| held(id, gib * 1024);
    let two = [gib(12, 20), gib(15, 10)];
    let denial = check_size(&memory(40), &two, gib(0, 20).size).unwrap_err();
    let smaller = DeniedRequest { instead: Some("--mig 1g.10gb"), ..request("2g.20gb") };
    assert_eq!(
        text(&denial.error(smaller)),
        "cannot grant 2g.20gb: your leases would hold 50 GiB of at most 40 GiB\n\
         2 leases hold 30 GiB (L12: 20 GiB, L15: 10 GiB), and this request adds 20 GiB\n\
         the quota for group students applies\n\
         request less, such as `--mig 1g.10gb`, or release a lease: `gpushctl lease end L15`"
    );
    let other = DeniedRequest { holder: Some("anna"), ..request("2g.20gb") };
    let denied = text(&denial.error(other));
    assert!(
        denied.starts_with("cannot grant 2g.20gb: the leases of anna would hold 50 GiB of at most 40 GiB"),
        "{denied}"
    );
    assert!(denied.ends_with("request at most 10 GiB, or release a lease: `gpushctl lease end L15`"), "{denied}");
    // One lease is not enough, so the hint names two.
    let denial = check_size(&memory(40), &two, gib(0, 40).size).unwrap_err();
    let denied = text(&denial.error(request("4g.40gb")));
    assert!(denied.ends_with("or release leases: `gpushctl lease end L12 L15`"), "{denied}");
    // No release helps.
    let denial = check_size(&memory(40), &two, gib(0, 80).size).unwrap_err();
    assert!(denial.hint(None).ends_with("request at most 10 GiB"), "{}", denial.hint(None));
    let denial = check_size(&memory(40), &[], gib(0, 80).size).unwrap_err();
    assert_eq!(
        text(&denial.error(request("7g.80gb"))),
        "cannot grant 7g.80gb: your leases would hold 80 GiB of at most 40 GiB\n\
         the quota for group students applies\nrequest at most 40 GiB"
    );
    let shares = Limits { mps_tenths: Some(500), ..Limits::default() };
    let half = HeldLease { size: Size { members: 1, mps_tenths: 500, ..Size::default() }, ..gib(3, 0) };
    let denial = check_size(&of(shares), &[half], Size { members: 1, mps_tenths: 250, ..Size::default() }).unwrap_err();
    assert_eq!(
        text(&denial.error(request("an MPS share of 25 %"))),
        "cannot grant an MPS share of 25 %: your leases would have MPS shares of 75 %, and may have 50 %\n\
         1 lease holds 50 % (L3: 50 %), and this request adds 25 %\nthe quota for group students applies\n\
         release a lease: `gpushctl lease end L3`"
    );
    let denial = check_request(&Effective::without_quota(limits(1)), &[half], LeaseKind::Mps, None).unwrap_err();
    assert_eq!(
        text(&denial.error(request("a whole GPU"))),
        "cannot grant a whole GPU: you hold 1 lease of at most 1\nleases: L3\n\
         no quota names you, so the built-in limits apply\nuse L3: `gpushctl run --lease L3 -- COMMAND`, or release it: `gpushctl lease end L3`"
    );
}

/// Fault: the hint for a renewal was the whole limit, and gpushd refused that too, because the limit counts from the grant.
#[test]
fn hint_for_a_renewal_is_the_time_that_is_left() {
    let half_day = of(Limits { longest_s: Some(12 * 3600), ..Limits::default() });
    let hint = |since_s: u64| {
        let denial = check_request(&half_day, &[], LeaseKind::Mig, Some(13 * 3600)).unwrap_err();
        denial.of_renewal(LeaseId(3), since_s).hint.unwrap()
    };
    assert_eq!(hint(83), "use `--for 11h57m` or a shorter duration");
    assert_eq!(hint(11 * 3600), "use `--for 59m` or a shorter duration");
    assert_eq!(hint(12 * 3600 - 90), "use `--for 45s` or a shorter duration");
    assert!(hint(12 * 3600).starts_with("request another lease"), "{}", hint(12 * 3600));
    let denial = check_request(&half_day, &[], LeaseKind::Mig, Some(13 * 3600)).unwrap_err();
    let causes = denial.of_renewal(LeaseId(3), 83).causes;
    assert_eq!(causes, ["the quota counts from the grant of the lease, 1m23s ago"]);
}

#[test]
fn waiting_requests_have_a_separate_limit() {
    let limits = Limits { queued: Some(1), leases: Some(2), ..Limits::default() };
    let waiting = HeldLease { queued: true, ..held(5, 0) };
    assert_eq!(check_queue(&of(limits.clone()), &[held(1, 0), held(2, 0)]), Ok(()));
    let denial = check_queue(&of(limits.clone()), &[waiting]).unwrap_err();
    assert_eq!(denial.to_string(), "group students may wait for 1 lease; the user waits for L5");
    assert_eq!(check_request(&of(limits), &[waiting, held(1, 0)], LeaseKind::Mig, None), Ok(()));
}

#[test]
fn standard_limits_leave_a_quarter_of_the_host_to_others() {
    let user = User::Account { uid: Some(1000), gids: &[], has_all_groups: true };
    let gpu = |members: u32| Size { members: 1, gpu_thousandths: 1000 * members, ..Size::default() };
    for gpus in 1..=16 {
        let quota = effective(&[], user, id_of, gpus).unwrap();
        let mut held = Vec::new();
        while check_size(&quota, &held, gpu(1)).is_ok() {
            held.push(HeldLease { id: LeaseId(held.len() as u64 + 1), queued: false, size: gpu(1), releasable: true });
        }
        assert_eq!(held.len(), (gpus * 3 / 4).max(1), "{gpus} GPUs");
        // A gang cannot lease all GPUs with one request either.
        let gang = Size { members: gpus, ..gpu(u32::try_from(gpus).unwrap()) };
        assert_eq!(check_size(&quota, &[], gang).is_ok(), gpus == 1, "{gpus} GPUs");
    }
}

proptest! {
    /// The granted amount never exceeds an absolute limit. A request that is denied to a user is
    /// also denied to a user who holds more.
    #[test]
    fn granted_leases_never_exceed_the_limits(
        desired_states in proptest::collection::vec((0..50_000_u64, 0..400_u32, 1..20_000_u64), 1..60),
        most_mib in 1..200_000_u64, most_tenths in 1..1500_u32, most in 0..12_u32, longest in 1..20_000_u64,
    ) {
        let quota = of(Limits {
            leases: Some(most),
            memory: Some(MemoryAmount::Mib(most_mib)),
            mps_tenths: Some(most_tenths),
            longest_s: Some(longest),
            ..Limits::default()
        });
        let mut held: Vec<HeldLease> = Vec::new();
        for (n, (memory_mib, mps_tenths, seconds)) in desired_states.into_iter().enumerate() {
            let size = Size { members: 1, memory_mib, mps_tenths, ..Size::default() };
            let granted = check_request(&quota, &held, LeaseKind::Mps, Some(seconds)).is_ok()
                && check_size(&quota, &held, size).is_ok();
            let one = HeldLease { id: LeaseId(n as u64), queued: false, size, releasable: true };
            if granted {
                prop_assert!(seconds <= longest);
                held.push(one);
            } else {
                let more: Vec<HeldLease> = held.iter().copied().chain([one]).collect();
                let still = check_request(&quota, &more, LeaseKind::Mps, Some(seconds)).is_err()
                    || check_size(&quota, &more, size).is_err();
                prop_assert!(still);
            }
            prop_assert!(held.len() <= most as usize);
            prop_assert!(held.iter().map(|held| held.size.memory_mib).sum::<u64>() <= most_mib);
            prop_assert!(held.iter().map(|held| held.size.mps_tenths).sum::<u32>() <= most_tenths);
        }
    }
}

#[test]
fn quota_gpus_narrow_the_request() {
    let set = |gpus: &[u32]| gpus.iter().copied().map(GpuIndex).collect::<BTreeSet<GpuIndex>>();
    let quota = of(Limits { gpus: Some(set(&[0, 1])), ..Limits::default() });
    assert_eq!(allowed_gpus(&quota, None), Ok(Some(set(&[0, 1]))));
    assert_eq!(allowed_gpus(&quota, Some(&set(&[1, 2]))), Ok(Some(set(&[1]))));
    let denial = allowed_gpus(&quota, Some(&set(&[2]))).unwrap_err();
    assert_eq!(denial.to_string(), "group students may hold leases on GPUs 0, 1 only");
    assert_eq!(denial.hint(None), "use `-g 0,1`");
    assert_eq!(allowed_gpus(&of(Limits::default()), Some(&set(&[2]))), Ok(Some(set(&[2]))));
    let none = of(Limits { gpus: Some(BTreeSet::new()), ..Limits::default() });
    assert!(allowed_gpus(&none, None).is_err(), "a selector that matches no GPU allows none");
}
