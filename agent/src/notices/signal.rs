//! The signal that announces a notice, if the request for the lease names one.
//!
//! gpushd sends it only to processes that belong to the lease, run as its holder, and have a handler for the signal. So
//! the signal does not end a program that does not expect it.

use std::collections::BTreeSet;

use gpush_api::{LeaseId, NoticeSignal};
use gpush_host::{
    pidfd::PidFd,
    proc::{self, Status},
};
use nix::sys::signal::Signal;

/// Sends a signal to each of these processes that runs as the user `owner` and has a handler for the signal. `read_at`
/// is the time before the processes were found, in clock ticks since boot: a process that started later has the pid of
/// a process that has ended.
pub(super) fn send(id: LeaseId, owner: u32, pids: &BTreeSet<u32>, signal: NoticeSignal, read_at: u64) {
    let number = number(signal);
    for pid in pids {
        let Ok(Some(process)) = PidFd::open(*pid) else { continue };
        // The pidfd is open, so everything that is read now is about its process, or the signal fails.
        let is_found_process = proc::start(*pid).is_some_and(|start| start <= read_at);
        let accepts = |status: Status| status.uids.iter().all(|uid| *uid == owner) && status.catches(number as i32);
        if !is_found_process || !Status::of(*pid).is_some_and(accepts) {
            continue;
        }
        match process.signal(number) {
            Ok(()) => tracing::debug!(lease = %id, pid, "lease {id}: sent SIG{signal} to process {pid}"),
            Err(error) => {
                tracing::debug!(lease = %id, pid, "lease {id}: cannot send SIG{signal} to process {pid}: {error}");
            }
        }
    }
}

fn number(signal: NoticeSignal) -> Signal {
    match signal {
        NoticeSignal::Usr1 => Signal::SIGUSR1,
        NoticeSignal::Usr2 => Signal::SIGUSR2,
        NoticeSignal::Hup => Signal::SIGHUP,
        NoticeSignal::Int => Signal::SIGINT,
        NoticeSignal::Term => Signal::SIGTERM,
        NoticeSignal::Urg => Signal::SIGURG,
        NoticeSignal::Winch => Signal::SIGWINCH,
    }
}
