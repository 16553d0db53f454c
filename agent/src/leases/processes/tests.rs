//! What an attribution means for the end of a lease, and processes that gpushd cannot read.

use gpush_api::EndReason;
use gpush_core::{
    attribution::{Doubt, Evidence, Unreadable},
    lease::machine::{self, Effect, Event, State},
};

use super::*;

const LEASE: LeaseId = LeaseId(2);

fn of_lease(evidence: Evidence) -> Attribution {
    Attribution::Lease { id: LEASE, evidence, earlier_runs: Vec::new() }
}

fn unreadable(fact: FactName) -> Attribution {
    let why = "Too many open files (os error 24)".to_owned();
    Attribution::Unknown { leases: vec![LEASE], unreadable: Unreadable { fact, why } }
}

/// Returns what is left after a process with this attribution was found.
fn with(attribution: &Attribution, of_job: bool) -> RemainingProcesses {
    let mut left = RemainingProcesses { remaining: Remaining::NONE, of_job, ..RemainingProcesses::default() };
    let counts = left.add(std::process::id(), LEASE, attribution);
    assert_eq!(counts, left.pids().count() == 1);
    left
}

#[test]
fn only_a_process_that_belongs_to_the_lease_may_be_ended_with_it() {
    for evidence in [Evidence::Scope, Evidence::Job, Evidence::Environment, Evidence::Cgroup] {
        let left = with(&of_lease(evidence), false);
        assert_eq!((left.own.len(), left.others.len()), (1, 0), "{evidence:?}");
    }
    let perhaps = Attribution::Perhaps { leases: vec![LeaseId(1), LEASE], doubt: Doubt::SeveralJobs };
    for counted in [perhaps, of_lease(Evidence::Inherited)] {
        let left = with(&counted, false);
        assert_eq!((left.own.len(), left.others.len()), (0, 1), "{counted:?}");
    }
    let earlier = Attribution::Lease { id: LeaseId(3), evidence: Evidence::Job, earlier_runs: vec![LEASE] };
    assert_eq!(with(&earlier, true).others.len(), 1, "a later run of the job has the process");
    let other = Attribution::Perhaps { leases: vec![LeaseId(1)], doubt: Doubt::NoEvidence };
    for other in [other, Attribution::NoLease] {
        assert_eq!(with(&other, false).pids().count(), 0);
    }
}

/// Fault: if gpushd could not read the files of a process, it attributed the process to another lease. The lease to
/// which the process belonged ended.
#[test]
fn process_that_cannot_be_read_keeps_the_lease_open_and_is_not_ended() {
    for fact in [FactName::User, FactName::Cgroups, FactName::Environment] {
        let left = with(&unreadable(fact), false);
        assert_eq!(left.unknown().as_deref(), Some("Too many open files (os error 24)"));
        assert_eq!((left.pids().count(), left.remaining.bound), (0, None));
    }
}

/// Fault: on an MPS or time-sliced target, if gpushd could not read the environment of a process outside the job's
/// cgroup, it counted this as a failure of the node. So a user could make Epilog drain the node.
#[test]
fn unreadable_environment_does_not_hide_processes_of_a_job() {
    let left = with(&unreadable(FactName::Environment), true);
    assert_eq!((left.unknown(), left.others.len()), (None, 1));
    assert!(left.is_unattributed(), "Epilog does not wait for this process for long, and does not fail");
    assert!(with(&unreadable(FactName::Cgroups), true).unknown().is_some(), "the cgroup decides");
}

/// A process in a scope can also be on the GPU of another lease, or belong to another user.
#[test]
fn process_that_is_found_twice_is_named_once() {
    let mut left = with(&of_lease(Evidence::Scope), false);
    left.others.extend(left.own.clone());
    assert_eq!((left.pids().count(), left.words().len()), (1, 1));
}

/// Fault: when gpushd had no free file descriptor, it found no process of a lease, and ended the lease.
#[test]
fn lease_does_not_end_while_a_process_cannot_be_read() {
    let releasing = machine::step(State::Active, Event::Released, Duration::ZERO).0;
    let ends = |left: &RemainingProcesses| {
        let (_, effects) = machine::step(releasing, Event::Probed(left.remaining), Duration::ZERO);
        effects.contains(&Effect::RecordEnd(EndReason::Released))
    };
    let mut left = RemainingProcesses { remaining: Remaining::NONE, of_job: true, ..RemainingProcesses::default() };
    assert!(ends(&left) && left.words().is_empty());
    left.note_unread("Too many open files (os error 24)".to_owned());
    left.note_unread("Input/output error (os error 5)".to_owned());
    assert!(!ends(&left) && !left.is_unattributed());
    assert_eq!(left.words(), ["gpushd cannot read all processes: Too many open files (os error 24)"]);
    assert_eq!(left.pids().count(), 0, "gpushd ends no process");
}

/// Fault: a user who started short-lived processes during Epilog drained the node, because gpushd could not finish its
/// scan.
#[test]
fn churn_of_the_host_is_not_attributed_to_the_job() {
    let unfinished = || RemainingProcesses {
        remaining: Remaining { bound: None, ..Remaining::NONE },
        unknown: Some(Incomplete::Churn),
        of_job: true,
        ..RemainingProcesses::default()
    };
    assert!(unfinished().is_unattributed());
    assert_eq!(
        unfinished().words(),
        ["gpushd cannot read all processes: processes started and ended while gpushd listed them"]
    );
    assert!(!RemainingProcesses { of_job: false, ..unfinished() }.is_unattributed());
    // If a process of the job is alive, or a process cannot be read, the lease does not wait only for processes outside
    // the job.
    let own = BTreeSet::from([std::process::id()]);
    assert!(!RemainingProcesses { own, ..unfinished() }.is_unattributed());
    let mut unread = unfinished();
    unread.note_unread("Too many open files (os error 24)".to_owned());
    assert!(!unread.is_unattributed());
}

#[test]
fn process_that_cannot_be_found_is_not_alive() {
    assert!(may_be_alive(std::process::id()) && !may_be_alive(u32::MAX));
}
