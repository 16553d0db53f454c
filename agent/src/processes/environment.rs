//! The lease that a process names in its environment.
//!
//! ```text
//! its own environment names a lease of its user ──────┐
//! it named one before ────────────────────────────────┼─► that lease, which gpushd remembers
//! an ancestor names one, or named one before ─────────┘
//! otherwise: its environment is readable ──────────────► none, or a lease of another user
//!            its environment is empty or overwritten ──► unknown
//! ```
//!
//! The kernel shows the memory that held the environment when the program started. Programs that set their title
//! (`setproctitle`) overwrite this memory, and just after an exec the memory is empty for a moment. So a process may
//! have a lease even if gpushd does not find the name of the lease in the environment. The process itself sets the
//! name. So gpushd accepts the name only if the process's user holds that lease. All four uids of the process must be
//! the uid of this user: the environment of a setuid program comes from the user that started the program. The name
//! gives no access to a GPU.

use std::{collections::HashMap, io, sync::MutexGuard, time::Duration};

use gpush_api::LeaseId;
use gpush_host::proc::{self, Environment, Image};
use gpush_locked::Locked;

use crate::mps;

/// Maximum number of attempts to read the environment of a process that is executing a program, and the pause between
/// them.
const ATTEMPTS: (u32, Duration) = (5, Duration::from_millis(2));

/// The lease that a process names in its environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EnvironmentLease {
    /// A lease of the process's user.
    Own(String),
    /// A lease that the process's user does not hold, or whose holder gpushd has not compared with the process's user
    /// yet.
    Other(String),
    /// The environment does not name a lease.
    None,
    /// Unknown, because the environment cannot be read, or was overwritten.
    Unknown,
}

/// What gpushd remembers about the environments of processes. The keys are pids.
#[derive(Debug, Default)]
pub(crate) struct Environments {
    /// For each process, its start time, and the lease that the process or an ancestor has named. gpushd adds an entry
    /// only if the process's user holds the lease at that time.
    leases: Locked<HashMap<u32, (u64, String)>>,
    /// For each executed program, the lease that its environment names. gpushd reads each environment only once,
    /// because it may be large.
    read: Locked<HashMap<u32, (Image, EnvironmentLease)>>,
}

impl Environments {
    fn leases(&self) -> MutexGuard<'_, HashMap<u32, (u64, String)>> {
        self.leases.lock()
    }

    fn read(&self) -> MutexGuard<'_, HashMap<u32, (Image, EnvironmentLease)>> {
        self.read.lock()
    }

    /// Returns the lease that the environment of a user's process names, regardless of the lease's holder. If the
    /// process has overwritten its environment, returns the lease that gpushd remembers. Returns `None` if one of the
    /// uids of the process is another user's. Reads files that may be large, so call it on a blocking thread.
    ///
    /// # Errors
    /// gpushd has no free file descriptor or memory, the kernel does not answer, or the process is still executing a
    /// program after all attempts.
    pub(crate) fn named_lease(&self, pid: u32, uid: u32) -> io::Result<Option<String>> {
        if proc::try_uids(pid)? != Some([uid; 4]) {
            return Ok(None);
        }
        Ok(match self.settled_lease(pid)? {
            EnvironmentLease::Own(name) | EnvironmentLease::Other(name) => Some(name),
            EnvironmentLease::None => None,
            EnvironmentLease::Unknown => self.recorded_lease(pid),
        })
    }

    /// Does the same as [`Self::cached_lease`], but waits while the process executes a program.
    fn settled_lease(&self, pid: u32) -> io::Result<EnvironmentLease> {
        // The program of the process, and whether the process is executing another one.
        let program = || match proc::image(pid) {
            None => (None, proc::is_executing(pid)),
            image => (image, false),
        };
        for attempt in 0..ATTEMPTS.0 {
            if attempt > 0 {
                std::thread::sleep(ATTEMPTS.1);
            }
            let before = program();
            let found = self.cached_lease(pid)?;
            let is_named = matches!(found, EnvironmentLease::Own(_) | EnvironmentLease::Other(_));
            if is_named || before != (None, true) && before == program() {
                return Ok(found);
            }
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("process {pid} is executing a program")))
    }

    fn cached_lease(&self, pid: u32) -> io::Result<EnvironmentLease> {
        let Some(image) = proc::image(pid) else { return read_lease(pid) };
        if let Some((_, known)) = self.read().get(&pid).filter(|(of, _)| *of == image) {
            return Ok(known.clone());
        }
        let found = read_lease(pid)?;
        // If the process executed another program meanwhile, the result may belong to either
        // program.
        if proc::image(pid) == Some(image) {
            let is_current = |pid: u32, of: &(Image, EnvironmentLease)| proc::image(pid) == Some(of.0);
            remember(&mut self.read(), pid, (image, found.clone()), is_current);
        }
        Ok(found)
    }

    /// Returns the lease that a process or one of its ancestors names now, or named earlier. `uid` is the process's
    /// user. `is_own` returns whether a lease id is the id of a lease of this user.
    pub(super) fn lease_of(&self, pid: u32, uid: u32, is_own: impl Fn(&str) -> bool) -> EnvironmentLease {
        let Some(start) = proc::start(pid) else { return EnvironmentLease::Unknown };
        let cached = |pid: u32| self.cached_lease(pid).unwrap_or(EnvironmentLease::Unknown);
        let own_lease = |pid: u32| {
            // Do not read the environments of ancestors that belong to other users: such a read may hang.
            if proc::uids(pid) != Some([uid; 4]) {
                return None;
            }
            match cached(pid) {
                EnvironmentLease::Other(name) if is_own(&name) => Some(name),
                EnvironmentLease::Own(_)
                | EnvironmentLease::Other(_)
                | EnvironmentLease::None
                | EnvironmentLease::Unknown => self.recorded_lease(pid).filter(|name| is_own(name)),
            }
        };
        let Some(name) = std::iter::once(pid).chain(proc::ancestors(pid)).find_map(own_lease) else {
            return match cached(pid) {
                // The process has uids of several users, so the name does not count.
                EnvironmentLease::Other(name) if is_own(&name) => EnvironmentLease::None,
                other => other,
            };
        };
        let is_alive = |pid: u32, of: &(u64, String)| proc::start(pid) == Some(of.0);
        remember(&mut self.leases(), pid, (start, name.clone()), is_alive);
        EnvironmentLease::Own(name)
    }

    fn recorded_lease(&self, pid: u32) -> Option<String> {
        let start = proc::start(pid)?;
        self.leases().get(&pid).filter(|(of, _)| *of == start).map(|(_, name)| name.clone())
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

/// Reads the lease that a process names.
fn read_lease(pid: u32) -> io::Result<EnvironmentLease> {
    Ok(match proc::environment(pid, mps::LEASE_VARIABLE)? {
        Environment::Set(name) => String::from_utf8(name)
            .ok()
            .filter(|name| is_name(name))
            .map_or(EnvironmentLease::Unknown, EnvironmentLease::Other),
        Environment::Unset => EnvironmentLease::None,
        Environment::Unknown => EnvironmentLease::Unknown,
    })
}

/// Returns whether a text is a lease id. Any other text does not count as a name, because gpushd shows the name to
/// other users.
fn is_name(text: &str) -> bool {
    text.starts_with('L') && text.parse::<LeaseId>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_is_named_by_its_id() {
        assert!(is_name("L12") && !is_name("L0"));
        for name in ["", "L", "12", "l12", "s12", "L1\n", "L123456789012345678901"] {
            assert!(!is_name(name), "{name:?}");
        }
    }

    #[test]
    fn environment_is_read_once_for_each_executed_program() {
        use std::io::{BufRead, BufReader, Write};
        let environments = Environments::default();
        let script = format!("echo up; read x; {}=L8 exec sh -c 'echo again; read x'", mps::LEASE_VARIABLE);
        let mut child = std::process::Command::new("sh")
            .args(["-c", &script])
            .env(mps::LEASE_VARIABLE, "L7")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let pid = child.id();
        assert_eq!(lines.next().unwrap().unwrap(), "up");
        assert_eq!(environments.cached_lease(pid).unwrap(), EnvironmentLease::Other("L7".to_owned()));
        let first = environments.read()[&pid].0;
        assert_eq!(environments.cached_lease(pid).unwrap(), EnvironmentLease::Other("L7".to_owned()));
        assert_eq!(environments.read()[&pid].0, first);
        writeln!(child.stdin.as_ref().unwrap(), "continue").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "again");
        assert_eq!(environments.cached_lease(pid).unwrap(), EnvironmentLease::Other("L8".to_owned()));
        assert_ne!(environments.read()[&pid].0, first);
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    /// Fault: the environment of a process was empty while the process executed a program, and the process did not count
    /// for its lease.
    #[test]
    fn process_names_its_lease_while_it_executes_programs() {
        let script = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(script.path(), "exec sh \"$0\"").unwrap();
        // With many variables, the kernel takes longer to execute the program.
        let variables = (0..5_000).map(|number| (format!("X{number}"), "1"));
        let mut command = std::process::Command::new("sh");
        let mut child = command.arg(script.path()).envs(variables).env(mps::LEASE_VARIABLE, "L7").spawn().unwrap();
        let (environments, uid) = (Environments::default(), nix::unistd::geteuid().as_raw());
        for _ in 0..20 {
            while proc::image(child.id()).is_some() {
                std::hint::spin_loop();
            }
            match environments.named_lease(child.id(), uid) {
                Ok(name) => assert_eq!(name.as_deref(), Some("L7")),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}"),
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(environments.named_lease(child.id(), uid).unwrap(), None);
    }

    #[test]
    fn process_without_a_readable_environment_names_the_lease_that_it_named_before() {
        let mut child = std::process::Command::new("/bin/sleep").arg("600").env_clear().spawn().unwrap();
        let (environments, uid) = (Environments::default(), nix::unistd::geteuid().as_raw());
        assert_eq!(environments.named_lease(child.id(), uid).unwrap(), None);
        environments.leases().insert(child.id(), (proc::start(child.id()).unwrap(), "L7".to_owned()));
        assert_eq!(environments.named_lease(child.id(), uid).unwrap().as_deref(), Some("L7"));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn ended_processes_are_removed_when_a_map_is_full() {
        let is_alive = |pid: u32, _: &()| proc::start(pid).is_some();
        let (me, mut map) = (std::process::id(), HashMap::new());
        remember(&mut map, me, (), is_alive);
        (0..1000).for_each(|number| remember(&mut map, u32::MAX - number, (), is_alive));
        assert!(map.contains_key(&me) && map.len() < 20, "{}", map.len());
    }

    /// Fault: a user started a setuid program, and its environment named a lease of the program's owner. The process
    /// counted for that lease.
    #[test]
    fn process_with_another_users_uid_names_no_lease() {
        const SCRIPT: &str = "import os, sys\nos.setresuid(65534, 65534, 0)\nprint('up', flush=True)\nsys.stdin.read()";
        let child = std::process::Command::new("python3")
            .args(["-c", SCRIPT])
            .env(mps::LEASE_VARIABLE, "L7")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn();
        let Ok(mut child) = child else { return eprintln!("SKIPPED: no python3") };
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
        if line.is_empty() {
            return eprintln!("SKIPPED: only root can change uids");
        }
        let (environments, pid) = (Environments::default(), child.id());
        assert_eq!(proc::owner(pid), Some(65534));
        assert_eq!(environments.cached_lease(pid).unwrap(), EnvironmentLease::Other("L7".to_owned()));
        assert_eq!(environments.named_lease(pid, 65534).unwrap(), None);
        assert_eq!(environments.lease_of(pid, 65534, |name| name == "L7"), EnvironmentLease::None);
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn named_lease_is_remembered_for_that_process_only() {
        let environments = Environments::default();
        let (me, uid) = (std::process::id(), nix::unistd::geteuid().as_raw());
        let start = proc::start(me).unwrap();
        let lease_of_me = |uid, own: &str| environments.lease_of(me, uid, |name| name == own);
        let seven = EnvironmentLease::Own("L7".to_owned());
        environments.leases().insert(me, (start, "L7".to_owned()));
        assert_eq!(lease_of_me(uid, "L7"), seven);
        assert!(lease_of_me(uid, "L8") != seven && lease_of_me(uid + 1, "L7") != seven);
        environments.leases().insert(me, (start + 1, "L7".to_owned()));
        assert_ne!(lease_of_me(uid, "L7"), seven);
    }
}
