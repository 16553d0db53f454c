//! Refusals and warnings about leases.

use gpush_api::EndReason;
use gpush_host::{accounts::Account, peer::Peer};

use super::*;
use crate::state::leases::tests::record;

fn caller(uid: u32, viewer: Viewer, is_on_this_host: bool) -> Caller {
    let (pid, groups) = (Some(std::process::id()), Vec::new());
    let peer = Peer { uid, pid, start: None, groups, is_on_this_host };
    Caller::with_viewer(peer, viewer, Ok(Account::User(uid)))
}

#[test]
fn text_that_is_not_a_lease_is_named() {
    assert_eq!(id("L12"), Ok(LeaseId(12)));
    for text in ["", "12x", "lease", "L", "L-1"] {
        let error = id(text).unwrap_err();
        assert!(error.message.contains(" is not a lease: ") && error.hint.is_some(), "{text}: {error:?}");
    }
}

#[test]
fn refused_user_learns_who_may_change_the_lease() {
    let lease = OpenLease::new(record(1, 1000, "GPU-0"));
    let alice = caller(1001, Viewer::User(1001), true);
    let used = denied(&lease, &alice, "use");
    assert_eq!(used.message, "you may not use lease L1: user1000 holds it");
    assert_eq!(used.causes, ["only the holder and administrators may use a lease"]);
    let released = denied(&lease, &alice, "release");
    assert!(released.causes[0].contains("the owner of the holder's subordinate uid"), "{released:?}");
}

/// Root of a container has the uid of the host's root, so the message "root holds it" would not help.
#[test]
fn lease_of_root_is_not_given_to_root_of_a_container() {
    let lease = OpenLease::new(record(1, 0, "GPU-0"));
    let inside = denied(&lease, &caller(0, Viewer::User(0), false), "release");
    assert!(inside.causes[0].starts_with("root of a container may not change"), "{inside:?}");
    let other = denied(&lease, &caller(1000, Viewer::User(1000), true), "release");
    assert_eq!(other.message, "you may not release lease L1: user0 holds it");
}

#[test]
fn lease_of_a_slurm_job_is_left_to_slurm() {
    let job = LeaseRecord {
        binding: LeaseBinding::Job {
            cluster: "c".to_owned(),
            job: 7,
            node: "n".to_owned(),
            restart: 0,
            leader: None,
            cgroup: None,
            name: None,
            account: None,
        },
        ..record(1, 1000, "GPU-0")
    };
    let user = caller(1000, Viewer::User(1000), true);
    assert_eq!(job_denied(&record(1, 1000, "GPU-0"), &user, "release"), None, "it belongs to no job");
    for viewer in [Viewer::Admin, Viewer::Hook] {
        assert_eq!(job_denied(&job, &caller(0, viewer, true), "release"), None);
    }
    let hint = |what| job_denied(&job, &user, what).unwrap().hint.unwrap();
    assert!(hint("use").contains("`srun --jobid=7 --overlap COMMAND`"));
    assert!(hint("release").contains("`scancel 7`"));
    // Fault: the hint for a renewal ended the job.
    assert!(hint("renew").contains("`scontrol update JobId=7 TimeLimit=+60`") && !hint("renew").contains("scancel"));
}

#[test]
fn ended_lease_error_names_the_reason() {
    let ended_for = |reason| {
        let record = LeaseRecord { state: LeaseState::Ended, reason, ..record(1, 1000, "GPU-0") };
        ended(&in_full(&record)).message
    };
    assert_eq!(ended_for(Some(EndReason::GpuLost)), "lease L1 has ended: gpu lost");
    assert_eq!(ended_for(None), "lease L1 has ended");
}

#[test]
fn holder_is_warned_of_what_the_share_does_not_limit() {
    let with_driver = |kind, members: usize, driver| {
        let mut record = LeaseRecord { kind, ..record(1, 1000, "GPU-0") };
        record.members = vec![record.members[0].clone(); members];
        warnings(&record, driver).len()
    };
    let of = |kind, members| with_driver(kind, members, Some("550.54.15"));
    // Fault: the warning about drivers older than R570 appeared with each driver.
    let drivers = [Some("570.86.10"), Some("580.1"), Some("550.54"), None];
    assert_eq!(drivers.map(|driver| with_driver(LeaseKind::Mig, 2, driver)), [0, 0, 1, 1]);
    assert_eq!((of(LeaseKind::Whole, 1), of(LeaseKind::Whole, 2)), (0, 0));
    assert_eq!((of(LeaseKind::Mig, 1), of(LeaseKind::Mig, 2)), (0, 1));
    assert_eq!((of(LeaseKind::Mps, 1), of(LeaseKind::Timeslice, 1)), (1, 1));
}

/// Fault: the first `gpushctl run --mps` took the whole GPU, and did not say so.
#[test]
fn holder_of_a_whole_target_without_a_percentage_is_warned() {
    let of = |requested: Option<&str>, granted: &str| {
        let percentage = |text: &str| text.parse().unwrap();
        let mut record = record(1, 1000, "GPU-0");
        let (memory_limit_mib, priority) = (None, None);
        record.request.share = LeaseShare::Mps { percentage: requested.map(percentage), memory_limit_mib, priority };
        let (percentage, priority) = (percentage(granted), gpush_api::Priority::default());
        record.members[0].share = MemberShare::Mps { percentage, memory_limit_mib, priority };
        warnings(&record, None).iter().any(|warning| warning.contains("takes 100 %"))
    };
    assert!(of(None, "100"));
    assert_eq!((of(Some("100"), "100"), of(None, "50")), (false, false));
}
