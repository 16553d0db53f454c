//! Leases as data, without a store or a driver.

use gpush_api::{Actor, EndReason, EventPayload, LeaseBinding, LeaseHolder, LeaseKind, LeaseRequest};
use gpush_core::lease::machine::{self, Event, Remaining};
use jiff::SignedDuration;

use super::*;
use crate::state::{
    State,
    events::{Cursor, Next},
};

/// Returns the record of an active lease on a share of a GPU.
pub(crate) fn record(id: u64, uid: u32, target: &str) -> LeaseRecord {
    let actor = Actor { uid: 0, user: Some("root".to_owned()), pid: Some(4711) };
    LeaseRecord {
        id: LeaseId(id),
        sequence: id,
        holder: LeaseHolder { uid, user: Some(format!("user{uid}")) },
        asked_by: actor,
        kind: LeaseKind::Mps,
        state: LeaseState::Active,
        reason: None,
        request: LeaseRequest::default(),
        members: vec![member(target)],
        binding: LeaseBinding::None,
        operation: None,
        created_at: Timestamp::UNIX_EPOCH,
        granted_at: None,
        expires_at: None,
        ended_at: None,
        revocation: None,
        boot_id: "boot".to_owned(),
    }
}

fn member(target: &str) -> LeaseMember {
    let share = MemberShare::Mps {
        percentage: "25".parse().unwrap(),
        memory_limit_mib: None,
        priority: gpush_api::Priority::default(),
    };
    LeaseMember { target: target.into(), gpu_uuid: "GPU-0".into(), share, memory_mib: 1, gpu_memory_mib: 4 }
}

/// Returns the lease events since the last call.
fn events(cursor: &mut Cursor) -> Vec<(LeaseId, LeaseState, Option<EndReason>)> {
    let mut reported = Vec::new();
    while let Next::Events(events) = cursor.poll() {
        for event in events {
            if let EventPayload::Lease(change) = &event.what {
                reported.push((change.lease_id, change.state, change.reason));
            }
        }
    }
    reported
}

/// Applies an event to lease L1.
fn step(state: &State, event: Event) {
    state.change_leases(|table| {
        let lease = table.get_mut(LeaseId(1)).unwrap();
        lease.state = machine::step(lease.state, event, Duration::ZERO).0;
    });
}

/// A refused request waited for a releasing lease although its end was not near.
#[test]
fn releasing_lease_that_waits_for_no_running_process_ends_soon() {
    let mut lease = OpenLease::new(LeaseRecord { state: LeaseState::Releasing, ..record(1, 1000, "GPU-0") });
    lease.state = machine::State::restored(LeaseState::Releasing, Some(EndReason::Released));
    assert!(lease.ends_now(), "gpushd has not checked yet what it waits for");
    lease.waits_for = vec!["the driver does not answer".to_owned()];
    assert!(!lease.ends_now());
    lease.left = vec![std::process::id()];
    assert!(!lease.ends_now(), "a process runs");
    lease.left = vec![u32::MAX];
    assert!(lease.ends_now(), "the process has ended");
}

#[test]
fn reservation_occupies_its_target_until_it_ends() {
    let state = State::empty();
    let reservation = || Reservation { holder: 1000, members: vec![member("GPU-0")], lease: None, end: None };
    let (first, second) = state.change_leases(|table| (table.reserve(reservation()), table.reserve(reservation())));
    assert_ne!(first, second);
    assert!(state.leases().is_occupied(&"GPU-0".into()) && state.leases().on_target(&"GPU-0".into()).next().is_none());
    assert_eq!(state.leases().admitted(&"GPU-0".into()), BTreeSet::from([1000]));
    state.change_leases(|table| {
        table.reserved.remove(&first);
        table.insert(record(1, 1000, "GPU-0"));
    });
    assert_eq!(state.leases().members().count(), 2, "the lease, and the other reservation");
    state.change_leases(|table| table.reserved.remove(&second));
    assert_eq!(state.leases().members().count(), 1);
    assert_eq!(state.now().leases.open.len(), 1, "the snapshot has it");
}

/// A change of one lease must not become slower if there are more leases.
#[test]
fn change_of_a_lease_copies_and_reports_no_other() {
    let state = State::empty();
    state.change_leases(|table| (1..=100).for_each(|id| table.insert(record(id, 1000, "GPU-0"))));
    let (before, mut cursor) = (state.leases(), state.events().listen(None));
    step(&state, Event::Released);
    let after = state.leases();
    let copied = |id: &u64| !Arc::ptr_eq(&before.open[&LeaseId(*id)], &after.open[&LeaseId(*id)]);
    assert_eq!((1..=100).filter(copied).collect::<Vec<_>>(), [1]);
    assert_eq!(before.open[&LeaseId(1)].state.name(), LeaseState::Active, "an earlier snapshot stays as it was");
    assert_eq!(events(&mut cursor), [(LeaseId(1), LeaseState::Releasing, Some(EndReason::Released))]);
}

#[test]
fn releasing_lease_keeps_its_capacity_without_admission() {
    let state = State::empty();
    let mut cursor = state.events().listen(None);
    state.change_leases(|table| table.insert(record(1, 1000, "GPU-0")));
    step(&state, Event::Released);
    assert!(state.leases().is_occupied(&"GPU-0".into()));
    assert_eq!(state.leases().admitted(&"GPU-0".into()), BTreeSet::new());
    let unknown = Remaining { driver: None, ..Remaining::NONE };
    step(&state, Event::Probed(unknown));
    assert!(state.leases().is_occupied(&"GPU-0".into()), "a source that does not answer may have processes");
    step(&state, Event::Probed(Remaining::NONE));
    assert!(state.leases().is_occupied(&"GPU-0".into()), "the end is not durable yet");
    step(&state, Event::EndRecorded);
    assert!(!state.leases().is_occupied(&"GPU-0".into()) && state.leases().open.is_empty());
    let released = Some(EndReason::Released);
    let expected = [LeaseState::Active, LeaseState::Releasing, LeaseState::Ended];
    let reported: Vec<_> = events(&mut cursor);
    assert_eq!(reported.iter().map(|(_, state, _)| *state).collect::<Vec<_>>(), expected);
    assert_eq!(reported.last().unwrap().2, released);
}

/// Fault: each release of a lease with an end time published the event `active` again. The record of the release comes
/// from the store, which rounds times to milliseconds.
#[test]
fn equal_lease_record_publishes_no_event() {
    let state = State::empty();
    let mut cursor = state.events().listen(None);
    let exact = Timestamp::new(1_800_000_000, 123_456_789).unwrap();
    let revocation = |at| gpush_api::LeaseRevocation {
        by: gpush_api::Actor { uid: 0, user: None, pid: None },
        reason: "maintenance".to_owned(),
        at,
        processes_end_at: Some(at),
    };
    let with_times =
        |at| LeaseRecord { expires_at: Some(at), revocation: Some(revocation(at)), ..record(1, 1000, "GPU-0") };
    state.change_leases(|table| table.insert(with_times(exact)));
    for rounded in [1_800_000_000_123, 1_800_000_000_000] {
        let again = with_times(Timestamp::from_millisecond(rounded).unwrap());
        state.change_leases(|table| table.get_mut(LeaseId(1)).unwrap().set_record(again));
    }
    assert_eq!(events(&mut cursor).len(), 1);
    // A later end is a change.
    let renewed = with_times(Timestamp::new(1_800_000_001, 0).unwrap());
    state.change_leases(|table| table.get_mut(LeaseId(1)).unwrap().set_record(renewed));
    assert_eq!(events(&mut cursor).len(), 1);
}

#[test]
fn lease_expires_by_either_clock() {
    let now = Timestamp::now();
    let in_an_hour = now.checked_add(SignedDuration::from_hours(1)).unwrap();
    let lease = OpenLease::new(LeaseRecord { expires_at: Some(in_an_hour), ..record(1, 1000, "GPU-0") });
    let at = Instant::now();
    assert!(!lease.has_expired(now, at));
    // The wall clock is ahead, the monotonic clock is not.
    assert!(lease.has_expired(in_an_hour, at));
    // The wall clock was set back, but by the monotonic clock, the end time of the lease has passed.
    assert!(lease.has_expired(Timestamp::UNIX_EPOCH, at + Duration::from_secs(3601)));
    assert!(!OpenLease::new(record(1, 1000, "GPU-0")).has_expired(Timestamp::MAX, at + Duration::from_secs(1 << 30)));
}

#[test]
fn plan_sees_idle_leases_as_users_of_their_targets() {
    let mut table = LeaseTable::new(
        vec![record(7, 1000, "MIG-1"), LeaseRecord { state: LeaseState::Queued, ..record(8, 1000, "MIG-0") }],
        CreatedInstances::new(),
    );
    table.reserve(Reservation { holder: 1001, members: vec![member("GPU-0")], lease: None, end: None });
    let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
    gpus.truncate(1);
    gpus[0].uuid = "GPU-0".into();
    let instance = |n: u8| gpush_api::GpuInstance {
        id: u32::from(n),
        profile_id: 19,
        profile: "1g.10gb".to_owned(),
        placement: gpush_api::Placement { start: n, size: 1 },
        memory: None,
        compute: vec![gpush_api::ComputeInstance {
            id: 0,
            profile_id: 0,
            profile: "1g.10gb".to_owned(),
            placement: None,
            uuid: Some(format!("MIG-{n}").into()),
            processes: Vec::new(),
        }],
        processes: Vec::new(),
    };
    gpus[0].mig.as_mut().unwrap().instances = (0..2).map(instance).collect();
    table.mark_reservations(&mut gpus);
    let instances = &gpus[0].mig.as_ref().unwrap().instances;
    assert!(instances.iter().all(|instance| instance.compute[0].processes.is_empty()));
    let uses = table.uses_on(&"GPU-0".into());
    let uses: Vec<(&str, String)> = uses.iter().map(|one| (one.target.as_str(), one.to_string())).collect();
    let reserved = ("GPU-0", format!("lease {UNRECORDED} of uid 1001, without an end"));
    let leased = ("MIG-1", "lease L7 of user1000, without an end".to_owned());
    assert_eq!(uses, [leased, reserved], "a queued lease has nothing");
    assert_eq!(gpus[0].processes[0].command.as_deref(), Some("a lease that is being granted"));
}
