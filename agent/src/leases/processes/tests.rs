//! Processes that gpushd cannot read, for example because gpushd has no free file descriptor.

use gpush_api::EndReason;
use gpush_core::lease::machine::{self, Effect, Event, State};
use nix::libc;

use super::*;
use crate::state::{LeaseTable, leases::tests::record};

/// Returns a lease of this process's user on a share of a GPU.
fn lease(id: u64) -> OpenLease {
    OpenLease::new(record(id, nix::unistd::geteuid().as_raw(), "GPU-0"))
}

fn too_many_files() -> io::Error {
    io::Error::from_raw_os_error(libc::EMFILE)
}

/// Fault: if gpushd could not read the files of a process, it attributed the process to another lease. The lease to
/// which the process belonged ended.
#[test]
fn process_that_cannot_be_read_is_attributed_to_no_other_lease() {
    let (first, second) = (lease(1), lease(2));
    let mut table = LeaseTable::default();
    for lease in [&first, &second] {
        table.open.insert(lease.id(), Arc::new(lease.clone()));
    }
    let me = std::process::id();
    let of_second = |named: &dyn Fn(u32) -> io::Result<Option<String>>,
                     job: &dyn Fn(u32) -> io::Result<Option<SlurmJob>>| {
        attribute(&table, &second, &second.record.members[0], me, named, job).map_err(|error| error.raw_os_error())
    };
    assert_eq!(of_second(&|_| Ok(Some("L2".to_owned())), &|_| Ok(None)), Ok(LeaseMatch::This));
    assert_eq!(of_second(&|_| Ok(None), &|_| Ok(None)), Ok(LeaseMatch::Another), "the first lease is older");
    let unread = Err(Some(libc::EMFILE));
    assert_eq!(of_second(&|_| Err(too_many_files()), &|_| Ok(None)), unread);
    assert_eq!(of_second(&|_| Ok(Some("L2".to_owned())), &|_| Err(too_many_files())), unread);
}

/// Fault: on an MPS or time-sliced target, if gpushd could not read the environment of a process outside the job's
/// cgroup, it counted this as a failure of the node. So a user could make Epilog drain the node.
#[test]
fn unreadable_environment_does_not_hide_processes_of_a_job() {
    let uid = nix::unistd::geteuid().as_raw();
    let (older, mut of_job) = (lease(1), lease(2));
    of_job.record.binding = LeaseBinding::Job {
        cluster: "ci".to_owned(),
        job: 42,
        node: "n1".to_owned(),
        restart: 0,
        leader: None,
        cgroup: None,
    };
    let mut table = LeaseTable::default();
    for lease in [&older, &of_job] {
        table.open.insert(lease.id(), Arc::new(lease.clone()));
    }
    let me = std::process::id();
    let found = |job: Option<SlurmJob>| {
        let unread = |_| Err(io::Error::from(io::ErrorKind::TimedOut));
        attribute(&table, &of_job, &of_job.record.members[0], me, &unread, &|_| Ok(job.clone()))
    };
    assert_eq!(found(None).unwrap(), LeaseMatch::PerhapsThis);
    // The cgroup decides whether the process belongs to the job.
    let job = |id| SlurmJob { id, node: Some("n1".to_owned()), uid: Some(uid) };
    assert_eq!(found(Some(job(42))).unwrap(), LeaseMatch::This);
    assert_eq!(found(Some(job(43))).unwrap(), LeaseMatch::PerhapsThis);
    let others = BTreeSet::from([me]);
    let left = RemainingProcesses { remaining: Remaining::NONE, of_job: true, others, ..RemainingProcesses::default() };
    assert!(left.is_unattributed(), "Epilog does not wait for this process for long, and does not fail");
}

/// Fault: gpushd ended a process that did not name the lease of the device. `process list` showed this process as
/// `perhaps lease L1`, which says that gpushd does not end it.
#[test]
fn process_on_a_device_belongs_to_its_lease_only_if_it_names_it() {
    let me = std::process::id();
    for share in [MemberShare::Whole, MemberShare::Mig { profile: "1g.10gb".to_owned() }] {
        let mut lease = lease(1);
        lease.record.members[0].share = share;
        let mut table = LeaseTable::default();
        table.open.insert(lease.id(), Arc::new(lease.clone()));
        let found = |name: Option<&str>| {
            let named = |_| Ok(name.map(str::to_owned));
            attribute(&table, &lease, &lease.record.members[0], me, &named, &|_| Ok(None)).unwrap()
        };
        assert_eq!(found(Some("L1")), LeaseMatch::This);
        // The lease stays open, but gpushd does not end the process.
        for name in [None, Some("L2")] {
            assert_eq!(found(name), LeaseMatch::PerhapsThis);
        }
    }
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
    left.note_error(&too_many_files());
    left.note_error(&io::Error::from_raw_os_error(libc::EIO));
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
    unread.note_error(&too_many_files());
    assert!(!unread.is_unattributed());
}

#[test]
fn process_that_cannot_be_found_is_not_alive() {
    assert!(may_be_alive(std::process::id()) && !may_be_alive(u32::MAX));
}
