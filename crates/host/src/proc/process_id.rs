//! A process that is identified by its pid and its start time.

use super::{AnyPid, parent, positive, start};

/// A pid with the start time of its process. A later process that gets the same pid has another start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId {
    /// Pid.
    pub pid: i32,
    /// Start in clock ticks since boot, see [`start`].
    pub start: u64,
}

impl ProcessId {
    /// Identifies the process that has this pid now; `None` if there is no such process, or its start cannot be read.
    pub fn of(pid: impl AnyPid) -> Option<Self> {
        let pid = positive(pid)?;
        Some(Self { pid, start: start(pid)? })
    }

    /// Identifies the parent of a process; `None` if the parent has ended, or is the first process of the host.
    pub fn parent_of(pid: impl AnyPid) -> Option<Self> {
        let found = Self::of(parent(pid).filter(|parent| *parent > 1)?)?;
        // The parent may have ended before its start was read. The process then has another parent.
        (parent(pid) == u32::try_from(found.pid).ok()).then_some(found)
    }

    /// Returns whether the process is alive.
    pub fn is_alive(self) -> bool {
        start(self.pid) == Some(self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_process_differs_from_a_later_one_with_its_pid() {
        let me = ProcessId::of(std::process::id()).unwrap();
        assert!(me.is_alive());
        assert!(!ProcessId { start: me.start + 1, ..me }.is_alive());
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        assert_eq!(ProcessId::parent_of(pid), Some(me));
        assert!(crate::proc::children(me.pid).contains(&pid.cast_signed()));
        let of_child = ProcessId::of(pid).unwrap();
        child.kill().and_then(|()| child.wait()).unwrap();
        assert!(!of_child.is_alive());
        assert_eq!((ProcessId::of(pid), ProcessId::parent_of(pid)), (None, None));
    }
}
