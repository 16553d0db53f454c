//! The leases that processes name in their environments.
//!
//! ```text
//! the own environment of a process names a lease ──► that lease; gpushd remembers it for this process
//! its environment is empty or overwritten ─────────► unknown, or what gpushd remembers
//! otherwise ───────────────────────────────────────► none
//! ```
//!
//! The kernel shows the memory that held the environment when the program started. Programs that set their title
//! (`setproctitle`) overwrite this memory, and just after an exec the memory is empty for a moment. So a process may
//! have a lease even if gpushd does not find the name of the lease in the environment.
//!
//! The process itself sets the name, so the name gives no access to a GPU. A name in the environment of a client of
//! another gpushd does not count, because lease numbers are unique only within one gpushd.

use std::{collections::HashMap, fmt, io, time::Duration};

use gpush_api::LeaseId;
use gpush_core::lease::environment::LEASE_VARIABLE;
use gpush_locked::Locked;

use crate::proc::{self, Environment, Image};

/// Maximum number of attempts to read the environment of a process that is executing a program, and the pause between
/// them.
const ATTEMPTS: (u32, Duration) = (5, Duration::from_millis(2));

/// The lease that the environment of a process names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnvironmentName {
    /// The environment names this lease.
    Lease(LeaseId),
    /// The environment does not name a lease of this gpushd.
    None,
    /// Unknown, because the environment cannot be read, or was overwritten.
    Unknown,
}

/// Returns whether a process is a client of another gpushd.
type IsOfAnotherAgent = dyn Fn(u32) -> io::Result<bool> + Send + Sync;

/// What gpushd remembers about the environments of processes. The keys are pids.
pub struct LeaseNames {
    remembered: Locked<HashMap<u32, RememberedName>>,
    /// For each process, its program and the lease that its environment names. gpushd reads each environment only once,
    /// because it may be large.
    read: Locked<HashMap<u32, (Image, EnvironmentName)>>,
    is_of_another_agent: Box<IsOfAnotherAgent>,
}

/// The lease that a process has named, or that an ancestor has named. The holder of the lease is the user of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RememberedName {
    /// Start of the process, in clock ticks since boot.
    start: u64,
    id: LeaseId,
    /// Whether the process itself has named the lease.
    is_own: bool,
}

impl fmt::Debug for LeaseNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseNames").finish_non_exhaustive()
    }
}

impl LeaseNames {
    /// Creates an empty memory. `is_of_another_agent` returns whether a process is a client of another gpushd.
    pub fn new(is_of_another_agent: impl Fn(u32) -> io::Result<bool> + Send + Sync + 'static) -> Self {
        let is_of_another_agent = Box::new(is_of_another_agent);
        Self { remembered: Locked::default(), read: Locked::default(), is_of_another_agent }
    }

    /// Does the same as [`Self::name`], but waits while the process executes a program. `image` is its last known program.
    pub(super) fn settled_name(&self, pid: u32, image: Option<Image>) -> io::Result<EnvironmentName> {
        if let Some(known) = image.and_then(|image| self.known_name(pid, image)) {
            return Ok(known);
        }
        // The program of the process, and whether the process is executing another one.
        let program = || -> io::Result<_> {
            let image = proc::try_image(pid)?;
            Ok((image, image.is_none() && proc::is_executing(pid)))
        };
        for attempt in 0..ATTEMPTS.0 {
            if attempt > 0 {
                std::thread::sleep(ATTEMPTS.1);
            }
            let before = program()?;
            if let Some(known) = before.0.and_then(|image| self.known_name(pid, image)) {
                return Ok(known);
            }
            let found = self.name(pid)?;
            let is_named = matches!(found, EnvironmentName::Lease(_));
            if is_named || before != (None, true) && before == program()? {
                return Ok(found);
            }
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("process {pid} is executing a program")))
    }

    /// Returns the lease that the environment of a process names. Reads files that may be large.
    ///
    /// # Errors
    /// gpushd has no free file descriptor or memory, or the kernel does not answer.
    pub(super) fn name(&self, pid: u32) -> io::Result<EnvironmentName> {
        let Some(image) = proc::image(pid) else { return self.read_name(pid) };
        if let Some(known) = self.known_name(pid, image) {
            return Ok(known);
        }
        let found = self.read_name(pid)?;
        // If the process executed another program meanwhile, the result may belong to either
        // program.
        if proc::image(pid) == Some(image) {
            let is_current = |pid: u32, of: &(Image, EnvironmentName)| proc::image(pid) == Some(of.0);
            remember(&mut self.read.lock(), pid, (image, found), is_current);
        }
        Ok(found)
    }

    /// Returns the lease that the environment of a program names, if gpushd has read the environment.
    fn known_name(&self, pid: u32, image: Image) -> Option<EnvironmentName> {
        self.read.lock().get(&pid).filter(|(of, _)| *of == image).map(|(_, known)| *known)
    }

    fn read_name(&self, pid: u32) -> io::Result<EnvironmentName> {
        let name = match proc::environment(pid, LEASE_VARIABLE)? {
            Environment::Set(name) => String::from_utf8(name).ok().and_then(|name| parsed(&name)),
            Environment::Unset => return Ok(EnvironmentName::None),
            Environment::Unknown => None,
        };
        match name {
            Some(_) if (self.is_of_another_agent)(pid)? => Ok(EnvironmentName::None),
            Some(id) => Ok(EnvironmentName::Lease(id)),
            None => Ok(EnvironmentName::Unknown),
        }
    }

    /// Returns the lease that a process or an ancestor has named. `start` is the start of the process.
    pub(super) fn remembered(&self, pid: u32, start: Option<u64>) -> Option<LeaseId> {
        self.known(pid, start).map(|known| known.id)
    }

    /// Returns the lease that a process itself has named.
    pub(super) fn remembered_own(&self, pid: u32, start: Option<u64>) -> Option<LeaseId> {
        self.known(pid, start).filter(|known| known.is_own).map(|known| known.id)
    }

    fn known(&self, pid: u32, start: Option<u64>) -> Option<RememberedName> {
        self.remembered.lock().get(&pid).copied().filter(|known| Some(known.start) == start)
    }

    /// Remembers that a process names a lease. The user of the process holds the lease.
    pub(super) fn remember_own(&self, pid: u32, start: Option<u64>, id: LeaseId) {
        let Some(start) = start else { return };
        self.insert(pid, RememberedName { start, id, is_own: true });
    }

    /// Remembers that an ancestor of a process names a lease, unless the process itself has named a lease before.
    pub(super) fn remember_inherited(&self, pid: u32, start: Option<u64>, id: LeaseId) {
        let Some(start) = start else { return };
        if self.known(pid, Some(start)).is_none_or(|known| !known.is_own) {
            self.insert(pid, RememberedName { start, id, is_own: false });
        }
    }

    fn insert(&self, pid: u32, name: RememberedName) {
        // A process that cannot be read now may still run.
        let is_alive =
            |pid: u32, of: &RememberedName| proc::try_start(pid).map_or(true, |start| start == Some(of.start));
        remember(&mut self.remembered.lock(), pid, name, is_alive);
    }
}

/// Adds a process to a map. If the map is full, first removes the processes for which `is_current` returns `false`. So
/// gpushd removes ended processes only while it reads new processes, and not at intervals.
fn remember<T>(map: &mut HashMap<u32, T>, pid: u32, value: T, is_current: impl Fn(u32, &T) -> bool) {
    if map.len() == map.capacity() {
        map.retain(|pid, value| is_current(*pid, value));
        // With this capacity, the map is full again only after it has at least doubled.
        map.reserve(map.len() + 1);
    }
    map.insert(pid, value);
}

/// Returns the lease that a text names. Any other text does not count as a name, because gpushd shows the name to other
/// users.
fn parsed(name: &str) -> Option<LeaseId> {
    name.parse().ok().filter(|_| name.starts_with('L'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_is_named_by_its_id() {
        assert_eq!(parsed("L12"), Some(LeaseId(12)));
        for name in ["L0", "", "L", "12", "l12", "s12", "L1\n", "L123456789012345678901"] {
            assert_eq!(parsed(name), None, "{name:?}");
        }
    }

    #[test]
    fn ended_processes_are_removed_when_a_map_is_full() {
        let is_alive = |pid: u32, _: &()| proc::start(pid).is_some();
        let (me, mut map) = (std::process::id(), HashMap::new());
        remember(&mut map, me, (), is_alive);
        (0..1000).for_each(|number| remember(&mut map, u32::MAX - number, (), is_alive));
        assert!(map.contains_key(&me) && map.len() < 20, "{}", map.len());
    }

    #[test]
    fn environment_is_read_once_for_each_executed_program() {
        use std::io::{BufRead, BufReader, Write};
        let names = LeaseNames::new(|_| Ok(false));
        let script = format!("echo up; read x; {LEASE_VARIABLE}=L8 exec sh -c 'echo again; read x'");
        let mut child = std::process::Command::new("sh")
            .args(["-c", &script])
            .env(LEASE_VARIABLE, "L7")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let pid = child.id();
        assert_eq!(lines.next().unwrap().unwrap(), "up");
        assert_eq!(names.name(pid).unwrap(), EnvironmentName::Lease(LeaseId(7)));
        let first = names.read.lock()[&pid].0;
        assert_eq!(names.name(pid).unwrap(), EnvironmentName::Lease(LeaseId(7)));
        assert_eq!(names.read.lock()[&pid].0, first);
        writeln!(child.stdin.as_ref().unwrap(), "continue").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "again");
        assert_eq!(names.name(pid).unwrap(), EnvironmentName::Lease(LeaseId(8)));
        assert_ne!(names.read.lock()[&pid].0, first);
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    /// Lease numbers are unique only within one gpushd.
    #[test]
    fn name_of_a_client_of_another_gpushd_does_not_count() {
        let mut child = std::process::Command::new("sleep").arg("600").env(LEASE_VARIABLE, "L7").spawn().unwrap();
        let name = |is_of_another| LeaseNames::new(move |_| Ok(is_of_another)).settled_name(child.id(), None).unwrap();
        assert_eq!((name(false), name(true)), (EnvironmentName::Lease(LeaseId(7)), EnvironmentName::None));
        child.kill().and_then(|()| child.wait()).unwrap();
    }

    #[test]
    fn name_is_remembered_for_one_process_and_its_own_name_wins() {
        let names = LeaseNames::new(|_| Ok(false));
        let (me, start) = (std::process::id(), Some(7));
        names.remember_inherited(me, start, LeaseId(1));
        assert_eq!((names.remembered(me, start), names.remembered_own(me, start)), (Some(LeaseId(1)), None));
        names.remember_own(me, start, LeaseId(2));
        names.remember_inherited(me, start, LeaseId(1));
        assert_eq!(names.remembered_own(me, start), Some(LeaseId(2)));
        for other in [Some(8), None] {
            assert_eq!(names.remembered(me, other), None, "another process has the pid");
        }
    }
}
