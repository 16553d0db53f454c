//! Reads of processes without a free file descriptor. The test lowers the limit of its own process, so it is the only
//! test in this file.

use std::time::Duration;

use gpush_host::{
    cgroup,
    pidfd::PidFd,
    proc::{self, Environment},
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// A cgroup that does not exist.
const CGROUP: &str = "/gpush-test-descriptors.slice";

/// Fault: without a free file descriptor, every process was read as ended, and gpushd ended leases whose processes ran.
#[test]
fn process_that_cannot_be_read_is_not_taken_for_missing() {
    let me = std::process::id();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 0, hard).unwrap();
    let errors = [
        proc::pids().err(),
        proc::try_start(me).err(),
        proc::try_owner(me).err(),
        proc::try_cgroups(me).err(),
        proc::environment(me, "PATH").err(),
        cgroup::try_of(me).err(),
        PidFd::open(me).err(),
    ];
    let unread = cgroup::processes(CGROUP).map(|found| (found.pids.len(), found.is_empty()));
    let (job, is_ending, missing) = (cgroup::job_processes(1, 1000), proc::is_ending(me), proc::try_start(i32::MAX));
    // If the wait treated the cgroup as empty, the wait would end at once.
    let waiting = runtime.spawn(cgroup::wait_until_empty(CGROUP));
    let wait = async { tokio::time::timeout(Duration::from_millis(50), waiting).await };
    let has_waited = runtime.block_on(wait).is_err();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert!(has_waited);
    runtime.block_on(cgroup::wait_until_empty(CGROUP));
    assert_eq!(unread, Some((0, false)));
    for (index, error) in errors.into_iter().enumerate() {
        assert_eq!(error.and_then(|error| error.raw_os_error()), Some(nix::libc::EMFILE), "{index}");
    }
    assert_eq!((job, is_ending), (None, false));
    assert!(missing.is_err());
    assert_eq!((proc::try_start(i32::MAX).unwrap(), proc::try_owner(0).unwrap()), (None, None));
    assert!(proc::try_start(me).unwrap().is_some() && proc::pids().unwrap().contains(&me.cast_signed()));
    assert_ne!(proc::environment(me, "PATH").unwrap(), Environment::Unknown);
}
